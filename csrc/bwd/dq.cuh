// Warpgroup 0: finds the query tiles that the CTA's keys meet, loads them, and computes dQ = dS K, which it adds to memory.
#pragma once

#include "bwd/shared.cuh"
#include "bwd/visible.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

namespace flashmsa::bwd {

// Walks over the query tiles of a key tile, head by head. A warp's work: each lane looks at a tile of its own.
// NOTE: its state lives in shared memory; the warpgroup's few registers are dQ's.
template <class Config>
struct Walk {
  const KernelParams& params;
  WalkState& state;

  __device__ __forceinline__ uint32_t lane() const { return threadIdx.x % 32; }

  __device__ void begin(const KeyTile& key_tile) {
    const int32_t head = key_tile.kv_head * params.heads_per_kv_head();
    state.key_tile = key_tile;
    state.head = head;
    state.last_head = head + params.heads_per_kv_head() - 1;
    state.base = -32;
    state.found = state.partial = 0;
    __syncwarp();
  }

  // Which of the 32 tiles from state.base on the keys meet.
  __device__ void look() {
    const int32_t tile = state.base + lane();
    const int32_t n = state.key_tile.tile;
    bool meets = false, hides = false;
    int32_t detail = mask::kWholeCell, turn = 0;
    if (tile < params.q_tiles) {
      const QueryTile& plan =
          params.prepared.tiles[params.plan(state.key_tile.batch, state.head) * params.q_tiles + tile];
      const bool in_main = n >= plan.main.begin && n < plan.main.end;
      const bool in_first = n >= plan.first_begin && n < plan.first_end;
      meets = in_main || in_first;
      hides = !(n >= plan.main.full_begin && n < plan.main.full_end);
      if (meets && params.list.rows > 0) {
        detail = find_cell(params.list, list_slice(params.list, state.key_tile.batch, state.head),
                           tile * Config::kBlockQ / mask::kCell, n * Config::kBlockKv / mask::kCell);
        meets = detail != kNoCell;
        hides |= detail != mask::kWholeCell;
      }
      if (meets && params.prepared.turns != nullptr) turn = turn_of(plan, tile, in_first);
    }
    state.detail[lane()] = detail;
    state.turn[lane()] = turn;
    const uint32_t found = __ballot_sync(~0u, meets), partial = __ballot_sync(~0u, meets && hides);
    state.found = found;
    state.partial = partial;
    __syncwarp();
  }

  // How many key tiles before this one meet the same queries. They are started before this one.
  __device__ int32_t turn_of(const QueryTile& plan, int32_t tile, bool in_first) const {
    const int32_t n = state.key_tile.tile, first = plan.first_end - plan.first_begin;
    if (params.list.rows == 0) return in_first ? n - plan.first_begin : first + n - plan.main.begin;
    const int64_t slice = list_slice(params.list, state.key_tile.batch, state.head);
    const auto before = [&](int32_t key_tile) {
      return listed_before(params.list, slice, tile * Config::kBlockQ / mask::kCell, key_tile,
                           mask::kCell / Config::kBlockKv);
    };
    if (in_first) return before(n) - before(plan.first_begin);
    return before(plan.first_end) - before(plan.first_begin) + before(n) - before(plan.main.begin);
  }

  // The next step; tile negative after the last. SYNC: the same in all lanes, which read before one of them writes.
  __device__ Step next() {
    while (state.found == 0) {
      int32_t base = state.base + 32, head = state.head;
      if (base >= params.q_tiles) {
        if (head == state.last_head) return {-1, 0, 0, 0, 0};
        ++head;
        base = 0;
      }
      __syncwarp();
      state.base = base;
      state.head = head;
      __syncwarp();
      look();
    }
    const uint32_t found = state.found;
    const int32_t at = __ffs(found) - 1;
    const Step step = {state.base + at, state.head, static_cast<int32_t>(state.partial >> at & 1u), state.detail[at],
                       state.turn[at]};
    __syncwarp();
    state.found = found & (found - 1);
    __syncwarp();
    return step;
  }
};

template <class Config>
struct DqWarpgroup {
  using S = Shared<Config>;
  using Element = typename Config::Element;
  using Mma = sm90::Wgmma<64, Element>;
  using DsOperand = sm90::MnMajor<typename S::DsTile>;
  using KOperand = sm90::MnMajor<typename S::KTile>;
  static constexpr int32_t kColumnPieces = Config::kHeadDim / 64;

