// The masks of paged attention: a composite mask's bounds inside each sequence, over keys that lie on pages.
//
// Paged<false>: key tiles follow each other in the sequence, [t * tile, (t + 1) * tile), whatever pages they lie on.
// Paged<true> (query_pages): key tiles are made of the pages listed for the rows' query block, in pieces of a page. Pieces
// are counted along the sorted list; of the tiles made of them the first hold what needs a test, padded in front to whole
// tiles, then come those that every row sees in full.
//
// Lengths, offsets, tables and lists are device data that no host code has looked at. Whatever they hold, every page lies in
// the pool, every row in Q, and entries behind a length are not read.
#pragma once

#include <cstdint>

#include "core/paged.h"
#include "mask/composite.h"
#include "mask/interval.h"

namespace flashmsa::prefill {

using mask::Interval;
using mask::KeyTiles;
using mask::TwoRuns;
using mask::TwoRunTiles;

// Coordinates of a pool's tensor map (64 columns, 8 slots, column groups, eights of slots, heads), see launch.cuh. Two of page,
// slot and head share a dimension.
struct PoolSteps {
  int32_t eights;  // of a page, in the fourth dimension
  int32_t heads;  // of a page, in the fifth
  int32_t head;  // of a head, in the fifth
};

// Division of numbers below 2^31 by one of at least 2.
struct Divisor {
  uint32_t multiplier;
  int32_t shift;

  static Divisor of(int32_t divisor) {
    int32_t bits = 1;
    while ((int64_t{1} << bits) < divisor) ++bits;
    return {static_cast<uint32_t>(((int64_t{1} << (31 + bits)) + divisor - 1) / divisor), bits - 1};
  }
  FLASHMSA_HD int32_t divide(int32_t x) const {
    return static_cast<int32_t>(static_cast<uint64_t>(x) * multiplier >> 32) >> shift;
  }
};

// A page of a list: its number in the sequence and, as the table has it, in the pool.
struct alignas(8) ListedPage {
  int32_t logical, page;
};

// query_pages sorted, once each, those in use.
struct PageLists {
  const ListedPage* pages;  // (batch, query_blocks, capacity)
  const int32_t* counts;  // (batch, query_blocks)
  int32_t query_block, query_blocks, capacity;
};

struct PagedMaskParams {
  BandArgs band;
  bool bounded, two_runs;
  const int32_t* kv_lens;  // null: max_len
  const int32_t* cu_seqlens_q;  // null: padded
  int32_t batch, len_q, total_q;
  int32_t max_len;  // max_pages * page_size; 0 without pages
  const int32_t* block_table;  // null: page b is sequence b
  int64_t block_table_stride;
  int32_t num_pages, page_size;
  Divisor by_page_size;
  int32_t piece_log2;  // rows of a tile that lie on one page and come by one box
  PoolRef k_pages, v_pages;
  PoolSteps k_steps, v_steps;
  PageLists lists;

  FLASHMSA_HD int32_t piece() const { return 1 << piece_log2; }
  FLASHMSA_HD int32_t length(int32_t sequence) const {
    return kv_lens == nullptr ? max_len : clamp(kv_lens[sequence], 0, max_len);
  }
  // NOTE: of pages in use alone.
  FLASHMSA_HD int32_t table_entry(int32_t sequence, int32_t logical) const {
    return block_table == nullptr ? sequence : block_table[sequence * block_table_stride + logical];
  }
  FLASHMSA_HD int32_t clamp_page(int32_t page) const { return clamp(page, 0, num_pages - 1); }
  FLASHMSA_HD int32_t page(int32_t sequence, int32_t logical) const {
    return clamp_page(table_entry(sequence, logical));
  }
};

// Rows of K and V by key, through the block table.
template <class Element>
struct PagedRows {
  const PagedMaskParams& params;
  int32_t sequence, head;

  FLASHMSA_HD const Element* row(const PoolRef& pool, int32_t key) const {
    const int32_t page = params.page(sequence, key / params.page_size);
    return static_cast<const Element*>(pool.data) + page * pool.stride_page +
           key % params.page_size * pool.stride_slot + head * pool.stride_head;
  }
  FLASHMSA_HD const Element* k(int32_t key) const { return row(params.k_pages, key); }
  FLASHMSA_HD const Element* v(int32_t key) const { return row(params.v_pages, key); }
};

// What a block knows of its list.
template <bool kListed>
struct ChosenPages {};
template <>
struct ChosenPages<true> {
  int64_t first;  // the list's first entry
  int32_t position_shift;  // position of query i, for ALiBi: i + this
  int32_t count;  // its entries
  int32_t pad;  // pieces missing in front of the first tile
  TwoRunTiles pieces;  // those that the rows meet, counted along the list
};

template <bool kChosen>
struct Paged {
  static constexpr const char* kName = kChosen ? "prefill_pages" : "prefill";
  static constexpr MaskKind kKind = MaskKind::kComposite;
  static constexpr bool kPlanned = true;
  static constexpr bool kSpansPlanned = true;
  static constexpr bool kListed = false;
  static constexpr bool kPaged = true;
  static constexpr bool kScattered = kChosen;
  using Params = PagedMaskParams;
  using Row = TwoRuns;
  using Tiles = std::conditional_t<kChosen, KeyTiles, TwoRunTiles>;

  // Rows of one sequence. Those of no sequence (sequence < 0, not owned) see nothing.
  struct Block : ChosenPages<kChosen> {
    int32_t sequence;
    bool owned;
    int32_t sequence_row;  // the row of Q that is the sequence's first
    int32_t first_row, end_row;
    int32_t len_kv;
    mask::Bounds bounds;
  };

