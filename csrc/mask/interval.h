// The interval-mask idea: the keys that a query row may see form one interval.
//
// A trait under mask/ says what that interval is; everything here follows from it, for the host and for the device.
// A trait provides
//   struct Params                                   plain data, passed to kernels by value
//   struct Block                                    what a block of consecutive rows needs to find its rows' intervals
//   static Params make_params(const AttentionParams&)
//   static Block  block(params, batch, first_row, last_row)
//   static Interval row(params, block, i)           for first_row <= i <= last_row
//   static constexpr bool kPlanned                  rows differ by device data: tiles are planned on the device (sched/);
//                                                   then also staged_size() and stage(), see document.h
// and promises that both ends of row(i) never decrease with i inside a block; an empty row is [x, x) with x in that order.
#pragma once

#include "core/params.h"
#include "core/types.h"

namespace flashmsa::mask {

struct Interval {
  int32_t begin;  // first allowed key
  int32_t end;  // one past the last allowed key; begin == end: no key
};

FLASHMSA_HD bool contains(Interval interval, int32_t key) { return key >= interval.begin && key < interval.end; }

enum class TileClass { kSkip, kPartial, kFull };

// The key tiles that a block of rows visits, in units of tiles: [begin, end) meets some row's interval,
// [full_begin, full_end) lies inside every row's interval and needs no test.
struct KeyTiles {
  int32_t begin;
  int32_t full_begin;
  int32_t full_end;
  int32_t end;

  FLASHMSA_HD int32_t count() const { return end - begin; }
  FLASHMSA_HD int32_t partial_count() const { return count() - (full_end - full_begin); }

  // Visit order: partial tiles right of the full ones, partial tiles left of them, then the full ones; each run from
  // right to left. So the loop with a mask test comes first and the loop without one runs to the end.
  FLASHMSA_HD int32_t visit(int32_t step) const {
    const int32_t right = end - full_end;
    if (step < right) return end - 1 - step;
    step -= right;
    const int32_t left = full_begin - begin;
    if (step < left) return full_begin - 1 - step;
    return full_end - 1 - (step - left);
  }

  FLASHMSA_HD TileClass classify(int32_t tile) const {
    if (tile < begin || tile >= end) return TileClass::kSkip;
    return tile >= full_begin && tile < full_end ? TileClass::kFull : TileClass::kPartial;
  }
};

// The tiles of a block whose first and last row have the intervals `first` and `last`. Both ends grow with the row, so
// the union of all rows is [first.begin, last.end) and their intersection [last.begin, first.end).
FLASHMSA_HD KeyTiles key_tiles(Interval first, Interval last, int32_t tile_size) {
  if (first.begin >= last.end) return {0, 0, 0, 0};
  KeyTiles tiles;
  tiles.begin = first.begin / tile_size;
  tiles.end = ceil_div(last.end, tile_size);
  // NOTE: for rows in order the clamps only say "no full tile"; they also keep unchecked device offsets in range.
  tiles.full_begin = clamp(ceil_div(last.begin, tile_size), tiles.begin, tiles.end);
  tiles.full_end = clamp(first.end / tile_size, tiles.full_begin, tiles.end);
  return tiles;
}

// What to add to a query's index for its position among the keys: aligned at the end, or at the start.
inline int32_t position_shift(const AttentionParams& p) { return p.mask.top_left ? 0 : p.len_kv - p.len_q; }

// The last key tile of a length that the tile does not divide is never full: no interval reaches past len_kv.
template <class Mask>
FLASHMSA_HD KeyTiles block_tiles(const typename Mask::Params& params, const typename Mask::Block& block,
                                 int32_t first_row, int32_t last_row, int32_t tile_size) {
  return key_tiles(Mask::row(params, block, first_row), Mask::row(params, block, last_row), tile_size);
}

}  // namespace flashmsa::mask
