// One stable counting pass over keys that lie in a CTA's shared memory.
#pragma once

#include <cstdint>

#include "hash/radix.h"

namespace flashmsa::hash {

inline constexpr int32_t kSortThreads = 1024;
inline constexpr int32_t kSortWarps = kSortThreads / 32;

// kItems keys a thread.
template <int kItems>
struct BlockRadix {
  static constexpr int32_t kCapacity = kItems * kSortThreads;
  static_assert(kCapacity <= 1 << 16, "places are 16 bits");
  // A warp counts its own keys; one more column keeps both digits and warps clear of bank conflicts.
  static constexpr int32_t kCountStride = kSortWarps + 1;

  uint32_t keys[kCapacity];                     // in original order
  uint16_t sorted[kCapacity];                   // the order so far, as places in `keys`
  int32_t counts[kMaxDigits * kCountStride];    // of a digit in a warp, then in the warps before it
  int32_t digit_start[kMaxDigits];              // how many keys have a lower digit
};

// Warp sums of `value` over the lanes up to each lane.
__device__ __forceinline__ int32_t warp_inclusive_sum(int32_t value, int32_t lane) {
#pragma unroll
  for (int32_t step = 1; step < 32; step *= 2) {
    const int32_t below = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += below;
  }
  return value;
}

// counts: exclusive sums over the warps, digit by digit; digit_start: exclusive sums over the digits.
template <int kItems>
__device__ __forceinline__ void scan_counts(BlockRadix<kItems>& s, int32_t digits) {
  constexpr int32_t kStride = BlockRadix<kItems>::kCountStride;
  const int32_t warp = threadIdx.x / 32;
  const int32_t lane = threadIdx.x % 32;
#pragma unroll 2
  for (int32_t digit = warp; digit < digits; digit += kSortWarps) {
    const int32_t count = s.counts[digit * kStride + lane];
    const int32_t sum = warp_inclusive_sum(count, lane);
    s.counts[digit * kStride + lane] = sum - count;
    if (lane == 31) s.digit_start[digit] = sum;
  }
  __syncthreads();
  if (warp == 0) {
    const int32_t own = ceil_div(digits, 32);
    const int32_t first = lane * own;
    const int32_t last = min_of(first + own, digits);
    int32_t total = 0;
    for (int32_t digit = first; digit < last; ++digit) total += s.digit_start[digit];
    int32_t before = warp_inclusive_sum(total, lane) - total;
    for (int32_t digit = first; digit < last; ++digit) {
      const int32_t count = s.digit_start[digit];
      s.digit_start[digit] = before;
      before += count;
    }
  }
  __syncthreads();
}

// Sorts the first `length` places by one digit of keys[place] - lowest: those of `sorted`, or 0, 1, 2 ... where
// kIdentity. All threads of the CTA call it; keys are in place before, and `sorted` and digit_start after.
// A warp ranks its own stretch of places, 32 at a time: equal digits find each other by one ballot for each bit.
template <bool kIdentity, int kItems>
__device__ __forceinline__ void radix_pass(BlockRadix<kItems>& s, int32_t length, int32_t lowest, int32_t shift,
                                           int32_t bits) {
  constexpr int32_t kStride = BlockRadix<kItems>::kCountStride;
  // PERF: as many at once as 64 registers hold.
  constexpr int32_t kGroup = kItems > 16 ? 4 : kItems < 8 ? kItems : 8;
  const int32_t warp = threadIdx.x / 32;
  const int32_t lane = threadIdx.x % 32;
  const int32_t first = warp * (32 * kItems) + lane;
  const uint32_t below = (1u << lane) - 1;
  const auto digit_at = [&](uint32_t place) {
    return static_cast<int32_t>(digit_of(key_of(static_cast<int32_t>(s.keys[place]), lowest), shift, bits));
  };

  // 1. Rank of each key among its warp's keys of the same digit.
  for (int32_t i = threadIdx.x; i < kStride << bits; i += kSortThreads) s.counts[i] = 0;
  __syncthreads();
  uint32_t ranked[kItems];  // place, rank: 16 bits each
#pragma unroll
  for (int32_t group = 0; group < kItems; group += kGroup) {
    uint32_t place[kGroup], peers[kGroup];
    int32_t digit[kGroup];
#pragma unroll
    for (int32_t j = 0; j < kGroup; ++j) {
      const int32_t at = first + 32 * (group + j);
      const bool valid = at < length;
      place[j] = kIdentity ? at : valid ? s.sorted[at] : 0;
      digit[j] = valid ? digit_at(place[j]) : 0;
      peers[j] = __ballot_sync(~0u, valid);
    }
    for (int32_t bit = 1; bit < 1 << bits; bit *= 2) {
#pragma unroll
      for (int32_t j = 0; j < kGroup; ++j) {
        const bool mine = (digit[j] & bit) != 0;
        const uint32_t vote = __ballot_sync(~0u, mine);
        peers[j] &= mine ? vote : ~vote;
      }
    }
#pragma unroll
    for (int32_t j = 0; j < kGroup; ++j) {
      const bool valid = first + 32 * (group + j) < length;
      int32_t& count = s.counts[digit[j] * kStride + warp];
      const int32_t before = count;
      const int32_t rank = __popc(peers[j] & below);
      __syncwarp();
      if (valid && rank == 0) count = before + __popc(peers[j]);
      __syncwarp();
      // NOTE: not shifts, which the compiler takes apart again: two registers a key.
      ranked[group + j] = __byte_perm(static_cast<uint32_t>(before + rank), place[j], 0x5410);
    }
  }
  __syncthreads();

  // 2. Where each warp's keys of each digit begin.
  scan_counts(s, 1 << bits);

  // 3. Scatter. Every place of `sorted` has been read.
#pragma unroll
  for (int32_t k = 0; k < kItems; ++k) {
    if (first + 32 * k < length) {
      const uint32_t place = ranked[k] >> 16;
      const int32_t digit = digit_at(place);
      const int32_t target = s.digit_start[digit] + s.counts[digit * kStride + warp] + (ranked[k] & 0xffff);
      s.sorted[target] = static_cast<uint16_t>(place);
    }
  }
  __syncthreads();
}

}  // namespace flashmsa::hash
