// Mask traits against the definition: every row's interval, and the tile plan of every block of rows.
#include <algorithm>
#include <vector>

#include "mask/list.h"
#include "mask_cases.h"

namespace flashmsa::test {
namespace {

struct TileShape {
  int32_t block_q, block_kv;
};

TileShape random_shape(Random& random) { return {64 * random.between(1, 3), 16 * random.between(1, 11)}; }

// A row's interval holds exactly the keys that the definition allows.
void check_row(const MaskCase& mask, int32_t batch, int32_t i, mask::Interval row) {
  CHECK(0 <= row.begin && row.begin <= row.end && row.end <= mask.len_kv, "row %d [%d, %d) of %s", i, row.begin,
        row.end, mask.text().c_str());
  for (int32_t j = 0; j < mask.len_kv; ++j) {
    if (mask::contains(row, j) == mask.allowed(batch, i, j)) continue;
    CHECK(mask::contains(row, j) == mask.allowed(batch, i, j), "row %d key %d of %s", i, j, mask.text().c_str());
    return;
  }
}

// How many pairs of the rows [first, last] and the keys of a tile are allowed.
int64_t allowed_pairs(const MaskCase& mask, int32_t batch, int32_t first, int32_t last, int32_t tile, int32_t size) {
  int64_t count = 0;
  for (int32_t i = first; i <= last; ++i) {
    for (int32_t j = tile * size; j < std::min((tile + 1) * size, mask.len_kv); ++j) count += mask.allowed(batch, i, j);
  }
  return count;
}

// visit() walks each of [begin, end) once, the partial tiles before the full ones.
void check_visits(const MaskCase& mask, mask::KeyTiles tiles, int32_t tile_count) {
  std::vector<int32_t> visits(tile_count, 0);
  bool full_seen = false;
  int32_t partial = 0;
  for (int32_t step = 0; step < tiles.count(); ++step) {
    const int32_t tile = tiles.visit(step);
    if (!CHECK(tiles.begin <= tile && tile < tiles.end && tile < tile_count, "tile %d at step %d of %s", tile, step,
               mask.text().c_str())) {
      return;
    }
    ++visits[tile];
    const bool full = tiles.classify(tile) == mask::TileClass::kFull;
    CHECK(full || !full_seen, "partial tile %d after a full one, %s", tile, mask.text().c_str());
    full_seen |= full;
    partial += !full;
  }
  CHECK(partial == tiles.partial_count(), "%d, not %d, of %s", partial, tiles.partial_count(), mask.text().c_str());
  for (int32_t tile = 0; tile < tile_count; ++tile) {
    CHECK(visits[tile] == (tile >= tiles.begin && tile < tiles.end), "tile %d visited %d times, %s", tile, visits[tile],
          mask.text().c_str());
  }
}

// The class of every tile: skip means no pair, full means all pairs of the block's rows and all keys of the tile.
void check_classes(const MaskCase& mask, int32_t batch, int32_t first, int32_t last, mask::KeyTiles tiles,
                   int32_t size) {
  const int32_t tile_count = ceil_div(mask.len_kv, size);
  CHECK(tiles.classify(-1) == mask::TileClass::kSkip, "%s", mask.text().c_str());
  CHECK(tiles.classify(tile_count) == mask::TileClass::kSkip, "%s", mask.text().c_str());
  for (int32_t tile = 0; tile < tile_count; ++tile) {
    const int64_t pairs = allowed_pairs(mask, batch, first, last, tile, size);
    const int64_t all = int64_t{last - first + 1} * size;
    const mask::TileClass tile_class = tiles.classify(tile);
    if (tile_class == mask::TileClass::kSkip) {
      CHECK(pairs == 0, "tile %d of rows %d-%d, %s", tile, first, last, mask.text().c_str());
    }
    // Both ways: a tile without a hidden pair must be full, or the plan wastes work.
    CHECK((tile_class == mask::TileClass::kFull) == (pairs == all), "tile %d of rows %d-%d, %s", tile, first, last,
          mask.text().c_str());
  }
}

template <class Mask>
void check_blocks(const MaskCase& mask, TileShape shape) {
  AttentionParams params;
  mask.fill(params);
  const typename Mask::Params mask_params = Mask::make_params(params);
  for (int32_t batch = 0; batch < mask.batch; ++batch) {
    for (int32_t first = 0; first < mask.len_q; first += shape.block_q) {
      const int32_t last = std::min(first + shape.block_q, mask.len_q) - 1;
      const typename Mask::Block block = Mask::block(mask_params, batch, first, last);
      mask::Interval above = {0, 0};
      for (int32_t i = first; i <= last; ++i) {
        const mask::Interval row = Mask::row(mask_params, block, i);
        check_row(mask, batch, i, row);
        CHECK(above.begin <= row.begin && above.end <= row.end, "row %d steps back, %s", i, mask.text().c_str());
        above = row;
      }
      const mask::KeyTiles tiles = mask::block_tiles<Mask>(mask_params, block, first, last, shape.block_kv);
      check_visits(mask, tiles, ceil_div(mask.len_kv, shape.block_kv));
      check_classes(mask, batch, first, last, tiles, shape.block_kv);
    }
  }
}

// Unchecked offsets: whatever they hold, intervals and tiles stay inside the keys.
void check_garbage(const MaskCase& mask, TileShape shape) {
  AttentionParams params;
  mask.fill(params);
  const auto mask_params = mask::Document::make_params(params);
  for (int32_t batch = 0; batch < mask.batch; ++batch) {
    for (int32_t first = 0; first < mask.len_q; first += shape.block_q) {
      const int32_t last = std::min(first + shape.block_q, mask.len_q) - 1;
      const auto block = mask::Document::block(mask_params, batch, first, last);
      for (int32_t i = first; i <= last; ++i) {
        const mask::Interval row = mask::Document::row(mask_params, block, i);
        CHECK(0 <= row.begin && row.begin <= row.end && row.end <= mask.len_kv, "row %d [%d, %d) of %s", i, row.begin,
              row.end, mask.text().c_str());
      }
      const auto tiles = mask::block_tiles<mask::Document>(mask_params, block, first, last, shape.block_kv);
      check_visits(mask, tiles, ceil_div(mask.len_kv, shape.block_kv));
      CHECK(tiles.full_begin == tiles.full_end || tiles.full_end * shape.block_kv <= mask.len_kv,
            "full tiles [%d, %d) of %s", tiles.full_begin, tiles.full_end, mask.text().c_str());
    }
  }
}

void check_mask(const MaskCase& mask, TileShape shape) {
  switch (mask.kind) {
#define FLASHMSA_CASE(Mask) \
  case mask::Mask::kKind:   \
    return check_blocks<mask::Mask>(mask, shape);
    FLASHMSA_FOR_EACH_MASK(FLASHMSA_CASE)
#undef FLASHMSA_CASE
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
    for (int32_t block_q : {64, 128, 192}) {
      for (int32_t block_kv = 16; block_kv <= 176; block_kv += 16) check_mask(mask, {block_q, block_kv});
    }
  }
  Random random(20240601);
  for (int32_t trial = 0; trial < 800; ++trial) {
    const int32_t len_q = random.pick({random.between(1, 20), random.between(1, 400)});
    const int32_t len_kv = random.pick({len_q, random.between(0, 20), random.between(0, 400)});
    check_mask(random_mask(random, random.between(1, 2), len_q, len_kv), random_shape(random));
  }
  for (int32_t trial = 0; trial < 2000; ++trial) {
    check_garbage(garbage_mask(random, random.between(1, 3), random.between(1, 200), random.between(0, 200)),
                  random_shape(random));
  }
  return report("test_mask");
}

}  // namespace
}  // namespace flashmsa::test

int main() { return flashmsa::test::run(); }
