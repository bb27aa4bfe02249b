// What happens to a logit between Q K^T and the softmax, beside its scale: a soft cap, ALiBi's distance penalty.
//
// S is in units of its own (logit = S * scale). With a cap it becomes tanh(S * scale / cap) and its unit the cap; ALiBi's
// slope is given in the same unit. So the softmax sees one factor, scale_log2, whichever of them are in use.
#pragma once

#include <cstdint>

#include "sm90/fragment.h"
#include "sm90/matrix.cuh"

namespace flashmsa::attn {

template <bool kSoftcapValue, bool kAlibiValue>
struct Score {
  static constexpr bool kSoftcap = kSoftcapValue;
  static constexpr bool kAlibi = kAlibiValue;
  static constexpr bool kPlain = !kSoftcap && !kAlibi;
};
using PlainScore = Score<false, false>;

// Where tanh's short series ends; below, its error is 6.4e-7 of tanh.
inline constexpr float kSeriesEnd = 0.5f;

// tanh(u) / u as a polynomial in t = u^2 on [0, kSeriesEnd^2], fitted for the least largest relative error.
__device__ __forceinline__ float tanh_series(float t) {
  return fmaf(fmaf(fmaf(-0.04475064f, t, 0.1320536f), t, -0.33328159f), t, 1.0f);
}

// tanh(u) by exponentials: tanh |u| = (1 - e) / (1 + e) with e = 2^(-2 log2(e) |u|), no digit lost for |u| >= kSeriesEnd.
__device__ __forceinline__ float tanh_exact(float u) {
  constexpr float kMinus2Log2E = -2.88539008177792681f;
  const float e = sm90::exp2_approx(fabsf(u) * kMinus2Log2E);
  const float large = copysignf(__fdividef(1.0f - e, 1.0f + e), u);
  return fabsf(u) < kSeriesEnd ? u * tanh_series(u * u) : large;
}

// S becomes tanh(S * factor).
// PERF: five multiply-adds an element where no logit of the warp is large, against two more exponentials of which the
// special-function unit has none to spare.
template <int kCount>
__device__ __forceinline__ void apply_softcap(float (&s)[kCount], float factor) {
  int32_t largest = 0;
#pragma unroll
  for (int e = 0; e < kCount; e += 2) {
    s[e] *= factor;
    s[e + 1] *= factor;
    largest = max(max(__float_as_int(fabsf(s[e])), __float_as_int(fabsf(s[e + 1]))), largest);
  }
  // The bits of positive floats are ordered as integers; NaN is above all.
  if (__any_sync(~0u, largest >= __float_as_int(kSeriesEnd))) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) s[e] = tanh_exact(s[e]);
  } else {
#pragma unroll
    for (int e = 0; e < kCount; ++e) s[e] *= tanh_series(s[e] * s[e]);
  }
}

// S -= slope * |position - key| for this thread's two rows: an addition and a multiply-add an element.
template <int kCount>
__device__ __forceinline__ void apply_alibi(float (&s)[kCount], float slope, const int32_t (&position)[2],
                                            int32_t first_key, int32_t thread) {
  const int32_t first_column = first_key + sm90::Accumulator::first_column(thread);
  const float from[2] = {static_cast<float>(first_column - position[0]), static_cast<float>(first_column - position[1])};
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    const int slot = sm90::Accumulator::row_slot(e);
    s[e] = fmaf(-slope, fabsf(from[slot] + static_cast<float>(sm90::Accumulator::column_offset(e))), s[e]);
  }
}

}  // namespace flashmsa::attn
