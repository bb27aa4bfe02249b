// Which of a thread's weights dropout keeps. core/philox.h says how they are drawn.
#pragma once

#include <type_traits>

#include "core/params.h"
#include "core/philox.h"
#include "sm90/fragment.h"
#include "sm90/tma.cuh"

namespace flashmsa::attn {

// What the draws need of a call.
struct DropoutParams {
  const int64_t* rng_state;
  int32_t heads_q, len_q, len_kv;
  uint32_t threshold;  // 1 … 65535
  uint32_t least;      // where draws come in order: the first draw that is kept, as a bfloat16 number in both halves
  float keep_scale;
  bool in_order;  // rows and keys are the caller's queries and keys. Otherwise:
  int32_t first_query, first_key, token_step;
  const int32_t* q_order;  // instead of these; null: not
  const int32_t* kv_order;
  int64_t q_stride_batch, q_stride_head, kv_stride_batch, kv_stride_head;
};

inline DropoutParams make_dropout_params(const AttentionParams& p) {
  DropoutParams dropout = {};
  dropout.keep_scale = 1.0f;  // kernels that decide at run time multiply by it without dropout too
  if (p.dropout_p <= 0) return dropout;
  const MaskArgs& m = p.mask;
  dropout.rng_state = p.rng_state;
  dropout.heads_q = p.heads_q;
  dropout.len_q = p.len_q;
  dropout.len_kv = p.len_kv;
  dropout.threshold = dropout_threshold(p.dropout_p);
  dropout.least = bf16_of_rank(min_of(dropout.threshold, kLastBf16Rank)) * 0x10001u;
  dropout.keep_scale = 65536.0f / static_cast<float>(65536u - dropout.threshold);
  dropout.in_order = draws_in_order(p);
  dropout.first_query = p.first_query;
  dropout.first_key = p.first_key;
  dropout.token_step = p.token_step;
  dropout.q_order = m.q_order;
  dropout.kv_order = m.kv_order;
  dropout.q_stride_batch = m.q_order_stride_batch;
  dropout.q_stride_head = m.q_order_stride_head;
  dropout.kv_stride_batch = m.kv_order_stride_batch;
  dropout.kv_stride_head = m.kv_order_stride_head;
  return dropout;
}

// The draws of one head, and which of the caller's queries and keys a row and a key of a sequence are. kAnyOrder: not the
// same.
template <bool kAnyOrder>
struct SequenceDraws {
  const DropoutParams& params;
  Dropout dropout;
  int32_t batch, head, kv_head, residue;

  __device__ __forceinline__ SequenceDraws(const DropoutParams& params, sm90::Sequence queries, int32_t kv_head)
      : params(params),
        dropout(make_dropout(params.rng_state, params.threshold, queries.batch, queries.head, params.heads_q)),
        batch(queries.batch),
        head(queries.head),
        kv_head(kv_head),
        residue(queries.residue) {}

  // NOTE: rows and keys past the ends are asked for too, and take those at the ends.
  __device__ __forceinline__ uint32_t query(int32_t row) const {
    if constexpr (!kAnyOrder) return row;
    row = clamp(row, 0, params.len_q - 1);
    if (params.q_order != nullptr)
      return params.q_order[batch * params.q_stride_batch + head * params.q_stride_head + row];
    return params.first_query + residue + row * params.token_step;
  }
  __device__ __forceinline__ uint32_t key(int32_t key) const {
    if constexpr (!kAnyOrder) return key;
    key = clamp(key, 0, params.len_kv - 1);
    if (params.kv_order != nullptr) {
      return params.kv_order[batch * params.kv_stride_batch + kv_head * params.kv_stride_head + key];
    }
    return params.first_key + residue + key * params.token_step;
  }
};

// Without dropout.
struct AllKept {
  __device__ __forceinline__ uint32_t keep(int /*pair*/, uint32_t weights) const { return weights; }
};

// Ones in each half whose draw is kept.
// PERF: what is no number counts as kept, by the unordered comparison.
__device__ __forceinline__ uint32_t kept_mask(uint32_t draws, uint32_t least) {
  uint32_t mask;
  asm("set.geu.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(draws), "r"(least));
  return mask;
}

// A bit for each of a thread's weights, which come in pairs of neighbouring columns: pair n is accumulators 2n, 2n + 1.
// PERF: both bits of a pair are 16 apart, so that they spread to a mask at once; and those of pairs 2n and 2n + 1 are 8 apart,
// so that these share a shift.
template <int kCount>
struct KeptBits {
  static constexpr int kWords = (kCount + 31) / 32;
  uint32_t words[kWords] = {};

  static __device__ __forceinline__ constexpr int place(int pair) { return pair % 16 / 2 + pair % 2 * 8; }

  __device__ __forceinline__ void put(int pair, uint32_t mask) { words[pair / 16] |= mask & 0x10001u << place(pair); }
  // When all are put. PERF: otherwise the compiler keeps what the bits are made of, for it knows each on its own.
  __device__ __forceinline__ void seal() {
#pragma unroll
    for (uint32_t& word : words) asm volatile("" : "+r"(word));
  }
  __device__ __forceinline__ bool has(int e) const { return (words[e / 32] >> (place(e / 2) + e % 2 * 16) & 1u) != 0; }
  // Of packed weights number `pair` what is kept, and 0 for the rest.
  __device__ __forceinline__ uint32_t keep(int pair, uint32_t weights) const {
    const uint32_t shifted = words[pair / 16] << (7 - place(pair) % 8);
    uint32_t mask;
    // The sign of byte 1 (0) twice, then that of byte 3 (2).
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(mask) : "r"(shifted), "n"(0xAA88));
    if (pair % 2 != 0) asm("prmt.b32 %0, %1, 0, %2;" : "=r"(mask) : "r"(shifted), "n"(0xBB99));
    return weights & mask;
  }
};

// Calls for the two rows of a thread, and what words of theirs are multiplied by.
struct RowPairCalls {
  Dropout::QueryCalls calls;
  uint32_t multiplier[2];

