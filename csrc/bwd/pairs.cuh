// What a consumer warpgroup does with a tile of pairs, 64 keys x kSubQ queries of S^T or dP^T in its accumulators: which
// pairs are hidden or dropped, P from S, dS from dP.
#pragma once

#include "attn/epilogue.cuh"
#include "attn/slow_rows.cuh"
#include "attn/softmax.cuh"
#include "bwd/dropout.cuh"
#include "bwd/shared.cuh"
#include "bwd/visible.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

namespace flashmsa::bwd {

template <class Config>
struct Pairs {
  using S = Shared<Config>;
  using Element = typename Config::Element;
  using Extra = typename Config::Extra;
  static constexpr int kPairs = Config::kSubQ / 2;  // of S^T over 128 threads
  static constexpr int kGradients = Config::kHeadDim / 2;  // of dK, dV: 64 keys x head_dim
  static constexpr int kSubs = Config::kBlockQ / Config::kSubQ;
  static constexpr int kQuerySteps = Config::kSubQ / 16;
  static constexpr int kColumnSteps = Config::kHeadDim / 16;
  static constexpr bool kWide = kPairs > 32;
  // dP starts from -Δ. Elsewhere Δ is subtracted behind it: dropout scales dP before.
  static constexpr bool kPreload = Config::kSplit == Split::kByKeys && !Extra::kDropout;
  using PairMma = sm90::Wgmma<Config::kSubQ, Element>;
  using GradientMma = sm90::Wgmma<Config::kHeadDim, Element>;
  using KeyOperand = sm90::KMajor<typename S::KTile>;
  using QueryOperand = sm90::KMajor<typename S::QTile>;
  using QueryTransposed = sm90::MnMajor<typename S::QTile>;
  using Fragment = uint32_t[kQuerySteps][4];  // S^T or dS^T, rounded, as the A operand
  using Kept = KeptBits<kPairs>;
  using RowTerms = typename S::RowTerms;

  const KernelParams& params;
  S& shared;

  __device__ __forceinline__ Pairs(const KernelParams& params, S& shared) : params(params), shared(shared) {}

  static __device__ __forceinline__ uint32_t address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
  }
  // NOTE: unsigned, here and below: signed quotients take registers that there are not.
  __device__ __forceinline__ uint32_t lane() const { return threadIdx.x % 32; }
  // This warp's first key within the tile.
  __device__ __forceinline__ uint32_t warp_key() const {
    const uint32_t warp = threadIdx.x / 32;
    return (Config::kSplit == Split::kByKeys ? warp - 4 : warp % 4) * sm90::kWarpRows;
  }
  // The same within the key tile, and of all keys.
  __device__ __forceinline__ uint32_t tile_key() const { return warp_key() + rank_of_cta<Config>() * Config::kCtaKeys; }
  __device__ __forceinline__ int32_t first_key() const { return shared.key_tile.tile * Config::kBlockKv + tile_key(); }
  __device__ __forceinline__ void release(sm90::Barrier& barrier) {
    if (lane() == 0) barrier.arrive();
  }
  // A value that is the same in all lanes, made known as such: descriptors stay in uniform registers.
  static __device__ __forceinline__ int32_t uniform(int32_t x) { return __shfl_sync(~0u, x, 0); }

  // A number that is computed where it stands. Kept over the loop, it takes a register that there is not.
  static __device__ __forceinline__ uint32_t here(uint32_t x) {
    if constexpr (Extra::kGeneral && Config::kSplit == Split::kByGradient) asm volatile("" : "+r"(x));
    return x;
  }

  // The queries of sub-step `sub` in a tile of Q or dO.
  static __device__ __forceinline__ uint32_t queries(const char* tile, int sub) {
    return address(tile) + sub * Config::kSubQ * sm90::kSwizzleRowBytes;
  }

