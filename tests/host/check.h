// What the host tests share: CHECK, a fixed-seed random generator, and a report that is the program's exit status.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <initializer_list>

namespace flashmsa::test {

inline int64_t checks = 0;
inline int64_t failures = 0;

// Counts one check. A failure prints where and what; after 20 of them only the count goes on.
[[gnu::format(printf, 5, 6)]] inline bool check(bool ok, const char* file, int line, const char* condition,
                                                const char* format, ...) {
  ++checks;
  if (ok) return true;
  if (++failures <= 20) {
    std::printf("%s:%d: %s: ", file, line, condition);
    va_list values;
    va_start(values, format);
    std::vprintf(format, values);
    va_end(values);
    std::printf("\n");
  }
  return false;
}

#define CHECK(condition, ...) ::flashmsa::test::check((condition), __FILE__, __LINE__, #condition, __VA_ARGS__)

// The exit status of a test program. A run without a check is a failure too.
inline int report(const char* name) {
  std::printf("%s: %lld checks, %lld failures\n", name, static_cast<long long>(checks),
              static_cast<long long>(failures));
  return failures == 0 && checks > 0 ? 0 : 1;
}

// splitmix64: the same sequence on every machine and standard library.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t bits() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  // A whole number in [low, high].
  int32_t between(int64_t low, int64_t high) {
    return static_cast<int32_t>(low + static_cast<int64_t>(bits() % static_cast<uint64_t>(high - low + 1)));
  }
  bool coin() { return bits() >> 63; }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  // About normal: mean 0, variance 1.
  double normal() {
    double sum = -6;
    for (int k = 0; k < 12; ++k) sum += uniform();
    return sum;
  }
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[between(0, static_cast<int64_t>(values.size()) - 1)];
  }

 private:
  uint64_t state_;
};

}  // namespace flashmsa::test
