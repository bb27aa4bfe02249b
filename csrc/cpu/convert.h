// fp16 and bf16 as bits, and their conversions to and from fp32. The core knows no torch, and C++20 has neither type.
//
// Widening is exact. Narrowing rounds to nearest, ties to even; overflow gives infinity, NaN stays a quiet NaN. Integer
// arithmetic decides everything, so a flush-to-zero mode of the calling thread changes nothing.
#pragma once

#include <bit>
#include <cstdint>

namespace flashmsa::cpu {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// The type that an element type is computed in.
template <class T>
struct Accumulate {
  using Type = float;
};
template <>
struct Accumulate<double> {
  using Type = double;
};
template <class T>
using AccumulateType = typename Accumulate<T>::Type;

constexpr double widen(double x) { return x; }
constexpr float widen(float x) { return x; }
constexpr float widen(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

// Without a branch, so that a loop over elements is vectorised.
constexpr float widen(Float16 x) {
  constexpr uint32_t kExponent = 0x7c00u << 13;
  constexpr uint32_t kRebias = (127 - 15) << 23;
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  const uint32_t exponent = magnitude & kExponent;
  const uint32_t normal = magnitude + kRebias;
  const uint32_t special = normal + kRebias;  // infinity and NaN: the largest exponent of both formats
  // A subnormal is m * 2^-24: put m behind the leading 1 of 2^-14, then take that 1 away.
  constexpr uint32_t kSmallestNormal = (127 - 14) << 23;
  const float subnormal = std::bit_cast<float>(magnitude + kSmallestNormal) - std::bit_cast<float>(kSmallestNormal);
  const uint32_t bits = exponent == kExponent ? special : exponent == 0 ? std::bit_cast<uint32_t>(subnormal) : normal;
  return std::bit_cast<float>(bits | sign);
}

constexpr void narrow(double x, double& out) { out = x; }
constexpr void narrow(float x, float& out) { out = x; }

constexpr void narrow(float x, BFloat16& out) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    out.bits = static_cast<uint16_t>(bits >> 16 | 0x40u);
    return;
  }
  // Half a unit less one, plus the last kept bit: carries exactly when the remainder rounds up.
  out.bits = static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

constexpr void narrow(float x, Float16& out) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t result = 0;
  if (magnitude > 0x7f800000u) {
    result = 0x7e00u | (magnitude >> 13 & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520, halfway from the largest half to the next power of two
    result = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // 2^-14, the smallest normal half
    result = (magnitude - ((127u - 15u) << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  } else if (magnitude >= 0x33000000u) {  // 2^-25, half of the smallest subnormal half
    const uint32_t shift = 126u - (magnitude >> 23);  // 14 … 24 bits below the unit of 2^-24
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    result = (mantissa + (1u << (shift - 1)) - 1u + (mantissa >> shift & 1u)) >> shift;
  }
  out.bits = static_cast<uint16_t>(sign | result);
}

}  // namespace flashmsa::cpu
