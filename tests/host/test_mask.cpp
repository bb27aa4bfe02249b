// Mask traits against the definition: every row's keys, the tile plan of every block of rows, and of a list
// what the walk over it makes visible.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "mask/list.h"
#include "mask_cases.h"
#include "sched/plan.h"

namespace flashmsa::test {
namespace {

struct TileShape {
  int32_t block_q, block_kv;
};

// Also tiles of single keys, where nothing hides behind a tile's other keys.
TileShape random_shape(Random& random) {
  return {64 * random.between(1, 3), random.pick({1, 3, 16 * random.between(1, 11), 16 * random.between(1, 11)})};
}

bool inside(mask::Interval interval, int32_t len_kv) {
  return 0 <= interval.begin && interval.begin <= interval.end && interval.end <= len_kv;
}

// A row's runs hold exactly the keys that the definition allows, none of them twice.
template <class Row>
void check_row(const MaskCase& mask, int32_t batch, int32_t head, int32_t i, const Row& row) {
  const mask::Interval main = mask::main_run(row), first = mask::first_run(row);
  CHECK(inside(main, mask.len_kv) && inside(first, mask.len_kv), "row %d [%d, %d) and [%d, %d) of %s", i, main.begin,
        main.end, first.begin, first.end, mask.text().c_str());
  int32_t count = 0;
  for (int32_t j = 0; j < mask.len_kv; ++j) {
    count += mask::contains(row, j);
    const bool twice = mask::contains(main, j) && mask::contains(first, j);
    const bool right = mask::contains(row, j) == (mask::contains(main, j) || mask::contains(first, j));
    if (mask::contains(row, j) == mask.allowed(batch, head, i, j) && !twice && right) continue;
    CHECK(false, "row %d key %d: main %d first %d, allowed %d, %s", i, j, mask::contains(main, j),
          mask::contains(first, j), mask.allowed(batch, head, i, j), mask.text().c_str());
    return;
  }
  CHECK(mask::visible_keys(row) == count, "row %d: %d keys, not %d, %s", i, mask::visible_keys(row), count,
        mask.text().c_str());
}

// Both ends of both runs never decrease; an empty first run says nothing.
bool steps_back(mask::Interval above, mask::Interval row) { return row.begin < above.begin || row.end < above.end; }
bool steps_back(const mask::TwoRuns& above, const mask::TwoRuns& row) {
  return steps_back(above.main, row.main) || steps_back(above.first, row.first);
}

// How many pairs of the rows [first, last] and the keys of a tile, counted from `origin`, are allowed.
int64_t allowed_pairs(const MaskCase& mask, int32_t batch, int32_t head, int32_t first, int32_t last, int32_t tile,
                      int32_t size, int32_t origin = 0) {
  int64_t count = 0;
  for (int32_t i = first; i <= last; ++i) {
    for (int32_t j = origin + tile * size; j < std::min(origin + (tile + 1) * size, mask.len_kv); ++j) {
      count += mask.allowed(batch, head, i, j);
    }
  }
  return count;
}

bool in_first(const mask::KeyTiles&, int32_t) { return false; }
bool in_first(const mask::TwoRunTiles& tiles, int32_t tile) {
  return tiles.first_begin <= tile && tile < tiles.first_end;
}

// visit() walks each tile of both runs once, the partial ones before the full ones. `tile_count`: tiles there are.
template <class Tiles>
void check_visits(const MaskCase& mask, const Tiles& tiles, int32_t tile_count) {
  std::vector<int32_t> visits(tile_count, 0);
  const mask::KeyTiles main = mask::main_tiles(tiles);
  bool full_seen = false;
  int32_t partial = 0;
  for (int32_t step = 0; step < tiles.count(); ++step) {
    const int32_t tile = tiles.visit(step);
    if (!CHECK(0 <= tile && tile < tile_count, "tile %d at step %d of %s", tile, step, mask.text().c_str())) return;
    ++visits[tile];
    const bool full = tiles.classify(tile) == mask::TileClass::kFull;
    CHECK(full || !full_seen, "partial tile %d after a full one, %s", tile, mask.text().c_str());
    full_seen |= full;
    partial += !full;
  }
  CHECK(partial == tiles.partial_count(), "%d, not %d, of %s", partial, tiles.partial_count(), mask.text().c_str());
  for (int32_t tile = 0; tile < tile_count; ++tile) {
    const bool met = (tile >= main.begin && tile < main.end) || in_first(tiles, tile);
    CHECK(visits[tile] == met, "tile %d visited %d times, %s", tile, visits[tile], mask.text().c_str());
  }
}

// The class of every tile: skip means no pair, full means all pairs of the block's rows and all keys of the tile.
// `two_runs`: some row has a first run. Before the tiles' origin there is no pair.
template <class Tiles>
void check_classes(const MaskCase& mask, int32_t batch, int32_t head, int32_t first, int32_t last, const Tiles& tiles,
                   int32_t size, int32_t origin, bool two_runs) {
  const int32_t tile_count = ceil_div(mask.len_kv - origin, size);
  CHECK(origin >= 0 && origin <= mask.len_kv && allowed_pairs(mask, batch, head, first, last, 0, origin) == 0,
        "origin %d of rows %d-%d, %s", origin, first, last, mask.text().c_str());
  CHECK(tiles.classify(-1) == mask::TileClass::kSkip, "%s", mask.text().c_str());
  CHECK(tiles.classify(tile_count) == mask::TileClass::kSkip, "%s", mask.text().c_str());
  for (int32_t tile = 0; tile < tile_count; ++tile) {
    const int64_t pairs = allowed_pairs(mask, batch, head, first, last, tile, size, origin);
    const int64_t all = int64_t{last - first + 1} * size;
    const mask::TileClass tile_class = tiles.classify(tile);
    if (tile_class == mask::TileClass::kSkip) {
      CHECK(pairs == 0, "tile %d of rows %d-%d, %s", tile, first, last, mask.text().c_str());
    }
    const bool full = tile_class == mask::TileClass::kFull;
    CHECK(!full || pairs == all, "tile %d of rows %d-%d, %s", tile, first, last, mask.text().c_str());
    // The other way: a tile without a hidden pair must be full, or the plan wastes work. Two runs may share such a tile.
    CHECK(full || two_runs || pairs < all, "tile %d of rows %d-%d, %s", tile, first, last, mask.text().c_str());
  }
}

template <class Mask>
constexpr bool kTakesTurns =
    std::is_same_v<Mask, mask::Dense> || std::is_same_v<Mask, mask::Causal> || std::is_same_v<Mask, mask::Band>;

// Of each 64 rows of a block, what lies outside their span holds nothing that they may see.
template <class Mask>
void check_spans(const MaskCase& mask, const typename Mask::Params& params, int32_t batch, int32_t head, int32_t first,
                 TileShape shape) {
  // NOTE: a plan has room for so many spans; kernels of taller tiles have masks without.
  if (Mask::kSpansPlanned && shape.block_q > sched::kMaxSpans * sched::kSpanRows) return;
  auto entry = sched::plan_row_block<Mask>(params, batch, head, first / shape.block_q, shape.block_q, shape.block_kv,
                                           mask.len_q);
  sched::plan_spans(params, entry, shape.block_q, shape.block_kv, mask.len_q);
  for (int32_t part = 0; part * sched::kSpanRows < shape.block_q; ++part) {
    const int32_t row = first + part * sched::kSpanRows;
    const int32_t last = std::min(row + sched::kSpanRows, mask.len_q) - 1;
    sched::Span span;
    if constexpr (Mask::kSpansPlanned) {
      span = entry.spans[part];
    } else {
      if (row >= mask.len_q) continue;
      span = sched::span_of(entry.tiles, Mask::tiles(params, entry.block, row, last, shape.block_kv));
    }
    CHECK(span.front >= 0 && span.steps >= 0 && span.back >= 0 &&
              span.front + span.steps + span.back == entry.tiles.count(),
          "%d %d %d of %d, %s", span.front, span.steps, span.back, entry.tiles.count(), mask.text().c_str());
    // Where warpgroups take turns (fwd/consumer.cuh), the first one must not wait for the second before its own first block.
    if (kTakesTurns<Mask> && part == 0 && shape.block_kv >= 2 * sched::kSpanRows) {
      CHECK(span.steps == 0 || span.front <= 1, "rows %d-%d let %d pass, %s", row, last, span.front,
            mask.text().c_str());
    }
    for (int32_t step = 0; step < entry.tiles.count(); ++step) {
      if (step >= span.front && step < span.front + span.steps) continue;
      const int64_t pairs = allowed_pairs(mask, batch, head, row, last, entry.tiles.visit(step), shape.block_kv,
                                          Mask::origin(params, entry.block));
      CHECK(pairs == 0, "rows %d-%d skip step %d, %s", row, last, step, mask.text().c_str());
    }
  }
}

// Masks that have kernels with ALiBi. Of lists what follows is checked by the composite they hold.
template <class Mask>
constexpr bool kHasPositions = std::is_same_v<Mask, mask::Composite> || std::is_same_v<Mask, mask::Causal>;

// What a block says of its rows' positions, against the rows that see something.
template <class Mask>
void check_positions(const typename Mask::Params& params, const typename Mask::Block& block, int32_t first,
                     int32_t last, const MaskCase& mask) {
  const bool in_order = Mask::positions_in_order(params, block);
  const bool none_past = Mask::sees_none_past(params, block, first);
  for (int32_t i = first; i <= last; ++i) {
    const typename Mask::Row row = Mask::row(params, block, i);
    if (mask::visible_keys(row) == 0) continue;
    const int32_t position = Mask::position(params, block, i);
    CHECK(!in_order || position == Mask::position(params, block, first) + (i - first), "row %d of %d-%d at %d, %s", i,
          first, last, position, mask.text().c_str());
    for (const mask::Interval run : {mask::main_run(row), mask::first_run(row)}) {
      CHECK(!none_past || mask::visible_keys(run) == 0 || run.end - 1 <= position, "row %d at %d sees key %d, %s", i,
            position, run.end - 1, mask.text().c_str());
    }
  }
}

template <class Mask>
void check_blocks(const MaskCase& mask, TileShape shape) {
  AttentionParams params;
  mask.fill(params);
  const typename Mask::Params mask_params = Mask::make_params(params);
  for (int32_t slice = 0; slice < mask.batch * mask.heads; ++slice) {
    const int32_t batch = slice / mask.heads, head = slice % mask.heads;
    for (int32_t first = 0; first < mask.len_q; first += shape.block_q) {
      const int32_t last = std::min(first + shape.block_q, mask.len_q) - 1;
      const typename Mask::Block block = Mask::block(mask_params, batch, head, first, last);
      typename Mask::Row above = {};
      bool two_runs = false;
      for (int32_t i = first; i <= last; ++i) {
        const typename Mask::Row row = Mask::row(mask_params, block, i);
        check_row(mask, batch, head, i, row);
        CHECK(!steps_back(above, row), "row %d steps back, %s", i, mask.text().c_str());
        above = row;
        two_runs |= mask::visible_keys(mask::first_run(row)) > 0;
        if constexpr (kHasPositions<Mask>) {
          if (mask::visible_keys(row) == 0) continue;
          CHECK(Mask::position(mask_params, block, i) == mask.position(batch, i), "row %d at %d, not %d, %s", i,
                Mask::position(mask_params, block, i), static_cast<int32_t>(mask.position(batch, i)),
                mask.text().c_str());
        }
      }
      const typename Mask::Tiles tiles = Mask::tiles(mask_params, block, first, last, shape.block_kv);
      const int32_t origin = Mask::origin(mask_params, block);
      check_visits(mask, tiles, ceil_div(mask.len_kv - origin, shape.block_kv));
      check_classes(mask, batch, head, first, last, tiles, shape.block_kv, origin, two_runs);
      check_spans<Mask>(mask, mask_params, batch, head, first, shape);
      if constexpr (kHasPositions<Mask>) check_positions<Mask>(mask_params, block, first, last, mask);
    }
  }
}

// A list's rows in blocks of 64 or 128, its tiles of as many keys: what the walk over the list makes visible is what the
// definition allows, and no tile is visited twice.
void check_list(const MaskCase& mask, TileShape shape) {
  using mask::BlockSparse;
  AttentionParams params;
  mask.fill(params);
  const BlockSparse::Params mask_params = BlockSparse::make_params(params);
  for (int32_t slice = 0; slice < mask.batch * mask.heads; ++slice) {
    const int32_t batch = slice / mask.heads, head = slice % mask.heads;
    for (int32_t first = 0; first < mask.len_q; first += shape.block_q) {
      const int32_t last = std::min(first + shape.block_q, mask.len_q) - 1;
      const BlockSparse::Block block = BlockSparse::block(mask_params, batch, head, first, last);
      const mask::TwoRunTiles tiles = BlockSparse::tiles(mask_params, block, first, last, shape.block_kv);
      std::vector<int32_t> detail(ceil_div(mask.len_kv, shape.block_kv), INT32_MIN);  // of the visited tiles
      check_visits(mask, tiles, (block.whole + block.mixed) * (mask::kCell / shape.block_kv));
      for (int32_t step = 0; step < tiles.count(); ++step) {
        const int32_t index = tiles.visit(step);
        const int32_t tile = BlockSparse::key_tile(mask_params, block, index, shape.block_kv);
        if (!CHECK(0 <= tile && tile < static_cast<int32_t>(detail.size()) && detail[tile] == INT32_MIN, "tile %d, %s",
                   tile, mask.text().c_str())) {
          return;
        }
        detail[tile] = mask.list.detail[BlockSparse::entry(block, index, shape.block_kv)];
        const int64_t pairs = allowed_pairs(mask, batch, head, first, last, tile, shape.block_kv);
        CHECK(tiles.classify(index) != mask::TileClass::kFull || pairs == int64_t{last - first + 1} * shape.block_kv,
              "tile %d of rows %d-%d, %s", tile, first, last, mask.text().c_str());
      }
      for (int32_t i = first; i <= last; ++i) {
        const mask::TwoRuns row = BlockSparse::row(mask_params, block, i);
        for (int32_t j = 0; j < mask.len_kv; ++j) {
          const int32_t what = detail[j / shape.block_kv];
          const int32_t key = j % mask::kCell, row_in_cell = i % mask::kCell;
          bool visible = what != INT32_MIN && mask::contains(row, j);
          if (visible) visible = mask::contains(BlockSparse::half_keys(mask_params, what, row_in_cell / 64), key);
          if (visible) {
            const int32_t* bits = BlockSparse::row_bits(mask_params, what, row_in_cell);
            visible = bits == nullptr || (bits[key / 32] >> key % 32 & 1) != 0;
          }
          if (visible == mask.allowed(batch, head, i, j)) continue;
          CHECK(false, "row %d key %d, %s", i, j, mask.text().c_str());
          return;
        }
      }
    }
  }
}

// Every visited entry lies in the list, and its bits in the bit tiles.
void check_garbage_list(const MaskCase& mask, const mask::BlockSparse::Params& params,
                        const mask::BlockSparse::Block& block, const mask::TwoRunTiles& tiles, TileShape shape) {
  using mask::BlockSparse;
  const int32_t capacity = static_cast<int32_t>(mask.list.cells.size());
  for (int32_t step = 0; step < tiles.count(); ++step) {
    const int32_t index = tiles.visit(step);
    const int32_t entry = BlockSparse::entry(block, index, shape.block_kv);
    if (!CHECK(0 <= entry && entry < capacity && index >= 0, "entry %d of %d, %s", entry, capacity,
               mask.text().c_str())) {
      return;
    }
    BlockSparse::key_tile(params, block, index, shape.block_kv);
    const int32_t detail = mask.list.detail[entry];
    for (int32_t half : {0, 1}) CHECK(inside(BlockSparse::half_keys(params, detail, half), mask::kCell), "%d", detail);
    const int32_t* bits = BlockSparse::row_bits(params, detail, mask::kCell - 1);
    if (bits == nullptr) continue;
    const int64_t word = bits - mask.list.bits.data();
    CHECK(0 <= word && word + 4 <= static_cast<int64_t>(mask.list.bits.size()), "word %d of %zu",
          static_cast<int32_t>(word), mask.list.bits.size());
  }
}

// Unchecked device data: whatever they hold, runs and tiles stay inside the keys.
template <class Mask>
void check_garbage(const MaskCase& mask, TileShape shape) {
  AttentionParams params;
  mask.fill(params);
  const auto mask_params = Mask::make_params(params);
  for (int32_t slice = 0; slice < mask.batch * mask.heads; ++slice) {
    for (int32_t first = 0; first < mask.len_q; first += shape.block_q) {
      const int32_t last = std::min(first + shape.block_q, mask.len_q) - 1;
      const auto block = Mask::block(mask_params, slice / mask.heads, slice % mask.heads, first, last);
      for (int32_t i = first; i <= last; ++i) {
        const auto row = Mask::row(mask_params, block, i);
        const mask::Interval runs[2] = {mask::main_run(row), mask::first_run(row)};
        CHECK(inside(runs[0], mask.len_kv) && inside(runs[1], mask.len_kv), "row %d [%d, %d) and [%d, %d) of %s", i,
              runs[0].begin, runs[0].end, runs[1].begin, runs[1].end, mask.text().c_str());
      }
      const auto tiles = Mask::tiles(mask_params, block, first, last, shape.block_kv);
      if constexpr (Mask::kListed) {
        check_garbage_list(mask, mask_params, block, tiles, shape);
      } else {
        check_visits(mask, tiles, ceil_div(mask.len_kv, shape.block_kv));
        const mask::KeyTiles main = mask::main_tiles(tiles);
        CHECK(main.full_begin == main.full_end || main.full_end * shape.block_kv <= mask.len_kv,
              "full tiles [%d, %d) of %s", main.full_begin, main.full_end, mask.text().c_str());
      }
    }
  }
}

// A list's blocks of rows and keys divide its cells.
TileShape list_shape(TileShape shape) { return {shape.block_q > 64 ? 128 : 64, shape.block_kv > 64 ? 128 : 64}; }

int32_t bands = 0;  // how many cases were one

// Composite masks that have kernels of their own.
void check_band(const MaskCase& mask, TileShape shape) {
  AttentionParams params;
  mask.fill(params);
  if (!mask::Band::serves(params)) return;
  ++bands;
  check_blocks<mask::Band>(mask, shape);
  // Rows that a grid may keep for its end: no longer than those behind them.
  const mask::Band::Params band = mask::Band::make_params(params);
  const auto keys_of = [&](int32_t row) { return mask::visible_keys(mask::Band::row(band, {}, row)); };
  const int32_t shorter = mask::Band::short_rows(params);
  CHECK(0 <= shorter && shorter <= mask.len_q, "%d short rows of %s", shorter, mask.text().c_str());
  for (int32_t row = 1; row < min_of(shorter + 1, mask.len_q); ++row) {
    if (keys_of(row) < mask.len_kv - row) {  // not at the end of the keys
      CHECK(keys_of(row - 1) <= keys_of(row), "row %d of %d short ones, %s", row, shorter, mask.text().c_str());
    }
  }
}

void check_mask(const MaskCase& mask, TileShape shape) {
  switch (mask.kind) {
    case MaskKind::kDense:
      return check_blocks<mask::Dense>(mask, shape);
    case MaskKind::kCausal:
      check_blocks<mask::Causal>(mask, shape);
      break;
    case MaskKind::kDocument:
      check_blocks<mask::Document>(mask, shape);
      break;
    case MaskKind::kBlockSparse:
      return check_list(mask, list_shape(shape));
    case MaskKind::kDilated:
    case MaskKind::kHash:
      return;  // cases of their own below
    case MaskKind::kComposite:
      if (mask.rows_given) check_blocks<mask::Hash>(mask, shape);
      check_band(mask, shape);
      break;
  }
  // The simpler ones too, as calls with a soft cap or ALiBi have them.
  check_blocks<mask::Composite>(mask, shape);
}

// A copy of what the plan's kernel looks at says the same of every row.
template <class Mask>
void check_staged(const MaskCase& mask) {
  AttentionParams params;
  mask.fill(params);
  const typename Mask::Params plain = Mask::make_params(params);
  std::vector<int32_t> space(Mask::staged_size(plain, mask.batch));
  typename Mask::Params staged;
  for (int32_t thread : {0, 1, 2}) staged = Mask::stage(plain, mask.batch, space.data(), thread, 3);
  for (int32_t b = 0; b < mask.batch; ++b) {
    const auto block = Mask::block(plain, b, 0, 0, mask.len_q - 1);
    const auto staged_block = Mask::block(staged, b, 0, 0, mask.len_q - 1);
    for (int32_t i = 0; i < mask.len_q; ++i) {
      const auto row = Mask::row(plain, block, i), copy = Mask::row(staged, staged_block, i);
      const bool same = mask::main_run(row).begin == mask::main_run(copy).begin &&
                        mask::main_run(row).end == mask::main_run(copy).end &&
                        mask::first_run(row).begin == mask::first_run(copy).begin &&
                        mask::first_run(row).end == mask::first_run(copy).end;
      CHECK(same, "row %d of %s", i, mask.text().c_str());
    }
  }
}

// Which of the caller's rows and keys a sorted one is, by batch and head; never one that the tensors do not have.
void check_orders(Random& random) {
  AttentionParams params;
  params.batch = random.between(1, 3);
  params.heads_kv = random.between(1, 3);
  params.heads_q = params.heads_kv * random.between(1, 3);
  params.len_q = random.between(1, 20);
  params.len_kv = random.between(1, 20);
  const bool batched = random.coin(), garbage = random.coin();
  const int32_t q_heads = random.pick({1, params.heads_q});
  const int32_t kv_heads = random.pick({1, params.heads_kv, params.heads_q});
  const auto draw = [&](int32_t heads, int32_t length) {
    std::vector<int32_t> order((batched ? params.batch : 1) * heads * length);
    for (int32_t& x : order) x = garbage ? random.between(-3, length + 3) : random.between(0, length - 1);
    return order;
  };
  const std::vector<int32_t> q_order = draw(q_heads, params.len_q), kv_order = draw(kv_heads, params.len_kv);
  const std::vector<int32_t> runs(params.len_q, 0);
  MaskArgs& m = params.mask;
  m.kind = MaskKind::kHash;
  m.q_order = q_order.data();
  m.kv_order = kv_order.data();
  m.kv_order_heads = kv_heads;
  m.q_order_stride_head = q_heads > 1 ? params.len_q : 0;
  m.q_order_stride_batch = batched ? int64_t{q_heads} * params.len_q : 0;
  m.kv_order_stride_head = kv_heads > 1 ? params.len_kv : 0;
  m.kv_order_stride_batch = batched ? int64_t{kv_heads} * params.len_kv : 0;
  m.row_begin = m.row_end = runs.data();
  const mask::Hash::Params hash = mask::Hash::make_params(params);
  const auto expected = [&](const std::vector<int32_t>& order, int32_t heads, int32_t all, int32_t length, int32_t b,
                            int32_t h, int32_t i) {
    const int32_t at = order[((batched ? b : 0) * heads + h / (all / heads)) * length + i];
    return at < 0 || at >= length ? length - 1 : at;
  };
  for (int32_t b = 0; b < params.batch; ++b) {
    for (int32_t h = 0; h < params.heads_q; ++h) {
      const mask::Hash::Block block = mask::Hash::block(hash, b, h, 0, params.len_q - 1);
      for (int32_t i = 0; i < params.len_q; ++i) {
        const int32_t want = expected(q_order, q_heads, params.heads_q, params.len_q, b, h, i);
        const int32_t got = mask::Hash::query(hash, block, i);
        CHECK(got == want, "query %d of batch %d head %d: %d, not %d", i, b, h, got, want);
      }
      for (int32_t j = 0; j < params.len_kv; ++j) {
        const int32_t want = expected(kv_order, kv_heads, params.heads_q, params.len_kv, b, h, j);
        const int32_t got = mask::Hash::key(hash, block, j);
        CHECK(got == want, "key %d of batch %d head %d: %d, not %d", j, b, h, got, want);
      }
    }
  }
}

MaskCase document(std::vector<int32_t> q_offsets, std::vector<int32_t> kv_offsets, int32_t len_q, int32_t len_kv,
                  bool causal) {
  MaskCase mask;
  mask.kind = MaskKind::kDocument;
  mask.len_q = len_q;
  mask.len_kv = len_kv;
  mask.causal = causal;
  mask.q_offsets = std::move(q_offsets);
  mask.kv_offsets = std::move(kv_offsets);
  return mask;
}

// Known hard ones, for every tile shape.
std::vector<MaskCase> adversarial_masks() {
  std::vector<MaskCase> masks;
  for (bool causal : {false, true}) {
    masks.push_back(document({0}, {0}, 70, 70, causal));                                // no document
    masks.push_back(document({0, 0, 0, 0, 1}, {0, 0, 0, 0, 1}, 1, 1, causal));          // more documents than tokens
    masks.push_back(document({0, 0, 150, 150, 300}, {0, 100, 100, 200, 300}, 300, 300, causal));  // no queries, no keys
    masks.push_back(document({0, 100, 130}, {0, 90, 90}, 260, 200, causal));  // rows past the last document
    masks.push_back(document({0, 500}, {0, 700}, 200, 100, causal));  // a document past the tensors
    masks.push_back(document({0, 64, 128, 192}, {0, 64, 128, 192}, 192, 192, causal));  // on the tiles' edges
    masks.push_back(document({0, 63, 129, 193}, {0, 65, 127, 200}, 193, 200, causal));  // beside them
    std::vector<int32_t> single(131);
    for (int32_t d = 0; d < 131; ++d) single[d] = d;
    masks.push_back(document(single, single, 130, 130, causal));  // one token each
  }
  for (int32_t len_q : {1, 2, 5, 64, 128, 129, 300}) {
    for (int32_t len_kv : {0, 1, 2, 5, 64, 127, 128, 300}) {
      for (bool top_left : {false, true}) {
        MaskCase mask;
        mask.kind = MaskKind::kCausal;
        mask.len_q = len_q;
        mask.len_kv = len_kv;
        mask.top_left = top_left;
        masks.push_back(mask);
      }
    }
  }
  return masks;
}

int run() {
  for (const MaskCase& mask : adversarial_masks()) {
    for (int32_t block_q : {64, 128, 192, 256}) {
      for (int32_t block_kv = 16; block_kv <= 176; block_kv += 16) check_mask(mask, {block_q, block_kv});
    }
  }
  Random random(20240601);
  for (int32_t trial = 0; trial < 1600; ++trial) {
    const int32_t len_q = random.pick({random.between(1, 20), random.between(1, 300)});
    const int32_t len_kv = random.pick({len_q, random.between(0, 20), random.between(0, 300)});
    const MaskCase mask = random_mask(random, random.between(1, 2), len_q, len_kv, random.between(1, 2));
    check_mask(mask, random_shape(random));
    if (mask.kind == MaskKind::kDocument) check_staged<mask::Document>(mask);
    if (mask.kind == MaskKind::kComposite) check_staged<mask::Composite>(mask);
    if (mask.kind == MaskKind::kBlockSparse) check_staged<mask::BlockSparse>(mask);
  }
  for (int32_t trial = 0; trial < 4000; ++trial) {
    const MaskCase mask = garbage_mask(random, random.between(1, 3), random.between(1, 200), random.between(0, 200));
    const TileShape shape = random_shape(random);
    if (mask.kind == MaskKind::kDocument) check_garbage<mask::Document>(mask, shape);
    if (mask.kind == MaskKind::kDocument || mask.kind == MaskKind::kComposite) {
      check_garbage<mask::Composite>(mask, shape);
    }
    if (mask.rows_given) check_garbage<mask::Hash>(mask, shape);
    if (mask.kind == MaskKind::kBlockSparse) check_garbage<mask::BlockSparse>(mask, list_shape(shape));
  }
  for (int32_t trial = 0; trial < 500; ++trial) check_orders(random);
  CHECK(bands > 50, "%d bands", bands);
  return report("test_mask");
}

}  // namespace
}  // namespace flashmsa::test

int main() { return flashmsa::test::run(); }
