// A soft cap's numbers, made on the host, and what of it is plain arithmetic. In units of S, see attn/score.cuh.
#pragma once

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "core/types.h"

namespace flashmsa::attn {

// Up to |u| = kShortEnd, tanh(u) is u (1 + t (kShort1 + kShort2 t)) to 5e-7.
inline constexpr float kShortEnd = 0.25f;
inline constexpr float kShort1 = -0.33324571f, kShort2 = 0.12876421f;

// A soft cap as the kernels use it: in units of S. NOTE: made on the host, because constants cost no registers.
struct CapParams {
  float factor;  // scale / cap; 0: no cap
  float inverse;  // 1 / factor
  float short_end;  // kShortEnd, and
  float short1, short2;  // the polynomial's coefficients

  FLASHMSA_HD bool used() const { return factor != 0.0f; }
};

inline CapParams make_cap(double scale, double cap) {
  if (cap <= 0) return {};
  // NOTE: finite and not 0, as its inverse; and where powers of it, or of an S below short_end, could leave fp32's range,
  // every S goes the long way.
  const float factor = std::clamp(static_cast<float>(scale / cap), 1e-30f, 1e30f);
  if (factor < 1e-9f || factor > 1e9f) return {factor, 1.0f / factor, 0.0f, 0.0f, 0.0f};
  const float square = factor * factor;
  return {factor, 1.0f / factor, kShortEnd / factor, kShort1 * square, kShort2 * square * square};
}

// A capped logit as the softmax's exponent, scale_log2 * tanh(S * factor) / factor less a reference, straight from S: odd
// polynomials, each for |S| below an `end` of its own, fitted for the least largest relative error (below).
// PERF: beside the multiply-add that every exponent takes they are two, three and five instructions, each of which takes about
// two cycles beside the tensor core; but for the last of the third none has three operands in vector registers.
struct CubicExponent {
  float end, offset, scale;

  // scale * S * (S^2 + offset) - reference
  FLASHMSA_HD float operator()(float s, float minus) const { return fmaf(s * fmaf(s, s, offset), scale, minus); }
};
struct QuinticExponent {
  float end, offset, rest, scale;

  // scale * S * ((S^2 + offset)^2 + rest) - reference
  FLASHMSA_HD float operator()(float s, float minus) const {
    const float square = fmaf(s, s, offset);
    return fmaf(s * fmaf(square, square, rest), scale, minus);
  }
};
struct NonicExponent {
  float end, coefficients[5];

  // S * (c0 + c1 S^2 + ... + c4 S^8) - reference
  FLASHMSA_HD float operator()(float s, float minus) const {
    const float square = s * s;
    float sum = coefficients[4];
    FLASHMSA_UNROLL
    for (int i = 3; i >= 0; --i) sum = fmaf(sum, square, coefficients[i]);
    return fmaf(s, sum, minus);
  }
};

// tanh(u) / u in powers of u^2: to 1.7e-6 up to |u| = 0.1, 1.2e-6 up to 0.3, 1.8e-6 up to 0.85.
inline constexpr double kCubicEnd = 0.1, kCubic[2] = {0.999998340647, -0.33200482413};
inline constexpr double kQuinticEnd = 0.3, kQuintic[3] = {0.999998838848, -0.333100215997, 0.126339459894};
inline constexpr double kNonicEnd = 0.85;
inline constexpr double kNonic[5] = {0.999998284136, -0.33321280466, 0.131949566144, -0.0482117565733, 0.0112914398744};

// NOTE: where a number has no place in fp32, as powers of the factor may not, `end` is 0 and the exponent not to be used.
struct CapExponents {
  CubicExponent cubic;
  QuinticExponent quintic;
  NonicExponent nonic;
};

inline CapExponents make_cap_exponents(double scale, double cap) {
  if (cap <= 0) return {};
  constexpr double kLog2E = 1.44269504088896341;
  const double factor = scale / cap, square = factor * factor, fourth = square * square, scale_log2 = scale * kLog2E;
  const auto fits = [](std::initializer_list<double> numbers) {
    return std::all_of(numbers.begin(), numbers.end(),
                       [](double x) { return std::fabs(x) > 1e-30 && std::fabs(x) < 1e30; });
  };
  const auto as_float = [](double x) { return static_cast<float>(x); };
  CapExponents exponents = {};

  const double end = kQuinticEnd / factor, half = kQuintic[1] / kQuintic[2] / 2;
  const double rest = (kQuintic[0] / kQuintic[2] - half * half) / fourth;
  if (fits({square, rest, rest * end, scale_log2 * square, scale_log2 * fourth})) {
    exponents.cubic = {as_float(kCubicEnd / factor), as_float(kCubic[0] / kCubic[1] / square),
                       as_float(scale_log2 * kCubic[1] * square)};
    exponents.quintic = {as_float(end), as_float(half / square), as_float(rest),
                         as_float(scale_log2 * kQuintic[2] * fourth)};
  }
  if (fits({square, scale_log2, scale_log2 * fourth * fourth * 1e5})) {
    exponents.nonic.end = as_float(kNonicEnd / factor);
    double power = scale_log2;
    for (int i = 0; i < 5; ++i, power *= square) exponents.nonic.coefficients[i] = as_float(kNonic[i] * power);
  }
  return exponents;
}

}  // namespace flashmsa::attn