  const KernelParams& params;
  S& shared;
  const KeyTile key_tile;

  __device__ __forceinline__ uint32_t lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ uint32_t warp() const { return threadIdx.x / 32; }

  __device__ void load_keys() {
    const int32_t first_key = key_tile.tile * Config::kBlockKv;
    const sm90::Sequence from = {key_tile.kv_head, key_tile.batch, key_tile.residue};
    shared.full_kv.arrive_expect(2 * S::KTile::kBytes);
    sm90::load_tile<typename S::KTile, sm90::kStridedRank>(shared.k, params.k, first_key, from, shared.full_kv);
    sm90::load_tile<typename S::KTile, sm90::kStridedRank>(shared.v, params.v, first_key, from, shared.full_kv);
  }

  // Q, dO, their numbers, and where pairs may be hidden their rows' keys. One thread.
  __device__ void load_step(const Step& step, uint32_t stage) {
    sm90::Barrier& full = shared.full[stage];
    shared.step[stage] = step;
    if (step.tile < 0) return full.arrive();
    const uint32_t row_bytes = step.partial ? S::kRowBytes : 0;
    full.arrive_expect(2 * S::QTile::kBytes + S::kStatBytes + row_bytes);
    const int32_t row = step.tile * Config::kBlockQ;
    const sm90::Sequence from = {step.head, key_tile.batch, key_tile.residue};
    sm90::load_tile<typename S::QTile, sm90::kStridedRank>(shared.q[stage], params.q, row, from, full);
    const int64_t sequence = params.sequence(key_tile.batch, step.head, key_tile.residue);
    copy(shared.stats[stage], params.prepared.stats + (sequence * params.q_tiles + step.tile) * (2 * Config::kBlockQ),
         S::kStatBytes, full);
    sm90::load_tile<typename S::QTile, sm90::kStridedRank>(shared.dout[stage], params.dout, row, from, full);
    if (Config::kRowsShared && step.partial) {
      const int64_t plan = params.plan(key_tile.batch, step.head);
      copy(shared.rows[stage], params.prepared.rows + (plan * params.q_tiles + step.tile) * Config::kBlockQ,
           S::kRowBytes, full);
    }
  }

  __device__ static void copy(void* to, const void* from, uint32_t bytes, sm90::Barrier& full) {
    sm90::ptx::cp_async_bulk(sm90::ptx::space_cluster, sm90::ptx::space_global, to, from, bytes, &full.word);
  }

  // A 64 x 64 piece of dQ: rows 64 * (piece / columns) …, columns 64 * (piece % columns) ….
  __device__ __forceinline__ void multiply(float (&dq)[32], int32_t piece, uint32_t buffer) {
    const uint32_t ds = static_cast<uint32_t>(__cvta_generic_to_shared(shared.ds[buffer]));
    const uint32_t k = static_cast<uint32_t>(__cvta_generic_to_shared(shared.k));
    const uint64_t a = DsOperand::descriptor(ds + piece / kColumnPieces * S::DsTile::kGroupBytes);
    const uint64_t b = KOperand::descriptor(k + piece % kColumnPieces * S::KTile::kGroupBytes);
    sm90::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kBlockKv / 16; ++i) {
      Mma::template ss<true, true>(dq, a + DsOperand::step(i), b + KOperand::step(i), i > 0);
    }
    sm90::wgmma_commit();
  }

