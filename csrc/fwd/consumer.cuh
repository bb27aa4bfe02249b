// The consumers: each warpgroup owns 64 rows of a tile and turns key blocks into O.
#pragma once

#include "attn/epilogue.cuh"
#include "attn/masking.cuh"
#include "attn/slow_rows.cuh"
#include "attn/softmax.cuh"
#include "fwd/shared.cuh"
#include "sm90/registers.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

namespace flashmsa::fwd {

template <class Mask, class Config>
struct Consumer {
  using S = Shared<Mask, Config>;
  using Element = typename Config::Element;
  using Params = KernelParams<Mask>;
  static constexpr int kScores = Config::kBlockKv / 2;   // S: 64 rows x block_kv over 128 threads
  static constexpr int kOutputs = Config::kHeadDim / 2;  // O: 64 rows x head_dim
  static constexpr int kQSteps = Config::kHeadDim / 16;
  static constexpr int kKeySteps = Config::kBlockKv / 16;
  using ScoreMma = sm90::Wgmma<Config::kBlockKv, Element>;
  using OutputMma = sm90::Wgmma<Config::kHeadDim, Element>;
  using QOperand = sm90::KMajor<typename S::QTile>;
  using KOperand = sm90::KMajor<typename S::KTile>;
  using VOperand = sm90::MnMajor<typename S::VTile>;

  const Params& params;
  S& shared;
  const int32_t warpgroup;  // 0 .. kConsumerWarpgroups - 1
  uint64_t q_descriptor, k_descriptor, v_descriptor;  // of stage 0
  uint32_t round = 0;       // tiles finished
  uint32_t key_blocks = 0;  // K tiles taken so far; within a tile V runs one behind

  // What lives for one tile. NOTE: a local of the tile loop, without initial values: as members the accumulators would
  // stay live from tile to tile, through the slow path too, and spill.
  struct Fragments {
    float s[kScores];
    float o[kOutputs];
    uint32_t p[kKeySteps][4];
    uint32_t q[Config::kQInRegisters ? kQSteps : 1][4];
    attn::OnlineSoftmax softmax;
  };

  __device__ __forceinline__ Consumer(const Params& params, S& shared, int32_t warpgroup)
      : params(params), shared(shared), warpgroup(warpgroup) {
    const auto address = [](const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); };
    q_descriptor = QOperand::descriptor(address(shared.q) + warpgroup * sm90::kWarpgroupRows * sm90::kSwizzleRowBytes);
    k_descriptor = KOperand::descriptor(address(shared.k));
    v_descriptor = VOperand::descriptor(address(shared.v));
  }

  __device__ __forceinline__ int32_t thread() const { return threadIdx.x % sm90::kWarpgroupThreads; }
  __device__ __forceinline__ int32_t lane() const { return threadIdx.x % 32; }
  // This warp's first row within the tile.
  __device__ __forceinline__ int32_t warp_row() const {
    return warpgroup * sm90::kWarpgroupRows + thread() / 32 * sm90::kWarpRows;
  }

  // One arrival a warp: every lane has passed the wait that ends its reads.
  __device__ __forceinline__ void release(sm90::Barrier& barrier) {
    if (lane() == 0) barrier.arrive();
  }

  // The tile at hand. NOTE: read again after the main loop rather than kept in registers through it.
  __device__ __forceinline__ const TileWork<Mask>& work() const { return shared.work[S::WorkRing::stage(round)]; }

  __device__ __forceinline__ void wait_work() {
    shared.full_work[S::WorkRing::stage(round)].wait(S::WorkRing::full_parity(round));
  }

  // SYNC: all threads arrive, because all have read the slot.
  __device__ __forceinline__ void finish_work() {
    shared.empty_work[S::WorkRing::stage(round)].arrive();
    ++round;
  }

  __device__ __forceinline__ void load_q(Fragments& f) {
    shared.full_q.wait(S::QRing::full_parity(round));
    if constexpr (Config::kQInRegisters) {
      const uint32_t tile = static_cast<uint32_t>(__cvta_generic_to_shared(shared.q));
#pragma unroll
      for (int k = 0; k < kQSteps; ++k) {
        sm90::ldmatrix_x4(f.q[k], tile + S::QTile::chunk_offset(warp_row() + sm90::Matrix16x16::row(lane()),
                                                              2 * k + sm90::Matrix16x16::half(lane())));
      }
      __syncwarp();
      release(shared.empty_q);
    }
  }

