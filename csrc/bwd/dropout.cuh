// Which of a thread's pairs dropout keeps. core/philox.h says how weights are drawn.
#pragma once

#include "attn/dropout.cuh"
#include "bwd/shared.cuh"
#include "sm90/fragment.h"

namespace flashmsa::bwd {

// Of a thread's accumulators of S^T, packed in pairs of neighbouring queries.
template <int kCount>
using KeptBits = attn::KeptBits<kCount>;

__device__ __forceinline__ attn::SequenceDraws<true> draws_of(const KernelParams& params, int32_t batch, int32_t head,
                                                              int32_t residue) {
  return {params.dropout, {head, batch, residue}, head / params.heads_per_kv_head()};
}

// Pairs in the caller's order. Queries first_query …, keys of this warp from first_key. A call of the generator serves 32
// queries and 64 keys, of which the warp has 16: eight pairs of this thread and eight of the one whose keys are the
// neighbours. The two share their calls: one makes those of even queries, the other those of odd ones.
template <int kCount>
__device__ __forceinline__ KeptBits<kCount> draw_in_order(const attn::DropoutParams& params, int32_t batch,
                                                          int32_t head, int32_t first_query, int32_t first_key) {
  const Dropout dropout = make_dropout(params.rng_state, params.threshold, batch, head, params.heads_q);
  const uint32_t lane = threadIdx.x % 32, row = lane / 4, quarter = static_cast<uint32_t>(first_key) / 16 % 4;
  const bool odd = row % 2 != 0;
  const Dropout::KeyCalls calls = dropout.calls_of_key(first_key + row);
  const uint32_t queries = Dropout::query_count(first_query) + lane % 4 * 2 + (odd ? 1 : 0);
  // Of a word that holds draws of both threads' keys, which half goes to the other; and where both queries' draws of this
  // thread's first and second key are then, in its own words and what came from the other.
  const uint32_t sent = odd ? 0x5410u : 0x7632u;
  const uint32_t first = odd ? 0x3254u : 0x5410u, second = odd ? 0x3276u : 0x7610u;
  KeptBits<kCount> kept;
#pragma unroll
  for (int block = 0; block < kCount / 16; ++block) {
    const PhiloxBlock call = calls.at(queries + 8 * block);
    // draw_word for the warp's keys: n = 2 quarter and the one after.
    const auto& w = call.word;
    const bool swapped = quarter % 2 != 0;
    const uint32_t x0 = swapped ? w[2] : w[0], x1 = swapped ? w[3] : w[1];
    const uint32_t x2 = swapped ? w[0] : w[2], x3 = swapped ? w[1] : w[3];
    const uint32_t further = quarter / 2, y0 = x1 + further * x2, y1 = x2 + further * x3;
#pragma unroll
    for (int n = 0; n < 4; ++n) {  // queries 8 n further
      const uint32_t multiplier = draw_multiplier(n);
      const uint32_t a = x0 * multiplier + y0, b = x1 * multiplier + y1;
      const uint32_t other = __shfl_xor_sync(~0u, __byte_perm(a, b, sent), 4);
      const int pair = 8 * block + 2 * n;
      kept.put(pair, attn::kept_mask(__byte_perm(a, other, first), params.least));
      kept.put(pair + 1, attn::kept_mask(__byte_perm(b, other, second), params.least));
    }
  }
  kept.seal();
  return kept;
}

// Pairs in any order.
template <int kCount>
__device__ __forceinline__ KeptBits<kCount> draw_one_by_one(const KernelParams& params, const KeyTile& key_tile,
                                                            int32_t head, int32_t first_query, int32_t first_key) {
  static_assert(kCount <= 32);
  KeptBits<kCount> kept;
  if (params.dropout.rng_state == nullptr) {
    kept.words[0] = ~0u;
    return kept;
  }
  const attn::SequenceDraws<true> draws = draws_of(params, key_tile.batch, head, key_tile.residue);
#pragma unroll 1
  for (int e = 0; e < kCount; ++e) {
    const int32_t lane = threadIdx.x % 32;
    const int32_t query = first_query + 8 * (e / 4) + lane % 4 * 2 + e % 2;
    const int32_t key = first_key + lane / 4 + 8 * sm90::Accumulator::row_slot(e);
    if (draws.dropout.keeps(draws.query(query), draws.key(key)))
      kept.words[0] |= 1u << (kept.place(e / 2) + e % 2 * 16);
  }
  return kept;
}

}  // namespace flashmsa::bwd
