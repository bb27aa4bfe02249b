// The per-element test of a partial tile.
#pragma once

#include "attn/softmax.cuh"
#include "mask/interval.h"
#include "sm90/fragment.h"

namespace flashmsa::attn {

// Sets S to -inf outside the intervals of this thread's two rows. first_key is the tile's first key.
template <int kCount>
__device__ __forceinline__ void apply_intervals(float (&s)[kCount], const mask::Interval (&rows)[2], int32_t first_key,
                                                int32_t thread) {
  const int32_t first_column = first_key + sm90::Accumulator::first_column(thread);
  // One unsigned comparison tests both ends: key - begin < end - begin.
  const int32_t begin[2] = {first_column - rows[0].begin, first_column - rows[1].begin};
  const uint32_t width[2] = {static_cast<uint32_t>(rows[0].end - rows[0].begin),
                             static_cast<uint32_t>(rows[1].end - rows[1].begin)};
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    const int slot = sm90::Accumulator::row_slot(e);
    const uint32_t distance = static_cast<uint32_t>(begin[slot] + sm90::Accumulator::column_offset(e));
    if (distance >= width[slot]) s[e] = kNegativeInfinity;
  }
}

}  // namespace flashmsa::attn
