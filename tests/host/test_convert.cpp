// fp16 and bf16 conversions against their definition: every 16-bit value, and every rounding boundary between two.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "check.h"
#include "cpu/convert.h"

namespace flashmsa::test {
namespace {

struct Format {
  const char* name;
  int mantissa_bits, bias;
};
constexpr Format kHalf = {"fp16", 10, 15};
constexpr Format kBrain = {"bf16", 7, 127};

uint32_t exponent_of(Format f, uint32_t bits) { return (bits & 0x7fff) >> f.mantissa_bits; }
uint32_t mantissa_of(Format f, uint32_t bits) { return bits & ((1u << f.mantissa_bits) - 1); }
uint32_t largest_exponent(Format f) { return 0x7fffu >> f.mantissa_bits; }

// The value of a finite bit pattern; the pattern of infinity reads as the next power of two, which rounding needs.
double value_of(Format f, uint32_t bits) {
  const int exponent = static_cast<int>(exponent_of(f, bits));
  const double unit = std::ldexp(1.0, std::max(exponent, 1) - f.bias - f.mantissa_bits);
  const double magnitude = unit * (mantissa_of(f, bits) + (exponent > 0 ? std::ldexp(1.0, f.mantissa_bits) : 0.0));
  return bits & 0x8000 ? -magnitude : magnitude;
}

template <class T>
uint16_t narrowed(float x) {
  T out;
  cpu::narrow(x, out);
  return out.bits;
}

template <class T>
void check_widen(Format f) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float x = cpu::widen(T{static_cast<uint16_t>(bits)});
    const bool sign = bits & 0x8000;
    if (exponent_of(f, bits) != largest_exponent(f)) {
      CHECK(x == value_of(f, bits) && std::signbit(x) == sign, "%s %04x is %a", f.name, bits, x);
      CHECK(narrowed<T>(x) == bits, "%s %04x comes back as %04x", f.name, bits, narrowed<T>(x));
    } else if (mantissa_of(f, bits) == 0) {
      CHECK(std::isinf(x) && std::signbit(x) == sign, "%s %04x is %a", f.name, bits, x);
      CHECK(narrowed<T>(x) == bits, "%s %04x comes back as %04x", f.name, bits, narrowed<T>(x));
    } else {
      CHECK(std::isnan(x), "%s %04x is %a", f.name, bits, x);
    }
  }
}

// Around the midpoint of two neighbours: nearest, and at the midpoint itself the even one.
template <class T>
void check_rounding(Format f) {
  const uint32_t infinity = largest_exponent(f) << f.mantissa_bits;
  for (uint32_t sign : {0u, 0x8000u}) {
    for (uint32_t bits = 0; bits < infinity; ++bits) {
      const float low = static_cast<float>(value_of(f, sign | bits));
      // In double: the value above the largest bf16 is 2^128, beyond float.
      const float middle = static_cast<float>((value_of(f, sign | bits) + value_of(f, sign | (bits + 1))) / 2);
      const float towards_low = std::nextafter(middle, 0.f);
      const float towards_high = std::bit_cast<float>(std::bit_cast<uint32_t>(middle) + 1);
      const uint32_t even = bits % 2 == 0 ? bits : bits + 1;
      CHECK(narrowed<T>(middle) == (sign | even), "%s of %a is %04x", f.name, middle, narrowed<T>(middle));
      CHECK(narrowed<T>(towards_low) == (sign | bits), "%s of %a is %04x", f.name, towards_low,
            narrowed<T>(towards_low));
      CHECK(narrowed<T>(towards_high) == (sign | (bits + 1)), "%s of %a is %04x", f.name, towards_high,
            narrowed<T>(towards_high));
      const float quarter = low + (middle - low) / 2;
      CHECK(narrowed<T>(quarter) == (sign | bits), "%s of %a is %04x", f.name, quarter, narrowed<T>(quarter));
    }
  }
}

// NaN stays NaN whichever of its bits are set (the low ones are cut off), and keeps its sign.
template <class T>
void check_special(Format f) {
  for (uint32_t sign : {0u, 0x80000000u}) {
    for (uint32_t bits : {0x7f800001u, 0x7f80ffffu, 0x7f801000u, 0x7fc00000u, 0x7fffffffu, 0x7fbfffffu}) {
      const uint32_t out = narrowed<T>(std::bit_cast<float>(sign | bits));
      CHECK(exponent_of(f, out) == largest_exponent(f) && mantissa_of(f, out) != 0 && out >> 15 == sign >> 31,
            "%s of NaN %08x is %04x", f.name, sign | bits, out);
    }
    const uint32_t infinity = largest_exponent(f) << f.mantissa_bits;
    CHECK(narrowed<T>(std::bit_cast<float>(sign | 0x7f800000u)) == (sign >> 16 | infinity), "%s infinity", f.name);
    CHECK(narrowed<T>(std::bit_cast<float>(sign | 0x7f7fffffu)) == (sign >> 16 | infinity), "%s overflow", f.name);
    CHECK(narrowed<T>(std::bit_cast<float>(sign | 1u)) == sign >> 16, "%s underflow", f.name);
  }
}

template <class T>
void check_format(Format f) {
  check_widen<T>(f);
  check_rounding<T>(f);
  check_special<T>(f);
}

}  // namespace
}  // namespace flashmsa::test

int main() {
  using namespace flashmsa;
  test::check_format<cpu::Float16>(test::kHalf);
  test::check_format<cpu::BFloat16>(test::kBrain);
  return test::report("test_convert");
}
