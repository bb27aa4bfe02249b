// Vocabulary shared by host and device code: element types and integer helpers.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FLASHMSA_HD __host__ __device__ __forceinline__
#define FLASHMSA_UNROLL _Pragma("unroll")
#else
#define FLASHMSA_HD inline
#define FLASHMSA_UNROLL
#endif

namespace flashmsa {

enum class DType : int32_t { kF16, kBF16, kF32, kF64 };

template <class T>
FLASHMSA_HD constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <class T>
FLASHMSA_HD constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}

template <class T>
FLASHMSA_HD constexpr T max_of(T a, T b) {
  return a > b ? a : b;
}

template <class T>
FLASHMSA_HD constexpr T clamp(T x, T low, T high) {
  return min_of(max_of(x, low), high);
}

}  // namespace flashmsa
