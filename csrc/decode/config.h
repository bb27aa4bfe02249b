// The decode kernel's tuning: one line per head-dim bucket, and everything that follows from it.
#pragma once

#include "core/types.h"

namespace flashmsa::decode {

inline constexpr int32_t kWarps = 4;  // that attend; one more loads
inline constexpr int32_t kAttending = 32 * kWarps;
inline constexpr int32_t kThreads = kAttending + 32;
inline constexpr int32_t kTileRows = 16;                    // of mma.sync
inline constexpr int32_t kGroupRows = kTileRows * kWarps;   // most query rows of one CTA
inline constexpr int32_t kMaxRows = 4 * kGroupRows;         // most query rows of a kv head; beyond, prefill is for them
inline constexpr int32_t kGrainKeys = 128;                  // what a balanced plan deals out
inline constexpr int32_t kInvariantKeys = 1024;             // batch_invariant: keys of a part, where that gives at most
inline constexpr int32_t kInvariantParts = 32;              // ... so many parts; a longer sequence has longer parts
inline constexpr int32_t kClusterSize = 8;

template <class ElementType, int32_t kHeadDimValue, int32_t kChunkValue, int32_t kStagesValue, int32_t kCtasValue,
          bool kQInRegistersValue>
struct Config {
  using Element = ElementType;
  static constexpr int32_t kHeadDim = kHeadDimValue;  // bucket: serves head_dim and head_dim_v up to this
  static constexpr int32_t kChunk = kChunkValue;      // keys that a warp takes at a time
  static constexpr int32_t kStages = kStagesValue;    // tiles of K and of V, kWarps chunks each, in flight
  static constexpr int32_t kCtas = kCtasValue;        // that fit on an SM
  static constexpr bool kQInRegisters = kQInRegistersValue;  // else its fragments lie in shared memory
  static constexpr int32_t kSlotBytes = kChunk * kHeadDim * 2;
  static constexpr int32_t kSlots = 2 * kStages * kWarps;
  static constexpr int32_t kORow = kHeadDim + 8;      // floats; 8 more, so that eight rows lie in different banks
};

#ifndef CH
#define CH 32
#define PR 2
#define CT 1
#endif
// PERF: 64 KB in flight an SM is enough, and 113 KB in all lets two CTAs fit, which clusters of 8 need.
//                           head_dim  chunk  stages  ctas  q_regs
template <class Element>
using Config64 = Config<Element, 64, 32, 2, 1, true>;
template <class Element>
using Config128 = Config<Element, 128, CH, PR, CT, true>;
template <class Element>
using Config256 = Config<Element, 256, 16, 2, 1, false>;

constexpr int32_t bucket_of(int32_t head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }

}  // namespace flashmsa::decode
