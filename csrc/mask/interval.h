// The interval-mask idea: the keys that a query row may see form one interval.
//
// A trait under mask/ says what that interval is; everything here follows from it, for the host and for the device.
// A trait provides
//   struct Params                                   plain data, passed to kernels by value
//   struct Block                                    what a block of consecutive rows needs to find its rows' intervals
//   using Row = Interval, or TwoRuns                the keys of a row
//   using Tiles = KeyTiles, or TwoRunTiles          the key tiles of a block
//   static Params make_params(const AttentionParams&)
//   static Block  block(params, batch, head, first_row, last_row)
//   static Row    row(params, block, i)             for first_row <= i <= last_row
//   static int32_t origin(params, block)            the key at which the block's tile 0 begins
//   static Tiles  tiles(params, block, first_row, last_row, tile_size)   of some of the block's rows
//   static constexpr bool kPlanned                  rows may differ by device data, and tiles are then planned on the device
//                                                   (sched/); with staged_size() and stage(), see document.h
//   static constexpr bool kSpansPlanned             the plan also says what each 64 rows of a block meet
//   static constexpr bool kListed                   tiles count the entries of a list, see block_sparse.h
// and promises that both ends of a row's interval never decrease with i inside a block; an empty row is [x, x) with x in
// that order.
#pragma once

#include "core/params.h"
#include "core/types.h"

namespace flashmsa::mask {

struct Interval {
  int32_t begin;  // first allowed key
  int32_t end;  // one past the last allowed key; begin == end: no key
};

// Two runs of keys: a window's always-visible first keys, and the window. The first may reach into the main one.
struct TwoRuns {
  Interval first;
  Interval main;
};

FLASHMSA_HD Interval main_run(Interval row) { return row; }
FLASHMSA_HD Interval main_run(const TwoRuns& row) { return row.main; }
// The part of the first run that lies left of the main one; empty without one.
FLASHMSA_HD Interval first_run(Interval /*row*/) { return {0, 0}; }
FLASHMSA_HD Interval first_run(const TwoRuns& row) {
  const int32_t end = row.main.begin < row.main.end ? min_of(row.first.end, row.main.begin) : row.first.end;
  return {row.first.begin, max_of(end, row.first.begin)};
}

FLASHMSA_HD bool contains(Interval interval, int32_t key) { return key >= interval.begin && key < interval.end; }
FLASHMSA_HD bool contains(const TwoRuns& row, int32_t key) {
  return contains(row.main, key) || contains(row.first, key);
}
FLASHMSA_HD int32_t visible_keys(Interval row) { return row.end - row.begin; }
FLASHMSA_HD int32_t visible_keys(const TwoRuns& row) { return visible_keys(row.main) + visible_keys(first_run(row)); }

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

// The same, and before `begin` a run of partial tiles [first_begin, first_end), visited last of the partial ones.
struct TwoRunTiles {
  KeyTiles main;
  int32_t first_begin;
  int32_t first_end;

  FLASHMSA_HD int32_t first_count() const { return first_end - first_begin; }
  FLASHMSA_HD int32_t count() const { return main.count() + first_count(); }
  FLASHMSA_HD int32_t partial_count() const { return main.partial_count() + first_count(); }

  FLASHMSA_HD int32_t visit(int32_t step) const {
    const int32_t partial = main.partial_count();
    if (step < partial) return main.visit(step);
    step -= partial;
    if (step < first_count()) return first_end - 1 - step;
    return main.full_end - 1 - (step - first_count());
  }

  FLASHMSA_HD TileClass classify(int32_t tile) const {
    return tile >= first_begin && tile < first_end ? TileClass::kPartial : main.classify(tile);
  }
};

FLASHMSA_HD const KeyTiles& main_tiles(const KeyTiles& tiles) { return tiles; }
FLASHMSA_HD const KeyTiles& main_tiles(const TwoRunTiles& tiles) { return tiles.main; }

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

// The same of two runs. NOTE: between the first row's runs the tiles up to the last row's first run count: more than
// needed only where a block's rows have first runs in several documents.
FLASHMSA_HD TwoRunTiles key_tiles(const TwoRuns& first, const TwoRuns& last, int32_t tile_size) {
  TwoRunTiles tiles = {key_tiles(first.main, last.main, tile_size), 0, 0};
  const int32_t begin = first.first.begin;
  const int32_t end = max_of(first.first.end, last.first.end);
  if (begin >= end) return tiles;
  tiles.first_begin = begin / tile_size;
  tiles.first_end = ceil_div(end, tile_size);
  if (tiles.main.count() > 0) tiles.first_end = min_of(tiles.first_end, tiles.main.begin);
  tiles.first_begin = min_of(tiles.first_begin, tiles.first_end);
  return tiles;
}

// NOTE: not below 0, where unchecked device data could lead.
FLASHMSA_HD Interval from_origin(Interval row, int32_t origin) {
  return {max_of(row.begin - origin, 0), max_of(row.end - origin, 0)};
}

// The tiles that rows in order meet, counted from the block's origin. The last key tile of a length that the tile does not
// divide is never full: no interval reaches past len_kv.
template <class Mask>
FLASHMSA_HD typename Mask::Tiles row_tiles(const typename Mask::Params& params, const typename Mask::Block& block,
                                           int32_t first_row, int32_t last_row, int32_t tile_size) {
  const int32_t origin = Mask::origin(params, block);
  return key_tiles(from_origin(Mask::row(params, block, first_row), origin),
                   from_origin(Mask::row(params, block, last_row), origin), tile_size);
}

}  // namespace flashmsa::mask
