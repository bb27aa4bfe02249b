// Where rows stand beside a tile of keys: before all of them, behind all of them, or neither. For ALiBi, whose penalty is a
// linear function of the key on either side.
#pragma once

#include <climits>
#include <cstdint>

#include "core/types.h"
#include "mask/interval.h"

namespace flashmsa::mask {

enum class Side : int32_t { kAmid = 0, kBefore = 1, kBehind = 2 };

// Positions of rows among the keys: all lie between the two.
struct PositionSpan {
  int32_t first, last;
};
// Rows that are to stand amid all keys, and behind them.
inline constexpr PositionSpan kEverywhere = {INT32_MIN, INT32_MAX};
inline constexpr PositionSpan kBehindAll = {INT32_MAX, INT32_MAX};

// At the last key and at the first is still behind and before: the distance is 0 there.
FLASHMSA_HD Side side_of(PositionSpan rows, int32_t first_key, int32_t keys) {
  if (rows.first >= first_key + (keys - 1)) return Side::kBehind;
  return rows.last <= first_key ? Side::kBefore : Side::kAmid;
}

// Full tiles in the order of their distance from the rows: those that they stand amid, from right to left; those behind
// which they stand, from right to left; those before which they stand, from left to right. ALiBi's penalties then grow from
// tile to tile, and a softmax keeps the reference that it began with.
struct SideOrder {
  int32_t amid_end, behind_end;  // steps: one past the last of the first kind, of the second; partial tiles come before
  // The first key of step s is behind_key - s * tile_size in the second kind, before_key + s * tile_size in the third.
  int32_t behind_key, before_key;
};

template <class Tiles>
FLASHMSA_HD SideOrder side_order(const Tiles& tiles, int32_t origin, PositionSpan rows, int32_t tile_size) {
  const KeyTiles& main = main_tiles(tiles);
  // How many tiles from the origin on end by the first row's key, and how many begin before the last row's.
  // NOTE: no sum that can overflow, for positions may be anything.
  const int32_t first = rows.first >= origin ? rows.first - origin : -1;
  const int32_t last = rows.last > origin ? rows.last - origin : 0;
  const int32_t behind = first < 0 ? 0 : first / tile_size + (first % tile_size == tile_size - 1);
  const int32_t not_before = last / tile_size + (last % tile_size != 0);
  const int32_t amid_begin = clamp(behind, main.full_begin, main.full_end);
  const int32_t amid_end = clamp(not_before, main.full_begin, main.full_end);
  SideOrder order;
  order.amid_end = tiles.partial_count() + amid_end - amid_begin;
  order.behind_end = order.amid_end + amid_begin - main.full_begin;
  order.behind_key = origin + (amid_begin - 1 + order.amid_end) * tile_size;
  order.before_key = origin + (amid_end - order.behind_end) * tile_size;
  return order;
}

// The first key of a step, by Tiles::visit() but for the full tiles.
template <class Tiles>
FLASHMSA_HD int32_t first_key(const Tiles& tiles, int32_t origin, const SideOrder& order, int32_t step,
                              int32_t tile_size) {
  if (step < tiles.partial_count()) return origin + tiles.visit(step) * tile_size;
  // The tiles amid go on to those behind.
  return step < order.behind_end ? order.behind_key - step * tile_size : order.before_key + step * tile_size;
}

}  // namespace flashmsa::mask
