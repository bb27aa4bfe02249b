// The consumers: each warpgroup owns 64 keys and turns query tiles into dK and dV.
#pragma once

#include "attn/epilogue.cuh"
#include "attn/slow_rows.cuh"
#include "attn/softmax.cuh"
#include "bwd/shared.cuh"
#include "bwd/visible.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

namespace flashmsa::bwd {

template <class Config>
struct Consumer {
  using S = Shared<Config>;
  using Element = typename Config::Element;
  static constexpr int kPairs = Config::kBlockQ / 2;     // of S^T: 64 keys x block_q over 128 threads
  static constexpr int kGradients = Config::kHeadDim / 2;  // of dK, dV: 64 keys x head_dim
  static constexpr int kQuerySteps = Config::kBlockQ / 16;
  static constexpr int kColumnSteps = Config::kHeadDim / 16;
  using PairMma = sm90::Wgmma<Config::kBlockQ, Element>;
  using GradientMma = sm90::Wgmma<Config::kHeadDim, Element>;
  using KeyOperand = sm90::KMajor<typename S::KTile>;
  using QueryOperand = sm90::KMajor<typename S::QTile>;
  using QueryTransposed = sm90::MnMajor<typename S::QTile>;
  using Fragment = uint32_t[kQuerySteps][4];  // S^T or dS^T, rounded, as the A operand

  const KernelParams& params;
  S& shared;
  const KeyTile key_tile;
  const int32_t warpgroup;
  uint64_t k_descriptor, v_descriptor;

  __device__ __forceinline__ Consumer(const KernelParams& params, S& shared, int32_t warpgroup)
      : params(params), shared(shared), key_tile(key_tile_of(params, blockIdx.x)), warpgroup(warpgroup) {
    const uint32_t rows = warpgroup * sm90::kWarpgroupRows * sm90::kSwizzleRowBytes;
    k_descriptor = KeyOperand::descriptor(address(shared.k) + rows);
    v_descriptor = KeyOperand::descriptor(address(shared.v) + rows);
  }

  static __device__ __forceinline__ uint32_t address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
  }
  __device__ __forceinline__ int32_t lane() const { return threadIdx.x % 32; }
  // This warp's first key within the tile.
  __device__ __forceinline__ int32_t warp_key() const {
    return warpgroup * sm90::kWarpgroupRows + threadIdx.x % sm90::kWarpgroupThreads / 32 * sm90::kWarpRows;
  }
  __device__ __forceinline__ void release(sm90::Barrier& barrier) {
    if (lane() == 0) barrier.arrive();
  }

