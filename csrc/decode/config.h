// The decode kernel's tuning: one line per head-dim bucket, and everything that follows from it.
#pragma once

#include "core/types.h"

namespace flashmsa::decode {

inline constexpr int32_t kLoaders = 4;  // warps that load
inline constexpr int32_t kTileRows = 16;  // of mma.sync, and of a warp's part of wgmma
inline constexpr int32_t kGroupRows = 4 * kTileRows;  // most query rows of one CTA; by wgmma Config::kGroupRows
inline constexpr int32_t kMaxRows = 4 * kGroupRows;  // most query rows of a kv head; beyond, prefill is for them
inline constexpr int32_t kGrainKeys = 128;  // what a balanced plan deals out
inline constexpr int32_t kInvariantKeys = 1024;  // batch_invariant: keys of a part, where that gives at most
inline constexpr int32_t kInvariantParts = 32;  // ... so many parts; a longer sequence has longer parts
inline constexpr int32_t kTable = 128;  // sequences of a table
inline constexpr int32_t kMergedParts = 16;  // most parts of a row that are merged at a time
inline constexpr int32_t kMergedRows = 64;   // most rows of which they are

// A kernel's tuning. kCtas: of an SM. kRegisters…: of a thread, by setmaxnreg; 0: as it was compiled.
template <class ElementType, int32_t kHeadDimValue, int32_t kChunkValue, int32_t kWarpsValue, int32_t kStagesValue,
          bool kQInRegistersValue, int32_t kCtasValue = 1, int kRegistersAttendingValue = 0,
          int kRegistersLoadingValue = 0>
struct Config {
  using Element = ElementType;
  static constexpr int32_t kHeadDim = kHeadDimValue;  // bucket: serves head_dim and head_dim_v up to this
  static constexpr int32_t kChunk = kChunkValue;      // keys that a warp takes at a time
  static constexpr int32_t kWarps = kWarpsValue;      // that attend
  static constexpr int32_t kStages = kStagesValue;    // tiles of K and of V, kWarps chunks each, in flight
  static constexpr bool kQInRegisters = kQInRegistersValue;  // else its fragments lie in shared memory
  static constexpr int32_t kCtas = kCtasValue;
  static constexpr bool kByWarpgroups = false;
  static constexpr bool kClustered = false;
  static constexpr bool kPlain = false;
  static constexpr int kRegistersAttending = kRegistersAttendingValue, kRegistersLoading = kRegistersLoadingValue;

  static constexpr int32_t kAttending = 32 * kWarps, kThreads = kAttending + 32 * kLoaders;
  static constexpr int32_t kGroupRows = decode::kGroupRows;  // most query rows of a CTA
  static constexpr int32_t kSharers = kWarps;                // most warps that share a tile of rows
  static constexpr int32_t kTileChunks = kWarps;             // chunks of a tile
  static constexpr int32_t kSlotBytes = kChunk * kHeadDim * 2;
  static constexpr int32_t kSlots = 2 * kStages * kTileChunks;
  static constexpr int32_t kORow = kHeadDim + 8;  // floats; 8 more, so that eight rows lie in different banks
  static constexpr int32_t kMergedSlots = 4096 / kAttending;  // float4s of a thread for parts to merge: 64 KB in all
  static_assert(kWarps % kLoaders == 0 && kThreads >= kTable && kMergedSlots >= kMergedParts);
  // NOTE: the pool that setmaxnreg deals out is entry registers times threads; asking for more hangs for ever.
  static constexpr int kEntryRegisters = 65536 / (kThreads * kCtas) / 8 * 8;
  static_assert(kRegistersAttending * kWarps + kRegistersLoading * kLoaders <= kEntryRegisters * (kWarps + kLoaders));
};

// The same with two warpgroups in place of the warps: each attends for 64 rows by wgmma, which both take a chunk from one
// place in shared memory. Up to 64 rows they deal out the chunks, up to 128 the rows.
template <class Base, int32_t kTileChunksValue>
struct ByWarpgroups : Base {
  static constexpr bool kByWarpgroups = true;
  static constexpr int32_t kGroupRows = Base::kWarps * kTileRows;
  static constexpr int32_t kSharers = kGroupRows / decode::kGroupRows;
  static constexpr int32_t kTileChunks = kTileChunksValue;
  static constexpr int32_t kSlots = 2 * Base::kStages * kTileChunks;
  static_assert(Base::kWarps == 8 && kTileChunks % kLoaders == 0 && Base::kQInRegisters);
};

// The same for a kernel of clusters.
template <class Base>
struct Clustered : Base {
  static constexpr bool kClustered = true;
};

// The same for calls without a mask, tree, ALiBi, softcap, sinks and packed queries, as most are.
// PERF: three quarters of the code; what there is of it comes from memory at every call, microseconds in all.
template <class Base>
struct Plain : Base {
  static constexpr bool kPlain = true;
};

// The kernels of a head-dim bucket.
// PERF: `Packed` has two CTAs on an SM, so that 16 clusters of 8 run at once, which do not fit otherwise: a cluster lies within
// a GPC, of 16 or 18 SMs or less. `Wide` has twice the warps, for what instructions and not memory limit: more rows than a tile
// has, and short sequences. What was measured beside these and lost is in benchmarks/NOTES.md.
template <class Element, int32_t kHeadDim>
struct Kernels;
//                  head_dim  chunk  warps  stages  q_regs  CTAs  registers
template <class Element>
struct Kernels<Element, 64> {
  using Shares = Config<Element, 64, 32, 4, 2, true>;
  using WideShares = Config<Element, 64, 32, 8, 2, true, 1, 208, 88>;
  using RowsShares = ByWarpgroups<Config<Element, 64, 64, 8, 2, true, 1, 200, 104>, 4>;
  using WideCluster = Clustered<WideShares>;
  using PackedCluster = Clustered<Config<Element, 64, 32, 4, 2, true, 2, 200, 56>>;
};
template <class Element>
struct Kernels<Element, 128> {
  using Shares = Config<Element, 128, 32, 4, 2, true>;
  using WideShares = Config<Element, 128, 32, 8, 1, true, 1, 208, 88>;
  using RowsShares = ByWarpgroups<Config<Element, 128, 64, 8, 1, true, 1, 200, 104>, 4>;
  using WideCluster = Clustered<WideShares>;
  using PackedCluster = Clustered<Config<Element, 128, 32, 4, 1, true, 2, 200, 56>>;
};
template <class Element>
struct Kernels<Element, 256> {
  using Shares = Config<Element, 256, 16, 4, 2, false>;
  using WideShares = Shares;
  using RowsShares = void;
  using WideCluster = Clustered<Shares>;
  using PackedCluster = WideCluster;
};

constexpr int32_t bucket_of(int32_t head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }

}  // namespace flashmsa::decode
