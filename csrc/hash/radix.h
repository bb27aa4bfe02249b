// How keys are cut into digits: shared by the sorts on the device and on the host.
#pragma once

#include <cstdint>

#include "core/types.h"

namespace flashmsa::hash {

inline constexpr int32_t kMaxDigitBits = 8;
inline constexpr int32_t kMaxDigits = 1 << kMaxDigitBits;
inline constexpr int32_t kMaxPasses = 32 / kMaxDigitBits;

struct Digits {
  int32_t passes;  // 0 where all keys are equal
  int32_t bits;    // of each digit
};

// Of keys from 0 to `largest`, counted from the segment's smallest bucket: few buckets need few bits, negative ids too.
FLASHMSA_HD Digits digits_of(uint32_t largest) {
  if (largest == 0) return {0, 0};
#if defined(__CUDA_ARCH__)
  const int32_t bits = 32 - __clz(static_cast<int>(largest));
#else
  const int32_t bits = 32 - __builtin_clz(largest);
#endif
  const int32_t passes = ceil_div(bits, kMaxDigitBits);
  return {passes, ceil_div(bits, passes)};
}

// A bucket's place among the segment's, whose smallest is `lowest`. The difference of any two int32 fits.
FLASHMSA_HD uint32_t key_of(int32_t bucket, int32_t lowest) {
  return static_cast<uint32_t>(bucket) - static_cast<uint32_t>(lowest);
}

FLASHMSA_HD uint32_t digit_of(uint32_t key, int32_t shift, int32_t bits) { return (key >> shift) & ((1u << bits) - 1); }

}  // namespace flashmsa::hash
