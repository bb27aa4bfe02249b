// Block-sparse: which cells of 128 x 128 pairs may be seen is a list (CellListArgs, core/params.h), and what they hold is cut
// by a composite mask.
//
// A block's key tiles are counted along the list: tile number `index` is part index % (128 / tile_size) of the list's entry
// index / (128 / tile_size). Whole cells come first, in order; mixed ones after them are the first run of TwoRunTiles, all
// partial. So everything that holds for tiles in a row holds here, and only key_tile() looks into the list.
#pragma once

#include <cstdint>

#include "mask/composite.h"
#include "mask/interval.h"

namespace flashmsa::mask {

inline constexpr int32_t kCell = 128;  // rows, and keys, of a cell
inline constexpr int32_t kWholeCell = -1;

struct BlockSparse {
  static constexpr const char* kName = "block_sparse";
  static constexpr MaskKind kKind = MaskKind::kBlockSparse;
  static constexpr bool kPlanned = true;
  static constexpr bool kSpansPlanned = false;
  static constexpr bool kListed = true;
  using Row = TwoRuns;
  using Tiles = TwoRunTiles;

  struct Params {
    Composite::Params interval;
    CellListArgs list;
  };

  // Rows of one cell row.
  struct Block {
    Composite::Block interval;
    int32_t entry;  // the first in the list
    int32_t whole, mixed;  // how many
  };

  static Params make_params(const AttentionParams& p) { return {Composite::make_params(p), p.mask.list}; }

  static FLASHMSA_HD int64_t staged_size(const Params& params, int32_t batches) {
    return Composite::staged_size(params.interval, batches);
  }
  static FLASHMSA_HD Params stage(const Params& params, int32_t batches, int32_t* space, int32_t thread,
                                  int32_t threads) {
    return {Composite::stage(params.interval, batches, space, thread, threads), params.list};
  }

  static FLASHMSA_HD Block block(const Params& params, int32_t batch, int32_t head, int32_t first_row,
                                 int32_t last_row) {
    const CellListArgs& list = params.list;
    Block block = {Composite::block(params.interval, batch, head, first_row, last_row), 0, 0, 0};
    const int32_t cell_row = first_row / kCell;
    if (cell_row >= list.rows) return block;
    const int64_t slice = int64_t{batch} * list.stride_batch + int64_t{head} * list.stride_head;
    const int32_t* start = list.row_start + slice * (list.rows + 1) + cell_row;
    block.entry = clamp(start[0], 0, list.capacity);
    const int32_t count = clamp(start[1], block.entry, list.capacity) - block.entry;
    block.whole = clamp(list.whole_count[slice * list.rows + cell_row], 0, count);
    block.mixed = count - block.whole;
    return block;
  }

  // What the composite mask leaves of a row; the cells are not looked at.
  static FLASHMSA_HD TwoRuns row(const Params& params, const Block& block, int32_t i) {
    return Composite::row(params.interval, block.interval, i);
  }
  static FLASHMSA_HD int32_t position(const Params& params, const Block& block, int32_t i) {
    return Composite::position(params.interval, block.interval, i);
  }

  static FLASHMSA_HD int32_t origin(const Params&, const Block&) { return 0; }
  static FLASHMSA_HD Tiles tiles(const Params& params, const Block& block, int32_t first_row, int32_t last_row,
                                 int32_t tile_size) {
    const TwoRuns first = row(params, block, first_row), last = row(params, block, last_row);
    // A first run counts as part of the main one: the tiles between are few in a list.
    const bool two = first.first.begin < max_of(first.first.end, last.first.end);
    const Interval lowest = {two ? min_of(first.first.begin, first.main.begin) : first.main.begin, first.main.end};
    const Interval highest = {last.main.begin, max_of(last.main.end, last.first.end)};
    const KeyTiles keys = key_tiles(lowest, highest, tile_size);
    const int32_t parts = kCell / tile_size;
    const int32_t* whole = params.list.cells + block.entry;
    const auto at = [&](int32_t tile) { return lower_bound(whole, block.whole, tile, parts); };
    const auto mixed = [&](int32_t tile) { return lower_bound(whole + block.whole, block.mixed, tile, parts); };
    Tiles tiles;
    tiles.main = {at(keys.begin), at(keys.full_begin), at(keys.full_end), at(keys.end)};
    tiles.first_begin = block.whole * parts + mixed(keys.begin);
    tiles.first_end = block.whole * parts + mixed(keys.end);
    return tiles;
  }

  static FLASHMSA_HD int32_t entry(const Block& block, int32_t index, int32_t tile_size) {
    return block.entry + index / (kCell / tile_size);
  }
  // The key tile that tile number `index` stands for.
  static FLASHMSA_HD int32_t key_tile(const Params& params, const Block& block, int32_t index, int32_t tile_size) {
    const uint32_t parts = kCell / tile_size;
    // NOTE: unsigned, because an unchecked list's cell may be anything.
    const uint32_t first = static_cast<uint32_t>(params.list.cells[entry(block, index, tile_size)]) * parts;
    return static_cast<int32_t>(first + static_cast<uint32_t>(index) % parts);
  }

  // Which keys of cell `detail` the rows of 64-row half `half` may see: [begin, end) within the cell; all of them where
  // the cell is whole or has a bit tile.
  static FLASHMSA_HD Interval half_keys(const Params& params, int32_t detail, int32_t half) {
    if (detail == kWholeCell || params.list.bits != nullptr) return {0, kCell};
    const bool left = (detail >> (2 * half) & 1) != 0, right = (detail >> (2 * half + 1) & 1) != 0;
    return {left || !right ? 0 : kCell / 2, right ? kCell : left ? kCell / 2 : 0};
  }

  // The bits of a row of a mixed cell, one word for 32 keys; null where the cell has no bit tile.
  static FLASHMSA_HD const int32_t* row_bits(const Params& params, int32_t detail, int32_t row_in_cell) {
    if (detail == kWholeCell || params.list.bits == nullptr) return nullptr;
    const int32_t tile = clamp(detail, 0, params.list.tiles - 1);
    return params.list.bits + (int64_t{tile} * kCell + row_in_cell) * (kCell / 32);
  }

 private:
  // The first index whose key tile is `tile` or lies right of it. `cells` ascend.
  static FLASHMSA_HD int32_t lower_bound(const int32_t* cells, int32_t count, int32_t tile, int32_t parts) {
    const int32_t cell = tile / parts;
    // PERF: most masks do not cut the list; these two spare the search.
    if (count == 0 || tile <= 0) return 0;
    if (cells[count - 1] < cell) return count * parts;
    int32_t low = 0, high = count;
    while (low < high) {
      const int32_t mid = low + (high - low) / 2;
      if (cells[mid] < cell) {
        low = mid + 1;
      } else {
        high = mid;
      }
    }
    return low * parts + (low < count && cells[low] == cell ? tile % parts : 0);
  }
};

}  // namespace flashmsa::mask
