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

template <class ElementType, int32_t kHeadDimValue, int32_t kChunkValue, int32_t kStagesValue, bool kQInRegistersValue,
          int32_t kClusterStagesValue, int32_t kClusterCtasValue>
struct Config {
  using Element = ElementType;
  static constexpr int32_t kHeadDim = kHeadDimValue;  // bucket: serves head_dim and head_dim_v up to this
  static constexpr int32_t kChunk = kChunkValue;  // keys that a warp takes at a time
  static constexpr int32_t kStages = kStagesValue;  // tiles of K and of V, kWarps chunks each, in flight
  static constexpr bool kQInRegisters = kQInRegistersValue;  // else its fragments lie in shared memory
  static constexpr int32_t kSlotBytes = kChunk * kHeadDim * 2;
  static constexpr int32_t kSlots = 2 * kStages * kWarps;
  static constexpr int32_t kORow = kHeadDim + 8;  // floats; 8 more, so that eight rows lie in different banks
  static constexpr int32_t kTable = kAttending;   // sequences of a table
  static constexpr int32_t kPushedRows = 1;       // none
  static constexpr int32_t kCtas = 1;             // of an SM

  static constexpr int32_t kClusterStages = kClusterStagesValue, kClusterCtas = kClusterCtasValue;
};

// The same for the kernel of clusters. PERF: where two of its CTAs share an SM, 16 clusters of 8 run at once, which do not
// fit otherwise: they lie within a GPC, of 16 or 18 SMs or less.
template <class Base>
struct Clustered : Base {
  static constexpr int32_t kStages = Base::kClusterStages;
  static constexpr int32_t kSlots = 2 * kStages * kWarps;
  static constexpr int32_t kTable = 1;
  static constexpr int32_t kPushedRows = kTileRows;
  static constexpr int32_t kCtas = Base::kClusterCtas;
  // Of a thread, where two CTAs share an SM: 128 on average.
  static constexpr int kRegistersAttending = 200, kRegistersLoading = 56;
};

// PERF: what was measured beside these and lost is in benchmarks/NOTES.md.
//                           head_dim  chunk  stages  q_regs  clusters: stages  CTAs
template <class Element>
using Config64 = Config<Element, 64, 32, 2, true, 2, 2>;
template <class Element>
using Config128 = Config<Element, 128, 32, 2, true, 1, 2>;
template <class Element>
using Config256 = Config<Element, 256, 16, 2, false, 2, 1>;

constexpr int32_t bucket_of(int32_t head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }

}  // namespace flashmsa::decode
