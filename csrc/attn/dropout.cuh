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
  uint32_t threshold;   // 1 … 65535
  uint32_t last_drop;   // threshold - 1 in both halves, and
  uint32_t minus_last;  // its negative
  float keep_scale;
  bool in_order;  // rows and keys are the caller's queries and keys. Otherwise:
  int32_t first_query, first_key, token_step;
  const int32_t* q_order;  // instead of these; null: not
  const int32_t* kv_order;
  int64_t q_stride_batch, q_stride_head, kv_stride_batch, kv_stride_head;
};

inline DropoutParams make_dropout_params(const AttentionParams& p) {
  DropoutParams dropout = {};
  if (p.dropout_p <= 0) return dropout;
  const MaskArgs& m = p.mask;
  dropout.rng_state = p.rng_state;
  dropout.heads_q = p.heads_q;
  dropout.len_q = p.len_q;
  dropout.len_kv = p.len_kv;
  dropout.threshold = dropout_threshold(p.dropout_p);
  dropout.last_drop = (dropout.threshold - 1) * 0x10001u;
  dropout.minus_last = (0x10001u - dropout.threshold) % 0x10000u * 0x10001u;
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
        dropout(make_dropout(params.rng_state, 0.0, queries.batch, queries.head, params.heads_q)),
        batch(queries.batch),
        head(queries.head),
        kv_head(kv_head),
        residue(queries.residue) {
    dropout.threshold = params.threshold;
  }

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

// A bit for each of a thread's weights, which come in pairs of neighbouring columns: pair n is accumulators 2n, 2n + 1.
// PERF: both bits of a pair are 16 apart, so that two draws are compared, counted in and spread to a mask at once; and pairs
// 2n and 2n + 1 are 8 apart, so that they share a shift.
template <int kCount>
struct KeptBits {
  static constexpr int kRun = min_of(kCount / 4, 8);  // pairs 2n of a word
  static constexpr int kWords = kCount / 4 / kRun;
  uint32_t words[kWords];

  // Of packed weights number `pair` what is kept, and 0 for the rest.
  __device__ __forceinline__ uint32_t keep(int pair, uint32_t weights) const {
    const uint32_t shifted = words[pair / 2 / kRun] << (pair / 2 % kRun + 8 - kRun);
    uint32_t mask;
    // The sign of byte 1 (0) twice, then that of byte 3 (2).
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(mask) : "r"(shifted), "r"(pair % 2 == 0 ? 0xBB99 : 0xAA88));
    return weights & mask;
  }

  // Makes a word of its pairs in order, the even ones and the odd ones: a bit in either half.
  struct Run {
    uint32_t even = 0, odd = 0;
    __device__ __forceinline__ void add(uint32_t even_pair, uint32_t odd_pair) {
      even = even * 2 + even_pair;
      odd = odd * 2 + odd_pair;
    }
    __device__ __forceinline__ uint32_t word() const { return even * 256 + odd; }
  };
};

// 1 in each half whose draw is kept.
__device__ __forceinline__ uint32_t kept_draws(const DropoutParams& params, uint32_t draws) {
  return __viaddmin_u16x2(__vmaxu2(draws, params.last_drop), params.minus_last, 0x00010001u);
}

// The caller's order: one call of the generator serves the 8 accumulators of a 16 x 16 block. row: this thread's first;
// first_key: the tile's, a multiple of 16.
template <int kCount>
__device__ __forceinline__ KeptBits<kCount> draw_in_order(const DropoutParams& params, const Dropout& dropout,
                                                          uint32_t row, int32_t first_key) {
  using Bits = KeptBits<kCount>;
  constexpr int kAtOnce = kCount < 64 ? 1 : 2;
  // NOTE: the counter of Dropout::draws, stepped from block to block.
  uint32_t rows = row / 16 * 8 + row % 8;
  uint32_t keys = static_cast<uint32_t>(first_key) / 16 * 4 + threadIdx.x % 4;
  // PERF: what the first rounds make of it is made anew for each key block, rather than kept in registers.
  asm volatile("" : "+r"(rows));
  uint32_t key0 = dropout.key0, key1 = dropout.key1;
  Bits kept;
#pragma unroll
  for (int w = 0; w < Bits::kWords; ++w) {
    typename Bits::Run run;
    // PERF: two calls at a time, of which each has little to do at once. All of them together take too many registers, and
    // where O is large two do.
#pragma unroll(kAtOnce)
    for (int block = 0; block < Bits::kRun / 2; ++block, keys += 4) {
      // PERF: and the keys of the rounds for each pass, for the same reason.
      if (block % kAtOnce == 0) asm volatile("" : "+r"(key0), "+r"(key1));
      const PhiloxBlock drawn = philox({{rows, keys, dropout.slice, dropout.offset}}, key0, key1);
      // Pairs in their order: the upper row, the lower one, then both 8 columns further.
      run.add(kept_draws(params, drawn.word[0]), kept_draws(params, drawn.word[2]));
      run.add(kept_draws(params, drawn.word[1]), kept_draws(params, drawn.word[3]));
    }
    kept.words[w] = run.word();
  }
  return kept;
}

// Any order: a call for each weight.
template <int kCount>
__device__ __forceinline__ KeptBits<kCount> draw_one_by_one(const SequenceDraws<true>& draws, int32_t row,
                                                            int32_t first_key) {
  using Bits = KeptBits<kCount>;
  const uint32_t queries[2] = {draws.query(row), draws.query(row + 8)};
  int32_t column = first_key + sm90::Accumulator::first_column(threadIdx.x);
  Bits kept;
#pragma unroll
  for (int w = 0; w < Bits::kWords; ++w) {
    typename Bits::Run run;
#pragma unroll 1
    for (int n = 0; n < Bits::kRun; ++n, column += 8) {
      uint32_t pairs[2] = {0, 0};
#pragma unroll 1
      for (int parity = 0; parity < 2; ++parity) {
        const uint32_t key = draws.key(column + parity);
#pragma unroll
        for (int slot = 0; slot < 2; ++slot) {
          if (draws.dropout.keeps(queries[slot], key)) pairs[slot] |= 1u << (16 * parity);
        }
      }
      run.add(pairs[0], pairs[1]);
    }
    kept.words[w] = run.word();
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
