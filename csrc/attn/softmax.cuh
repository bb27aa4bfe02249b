// Online softmax of one thread's two rows, in base 2 with the scale folded into the exponent.
//
// A row's weights are P = 2^(S * scale_log2 - reference), l = sum of P, O = P V. Any reference gives the same O / l; a
// moving maximum keeps P in range. The reference follows the maximum only when it grows by more than 2^kLazyGrowth, or when
// a block's P add up to more than kLargestSum (try_exponentiate): until then P stays below that, exact in its relative
// precision, and O and l need no rescale.
#pragma once

#include <climits>
#include <cstdint>

#include "attn/dropout.cuh"
#include "sm90/fragment.h"
#include "sm90/matrix.cuh"

namespace flashmsa::attn {

inline constexpr float kNegativeInfinity = -__builtin_huge_valf();
// PERF: 8 is far below fp16's range (2^16) and makes rescales rare after the first tiles.
inline constexpr float kLazyGrowth = 8.0f;
// From here on the rounding of the bound itself would add to the growth: P would leave fp16's range at 2^25.
inline constexpr float kLazyEnd = 0x1p20f;

// PERF: as kLazyGrowth. Of up to 64 keys: equal logits do not reach it.
inline constexpr float kLargestSum = 0x1p12f;

// What a block's S lacks, the same number for all keys of a row: nothing, or ALiBi's slope times a distance.
struct NoShift {
  static constexpr bool kNone = true;
};
struct BlockShift {
  static constexpr bool kNone = false;
  float slope;  // in units of S; S - slope * distance is meant
  float slope_log2;  // in the exponent's
  float distance[2];  // of a thread's two rows; of either sign
};

// A row's maximum as the softmax has it, of a row's maximum of S.
struct AsItIs {
  __device__ __forceinline__ float operator()(float maximum) const { return maximum; }
};

struct OnlineSoftmax {
  float reference[2] = {kNegativeInfinity, kNegativeInfinity};  // in the exponent's units; -inf: no visible key yet
  float sum[2] = {0.0f, 0.0f};  // over this thread's columns only, until finish()
  // Bits of the S that outgrows the reference. With shifts: of an S without any, and then of either sign.
  int32_t limit[2] = {kAlwaysOutgrown, kAlwaysOutgrown};
  float sum_limit[2] = {0.0f, 0.0f};  // sum of a thread's P of one block that outgrows the reference; 0: any does

  static constexpr int32_t kAlwaysOutgrown = INT32_MIN;

  // NOTE: a reference of -inf is read as 0: every S is then -inf too, and P becomes 2^-inf = 0 instead of NaN.
  __device__ __forceinline__ float offset(int slot) const {
    return reference[slot] == kNegativeInfinity ? 0.0f : -reference[slot];
  }

  // Does some row of the warp need a new reference? The same answer in all lanes.
  // PERF: an integer maximum of three (VIMNMX3) does two elements an instruction. The bits of positive floats are ordered
  // as integers, above those of all negative ones; NaN is above infinity. A limit that is not positive is no such bound:
  // raise() then sets one that every block outgrows (-0.0 has its bits, so equal counts), and looks at the floats itself.
  template <int kCount, class Shift = NoShift>
  __device__ __forceinline__ bool outgrown(const float (&s)[kCount], const Shift& shift = Shift()) const {
    int32_t maximum[2] = {INT32_MIN, INT32_MIN};
#pragma unroll
    for (int e = 0; e < kCount; e += 2) {
      const int slot = sm90::Accumulator::row_slot(e);
      maximum[slot] = max(max(__float_as_int(s[e]), __float_as_int(s[e + 1])), maximum[slot]);
    }
    if constexpr (Shift::kNone) {
      return __any_sync(~0u, maximum[0] >= limit[0] || maximum[1] >= limit[1]);
    } else {
      const float own[2] = {fmaf(shift.slope, shift.distance[0], __int_as_float(limit[0])),
                            fmaf(shift.slope, shift.distance[1], __int_as_float(limit[1]))};
      return __any_sync(~0u, maximum[0] >= __float_as_int(own[0]) || own[0] < 0.0f ||
                                 maximum[1] >= __float_as_int(own[1]) || own[1] < 0.0f);
    }
  }