  // The rows of a block are given but for what follows from the device's data.
  static FLASHMSA_HD void fill_block(const Params& params, Block& block, int32_t len_q) {
    block.len_kv = block.owned ? params.length(block.sequence) : 0;
    block.bounds = {};
    if (params.bounded && block.owned) {
      block.bounds = mask::make_bounds(params.band, block.sequence, 0, len_q, 0, block.len_kv);
    }
    if constexpr (kChosen) block.position_shift = block.len_kv - len_q;
  }

  static FLASHMSA_HD int32_t position(const Params&, const Block& block, int32_t i) { return i + block.position_shift; }

  static FLASHMSA_HD TwoRuns row(const Params& params, const Block& block, int32_t i) {
    const TwoRuns all = {{0, 0}, {0, block.len_kv}};
    return params.bounded ? mask::Composite::cut(all, block.bounds, block.bounds.prefix, i) : all;
  }

  static FLASHMSA_HD int32_t origin(const Params&, const Block&) { return 0; }

  // Tiles, or with tile_size a piece pieces, of rows in a run of keys.
  static FLASHMSA_HD TwoRunTiles run_tiles(const Params& params, const Block& block, int32_t first_row,
                                           int32_t last_row, int32_t tile_size) {
    const TwoRuns first = row(params, block, first_row), last = row(params, block, last_row);
    if (params.two_runs) return mask::key_tiles(first, last, tile_size);
    return {mask::key_tiles(first.main, last.main, tile_size), 0, 0};
  }

  // ---- Paged<true> ----------------------------------------------------------------------------------------------------------

  static FLASHMSA_HD const ListedPage* list(const Params& params, const Block& block) {
    return params.lists.pages + block.first;
  }

  // Finds the block's list, and its pieces that the rows meet; returns the tiles made of them.
  static FLASHMSA_HD KeyTiles choose(const Params& params, Block& block, int32_t tile_size) {
    const int32_t query_block = block.first_row / params.lists.query_block;
    block.pad = block.count = 0;
    block.first = 0;
    block.pieces = {};
    if (!block.owned || query_block >= params.lists.query_blocks) return {0, 0, 0, 0};
    const int64_t which = int64_t{block.sequence} * params.lists.query_blocks + query_block;
    block.first = which * params.lists.capacity;
    block.count = clamp(params.lists.counts[which], 0, params.lists.capacity);
    const TwoRunTiles run = run_tiles(params, block, block.first_row, block.end_row - 1, params.piece());
    const auto at = [&](int32_t piece) { return place_of(params, block, piece); };
    block.pieces.main = {at(run.main.begin), at(run.main.full_begin), at(run.main.full_end), at(run.main.end)};
    if (run.first_count() > 0) {
      block.pieces.first_begin = at(run.first_begin);
      block.pieces.first_end = at(run.first_end);
    }
    const int32_t per_tile = tile_size >> params.piece_log2;
    const int32_t tiles = ceil_div(block.pieces.count(), per_tile);
    block.pad = tiles * per_tile - block.pieces.count();
    const int32_t tested = ceil_div(block.pad + block.pieces.partial_count(), per_tile);
    return {0, tested, tiles, tiles};
  }

  // Calls visit(keys) for each listed page.
  template <class Visit>
  static FLASHMSA_HD void visit_pages(const Params& params, const Block& block, const Visit& visit) {
    for (int32_t i = 0; i < block.count; ++i) {
      const int32_t begin = list(params, block)[i].logical * params.page_size;
      visit(Interval{begin, min_of(begin + params.page_size, block.len_kv)});
    }
  }

  // The row of tile 0 where its first piece begins.
  static FLASHMSA_HD int32_t first_row(const Params& params, const Block& block) {
    return block.pad << params.piece_log2;
  }

  // ---- Both -----------------------------------------------------------------------------------------------------------------

  // Rows of a tile, up to the end of the piece, that lie behind the length; empty, or [a, a), where none does. Of scattered
  // keys the tile is the first one. first_key: of the tile, or of its first piece.
  static FLASHMSA_HD Interval unused_rows(const Params& params, const Block& block, int32_t first_key) {
    int32_t begin = block.len_kv - first_key;
    if constexpr (kChosen) {
      if (begin >= params.piece()) return {0, 0};
      begin += first_row(params, block);
    }
    return {begin, ceil_div(begin, params.piece()) << params.piece_log2};
  }

  template <class Element>
  static FLASHMSA_HD PagedRows<Element> key_rows(const Params& params, const Block& block, int32_t head) {
    return {params, block.sequence, head};
  }

 private:
  // How many pieces of the list lie before number `piece` of the sequence.
  static FLASHMSA_HD int32_t place_of(const Params& params, const Block& block, int32_t piece) {
    const int32_t per_page = params.page_size >> params.piece_log2;
    const ListedPage* pages = list(params, block);
    const int32_t page = piece / per_page;
    // PERF: most bounds lie at an end of the list; these two spare the search.
    if (block.count == 0 || piece <= 0) return 0;
    if (pages[block.count - 1].logical < page) return block.count * per_page;
    int32_t low = 0, high = block.count;
    while (low < high) {
      const int32_t mid = low + (high - low) / 2;
      if (pages[mid].logical < page) {
        low = mid + 1;
      } else {
        high = mid;
      }
    }
    return low * per_page + (low < block.count && pages[low].logical == page ? piece % per_page : 0);
  }
};

}  // namespace flashmsa::prefill
