// A soft cap as a part of the softmax's exponent: odd polynomials against tanh in double.
#include <cmath>
#include <limits>

#include "attn/cap.h"
#include "check.h"

namespace flashmsa::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kLog2E = 1.44269504088896341;

// Relative error of an exponent without a reference: of the polynomial's fit, and of roundings, 2^-24 each, three of its
// numbers and four of its evaluation at most (numbers that are added weigh less than 1).
constexpr double kRoundings = 7 * 0x1p-24;
constexpr double kCubicError = 1.7e-6 + kRoundings, kQuinticError = 1.2e-6 + kRoundings,
                 kNonicError = 1.8e-6 + kRoundings;

template <class Exponent>
void check_exponent(Random& random, const char* name, const Exponent& exponent, double scale, double cap,
                    double error) {
  CHECK(exponent.end > 0 && std::isfinite(exponent.end), "%s, scale %g, cap %g: up to %g", name, scale, cap,
        exponent.end);
  const auto wanted = [&](float s) { return scale * kLog2E * std::tanh(s * (scale / cap)) * (cap / scale); };
  for (int i = 0; i < 2000; ++i) {
    double u = random.uniform();
    if (random.coin()) u = std::exp2(-20 * u);
    float s = static_cast<float>(random.coin() ? u : -u) * exponent.end;
    if (i == 0) s = exponent.end;
    if (i == 1) s = -exponent.end;
    const double found = exponent(s, 0.0f);
    CHECK(std::fabs(found - wanted(s)) <= error * std::fabs(wanted(s)),
          "%s, scale %g, cap %g, S = %.9g: %.9g, not %.9g", name, scale, cap, s, found, wanted(s));
    // A reference costs one more rounding.
    const float minus = static_cast<float>(wanted(exponent.end) * (2 * random.uniform() - 1));
    const double less = exponent(s, minus), wanted_less = wanted(s) + minus;
    CHECK(std::fabs(less - wanted_less) <= error * std::fabs(wanted(s)) + 0x1p-24 * std::fabs(wanted_less),
          "%s, scale %g, cap %g, S = %.9g, less %.9g: %.9g, not %.9g", name, scale, cap, s, -minus, less, wanted_less);
  }
  CHECK(exponent(0.0f, 3.0f) == 3.0f, "%s, scale %g, cap %g: S = 0", name, scale, cap);
  CHECK(std::isnan(exponent(std::nanf(""), 0.0f)), "%s, scale %g, cap %g: NaN", name, scale, cap);
}

void check_cap(Random& random, double scale, double cap) {
  const attn::CapExponents exponents = attn::make_cap_exponents(scale, cap);
  const double factor = scale / cap;
  if (exponents.cubic.end > 0) {
    check_exponent(random, "cubic", exponents.cubic, scale, cap, kCubicError);
    check_exponent(random, "quintic", exponents.quintic, scale, cap, kQuinticError);
    CHECK(std::fabs(exponents.cubic.end * factor - 0.1) < 1e-7, "up to %g", exponents.cubic.end * factor);
    CHECK(std::fabs(exponents.quintic.end * factor - 0.3) < 1e-7, "up to %g", exponents.quintic.end * factor);
  }
  if (exponents.nonic.end > 0) {
    check_exponent(random, "nonic", exponents.nonic, scale, cap, kNonicError);
    CHECK(std::fabs(exponents.nonic.end * factor - 0.85) < 1e-7, "up to %g", exponents.nonic.end * factor);
    // What a mask hides has weight 0 whatever the reference.
    CHECK(exponents.nonic(-kInfinity, 5.0f) == -kInfinity, "scale %g, cap %g: %g", scale, cap,
          exponents.nonic(-kInfinity, 5.0f));
  }
}

int run() {
  Random random(23);
  for (const double scale : {0.0625, 0.08838834764831845, 0.125, 1.0, 5.0}) {
    for (const double cap : {50.0, 30.0, 5.0, 0.5, 300.0}) {
      check_cap(random, scale, cap);
      CHECK(attn::make_cap_exponents(scale, cap).nonic.end > 0, "scale %g, cap %g has no nonic exponent", scale, cap);
    }
  }
  for (int i = 0; i < 2000; ++i) {
    check_cap(random, std::exp2(40 * random.uniform() - 20), std::exp2(40 * random.uniform() - 20));
  }
  // Powers of these factors have no place in fp32; no cap has no exponents.
  for (const auto& [scale, cap] : {std::pair(1.0, 1e30), {1e30, 1.0}, {1e-30, 1.0}, {1.0, 1e-30}, {1.0, 0.0}}) {
    const attn::CapExponents none = attn::make_cap_exponents(scale, cap);
    CHECK(none.cubic.end == 0 && none.quintic.end == 0 && none.nonic.end == 0, "scale %g, cap %g", scale, cap);
  }
  return report("test_cap");
}

}  // namespace
}  // namespace flashmsa::test

int main() { return flashmsa::test::run(); }