  // The largest |S| of a thread's two rows, as bits, which are ordered as integers. A NaN may pass unseen.
  template <int kCount>
  static __device__ __forceinline__ void largest(const float (&s)[kCount], int32_t (&size)[2]) {
    const auto of_pair = [&](int e) { return __float_as_int(fmaxf(fabsf(s[e]), fabsf(s[e + 1]))); };
    size[0] = size[1] = 0;
#pragma unroll
    for (int e = 0; e < kCount; e += 8) {
      size[0] = max(max(of_pair(e), of_pair(e + 4)), size[0]);
      size[1] = max(max(of_pair(e + 2), of_pair(e + 6)), size[1]);
    }
  }

  // Moves the references to the rows' maxima so far; returns the factors that O and l of the old references take. `curve`: what
  // is still to be done to S before the softmax.
  template <int kCount, class Shift = NoShift, class Curve = AsItIs>
  __device__ __forceinline__ void raise(const float (&s)[kCount], float scale_log2, float inverse_scale_log2,
                                        float (&factor)[2], const Shift& shift = Shift(),
                                        const Curve& curve = Curve()) {
    // Two chains a row: the even columns, the odd ones.
    float maximum[2] = {s[0], s[2]}, odd[2] = {s[1], s[3]};
#pragma unroll
    for (int e = 4; e < kCount; e += 2) {
      const int slot = sm90::Accumulator::row_slot(e);
      maximum[slot] = fmaxf(maximum[slot], s[e]);
      odd[slot] = fmaxf(odd[slot], s[e + 1]);
    }
    maximum[0] = fmaxf(maximum[0], odd[0]);
    maximum[1] = fmaxf(maximum[1], odd[1]);
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      maximum[slot] = fmaxf(maximum[slot], __shfl_xor_sync(~0u, maximum[slot], 1));
      maximum[slot] = fmaxf(maximum[slot], __shfl_xor_sync(~0u, maximum[slot], 2));
      maximum[slot] = curve(maximum[slot]);
      const float old_reference = reference[slot];
      if constexpr (Shift::kNone) {
        reference[slot] = fmaxf(old_reference, maximum[slot] * scale_log2);
      } else {
        reference[slot] =
            fmaxf(old_reference, fmaf(maximum[slot], scale_log2, -shift.slope_log2 * shift.distance[slot]));
      }
      factor[slot] = sm90::exp2_approx(old_reference + offset(slot));
      sum[slot] *= factor[slot];
      const float bound = (reference[slot] + kLazyGrowth) * inverse_scale_log2;
      sum_limit[slot] = reference[slot] != kNegativeInfinity && reference[slot] < kLazyEnd ? kLargestSum : 0.0f;
      // NOTE: a bound below 0 may come to lie above it in a block with another shift.
      const bool lazy = bound >= (Shift::kNone ? 0.0f : kNegativeInfinity) && reference[slot] < kLazyEnd;
      limit[slot] = lazy ? __float_as_int(bound) : Shift::kNone ? kAlwaysOutgrown : __float_as_int(kNegativeInfinity);
    }
  }

  // S becomes P, packed as the A operand of PV; P is added to the rows' sums before it is rounded, and before dropout.
  // PERF: kSpread holds the multiply-adds of each 16 elements back behind the exponentials of the 16 before. Otherwise the
  // compiler puts many of them ahead of all exponentials, where nothing hides them.
  template <class Element, bool kSpread = false, int kCount, class Kept = AllKept, class Shift = NoShift>
  __device__ __forceinline__ void exponentiate(float (&s)[kCount], uint32_t (&p)[kCount / 8][4], float scale_log2,
                                               const Kept& kept = Kept(), const Shift& shift = Shift()) {
    float minus[2] = {offset(0), offset(1)}, last[2] = {0.0f, 0.0f};
    if constexpr (!Shift::kNone) {
      minus[0] = fmaf(-shift.slope_log2, shift.distance[0], minus[0]);
      minus[1] = fmaf(-shift.slope_log2, shift.distance[1], minus[1]);
    }
#pragma unroll
    for (int e = 0; e < kCount; e += 2) {
      const int slot = sm90::Accumulator::row_slot(e);
      if (kSpread && e % 16 < 4 && e >= 16) minus[slot] = behind(minus[slot], last[slot]);
      const float p0 = sm90::exp2_approx(fmaf(s[e], scale_log2, minus[slot]));
      const float p1 = sm90::exp2_approx(fmaf(s[e + 1], scale_log2, minus[slot]));
      last[slot] = p1;
      sum[slot] += p0 + p1;
      p[e / 8][e % 8 / 2] = kept.keep(e / 2, sm90::pack2<Element>(p0, p1));
    }
  }