  // Adds a warp's part of a piece to memory, by way of shared memory.
  __device__ __forceinline__ void add(const float (&dq)[32], int32_t staging, float* target) {
    float* part = shared.staging[staging] + warp() * DqPiece::kWarpFloats;
    // SYNC: the copy that used this buffer last has read it.
    if (lane() == 0) sm90::ptx::cp_async_bulk_wait_group_read(sm90::ptx::n32_t<Config::kStagings - 1>{});
    __syncwarp();
#pragma unroll
    for (int e = 0; e < 32; e += 4) {
      *reinterpret_cast<float4*>(part + DqPiece::offset(lane(), e)) = {dq[e], dq[e + 1], dq[e + 2], dq[e + 3]};
    }
    sm90::fence_async_proxy();
    __syncwarp();
    if (lane() == 0) {
      sm90::ptx::cp_reduce_async_bulk(sm90::ptx::space_global, sm90::ptx::space_shared, sm90::ptx::op_add,
                                      target + warp() * DqPiece::kWarpFloats, part,
                                      DqPiece::kWarpFloats * sizeof(float));
      sm90::ptx::cp_async_bulk_commit_group();
    }
  }

  // Deterministic mode: key tiles add to the same 16 rows in their order. Those before are of CTAs started earlier, which
  // wait for none that starts later.
  // SYNC: a turn begins when what was added in the one before is complete in memory.
  __device__ __forceinline__ void wait_turn(int64_t block, int32_t turn) {
    if (params.prepared.turns == nullptr || lane() != 0) return;
    const int32_t* at = params.prepared.turns + block * 4 + warp();
    int32_t now;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(at) : "memory");
    } while (now < turn);
  }
  __device__ __forceinline__ void end_turn(int64_t block) {
    if (params.prepared.turns == nullptr || lane() != 0) return;
    sm90::wait_stores();
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(params.prepared.turns + block * 4 + warp()) : "memory");
  }

  __device__ void run() {
    Walk<Config> walk{params, shared.walk};
    if (warp() == 0) walk.begin(key_tile);
    Place<Config::kStages> ahead;
    bool more = true;
    // SYNC: one warp loads; `ahead` is as many steps in front of the others' as there are stages, less one.
    const auto load_next = [&] {
      if (warp() != 0 || !more) return;
      const Step step = walk.next();
      more = step.tile >= 0;
      shared.empty[ahead.stage].wait(ahead.parity ^ 1u);
      if (lane() == 0) load_step(step, ahead.stage);
      __syncwarp();
      ahead.advance();
    };
    if (threadIdx.x == 0) load_keys();
#pragma unroll 1
    for (int32_t s = 0; s < Config::kStages - 1; ++s) load_next();
    shared.full_kv.wait(0);

    Place<Config::kStages> at;
    Place<Config::kDsBuffers> buffer;
#pragma unroll 1
    for (;; at.advance(), buffer.advance()) {
#ifndef LATELOAD
      load_next();
#endif
      shared.full[at.stage].wait(at.parity);
      const int32_t tile = __shfl_sync(~0u, shared.step[at.stage].tile, 0);
      if (tile < 0) break;
      const int64_t block =
          (params.sequence(key_tile.batch, shared.step[at.stage].head, key_tile.residue) * params.q_tiles + tile) *
          (Config::kBlockQ / 64);
      const int32_t turn = shared.step[at.stage].turn;
      float* target = params.prepared.dq + block * (kColumnPieces * DqPiece::kFloats);
      shared.full_ds[buffer.stage].wait(buffer.parity);
#pragma unroll
      for (int32_t piece = 0; piece < Config::kPieces; ++piece) {
        float dq[32];
        multiply(dq, piece, buffer.stage);
#ifdef LATELOAD
        if (piece == 0) load_next();
#endif
        sm90::wgmma_wait<0>();
        sm90::pin_registers(dq);
        if (piece == Config::kPieces - 1 && lane() == 0) shared.empty_ds[buffer.stage].arrive();
        if (piece % kColumnPieces == 0) wait_turn(block + piece / kColumnPieces, turn);
        add(dq, piece % Config::kStagings, target + piece * DqPiece::kFloats);
        if (piece % kColumnPieces == kColumnPieces - 1) end_turn(block + piece / kColumnPieces);
      }
    }
    // SYNC: shared memory outlives the copies that read it.
    if (lane() == 0) sm90::wait_stores_read();
  }
};

}  // namespace flashmsa::bwd
