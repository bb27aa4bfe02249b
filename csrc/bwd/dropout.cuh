// Which of a thread's pairs dropout keeps. core/philox.h says how weights are drawn.
#pragma once

#include "bwd/shared.cuh"
#include "core/philox.h"
#include "sm90/fragment.h"

namespace flashmsa::bwd {

// A bit for each of a thread's accumulators of S^T.
template <int kCount>
struct KeptBits {
  uint32_t words[(kCount + 31) / 32];

  __device__ __forceinline__ KeptBits() {
#pragma unroll
    for (uint32_t& word : words) word = ~0u;
  }
  __device__ __forceinline__ bool has(int e) const { return (words[e / 32] >> (e % 32) & 1u) != 0; }
};

// The caller's indices of a query and a key.
__device__ __forceinline__ int32_t original_query(const KernelParams& params, int32_t batch, int32_t head,
                                                  int32_t residue, int32_t query) {
  const DropoutParams& d = params.dropout;
  if (query >= params.len_q) return query;
  if (d.q_order != nullptr) return d.q_order[batch * d.q_stride_batch + head * d.q_stride_head + query];
  return d.first_query + residue + query * d.token_step;
}
__device__ __forceinline__ int32_t original_key(const KernelParams& params, int32_t batch, int32_t kv_head,
                                                int32_t residue, int32_t key) {
  const DropoutParams& d = params.dropout;
  if (key >= params.len_kv) return key;
  if (d.kv_order != nullptr) return d.kv_order[batch * d.kv_stride_batch + kv_head * d.kv_stride_head + key];
  return d.first_key + residue + key * d.token_step;
}

__device__ __forceinline__ Dropout dropout_of(const KernelParams& params, int32_t batch, int32_t head) {
  return make_dropout(params.dropout.rng_state, params.dropout.p, batch, head, params.heads_q);
}

// Pairs in the caller's order: one call of the generator serves eight of them, four of this thread and four of the one
// whose keys are the neighbours; the two share their calls. Queries first_query …, keys of this warp from first_key.
template <int kCount>
__device__ __forceinline__ KeptBits<kCount> draw_in_order(const KernelParams& params, int32_t batch, int32_t head,
                                                          int32_t first_query, int32_t first_key) {
  const Dropout dropout = dropout_of(params, batch, head);
  const uint32_t threshold = dropout.threshold << 16;
  const uint32_t lane = threadIdx.x % 32, row = lane / 4;
  const bool odd = row % 2 != 0;
  const uint32_t query = first_query + lane % 4 * 2 + (odd ? 1 : 0), key = first_key + row;
  KeptBits<kCount> kept;
#pragma unroll
  for (uint32_t& word : kept.words) word = 0;
#pragma unroll
  for (int block = 0; block < kCount / 8; ++block) {
    const PhiloxBlock drawn = dropout.draws(query + 16 * block, key);
    // Draws of one half of each word are for this lane's key, of the other for its neighbour's.
    const uint32_t mine_at = odd ? 0x7632u : 0x5410u, other_at = odd ? 0x5410u : 0x7632u;
    uint32_t draw[2][2];  // [query's parity][query 8 further]: key in the low half, key + 8 in the high one
#pragma unroll
    for (int further = 0; further < 2; ++further) {
      const uint32_t a = drawn.word[2 * further], b = drawn.word[2 * further + 1];
      const uint32_t mine = __byte_perm(a, b, mine_at);
      const uint32_t other = __shfl_xor_sync(~0u, __byte_perm(a, b, other_at), 4);
      draw[0][further] = odd ? other : mine;
      draw[1][further] = odd ? mine : other;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int e = 8 * block + i;
      const uint32_t both = draw[e % 2][i / 4];
      const bool keep = (sm90::Accumulator::row_slot(e) == 0 ? both << 16 : both) >= threshold;
      if (keep) kept.words[e / 32] |= 1u << (e % 32);
    }
  }
  return kept;
}

// Pairs in any order.
template <int kCount>
__device__ __forceinline__ KeptBits<kCount> draw_one_by_one(const KernelParams& params, const KeyTile& key_tile,
                                                            int32_t head, int32_t first_query, int32_t first_key) {
  static_assert(kCount <= 32);
  KeptBits<kCount> kept;
  if (params.dropout.rng_state == nullptr) return kept;
  const Dropout dropout = dropout_of(params, key_tile.batch, head);
  kept.words[0] = 0;
#pragma unroll 1
  for (int e = 0; e < kCount; ++e) {
    const int32_t lane = threadIdx.x % 32;
    const int32_t query = first_query + 8 * (e / 4) + lane % 4 * 2 + e % 2;
    const int32_t key = first_key + lane / 4 + 8 * sm90::Accumulator::row_slot(e);
    const bool keep = dropout.keeps(original_query(params, key_tile.batch, head, key_tile.residue, query),
                                    original_key(params, key_tile.batch, key_tile.kv_head, key_tile.residue, key));
    if (keep) kept.words[0] |= 1u << e;
  }
  return kept;
}

}  // namespace flashmsa::bwd