  // x, not before `weight` is known: its sign, which is none, is or'ed to x.
  static __device__ __forceinline__ float behind(float x, float weight) {
    return __int_as_float(__float_as_int(x) | (__float_as_int(weight) & INT32_MIN));
  }

  // The same, unless some row of the warp needs a new reference first, which the answer says, in all lanes alike: P is then to
  // be made again, and the sums are as before. S stays either way.
  // PERF: no test of S. wgmmas with A in registers are issued as the tensor core takes them, so next to nothing of the last
  // P V is left when S is looked at, and a maximum lengthens the warpgroup's chain (d128 4x4096 dense: 4 %).
  // NOTE: P is not negative, so its sum bounds each; NaN is below no limit.
  template <class Element, bool kSpread, int kCount, class Shift = NoShift>
  __device__ __forceinline__ bool try_exponentiate(float (&s)[kCount], uint32_t (&p)[kCount / 8][4], float scale_log2,
                                                   const Shift& shift = Shift()) {
    const float before[2] = {sum[0], sum[1]};
    sum[0] = sum[1] = 0.0f;
    exponentiate<Element, kSpread>(s, p, scale_log2, AllKept(), shift);
    const bool outgrown = __any_sync(~0u, !(sum[0] < sum_limit[0]) || !(sum[1] < sum_limit[1]));
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) sum[slot] = outgrown ? before[slot] : before[slot] + sum[slot];
    return !outgrown;
  }

  // The same in two parts, by an exponent of its own, exponent(S, -reference): in place first, packed when the registers of the P
  // before are free.
  template <class Exponent, int kCount>
  __device__ __forceinline__ void exponentiate_in_place(const Exponent& exponent, float (&s)[kCount]) const {
    const float minus[2] = {offset(0), offset(1)};
#pragma unroll
    for (int e = 0; e < kCount; ++e) s[e] = sm90::exp2_approx(exponent(s[e], minus[sm90::Accumulator::row_slot(e)]));
  }
  template <class Element, int kCount, class Kept>
  __device__ __forceinline__ void pack(const float (&s)[kCount], uint32_t (&p)[kCount / 8][4], const Kept& kept) {
#pragma unroll
    for (int e = 0; e < kCount; e += 2) {
      sum[sm90::Accumulator::row_slot(e)] += s[e] + s[e + 1];
      p[e / 8][e % 8 / 2] = kept.keep(e / 2, sm90::pack2<Element>(s[e], s[e + 1]));
    }
  }

  // After the last tile: completes the sums over the row; lse in natural logarithm, -inf for a row without keys. `sink` in
  // the exponent's units, -inf for none: one more term of the sum.
  __device__ __forceinline__ void finish(float (&inverse)[2], float (&lse)[2], float sink) {
    constexpr float kLn2 = 0.693147180559945309f;
    const bool has_sink = sink != kNegativeInfinity;
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      float total = sum[slot];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      if (has_sink) {
        // Whichever is larger becomes the reference. A row without keys is 0 whatever its sink.
        const bool empty = total == 0.0f;
        const float top = fmaxf(reference[slot], sink);
        const float factor = sm90::exp2_approx(reference[slot] - top);
        total = fmaf(total, factor, sm90::exp2_approx(sink - top));
        inverse[slot] = empty ? 0.0f : factor * sm90::reciprocal_approx(total);
        lse[slot] = (empty ? sink : top + sm90::log2_approx(total)) * kLn2;
        continue;
      }
      // PERF: the approximations (2^-22) are far below the rounding of O and lse; the exact ones take 400 cycles a tile.
      inverse[slot] = total == 0.0f ? 0.0f : sm90::reciprocal_approx(total);
      lse[slot] = total == 0.0f ? kNegativeInfinity : (reference[slot] + sm90::log2_approx(total)) * kLn2;
    }
  }
};

}  // namespace flashmsa::attn
