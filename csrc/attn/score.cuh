// What happens to a logit between Q K^T and the softmax, beside its scale: a soft cap, ALiBi's distance penalty.
//
// S stays in units of its own, logit = S * scale, whichever of them are in use: capped it is tanh(S * factor) / factor with
// factor = scale / cap, and ALiBi's slope is given in the same unit.
#pragma once

#include <cstdint>

#include "attn/cap.h"
#include "sm90/fragment.h"
#include "sm90/matrix.cuh"

namespace flashmsa::attn {

template <bool kSoftcapValue, bool kAlibiValue>
struct Score {
  static constexpr bool kSoftcap = kSoftcapValue;
  static constexpr bool kAlibi = kAlibiValue;
  static constexpr bool kPlain = !kSoftcap && !kAlibi;
  // What happens to weights behind the softmax.
  static constexpr bool kDropout = false;
  // Soft cap and ALiBi where the call has them, and dropout in any order: decided at run time.
  static constexpr bool kGeneral = false;
  static constexpr const char* kName = kPlain ? "" : kSoftcap ? kAlibi ? "_softcap_alibi" : "_softcap" : "_alibi";
};
using PlainScore = Score<false, false>;

// Dropout in the caller's order, of plain weights.
struct Dropping : PlainScore {
  static constexpr bool kDropout = true;
  static constexpr const char* kName = "_dropout";
};
struct General : Score<true, true> {
  static constexpr bool kDropout = true, kGeneral = true;
  static constexpr const char* kName = "_general";
};

// Soft cap and ALiBi where the call has them, without dropout.
struct Chosen : Score<true, true> {
  static constexpr bool kGeneral = true;
  static constexpr const char* kName = "_score";
};

// tanh(u) for any u: tanh |u| = (1 - e) / (1 + e) with e = 2^(-2 log2(e) |u|); where that would lose digits, a
// polynomial u (1 + t P(t)) in t = u^2, fitted for the least largest relative error up to |u| = 1/2 (6.4e-7).
__device__ __forceinline__ float tanh_exact(float u) {
  constexpr float kMinus2Log2E = -2.88539008177792681f;
  const float e = sm90::exp2_approx(fabsf(u) * kMinus2Log2E);
  const float large = copysignf(__fdividef(1.0f - e, 1.0f + e), u);
  const float t = u * u;
  const float small = u * fmaf(fmaf(fmaf(-0.04475064f, t, 0.1320536f), t, -0.33328159f), t, 1.0f);
  return fabsf(u) < 0.5f ? small : large;
}

// S becomes tanh(S * factor) / factor, whatever it is.
template <int kCount>
__device__ __forceinline__ void apply_softcap_exactly(float (&s)[kCount], const CapParams& cap) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) s[e] = tanh_exact(s[e] * cap.factor) * cap.inverse;
}

// S becomes tanh(S * factor) / factor.
// PERF: four instructions an element where no logit of the warp is large, against two more exponentials of which the
// special-function unit has none to spare. What is done to S between Q K^T and the maximum costs four cycles an instruction.
template <int kCount>
__device__ __forceinline__ void apply_softcap(float (&s)[kCount], const CapParams& cap) {
  int32_t largest = 0;
#pragma unroll
  for (int e = 0; e < kCount; e += 4) {
    const int32_t pair[2] = {__float_as_int(fmaxf(fabsf(s[e]), fabsf(s[e + 1]))),
                             __float_as_int(fmaxf(fabsf(s[e + 2]), fabsf(s[e + 3])))};
    largest = max(max(pair[0], pair[1]), largest);
  }
  // The bits of positive floats are ordered as integers. A NaN may pass unseen, and stays one on either way.
  if (__any_sync(~0u, largest >= __float_as_int(cap.short_end))) {
    apply_softcap_exactly(s, cap);
  } else {
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      const float t = s[e] * s[e];
      s[e] *= fmaf(fmaf(cap.short2, t, cap.short1), t, 1.0f);
    }
  }
}

// S -= slope * |position - key| for this thread's two rows: an addition and a multiply-add an element.
template <int kCount>
__device__ __forceinline__ void apply_alibi(float (&s)[kCount], float slope, const int32_t (&position)[2],
                                            int32_t first_key, int32_t thread) {
  const int32_t first_column = first_key + sm90::Accumulator::first_column(thread);
  const float from[2] = {static_cast<float>(first_column - position[0]),
                         static_cast<float>(first_column - position[1])};
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    const int slot = sm90::Accumulator::row_slot(e);
    s[e] = fmaf(-slope, fabsf(from[slot] + static_cast<float>(sm90::Accumulator::column_offset(e))), s[e]);
  }
}

// The same where each 8 columns are keys of their own, groups[g] the first.
template <int kCount>
__device__ __forceinline__ void apply_alibi_to_groups(float (&s)[kCount], float slope, const int32_t (&position)[2],
                                                      const int32_t* groups, int32_t thread) {
#pragma unroll
  for (int group = 0; group < kCount / 4; ++group) {
    const int32_t first_column = groups[group] + sm90::Accumulator::first_column(thread);
    const float from[2] = {static_cast<float>(first_column - position[0]),
                           static_cast<float>(first_column - position[1])};
#pragma unroll
    for (int e = group * 4; e < group * 4 + 4; ++e) {
      const int slot = sm90::Accumulator::row_slot(e);
      s[e] = fmaf(-slope, fabsf(from[slot] + static_cast<float>(e % 2)), s[e]);
    }
  }
}

}  // namespace flashmsa::attn
