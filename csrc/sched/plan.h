// The plan of masks whose row blocks differ by device data (documents): one entry per row block, longest first.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/types.h"
#include "mask/interval.h"

namespace flashmsa::sched {

// Which key blocks of a tile some of its rows meet, in visit order: `front` blocks that lie right of all of them, `steps`
// to attend to, `back` blocks left of all of them.
struct Span {
  int32_t front, steps, back;
};

// Of rows that meet the tiles `own`, in a block of rows that meets `all`.
template <class Tiles>
FLASHMSA_HD Span span_of(const Tiles& all, const Tiles& own) {
  const int32_t count = all.count();
  if (all.partial_count() == 0) return {0, count, 0};
  if (own.count() == 0) return {count, 0, 0};
  const mask::KeyTiles& tiles = mask::main_tiles(all);
  const mask::KeyTiles& mine = mask::main_tiles(own);
  // Full blocks come last in visit order, a first run before them: with either there is nothing to skip at the end. These
  // rows' first run may also lie among the main tiles of the block.
  const bool only_main = tiles.full_begin == tiles.full_end && count == tiles.count() && own.count() == mine.count();
  const int32_t front = mine.count() == 0 ? 0 : clamp(tiles.end - mine.end, 0, count);
  const int32_t back = only_main ? clamp(mine.begin - tiles.begin, 0, count - front) : 0;
  return {front, count - front - back, back};
}

inline constexpr int32_t kSpanRows = 64;  // of a consumer warpgroup
inline constexpr int32_t kMaxSpans = 3;   // in a row block of a plan

// The spans of a row block's 64-row parts, where the plan holds them.
template <bool kPlanned>
struct PlannedSpans {};
template <>
struct PlannedSpans<true> {
  Span spans[kMaxSpans];
};

template <class Mask>
struct alignas(16) PlanEntry : PlannedSpans<Mask::kSpansPlanned> {
  int32_t row_block;
  typename Mask::Tiles tiles;
  typename Mask::Block block;  // block.batch: the batch, where each has its own plan
};

// The tiles of a block without rows, which is left out of the plan: fewer than those of rows without keys.
inline constexpr mask::KeyTiles kNoRows = {0, 0, 0, -1};

// Whether a mask's blocks bring their rows along, and how many blocks there are is known on the device alone.
template <class Mask>
inline constexpr bool kOwnRows = requires { requires Mask::kOwnRows; };

// The entry of one row block, wherever it is made: on the device ahead of the kernel, or by the kernel's scheduler.
template <class Mask>
FLASHMSA_HD PlanEntry<Mask> plan_row_block(const typename Mask::Params& params, int32_t batch, int32_t head,
                                           int32_t row_block, int32_t block_q, int32_t block_kv, int32_t len_q) {
  PlanEntry<Mask> entry;
  entry.row_block = row_block;
  if constexpr (kOwnRows<Mask>) {
    entry.block = Mask::block(params, batch, row_block, block_q);
    const int32_t first_row = entry.block.first_row, last_row = entry.block.end_row - 1;
    entry.tiles = first_row > last_row ? kNoRows : Mask::tiles(params, entry.block, first_row, last_row, block_kv);
  } else {
    const int32_t first_row = row_block * block_q;
    const int32_t last_row = min_of(first_row + block_q, len_q) - 1;
    entry.block = Mask::block(params, batch, head, first_row, last_row);
    entry.tiles = Mask::tiles(params, entry.block, first_row, last_row, block_kv);
  }
  return entry;
}

// Adds the spans to a finished entry, where the plan holds them.
template <class Mask>
FLASHMSA_HD void plan_spans(const typename Mask::Params& params, PlanEntry<Mask>& entry, int32_t block_q,
                            int32_t block_kv, int32_t len_q) {
  if constexpr (Mask::kSpansPlanned) {
    const typename Mask::Tiles tiles = entry.tiles;
    for (int32_t part = 0; part * kSpanRows < block_q; ++part) {
      const int32_t first = entry.row_block * block_q + part * kSpanRows;
      const int32_t last = min_of(first + kSpanRows, len_q) - 1;
      const bool none = first >= len_q;
      entry.spans[part] =
          none ? Span{tiles.count(), 0, 0} : span_of(tiles, Mask::tiles(params, entry.block, first, last, block_kv));
    }
  }
}

// Device workspace of one call: the grid's tile counter, the number of the plan's entries (kOwnRows), then the plan.
inline constexpr size_t kCounterBytes = 16;

template <class Mask>
size_t plan_bytes(int64_t entries) {
  return entries * sizeof(PlanEntry<Mask>);
}

// Key-tile counts are sorted by bucket: count >> shift, so that the largest possible count falls into the last bucket.
inline constexpr int32_t kPlanBuckets = 1024;

// Parts of a plan, each of which has its share of the buckets.
inline constexpr int32_t kMostTurns = 16;

FLASHMSA_HD int32_t bucket_shift(int32_t max_count) {
  int32_t shift = 0;
  while ((max_count >> shift) >= kPlanBuckets) ++shift;
  return shift;
}

}  // namespace flashmsa::sched
