// Online softmax of one thread's two rows, in base 2 with the scale folded into the exponent.
//
// A row's weights are P = 2^(S * scale_log2 - reference), l = sum of P, O = P V. Any reference gives the same O / l; a
// moving maximum keeps P in range. The reference follows the maximum only when it grows by more than 2^kLazyGrowth: until
// then P stays below that, exact in its relative precision, and O and l need no rescale.
#pragma once

#include <cstdint>

#include "sm90/fragment.h"
#include "sm90/matrix.cuh"

namespace flashmsa::attn {

inline constexpr float kNegativeInfinity = -__builtin_huge_valf();
// PERF: 8 is far below fp16's range (2^16) and makes rescales rare after the first tiles.
inline constexpr float kLazyGrowth = 8.0f;

struct OnlineSoftmax {
  float reference[2] = {kNegativeInfinity, kNegativeInfinity};  // in the exponent's units; -inf: no visible key yet
  float sum[2] = {0.0f, 0.0f};                                  // over this thread's columns only, until finish()

  // NOTE: a reference of -inf is read as 0: every S is then -inf too, and P becomes 2^-inf = 0 instead of NaN.
  __device__ __forceinline__ float offset(int slot) const {
    return reference[slot] == kNegativeInfinity ? 0.0f : -reference[slot];
  }

  // This thread's maximum over its columns of each row.
  template <int kCount>
  static __device__ __forceinline__ void thread_max(const float (&s)[kCount], float (&result)[2]) {
    result[0] = s[0];
    result[1] = s[2];
#pragma unroll
    for (int e = 1; e < kCount; ++e) {
      if (e == 2) continue;
      const int slot = sm90::Accumulator::row_slot(e);
      result[slot] = fmaxf(result[slot], s[e]);
    }
  }

  // Does some row of the warp need a new reference? The same answer in all lanes.
  __device__ __forceinline__ bool outgrown(const float (&maximum)[2], float scale_log2) const {
    // NOTE: -inf - -inf is NaN, which compares false: a row that still sees nothing needs nothing.
    const bool grows = fmaf(maximum[0], scale_log2, -reference[0]) > kLazyGrowth ||
                       fmaf(maximum[1], scale_log2, -reference[1]) > kLazyGrowth;
    return __any_sync(~0u, grows);
  }

  // Moves the references to the rows' true maxima; returns the factors that O and l of the old reference take.
  __device__ __forceinline__ void raise(const float (&maximum)[2], float scale_log2, float (&factor)[2]) {
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      float row_max = maximum[slot];
      row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 1));
      row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, 2));
      const float old_reference = reference[slot];
      reference[slot] = fmaxf(old_reference, row_max * scale_log2);
      factor[slot] = sm90::exp2_approx(old_reference + offset(slot));
      sum[slot] *= factor[slot];
    }
  }

  // S becomes P, packed as the A operand of PV; P is added to the rows' sums before it is rounded.
  template <class Element, int kCount>
  __device__ __forceinline__ void exponentiate(float (&s)[kCount], uint32_t (&p)[kCount / 8][4], float scale_log2) {
    const float minus[2] = {offset(0), offset(1)};
#pragma unroll
    for (int e = 0; e < kCount; e += 2) {
      const int slot = sm90::Accumulator::row_slot(e);
      const float p0 = sm90::exp2_approx(fmaf(s[e], scale_log2, minus[slot]));
      const float p1 = sm90::exp2_approx(fmaf(s[e + 1], scale_log2, minus[slot]));
      sum[slot] += p0 + p1;
      p[e / 8][e % 8 / 2] = sm90::pack2<Element>(p0, p1);
    }
  }

  // After the last tile: completes the sums over the row; lse in natural logarithm, -inf for a row without keys.
  __device__ __forceinline__ void finish(float (&inverse)[2], float (&lse)[2]) {
    constexpr float kLn2 = 0.693147180559945309f;
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      float total = sum[slot];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      inverse[slot] = total == 0.0f ? 0.0f : 1.0f / total;
      lse[slot] = total == 0.0f ? kNegativeInfinity : (reference[slot] + log2f(total)) * kLn2;
    }
  }
};

}  // namespace flashmsa::attn