  // S = Q K^T of the K stage at hand, in flight as one group.
  __device__ __forceinline__ void issue_scores(Fragments& f) {
    const uint32_t stage = S::KvRing::stage(key_blocks);
    shared.full_k[stage].wait(S::KvRing::full_parity(key_blocks));
    const uint64_t k_tile = k_descriptor + sm90::descriptor_step(stage * S::KTile::kBytes);
    sm90::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kQSteps; ++k) {
      if constexpr (Config::kQInRegisters) {
        ScoreMma::template rs<false>(f.s, f.q[k], k_tile + KOperand::step(k), k > 0);
      } else {
        ScoreMma::ss(f.s, q_descriptor + QOperand::step(k), k_tile + KOperand::step(k), k > 0);
      }
    }
    sm90::wgmma_commit();
  }

  // O += P V of the V stage at hand, in flight as one group.
  __device__ __forceinline__ void issue_output(Fragments& f) {
    const uint32_t stage = S::KvRing::stage(key_blocks - 1);
    shared.full_v[stage].wait(S::KvRing::full_parity(key_blocks - 1));
    const uint64_t v_tile = v_descriptor + sm90::descriptor_step(stage * S::VTile::kBytes);
    sm90::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeySteps; ++k) {
      OutputMma::template rs<true>(f.o, f.p[k], v_tile + VOperand::step(k), true);
    }
    sm90::wgmma_commit();
  }

  // After the wait for S(i): K(i) is free, the next block is i + 1.
  __device__ __forceinline__ void release_k() { release(shared.empty_k[S::KvRing::stage(key_blocks)]); }
  __device__ __forceinline__ void release_v() { release(shared.empty_v[S::KvRing::stage(key_blocks - 1)]); }

  // The first key block: S, softmax, P. O is still empty.
  __device__ __forceinline__ void first_block(Fragments& f, bool masked, int32_t first_key,
                                              const mask::Interval (&rows)[2]) {
    issue_scores(f);
    sm90::wgmma_wait<0>();
    sm90::pin_registers(f.s);
    release_k();
    ++key_blocks;
    if (masked) attn::apply_intervals(f.s, rows, first_key, thread());
    float maximum[2], factor[2];
    attn::OnlineSoftmax::thread_max(f.s, maximum);
    f.softmax.raise(maximum, params.scale_log2, factor);
    f.softmax.template exponentiate<Element>(f.s, f.p, params.scale_log2);
  }

  // A key block in the middle, one step of the pipeline:
  //   1. S(i) = Q K(i)^T and, behind it, O += P(i-1) V(i-1) go to the tensor cores
  //   2. S(i) arrives: K(i) is free; mask it; does a row outgrow its reference?
  //   3. O arrives: V(i-1) and P are free; rescale O if so
  //   4. P(i) = 2^(S(i) - reference)
  template <bool kMasked>
  __device__ __forceinline__ void next_block(Fragments& f, int32_t first_key,
                                             const mask::Interval (&rows)[2]) {
    issue_scores(f);  // 1
    issue_output(f);

    sm90::wgmma_wait<1>();  // 2
    sm90::pin_registers(f.s);
    release_k();
    if constexpr (kMasked) attn::apply_intervals(f.s, rows, first_key, thread());
    float maximum[2], factor[2];
    attn::OnlineSoftmax::thread_max(f.s, maximum);
    const bool outgrown = f.softmax.outgrown(maximum, params.scale_log2);

    sm90::wgmma_wait<0>();  // 3
    sm90::pin_registers(f.o);
    release_v();
    ++key_blocks;
    if (outgrown) {
      f.softmax.raise(maximum, params.scale_log2, factor);
      attn::scale_rows(f.o, factor);
    }

    f.softmax.template exponentiate<Element>(f.s, f.p, params.scale_log2);  // 4
  }

  // All key blocks of a tile: partial ones first, then full ones without a test, then the last P V.
  __device__ __forceinline__ void attend(Fragments& f, const mask::KeyTiles& tiles, const mask::Interval (&rows)[2]) {
    const int32_t steps = tiles.count();
    const int32_t partial = tiles.partial_count();
    const auto first_key = [&](int32_t step) { return tiles.visit(step) * Config::kBlockKv; };

    load_q(f);
    first_block(f, partial > 0, first_key(0), rows);
    // NOTE: only now: O would otherwise hold its registers through the first block.
#pragma unroll
    for (int e = 0; e < kOutputs; ++e) f.o[e] = 0.0f;
    int32_t step = 1;
#pragma unroll 1
    for (; step < partial; ++step) next_block<true>(f, first_key(step), rows);
#pragma unroll 1
    for (; step < steps; ++step) next_block<false>(f, 0, rows);
    if constexpr (!Config::kQInRegisters && Config::kOwnOBuffer) release(shared.empty_q);

    issue_output(f);
    sm90::wgmma_wait<0>();
    sm90::pin_registers(f.o);
    release_v();
  }

  __device__ __forceinline__ float* lse_row(const TileWork<Mask>& work) const {
    return params.lse + (int64_t{work.batch} * params.heads_q + work.head) * params.len_q;
  }

  // Normalised O by way of shared memory, 16 rows a warp; lse straight to memory.
  __device__ __forceinline__ void store(Fragments& f, const TileWork<Mask>& work, const float (&inverse)[2],
                                        const float (&lse)[2]) {
    using OTile = typename S::OTile;
    attn::scale_rows(f.o, inverse);
    char* staging = shared.o();
    // SYNC: own buffer: the previous tile's store has read it. Q's buffer: no warp of the warpgroup reads Q any more.
    if constexpr (Config::kOwnOBuffer) {
      if (lane() == 0) sm90::wait_stores_read();
      __syncwarp();
    } else {
      sm90::bar_sync(1 + warpgroup, sm90::kWarpgroupThreads);
    }
    attn::stage_rows<Element, OTile>(f.o, static_cast<uint32_t>(__cvta_generic_to_shared(staging)), warp_row());
    sm90::fence_async_proxy();
    __syncwarp();
    const int32_t first_row = work.row_block * Config::kBlockQ + warp_row();
    if (lane() == 0 && first_row < params.len_q) {
      sm90::store_rows<OTile>(params.out, staging + warp_row() * sm90::kSwizzleRowBytes, first_row, work.head, work.batch);
    }
    if (params.lse != nullptr && lane() % 4 == 0) {
#pragma unroll
      for (int slot = 0; slot < 2; ++slot) {
        const int32_t row = first_row + lane() / 4 + 8 * slot;
        if (row < params.len_q) lse_row(work)[row] = lse[slot];
      }
    }
  }

  // This warp's rows again, key by key; see attn/slow_rows.cuh.
  __device__ __forceinline__ void store_slowly(const TileWork<Mask>& work) {
    const int32_t kv_head = work.head / params.q_heads_per_kv_head;
    const int32_t first_row = work.row_block * Config::kBlockQ + warp_row();
    const int32_t end_row = min_of(first_row + sm90::kWarpRows, params.len_q);
#pragma unroll 1
    for (int32_t row = first_row; row < end_row; ++row) {
      const float lse = attn::slow_row<Element>(
          attn::row_of<Element>(params.q_rows, work.batch, work.head, row),
          attn::row_of<Element>(params.k_rows, work.batch, kv_head, 0), params.k_rows.stride_seq,
          attn::row_of<Element>(params.v_rows, work.batch, kv_head, 0), params.v_rows.stride_seq,
          attn::row_of<Element>(params.out_rows, work.batch, work.head, row), params.head_dim, params.head_dim_v,
          Mask::row(params.mask, work.block, row), params.scale_log2);
      if (params.lse != nullptr && lane() == 0) {
        lse_row(work)[row] = lse;
      }
    }
  }

  // A tile whose rows see no key: zeros and -inf, without a loop over anything.
  __device__ __forceinline__ void store_empty(const TileWork<Mask>& work) {
    shared.full_q.wait(S::QRing::full_parity(round));
    release(shared.empty_q);
    const int32_t first_row = work.row_block * Config::kBlockQ + warp_row();
    const int32_t end_row = min_of(first_row + sm90::kWarpRows, params.len_q);
#pragma unroll 1
    for (int32_t row = first_row; row < end_row; ++row) {
      Element* out_row = attn::row_of<Element>(params.out_rows, work.batch, work.head, row);
      if (lane() * 8 < params.head_dim_v) *reinterpret_cast<uint4*>(out_row + lane() * 8) = uint4{0, 0, 0, 0};
      if (params.lse != nullptr && lane() == 0) lse_row(work)[row] = attn::kNegativeInfinity;
    }
  }

  __device__ __forceinline__ void attend_and_store(const TileWork<Mask>& work) {
    mask::Interval rows[2];
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      // Rows past the tensor's end take its last row's interval: safe to ask for, and never stored.
      const int32_t row = work.row_block * Config::kBlockQ + warp_row() + lane() / 4 + 8 * slot;
      rows[slot] = Mask::row(params.mask, work.block, min_of(row, params.len_q - 1));
    }
    Fragments f;
    attend(f, work.tiles, rows);

    const TileWork<Mask> done = this->work();
    float inverse[2], lse[2];
    f.softmax.finish(inverse, lse);
    if (done.tiles.partial_count() > 0 && attn::any_nonfinite(f.o)) {
      store_slowly(done);
    } else {
      store(f, done, inverse, lse);
    }
    if constexpr (!Config::kOwnOBuffer) {
      if (lane() == 0) sm90::wait_stores_read();
      __syncwarp();
      release(shared.empty_q);
    }
  }

  __device__ __forceinline__ void run() {
    for (;;) {
      wait_work();
      const TileWork<Mask> work = this->work();
      if (work.row_block < 0) break;
      if (work.tiles.count() == 0) {
        store_empty(work);
      } else {
        attend_and_store(work);
      }
      finish_work();
    }
    if (lane() == 0) sm90::wait_stores();
  }
};

}  // namespace flashmsa::fwd
