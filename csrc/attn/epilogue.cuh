// From the accumulators to global memory.
#pragma once

#include "attn/softmax.cuh"
#include "sm90/fragment.h"
#include "sm90/matrix.cuh"

namespace flashmsa::attn {

// Is some element of this warp's rows NaN or infinite? The same answer in all lanes.
template <int kCount>
__device__ __forceinline__ bool any_nonfinite(const float (&o)[kCount]) {
  // 0 times a finite number is 0, times another NaN. Four chains, for the latency of one is felt.
  float zero[4] = {};
#pragma unroll
  for (int e = 0; e < kCount; ++e) zero[e % 4] = fmaf(o[e], 0.0f, zero[e % 4]);
  return __any_sync(~0u, (zero[0] + zero[1]) + (zero[2] + zero[3]) != 0.0f);
}

// Multiplies both rows of a thread.
template <int kCount>
__device__ __forceinline__ void scale_rows(float (&o)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) o[e] *= factor[sm90::Accumulator::row_slot(e)];
}

// Writes a warp's 16 rows of O, rounded, to their place in a swizzled tile: kPass accumulators from `first` on, which fill
// the tile's columns; fewer where there are no more. first_row counts within the tile.
template <class Element, class Tile, int kPass, int kCount>
__device__ __forceinline__ void stage_rows(const float (&o)[kCount], int first, uint32_t tile_address,
                                           int32_t first_row) {
  static_assert(kPass * 2 == Tile::kColumns);
  const int32_t lane = threadIdx.x % 32;
  const uint32_t row = first_row + sm90::Matrix16x16::row(lane);
  const uint32_t half = sm90::Matrix16x16::half(lane);
#pragma unroll
  for (int j = 0; j < kPass / 8; ++j) {
    if (first + 8 * j >= kCount) break;
    const float* block = o + first + 8 * j;
    sm90::stmatrix_x4(tile_address + Tile::chunk_offset(row, 2 * j + half), sm90::pack2<Element>(block[0], block[1]),
                      sm90::pack2<Element>(block[2], block[3]), sm90::pack2<Element>(block[4], block[5]),
                      sm90::pack2<Element>(block[6], block[7]));
  }
}

}  // namespace flashmsa::attn