  // 64 keys' rows (K or V) times queries' (Q or dO), in flight as one group.
  template <bool kAccumulate>
  __device__ __forceinline__ void issue_pairs(float (&s)[kPairs], uint64_t keys, uint32_t queries) {
    const uint64_t q = QueryOperand::descriptor(queries);
    sm90::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kColumnSteps; ++i) {
      PairMma::ss(s, keys + KeyOperand::step(i), q + QueryOperand::step(i), kAccumulate || i > 0);
    }
    sm90::wgmma_commit();
  }

  // The same, and number `which` of each query.
  __device__ __forceinline__ void issue_pairs_and(float (&s)[kPairs], int which, uint64_t keys, uint32_t queries,
                                                  uint32_t stage, int sub) {
    const auto weights = RowTerms::weights(lane(), which);
    const uint64_t q = QueryOperand::descriptor(queries);
    const uint64_t terms =
        RowTerms::descriptor(address(shared.stats[stage]) + sub * (Config::kSubQ / 8 * RowTerms::kGroupBytes));
    sm90::wgmma_fence();
    PairMma::template rs<true>(s, weights.fragment, terms, false);
#pragma unroll
    for (int i = 0; i < kColumnSteps; ++i) {
      PairMma::ss(s, keys + KeyOperand::step(i), q + QueryOperand::step(i), true);
    }
    sm90::wgmma_commit();
  }

  // S^T = K Q^T; by terms less lse.
  __device__ __forceinline__ void issue_s(float (&s)[kPairs], uint64_t keys, uint32_t stage, int sub) {
    const uint32_t of = queries(shared.q[stage], sub);
    if constexpr (Config::kTerms) {
      issue_pairs_and(s, 0, keys, of, stage, sub);
    } else {
      issue_pairs<false>(s, keys, of);
    }
  }

  // dP^T = V dO^T - Δ; without kPreload V dO^T.
  __device__ __forceinline__ void issue_dp(float (&dp)[kPairs], uint64_t keys, uint32_t stage, int sub) {
    const uint32_t of = queries(shared.dout[stage], sub);
    if constexpr (Config::kTerms) {
      issue_pairs_and(dp, 1, keys, of, stage, sub);
    } else {
      if constexpr (kPreload) preload(dp, stage, sub);
      issue_pairs<kPreload>(dp, keys, of);
    }
  }

  // dV += P^T dO, or dK += dS^T Q.
  __device__ __forceinline__ void issue_gradient(float (&d)[kGradients], const Fragment& weights, uint32_t queries) {
    const uint64_t q = QueryTransposed::descriptor(queries);
    sm90::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kQuerySteps; ++i) {
      GradientMma::template rs<true>(d, weights[i], q + QueryTransposed::step(i), true);
    }
    sm90::wgmma_commit();
  }

  // A statistic of the two queries of elements 4 n … 4 n + 3.
  __device__ __forceinline__ float2 statistic(uint32_t stage, int sub, int which, int n) const {
    const uint32_t row = which * Config::kBlockQ + sub * Config::kSubQ + 8 * n + lane() % 4 * 2;
    return *reinterpret_cast<const float2*>(&shared.stats[stage][row * sizeof(float)]);
  }

  // Element e's query within the step's tile, and key.
  __device__ __forceinline__ int32_t query_of(int sub, int e) const {
    return sub * Config::kSubQ + 8 * (e / 4) + lane() % 4 * 2 + e % 2;
  }
  __device__ __forceinline__ int32_t key_of(int e) const {
    return first_key() + lane() / 4 + 8 * sm90::Accumulator::row_slot(e);
  }

  // The keys of a step's rows: their main runs (0) or their first ones (1).
  __device__ __forceinline__ const mask::Interval* row_keys(uint32_t stage, const Step& step, int run) const {
    if constexpr (Config::kRowsShared) {
      return shared.rows[stage][run];
    } else {
      const int64_t plan = params.plan(shared.key_tile.batch, step.head);
      const mask::Interval* rows = run == 0 ? params.prepared.mains : params.prepared.firsts;
      return rows + (plan * params.q_tiles + step.tile) * Config::kBlockQ;
    }
  }

  // S^T of hidden pairs becomes -inf.
  // NOTE: two queries at a time, and little read ahead: registers are few here.
  __device__ __forceinline__ void hide(float (&s)[kPairs], uint32_t stage, int sub) {
    const Step& step = shared.step[stage];
    const mask::Interval* mains = row_keys(stage, step, 0);
    const auto hide_from = [&](int e, const mask::TwoRuns& keys) {
      if (!mask::contains(keys, key_of(0))) s[e] = attn::kNegativeInfinity;
      if (!mask::contains(keys, key_of(2))) s[e + 2] = attn::kNegativeInfinity;
    };
    if (params.prepared.firsts == nullptr) {
#pragma unroll
      for (int n = 0; n < kPairs / 4; ++n) {
        const int4 main = *reinterpret_cast<const int4*>(mains + query_of(sub, 4 * n));
        hide_from(4 * n, {{0, 0}, {main.x, main.y}});
        hide_from(4 * n + 1, {{0, 0}, {main.z, main.w}});
        asm volatile("" ::: "memory");
      }
    } else {
      const mask::Interval* firsts = row_keys(stage, step, 1);
#pragma unroll
      for (int n = 0; n < kPairs / 4; ++n) {
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const int32_t query = query_of(sub, 4 * n + x);
          hide_from(4 * n + x, {firsts[query], mains[query]});
        }
        asm volatile("" ::: "memory");
      }
    }
    if (step.detail != mask::kWholeCell) hide_in_cell(s, step, sub);
  }

  // The same of a listed cell that is not whole.
  // NOTE: wide tiles gather the answers in bits first, in a loop; unrolled it takes registers that there are not, which
  // narrow tiles have.
  __device__ __forceinline__ void hide_in_cell(float (&s)[kPairs], const Step& step, int sub) {
    const int32_t first_query = step.tile * Config::kBlockQ;
    const auto shown = [&](int e) {
      const uint32_t query = static_cast<uint32_t>(first_query + query_of(sub, e)) % mask::kCell;
      return cell_shows(params.list, step.detail, query, static_cast<uint32_t>(key_of(e)) % mask::kCell);
    };
    if constexpr (kWide) {
      uint32_t bits[kPairs / 32];
#pragma unroll
      for (int w = 0; w < kPairs / 32; ++w) {
        uint32_t word = 0;
#pragma unroll 1
        for (int e = 0; e < 32; ++e) word |= static_cast<uint32_t>(shown(32 * w + e)) << e;
        bits[w] = word;
      }
#pragma unroll
      for (int e = 0; e < kPairs; ++e) {
        if ((bits[e / 32] >> (e % 32) & 1u) == 0) s[e] = attn::kNegativeInfinity;
      }
    } else {
#pragma unroll
      for (int e = 0; e < kPairs; ++e) {
        if (!shown(e)) s[e] = attn::kNegativeInfinity;
        asm volatile("" ::: "memory");
      }
    }
  }

  // P^T of a band's hidden pairs becomes 0: query i sees the keys from i + low to before i + high.
  // NOTE: not S^T, as by `hide`: beside it registers are too few, where the test is as short as this.
  __device__ __forceinline__ void hide_outside_band(Fragment& p, uint32_t stage, int sub) {
    const uint32_t low = params.band.low, high = params.band.high;
    const uint32_t query = shared.step[stage].tile * Config::kBlockQ + query_of(sub, 0);
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const int32_t key = key_of(2 * slot);
      const uint32_t first = key - query - low, span = key < params.len_kv ? high - low : 0;
#pragma unroll
      for (int n = 0; n < kPairs / 4; ++n) {
        uint32_t& weights = p[n / 2][n % 2 * 2 + slot];
        if (first - 8 * n >= span) weights &= 0xffff0000u;
        if (first - (8 * n + 1) >= span) weights &= 0x0000ffffu;
      }
    }
  }

  // Soft cap and ALiBi, in units of S. `slope` becomes the derivative of the result by S.
  __device__ __forceinline__ void modify(float (&s)[kPairs], float (&slope)[kPairs], uint32_t stage, int sub) {
#pragma unroll
    for (int e = 0; e < kPairs; ++e) slope[e] = 1.0f;
    if (params.softcap) {
#pragma unroll
      for (int e = 0; e < kPairs; ++e) {
        const float t = attn::tanh_exact(s[e] * params.cap.factor);
        slope[e] = fmaf(-t, t, 1.0f);
        s[e] = t * params.cap.inverse;
      }
    }
    if (params.alibi_slopes != nullptr) {
      const Step step = shared.step[stage];
      const float alibi =
          params.alibi_slopes[shared.key_tile.batch * params.alibi_stride_batch + step.head] * params.alibi_factor;
      const int64_t row =
          (params.plan(shared.key_tile.batch, step.head) * params.q_tiles + step.tile) * Config::kBlockQ;
#pragma unroll
      for (int e = 0; e < kPairs; ++e) {
        const int32_t position = params.prepared.positions[row + query_of(sub, e)];
        s[e] -= alibi * fabsf(static_cast<float>(position - key_of(e)));
      }
    }
  }

  // Which weights dropout keeps.
  __device__ __forceinline__ Kept draw(uint32_t stage, int sub) {
    const Step step = shared.step[stage];
    const int32_t first_query = step.tile * Config::kBlockQ + sub * Config::kSubQ;
    if constexpr (Extra::kGeneral) {
      return draw_one_by_one<kPairs>(params, shared.key_tile, step.head, first_query, here(first_key()));
    } else {
      return draw_in_order<kPairs>(params.dropout, shared.key_tile.batch, step.head, first_query, first_key());
    }
  }

  // P^T = 2^(S^T scale - lse), rounded: before dropout, and with a slope `w` for dS, times it, and `p` for dV, what is kept.
  __device__ __forceinline__ void exponentiate(const float (&s)[kPairs], const float (&slope)[kPairs], Fragment& p,
                                               Fragment& w, const Kept& kept, uint32_t stage, int sub) {
#pragma unroll
    for (int n = 0; n < kPairs / 4; ++n) {
      float2 lse = {0.0f, 0.0f};
      if constexpr (!Config::kTerms) lse = statistic(stage, sub, 0, n);
#pragma unroll
      for (int slot = 0; slot < 2; ++slot) {
        const int e = 4 * n + 2 * slot;
        const float p0 = sm90::exp2_approx(fmaf(s[e], params.scale_log2, -lse.x));
        const float p1 = sm90::exp2_approx(fmaf(s[e + 1], params.scale_log2, -lse.y));
        uint32_t& weights = p[n / 2][n % 2 * 2 + slot];
        weights = sm90::pack2<Element>(p0, p1);
        if constexpr (Extra::kGeneral) {
          weights = kept.keep(e / 2, weights);
          w[n / 2][n % 2 * 2 + slot] = sm90::pack2<Element>(p0 * slope[e], p1 * slope[e + 1]);
        }
      }
    }
  }

  // P^T, made without a slope, to what is kept of it.
  __device__ __forceinline__ void drop(Fragment& p, const Kept& kept) {
#pragma unroll
    for (int n = 0; n < kPairs / 2; ++n) p[n / 4][n % 4] = kept.keep(n, p[n / 4][n % 4]);
  }

  // S^T, as it comes, to the weights.
  __device__ __forceinline__ void weigh(float (&s)[kPairs], Fragment& p, Fragment& w, const Kept& kept, uint32_t stage,
                                        int sub) {
    float slope[kPairs];
    if constexpr (Extra::kGeneral) modify(s, slope, stage, sub);
    const bool partial = uniform(shared.step[stage].partial) != 0;
    if (!Extra::kBand && partial) hide(s, stage, sub);
    exponentiate(s, slope, p, w, kept, stage, sub);
  }

  __device__ __forceinline__ void preload(float (&dp)[kPairs], uint32_t stage, int sub) {
#pragma unroll
    for (int n = 0; n < kPairs / 4; ++n) {
      const float2 delta = statistic(stage, sub, 1, n);
      dp[4 * n] = dp[4 * n + 2] = delta.x;
      dp[4 * n + 1] = dp[4 * n + 3] = delta.y;
    }
  }

  // dS^T = w ∘ (dP^T - Δ), rounded.
  // NOTE: where a hidden pair's dP is not finite, neither is its dS; postprocessing sees that.
  __device__ __forceinline__ void differentiate(float (&dp)[kPairs], const Fragment& w, Fragment& ds, const Kept& kept,
                                                uint32_t stage, int sub) {
#pragma unroll
    for (int n = 0; n < kPairs / 4; ++n) {
      float2 delta;
      if constexpr (!kPreload) delta = statistic(stage, sub, 1, n);
#pragma unroll
      for (int slot = 0; slot < 2; ++slot) {
        const int e = 4 * n + 2 * slot;
        if constexpr (!kPreload) {
          if constexpr (Extra::kDropout) {
            dp[e] = fmaf(dp[e], kept.has(e) ? params.dropout.keep_scale : 0.0f, delta.x);
            dp[e + 1] = fmaf(dp[e + 1], kept.has(e + 1) ? params.dropout.keep_scale : 0.0f, delta.y);
          } else {
            dp[e] += delta.x;
            dp[e + 1] += delta.y;
          }
        }
        const float2 weight = attn::unpack2(w[n / 2][n % 2 * 2 + slot], Element{});
        ds[n / 2][n % 2 * 2 + slot] = sm90::pack2<Element>(weight.x * dp[e], weight.y * dp[e + 1]);
      }
    }
  }

  // Where this lane's 16 bytes of a 16 x 16 block of dS^T lie, for ldmatrix and stmatrix.
  // PERF: a chunk's place within its 128 bytes is one exclusive or away from the first's.
  __device__ __forceinline__ uint32_t block_address(uint32_t first, int block) const {
    return (first ^ (block % 4 * 32)) + block / 4 * S::DsTile::kGroupBytes;
  }
  __device__ __forceinline__ uint32_t first_block(const char* tile) const {
    const uint32_t row = here(warp_key() + sm90::Matrix16x16::row(lane()));
    return address(tile) + S::DsTile::chunk_offset(row, sm90::Matrix16x16::half(lane()));
  }
  __device__ __forceinline__ void store_fragment(const Fragment& ds, char* tile, int sub) {
    const uint32_t first = first_block(tile);
#pragma unroll
    for (int i = 0; i < kQuerySteps; ++i) {
      sm90::stmatrix_x4(block_address(first, sub * kQuerySteps + i), ds[i][0], ds[i][1], ds[i][2], ds[i][3]);
    }
  }
  __device__ __forceinline__ void load_fragment(Fragment& ds, const char* tile, int sub) {
    const uint32_t first = first_block(tile);
#pragma unroll
    for (int i = 0; i < kQuerySteps; ++i) sm90::ldmatrix_x4(ds[i], block_address(first, sub * kQuerySteps + i));
  }

  // A warp's part of dS^T, whole, to dQ's warpgroup; in clusters to both CTAs'.
  // SYNC: makes it known to their wgmma. They released the place in both before anything was written there.
  __device__ __forceinline__ void publish(uint32_t buffer, uint32_t part) {
    sm90::fence_async_proxy();
    __syncwarp();
    sm90::Barrier& full = shared.full_ds[buffer][part];
    if constexpr (S::kClustered) {
      constexpr uint32_t kBytes = sm90::kWarpRows * sm90::kSwizzleRowBytes;  // in one run
      static_assert(S::DsTile::kGroups == 1);
      if (!sm90::elect()) return;
      const uint32_t other = rank_of_cta<Config>() ^ 1u;
      const char* rows = shared.ds[buffer] + warp_key() * sm90::kSwizzleRowBytes;
      full.arrive_expect(kBytes);
      sm90::copy_across(sm90::map_shared(rows + Config::kCtaKeys * sm90::kSwizzleRowBytes, other), rows, kBytes,
                        sm90::map_shared(&full.word, other));
    } else {
      release(full);
    }
  }

  // A gradient to memory, by way of shared rows that nobody needs any more.
  __device__ __forceinline__ void store(const float (&d)[kGradients], const sm90::TensorMap& tensor, char* staging) {
    const int32_t first = first_key();
    stage(d, staging);
    if (lane() == 0 && first < params.len_kv) send_all(tensor, staging, first);
  }
  __device__ __forceinline__ void stage(const float (&d)[kGradients], char* staging) const {
    attn::stage_rows<Element, typename S::KTile, kGradients>(d, 0, address(staging), here(warp_key()));
    sm90::fence_async_proxy();
    __syncwarp();
  }
  __device__ __forceinline__ void send_all(const sm90::TensorMap& tensor, const char* staging,
                                           int32_t first_key) const {
    sm90::store_rows<typename S::KTile, sm90::kStridedRank>(
        tensor, staging + warp_key() * sm90::kSwizzleRowBytes, 0, first_key,
        {shared.key_tile.kv_head, shared.key_tile.batch, shared.key_tile.residue});
  }

  // Packed, what is staged: the next document's keys are another CTA's.
  __device__ __forceinline__ void send_own(const sm90::TensorMap& tensor, const TensorRef& rows, int32_t columns,
                                           const char* staging) const {
    const int32_t first_key = shared.own.first_key + tile_key(), count = shared.own.end_key - first_key;
    if (count < sm90::kWarpRows) return send_some(rows, columns, staging, first_key, count);
    if (lane() == 0) send_all(tensor, staging, first_key);
  }
  // As many rows, eight elements a lane.
  // NOTE: row by row. A loop over rows and chunks in one takes registers that there are not.
  __device__ __forceinline__ void send_some(const TensorRef& rows, int32_t columns, const char* staging,
                                            int32_t first_key, int32_t count) const {
    const sm90::Sequence to = {shared.key_tile.kv_head, shared.key_tile.batch, shared.key_tile.residue};
    const uint32_t chunks = columns / 8;
#pragma unroll 1
    for (int32_t row = 0; row < count; ++row) {
      if (lane() >= chunks) continue;
      const uint4 value = *reinterpret_cast<const uint4*>(staging + S::KTile::chunk_offset(warp_key() + row, lane()));
      *reinterpret_cast<uint4*>(attn::row_of<Element>(rows, to, first_key + row) + lane() * 8) = value;
    }
  }
  // SYNC: shared memory outlives the stores that read it.
  __device__ __forceinline__ void finish_stores() {
    if (lane() == 0) sm90::wait_stores_read();
  }

  // A gradient is complete: scaled, and noted where it is not finite.
  __device__ __forceinline__ bool finish(float (&d)[kGradients], float factor) {
#pragma unroll
    for (int e = 0; e < kGradients; ++e) d[e] *= factor;
    return attn::any_nonfinite(d);
  }
  __device__ __forceinline__ void note(uint32_t warp, bool suspect) {
    if (lane() == 0) params.prepared.suspects[blockIdx.x * 8 + warp] = suspect;
  }
};

}  // namespace flashmsa::bwd
