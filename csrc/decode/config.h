// The decode kernel's tuning: one line per head-dim bucket, and everything that follows from it.
#pragma once

#include "core/types.h"

namespace flashmsa::decode {

inline constexpr int32_t kWarps = 4;  // that attend, and as many that load
inline constexpr int32_t kAttending = 32 * kWarps;
inline constexpr int32_t kThreads = 2 * kAttending;
inline constexpr int32_t kTileRows = 16;                    // of mma.sync
inline constexpr int32_t kGroupRows = kTileRows * kWarps;   // most query rows of one CTA
inline constexpr int32_t kMaxRows = 4 * kGroupRows;  // most query rows of a kv head; beyond, prefill is for them
inline constexpr int32_t kGrainKeys = 128;  // what a balanced plan deals out
inline constexpr int32_t kInvariantKeys = 1024;  // batch_invariant: keys of a part, where that gives at most
inline constexpr int32_t kInvariantParts = 32;  // ... so many parts; a longer sequence has longer parts
inline constexpr int32_t kClusterSize = 8;

template <class ElementType, int32_t kHeadDimValue, int32_t kChunkValue, int32_t kStagesValue, bool kQInRegistersValue>
struct Config {
  using Element = ElementType;
  static constexpr int32_t kHeadDim = kHeadDimValue;  // bucket: serves head_dim and head_dim_v up to this
  static constexpr int32_t kChunk = kChunkValue;  // keys that a warp takes at a time
  static constexpr int32_t kStages = kStagesValue;  // tiles of K and of V, kWarps chunks each, in flight
  static constexpr bool kQInRegisters = kQInRegistersValue;  // else its fragments lie in shared memory
  static constexpr int32_t kSlotBytes = kChunk * kHeadDim * 2;
  static constexpr int32_t kSlots = 2 * kStages * kWarps;
  static constexpr int32_t kORow = kHeadDim + 8;  // floats; 8 more, so that eight rows lie in different banks
};

// PERF: what was measured beside these and lost is in benchmarks/NOTES.md.
//                           head_dim  chunk  stages  q_regs
template <class Element>
using Config64 = Config<Element, 64, 32, 2, true>;
template <class Element>
using Config128 = Config<Element, 128, 32, 2, true>;
template <class Element>
using Config256 = Config<Element, 256, 16, 2, false>;

constexpr int32_t bucket_of(int32_t head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }

}  // namespace flashmsa::decode