  RowPairCalls() = default;
  __device__ __forceinline__ RowPairCalls(const Dropout& dropout, uint32_t row)
      : calls(dropout.calls_of_query(row)),
        multiplier{draw_multiplier(row % 32 / 8), draw_multiplier(row % 32 / 8 + 1)} {}
};

// A key block's draws in the caller's order, made as they are asked for: one call of the generator serves the 32 accumulators
// of a 16 x 64 block. Of packed weights number `pair` in their order, what is kept.
// PERF: among the exponentials, whose unit leaves the others time. All draws ahead of them, in the shadow of Q K^T, cost more.
struct Drawing {
  const RowPairCalls& rows;
  uint32_t keys, least;
  mutable PhiloxBlock block;

  // first_key: the tile's, a multiple of 64.
  __device__ __forceinline__ Drawing(const DropoutParams& params, const RowPairCalls& rows, int32_t first_key)
      : rows(rows), keys(Dropout::key_count(static_cast<uint32_t>(first_key)) + threadIdx.x % 4), least(params.least) {}
  __device__ __forceinline__ uint32_t keep(int pair, uint32_t weights) const {
    if (pair % 16 == 0) block = rows.calls.at(keys + pair / 4);
    return weights & kept_mask(draw_word(block, rows.multiplier[pair % 2], pair % 16 / 2), least);
  }
};

// The same as bits, of a tile whose first key is a multiple of 32.
template <int kCount>
__device__ __forceinline__ KeptBits<kCount> draw_in_order(uint32_t least, const RowPairCalls& rows, int32_t first_key) {
  const uint32_t keys = Dropout::key_count(static_cast<uint32_t>(first_key)) + threadIdx.x % 4;
  const bool second_half = first_key % 64 != 0;
  KeptBits<kCount> kept;
#pragma unroll
  for (int call = 0; call < KeptBits<kCount>::kWords; ++call) {
    const PhiloxBlock block = rows.calls.at(keys + 4 * call);
#pragma unroll
    for (int n = 0; n < min_of(kCount / 2, 16); ++n) {
      // Pairs in their order: the upper row, the lower one, then both 8 columns further.
      uint32_t draws = draw_word(block, rows.multiplier[n % 2], n / 2);
      if (kCount < 32 && second_half) draws = draw_word(block, rows.multiplier[n % 2], n / 2 + 4);
      kept.put(16 * call + n, kept_mask(draws, least));
    }
  }
  kept.seal();
  return kept;
}

// Any order: a call for each weight.
template <int kCount>
__device__ __forceinline__ KeptBits<kCount> draw_one_by_one(const SequenceDraws<true>& draws, int32_t row,
                                                            int32_t first_key) {
  // NOTE: no array, whose index is not known, here and below: it would lie in local memory.
  const uint32_t upper = draws.query(row), lower = draws.query(row + 8);
  const int32_t first_column = first_key + sm90::Accumulator::first_column(threadIdx.x);
  KeptBits<kCount> kept;
#pragma unroll
  for (int w = 0; w < KeptBits<kCount>::kWords; ++w) {
    uint32_t word = 0;
#pragma unroll 1
    for (int n = 0; n < min_of(kCount / 2, 16); ++n) {
#pragma unroll 1
      for (int parity = 0; parity < 2; ++parity) {
        const uint32_t key = draws.key(first_column + 8 * (8 * w + n / 2) + parity);
        if (draws.dropout.keeps(n % 2 == 0 ? upper : lower, key))
          word |= 1u << (KeptBits<kCount>::place(n) + 16 * parity);
      }
    }
    kept.words[w] = word;
  }
  return kept;
}

// A row on its own.
template <bool kAnyOrder>
struct RowDraws {
  SequenceDraws<kAnyOrder> draws;
  uint32_t query;

  __device__ __forceinline__ RowDraws(const SequenceDraws<kAnyOrder>& draws, int32_t row)
      : draws(draws), query(draws.query(row)) {}
  __device__ __forceinline__ bool keeps(int32_t key) const { return draws.dropout.keeps(query, draws.key(key)); }
  __device__ __forceinline__ float keep_scale() const { return draws.params.keep_scale; }
};
struct NoRowDraws {};

}  // namespace flashmsa::attn
