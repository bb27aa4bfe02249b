// What the GPU tests share: GPU_TEST and EXPECT, device memory, and 2-byte numbers by their definition.
//
// A program is a list of GPU_TESTs. It prints one line each, "ok NAME" or "FAILED NAME: what", and returns 0 when all
// passed. Arguments are names of tests to run, none: all. FLASHMSA_TEST_SEED=N draws other input.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "../host/check.h"  // Random
#include "core/cuda_check.h"
#include "core/types.h"

namespace flashmsa::test {

// ---- Tests ----------------------------------------------------------------------------------------------------------

struct Test {
  const char* name;
  void (*body)(Random&);
};

inline std::vector<Test>& all_tests() {
  static std::vector<Test> list;
  return list;
}

struct Registration {
  Registration(const char* name, void (*body)(Random&)) { all_tests().push_back({name, body}); }
};

#define GPU_TEST(name)                                        \
  void test_##name(Random& random);                           \
  const Registration registration_##name(#name, test_##name); \
  void test_##name([[maybe_unused]] Random& random)

// Of the test at hand: how many expectations were looked at and missed, and what the first miss was.
struct Outcome {
  int64_t expected = 0;
  int64_t missed = 0;
  std::string first;
};
inline Outcome outcome;

[[gnu::format(printf, 3, 4)]] inline void miss(int line, const char* condition, const char* format, ...) {
  if (++outcome.missed > 1) return;
  char text[512];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  outcome.first = "line " + std::to_string(line) + ": " + condition + ": " + text;
}

// A condition with NaN in it must fail: write a <= b, not !(a > b).
#define EXPECT(condition, ...)                                                   \
  do {                                                                           \
    ++::flashmsa::test::outcome.expected;                                        \
    if (!(condition)) ::flashmsa::test::miss(__LINE__, #condition, __VA_ARGS__); \
  } while (false)

inline std::string run_test(const Test& test, uint64_t seed) {
  outcome = {};
  for (const char* c = test.name; *c != 0; ++c) seed = seed * 131 + static_cast<unsigned char>(*c);
  Random random(seed);
  try {
    test.body(random);
    FLASHMSA_CHECK_CUDA(cudaDeviceSynchronize());
  } catch (const std::exception& error) {
    return error.what();
  }
  if (outcome.expected == 0) return "it expects nothing";
  if (outcome.missed == 0) return "";
  return outcome.first + " (" + std::to_string(outcome.missed) + " of " + std::to_string(outcome.expected) + " missed)";
}

inline int run_tests(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a test that hangs is the one after the last line
  cudaDeviceProp device{};
  const cudaError_t error = cudaGetDeviceProperties(&device, 0);
  if (error != cudaSuccess || device.major != 9 || device.minor != 0) {
    std::printf("FAILED device: needs a GPU of compute capability 9.0; %s\n",
                error != cudaSuccess ? cudaGetErrorString(error) : device.name);
    return 1;
  }
  const char* seed = std::getenv("FLASHMSA_TEST_SEED");
  bool good = true;
  int ran = 0;
  for (const Test& test : all_tests()) {
    const auto named = [&](const char* argument) { return std::string_view(argument) == test.name; };
    if (argc > 1 && std::none_of(argv + 1, argv + argc, named)) continue;
    ++ran;
    const std::string fault = run_test(test, seed == nullptr ? 0 : std::strtoull(seed, nullptr, 10));
    good = good && fault.empty();
    if (fault.empty()) {
      std::printf("ok %s\n", test.name);
    } else {
      std::printf("FAILED %s: %s\n", test.name, fault.c_str());
    }
  }
  return good && ran > 0 ? 0 : 1;
}

// ---- Device memory and launches -------------------------------------------------------------------------------------

// Memory that holds 0xFF bytes (NaN in every float format) until something is written.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : count_(count) {
    FLASHMSA_CHECK_CUDA(cudaMalloc(&data_, std::max<size_t>(bytes(), 1)));
    FLASHMSA_CHECK_CUDA(cudaMemset(data_, 0xFF, bytes()));
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(values.size()) {
    FLASHMSA_CHECK_CUDA(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice));
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  T* data() const { return data_; }
  template <class U>
  U* as() const {
    return reinterpret_cast<U*>(data_);
  }
  // What is there after all kernels so far.
  std::vector<T> read() const {
    std::vector<T> values(count_);
    FLASHMSA_CHECK_CUDA(cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  size_t bytes() const { return count_ * sizeof(T); }

  size_t count_;
  T* data_ = nullptr;
};

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int blocks, int threads, size_t shared_bytes,
            const Arguments&... arguments) {
  FLASHMSA_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  kernel<<<blocks, threads, shared_bytes>>>(arguments...);
  FLASHMSA_CHECK_CUDA(cudaGetLastError());
}

// The dynamic shared memory of a kernel, as its plan.
template <class Plan>
__device__ __forceinline__ Plan& shared_as() {
  extern __shared__ __align__(1024) char shared_memory[];
  return *reinterpret_cast<Plan*>(shared_memory);
}

// The shared memory of kernels that need one tile and nothing else.
template <class Tile>
struct TilePlan {
  alignas(1024) char tile[Tile::kBytes];
};

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// All threads of the block copy; `bytes` is a multiple of 16. The caller fences and synchronises.
__device__ __forceinline__ void block_copy(void* to, const void* from, uint32_t bytes) {
  for (uint32_t i = threadIdx.x; i < bytes / 16; i += blockDim.x) {
    static_cast<uint4*>(to)[i] = static_cast<const uint4*>(from)[i];
  }
}

// ---- 2-byte numbers, by definition -----------------------------------------------------------------------------------

template <class Element>
struct Format;
template <>
struct Format<__nv_bfloat16> {
  static constexpr int kExponentBits = 8, kMantissaBits = 7;
  static constexpr DType kDType = DType::kBF16;
};
template <>
struct Format<__half> {
  static constexpr int kExponentBits = 5, kMantissaBits = 10;
  static constexpr DType kDType = DType::kF16;
};

// Largest relative error of rounding to nearest, in the range of normal numbers.
template <class Element>
inline constexpr double kRoundoff = 1.0 / (2 << Format<Element>::kMantissaBits);

template <class Element>
inline constexpr int kInfinityBits = ((1 << Format<Element>::kExponentBits) - 1) << Format<Element>::kMantissaBits;

template <class Element>
inline constexpr int kMinExponent = 2 - (1 << (Format<Element>::kExponentBits - 1));

// The distance of neighbouring numbers below the smallest normal one.
template <class Element>
double smallest() {
  return std::ldexp(1.0, kMinExponent<Element> - Format<Element>::kMantissaBits);
}

template <class Element>
double decode(uint16_t bits) {
  constexpr int kMantissa = Format<Element>::kMantissaBits;
  const int magnitude = bits & 0x7FFF;
  const int exponent = magnitude >> kMantissa, fraction = magnitude & ((1 << kMantissa) - 1);
  double value;
  if (magnitude >= kInfinityBits<Element>) {
    value = fraction == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    value = std::ldexp(fraction, kMinExponent<Element> - kMantissa);
  } else {
    value = std::ldexp((1 << kMantissa) + fraction, kMinExponent<Element> + exponent - 1 - kMantissa);
  }
  return bits & 0x8000 ? -value : value;
}

// The nearest number, of two equally near ones the even one.
template <class Element>
uint16_t encode(double value) {
  constexpr int kMantissa = Format<Element>::kMantissaBits;
  const int sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  if (std::isnan(value)) return static_cast<uint16_t>(sign | kInfinityBits<Element> | 1 << (kMantissa - 1));
  if (magnitude == 0) return static_cast<uint16_t>(sign);
  if (std::isinf(value)) return static_cast<uint16_t>(sign | kInfinityBits<Element>);
  const int exponent = std::max(std::ilogb(magnitude), kMinExponent<Element>);
  // Units of the last place. A normal number's leading one adds 1 to the exponent's field, and so does a carry.
  const double units = std::nearbyint(std::ldexp(magnitude, kMantissa - exponent));
  const int64_t bits = (int64_t{exponent - kMinExponent<Element>} << kMantissa) + static_cast<int64_t>(units);
  return static_cast<uint16_t>(sign | std::min<int64_t>(bits, kInfinityBits<Element>));
}

inline float as_float(uint32_t bits) { return std::bit_cast<float>(bits); }

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// `count` random bit patterns: every kind of number, NaN too.
inline std::vector<uint16_t> random_patterns(Random& random, size_t count) {
  std::vector<uint16_t> bits(count);
  for (uint16_t& x : bits) x = static_cast<uint16_t>(random.bits());
  return bits;
}

inline std::vector<float> random_normals(Random& random, size_t count, double deviation = 1.0) {
  std::vector<float> values(count);
  for (float& x : values) x = static_cast<float>(deviation * random.normal());
  return values;
}

}  // namespace flashmsa::test