  // 64 keys' rows (K or V) times a query tile's (Q or dO), in flight as one group.
  template <bool kAccumulate>
  __device__ __forceinline__ void issue_pairs(float (&s)[kPairs], uint64_t keys, const char* queries) {
    const uint64_t q = QueryOperand::descriptor(address(queries));
    sm90::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kColumnSteps; ++i) {
      PairMma::ss(s, keys + KeyOperand::step(i), q + QueryOperand::step(i), kAccumulate || i > 0);
    }
    sm90::wgmma_commit();
  }

  // dV += P^T dO, or dK += dS^T Q.
  __device__ __forceinline__ void issue_gradient(float (&d)[kGradients], const Fragment& weights, const char* queries) {
    const uint64_t q = QueryTransposed::descriptor(address(queries));
    sm90::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kQuerySteps; ++i) {
      GradientMma::template rs<true>(d, weights[i], q + QueryTransposed::step(i), true);
    }
    sm90::wgmma_commit();
  }

  // A row's statistic for the two queries of elements 4 n … 4 n + 3; rows are queries here.
  __device__ __forceinline__ float2 statistic(uint32_t stage, int which, int n) const {
    return *reinterpret_cast<const float2*>(&shared.stats[stage][which * Config::kBlockQ + 8 * n + lane() % 4 * 2]);
  }

  // S^T of hidden pairs becomes -inf.
  __device__ void hide(float (&s)[kPairs], uint32_t stage) {
    const Step step = shared.step[stage];
    const int32_t key = key_tile.tile * Config::kBlockKv + warp_key() + lane() / 4;
    const bool cut_cell = step.detail != mask::kWholeCell;
#pragma unroll
    for (int e = 0; e < kPairs; ++e) {
      const int32_t query = 8 * (e / 4) + lane() % 4 * 2 + e % 2;
      const int32_t mine = key + 8 * sm90::Accumulator::row_slot(e);
      bool shown = mask::contains(shared.rows[stage][query], mine);
      if (cut_cell) {
        shown = shown && cell_shows(params.list, step.detail, (step.tile * Config::kBlockQ + query) % mask::kCell,
                                    mine % mask::kCell);
      }
      if (!shown) s[e] = attn::kNegativeInfinity;
    }
  }

  // P^T = 2^(S^T scale - lse), rounded.
  __device__ __forceinline__ void exponentiate(const float (&s)[kPairs], Fragment& p, uint32_t stage) {
#pragma unroll
    for (int n = 0; n < kPairs / 4; ++n) {
      const float2 lse = statistic(stage, 0, n);
#pragma unroll
      for (int slot = 0; slot < 2; ++slot) {
        const int e = 4 * n + 2 * slot;
        const float p0 = sm90::exp2_approx(fmaf(s[e], params.scale_log2, -lse.x));
        const float p1 = sm90::exp2_approx(fmaf(s[e + 1], params.scale_log2, -lse.y));
        p[n / 2][n % 2 * 2 + slot] = sm90::pack2<Element>(p0, p1);
      }
    }
  }

  // dS^T = P^T ∘ (dP^T - Δ), rounded. dP comes with Δ subtracted.
  // NOTE: where a hidden pair's dP is not finite, neither is its dS; postprocessing sees that.
  __device__ __forceinline__ void differentiate(const float (&dp)[kPairs], const Fragment& p, Fragment& ds) {
#pragma unroll
    for (int w = 0; w < kPairs / 2; ++w) {
      const float2 weight = attn::unpack2(p[w / 4][w % 4], Element{});
      ds[w / 4][w % 4] = sm90::pack2<Element>(weight.x * dp[2 * w], weight.y * dp[2 * w + 1]);
    }
  }

  // PERF: a chunk's place within its 128 bytes is one exclusive or away from the first's.
  __device__ __forceinline__ void store_ds(const Fragment& ds) {
    const uint32_t row = warp_key() + sm90::Matrix16x16::row(lane());
    const uint32_t first = address(shared.ds) + S::DsTile::chunk_offset(row, sm90::Matrix16x16::half(lane()));
#pragma unroll
    for (int i = 0; i < kQuerySteps; ++i) {
      sm90::stmatrix_x4((first ^ (i % 4 * 32)) + i / 4 * S::DsTile::kGroupBytes, ds[i][0], ds[i][1], ds[i][2], ds[i][3]);
    }
  }

  // One query tile:
  //   1. S^T(i) = K Q(i)^T and, behind it, dK += dS^T(i-1) Q(i-1) go to the tensor cores
  //   2. S^T(i) arrives: P^T(i)
  //   3. dK arrives: Q(i-1) and dO(i-1) are free
  //   4. dP^T(i) = V dO(i)^T - Δ(i), and behind it dV += P^T(i) dO(i)
  //   5. dP^T(i) arrives: dS^T(i), to shared memory for dQ
  //   6. dV arrives
  // NOTE: the first tile finds dS^T(i-1) = 0 and takes its own Q, stage == before, for Q(i-1).
  __device__ __forceinline__ void step(float (&dk)[kGradients], float (&dv)[kGradients], Fragment& ds, uint32_t stage,
                                       uint32_t before, uint32_t ds_parity) {
    float s[kPairs];
    issue_pairs<false>(s, k_descriptor, shared.q[stage]);  // 1
    issue_gradient(dk, ds, shared.q[before]);

    sm90::wgmma_wait<1>();  // 2
    sm90::pin_registers(s);
    if (__shfl_sync(~0u, shared.step[stage].partial, 0) != 0) hide(s, stage);
    Fragment p;
    exponentiate(s, p, stage);

    sm90::wgmma_wait<0>();  // 3
    sm90::pin_registers(dk);
    if (before != stage) release(shared.empty[before]);

    float dp[kPairs];
#pragma unroll
    for (int n = 0; n < kPairs / 4; ++n) {
      const float2 delta = statistic(stage, 1, n);
      dp[4 * n] = dp[4 * n + 2] = delta.x;
      dp[4 * n + 1] = dp[4 * n + 3] = delta.y;
    }
    issue_pairs<true>(dp, v_descriptor, shared.dout[stage]);  // 4
    issue_gradient(dv, p, shared.dout[stage]);

    sm90::wgmma_wait<1>();  // 5
    sm90::pin_registers(dp);
    differentiate(dp, p, ds);
    shared.empty_ds.wait(ds_parity ^ 1u);
    store_ds(ds);
    sm90::fence_async_proxy();
    __syncwarp();
    release(shared.full_ds);

    sm90::wgmma_wait<0>();  // 6
    sm90::pin_registers(dv);
  }

  // A gradient by way of V's rows of this warp, which are no longer needed.
  __device__ __forceinline__ void store(const float (&d)[kGradients], const sm90::TensorMap& tensor) {
    const int32_t first_key = key_tile.tile * Config::kBlockKv + warp_key();
    attn::stage_rows<Element, typename S::KTile, kGradients>(d, 0, address(shared.v), warp_key());
    sm90::fence_async_proxy();
    __syncwarp();
    if (lane() == 0 && first_key < params.len_kv) {
      sm90::store_rows<typename S::KTile, sm90::kStridedRank>(
          tensor, shared.v + warp_key() * sm90::kSwizzleRowBytes, 0, first_key,
          {key_tile.kv_head, key_tile.batch, key_tile.residue});
    }
    if (lane() == 0) sm90::wait_stores_read();
    __syncwarp();
  }

  __device__ __forceinline__ void run() {
    float dk[kGradients], dv[kGradients];
    Fragment ds;
#pragma unroll
    for (int e = 0; e < kGradients; ++e) dk[e] = dv[e] = 0.0f;
#pragma unroll
    for (int i = 0; i < kQuerySteps * 4; ++i) ds[i / 4][i % 4] = 0;
    shared.full_kv.wait(0);

    Place<Config::kStages> at;
    uint32_t before = 0, ds_parity = 0;
#pragma unroll 1
    for (;; ds_parity ^= 1u) {
      shared.full[at.stage].wait(at.parity);
      if (__shfl_sync(~0u, shared.step[at.stage].tile, 0) < 0) break;
      step(dk, dv, ds, at.stage, before, ds_parity);
      before = at.stage;
      at.advance();
    }
    if (at.stage != before) {
      issue_gradient(dk, ds, shared.q[before]);
      sm90::wgmma_wait<0>();
      sm90::pin_registers(dk);
    }

#pragma unroll
    for (int e = 0; e < kGradients; ++e) dk[e] *= params.scale;
    const bool suspect = attn::any_nonfinite(dk) || attn::any_nonfinite(dv);
    if (lane() == 0) params.prepared.suspects[blockIdx.x * 8 + warp_key() / sm90::kWarpRows] = suspect;
    store(dv, params.dv);
    store(dk, params.dk);
  }
};

}  // namespace flashmsa::bwd
