// Tiles that begin where documents do, against a look at every row and key (bwd/packed.h, mask/packed.h, mask/document.h).

#include "bwd/packed.h"

#include <vector>

#include "check.h"
#include "mask/document.h"
#include "mask/packed.h"
#include "sched/plan.h"

namespace flashmsa::test {
namespace {

using namespace flashmsa::bwd;

struct Call {
  std::vector<int32_t> q_offsets, kv_offsets;
  int32_t len_q, len_kv, block_q, block_kv;
  bool causal;

  int32_t documents() const { return static_cast<int32_t>(q_offsets.size()) - 1; }
  PackedTiles queries() const { return {q_offsets.data(), documents(), len_q, block_q}; }
  PackedTiles keys() const { return {kv_offsets.data(), documents(), len_kv, block_kv}; }
  int32_t query_tiles() const { return PackedTiles::count(documents(), len_q, block_q); }
  int32_t key_tiles() const { return PackedTiles::count(documents(), len_kv, block_kv); }
};

PackedTiles::Range range_of(const PackedTiles& tiles, int32_t tile) {
  return tiles.range(tile, tiles.document_of(tile));
}

// The tile of each row. Every row has one.
std::vector<int32_t> tiles_of_rows(const Call& call) {
  std::vector<int32_t> tiles(call.len_q, -1);
  for (int32_t tile = 0; tile < call.query_tiles(); ++tile) {
    const PackedTiles::Range range = range_of(call.queries(), tile);
    for (int32_t i = range.begin; i < range.end; ++i) {
      CHECK(tiles[i] == -1, "row %d is in tiles %d and %d", i, tiles[i], tile);
      tiles[i] = tile;
    }
  }
  for (int32_t i = 0; i < call.len_q; ++i) CHECK(tiles[i] >= 0, "row %d of %d is in no tile", i, call.len_q);
  return tiles;
}

void check_rows(const Call& call, const std::vector<int32_t>& tiles, const PackedKeys& keys) {
  const mask::Document::Params mask = {
      call.q_offsets.data(), call.kv_offsets.data(), call.documents(), 0, call.len_kv, call.causal};
  for (int32_t tile = keys.begin; tile < keys.end; ++tile) {
    const PackedTiles::Range range = range_of(call.queries(), tile);
    CHECK(range.begin == keys.first_row + (tile - keys.begin) * call.block_q, "tile %d begins at row %d", tile,
          range.begin);
    const bool whole = tile >= keys.full_begin && tile < keys.full_end;
    CHECK(!whole || range.end - range.begin == call.block_q, "tile %d counts as whole and lacks rows", tile);
  }
  for (int32_t i = 0; i < call.len_q; ++i) {
    const mask::Interval row = mask::Document::row(mask, mask::Document::block(mask, 0, 0, i, i), i);
    const bool meets = max_of(row.begin, keys.first_key) < min_of(row.end, keys.end_key);
    const bool visited = tiles[i] >= keys.begin && tiles[i] < keys.end;
    CHECK(visited || !meets, "row %d is not visited by keys %d to %d", i, keys.first_key, keys.end_key);
    const bool whole = visited && tiles[i] >= keys.full_begin && tiles[i] < keys.full_end;
    CHECK(!whole || (row.begin <= keys.first_key && row.end >= keys.first_key + call.block_kv),
          "row %d sees [%d, %d), and keys %d to %d count as whole", i, row.begin, row.end, keys.first_key,
          keys.end_key);
  }
}

void check_call(const Call& call) {
  const std::vector<int32_t> tiles = tiles_of_rows(call);
  std::vector<int32_t> owners(call.len_kv, 0);
  for (int32_t tile = 0; tile < call.key_tiles(); ++tile) {
    const PackedKeys keys = make_packed_keys(call.keys(), call.queries(), call.causal, tile);
    for (int32_t j = keys.first_key; j < keys.end_key; ++j) ++owners[j];
    if (keys.empty()) continue;
    const int32_t document = call.keys().document_of(tile);
    CHECK(keys.origin(call.block_kv) == call.keys().begin(document), "tile %d: keys count from %d", tile,
          keys.origin(call.block_kv));
    check_rows(call, tiles, keys);
  }
  for (int32_t j = 0; j < call.len_kv; ++j) CHECK(owners[j] == 1, "key %d is in %d tiles", j, owners[j]);
}

// Offsets that hold anything: nothing points outside.
void check_bounds(const Call& call) {
  for (int32_t tile = 0; tile < call.query_tiles(); ++tile) {
    const PackedTiles::Range range = range_of(call.queries(), tile);
    CHECK(range.begin >= 0 && range.end <= call.len_q && range.end - range.begin <= call.block_q, "rows [%d, %d) of %d",
          range.begin, range.end, call.len_q);
  }
  for (int32_t tile = 0; tile < call.key_tiles(); ++tile) {
    const PackedKeys keys = make_packed_keys(call.keys(), call.queries(), call.causal, tile);
    CHECK(keys.first_key >= 0 && keys.end_key <= call.len_kv && keys.end_key - keys.first_key <= call.block_kv,
          "keys [%d, %d) of %d", keys.first_key, keys.end_key, call.len_kv);
    const bool ordered = keys.begin <= keys.full_begin && keys.full_begin <= keys.full_end && keys.full_end <= keys.end;
    CHECK(keys.begin >= 0 && keys.end <= call.query_tiles() && ordered, "tiles %d %d %d %d of %d", keys.begin,
          keys.full_begin, keys.full_end, keys.end, call.query_tiles());
  }
}

mask::Packed::Params params_of(const Call& call, bool packed) {
  return {{call.q_offsets.data(), call.kv_offsets.data(), call.documents(), 0, call.len_kv, call.causal},
          packed,
          call.len_q};
}

// A block of rows of the forward pass: what its rows see, and which of its tiles of keys they meet.
void check_block(const Call& call, const mask::Packed::Params& params, const sched::PlanEntry<mask::Packed>& entry) {
  const mask::Packed::Block& block = entry.block;
  const int32_t origin = mask::Packed::origin(params, block);
  const mask::Document::Block all = mask::Document::block(params, 0, 0, 0, call.len_q - 1);
  for (int32_t i = block.first_row; i < block.end_row; ++i) {
    const mask::Interval row = mask::Packed::row(params, block, i), meant = mask::Document::row(params, all, i);
    CHECK(row.begin == meant.begin && row.end == meant.end, "row %d sees [%d, %d), not [%d, %d)", i, row.begin, row.end,
          meant.begin, meant.end);
    for (int32_t key = row.begin; key < row.end; ++key) {
      const int32_t tile = (key - origin) / call.block_kv;
      CHECK(key >= origin && tile >= entry.tiles.begin && tile < entry.tiles.end, "row %d, key %d", i, key);
    }
    const bool any_full = entry.tiles.full_begin < entry.tiles.full_end;
    CHECK(!any_full || (row.begin <= origin + entry.tiles.full_begin * call.block_kv &&
                        row.end >= origin + entry.tiles.full_end * call.block_kv),
          "row %d does not see all keys of full tiles", i);
  }
  if (!params.packed || call.causal) return;
  CHECK(entry.tiles.partial_count() <= 1, "%d partial tiles", entry.tiles.partial_count());
}

void check_blocks(const Call& call, bool packed) {
  const mask::Packed::Params params = params_of(call, packed);
  std::vector<int32_t> blocks(call.len_q, 0);
  for (int32_t number = 0; number < mask::Packed::row_blocks(params, call.block_q); ++number) {
    const auto entry =
        sched::plan_row_block<mask::Packed>(params, 0, 0, number, call.block_q, call.block_kv, call.len_q);
    const int32_t rows = entry.block.end_row - entry.block.first_row;
    CHECK((rows <= 0) == (entry.tiles.count() < 0), "block %d of %d rows has %d tiles", number, rows,
          entry.tiles.count());
    CHECK(rows <= call.block_q, "block %d has %d rows", number, rows);
    for (int32_t i = entry.block.first_row; i < entry.block.end_row; ++i) ++blocks[i];
    check_block(call, params, entry);
  }
  for (int32_t i = 0; i < call.len_q; ++i) CHECK(blocks[i] == 1, "row %d is in %d blocks", i, blocks[i]);
}

// Whatever offsets hold, rows and keys stay in the tensors.
void check_block_bounds(const Call& call, bool packed) {
  const mask::Packed::Params params = params_of(call, packed);
  for (int32_t number = 0; number < mask::Packed::row_blocks(params, call.block_q); ++number) {
    const auto entry =
        sched::plan_row_block<mask::Packed>(params, 0, 0, number, call.block_q, call.block_kv, call.len_q);
    const int32_t first = entry.block.first_row, end = entry.block.end_row;
    if (first >= end) continue;
    CHECK(first >= 0 && end <= call.len_q && end - first <= call.block_q, "rows %d to %d", first, end);
    CHECK(entry.tiles.count() >= 0 && entry.tiles.begin >= 0 && mask::Packed::origin(params, entry.block) >= 0 &&
              mask::Packed::origin(params, entry.block) <= call.len_kv,
          "keys of rows %d to %d", first, end);
    for (int32_t i : {first, end - 1}) {
      const mask::Interval row = mask::Packed::row(params, entry.block, i);
      CHECK(row.begin >= 0 && row.begin <= row.end && row.end <= call.len_kv, "row %d sees [%d, %d)", i, row.begin,
            row.end);
    }
  }
}

// Which kernels and blocks a mean length takes.
void check_lengths() {
  AttentionParams p;
  p.mask.kind = MaskKind::kDocument;
  p.len_q = 1 << 16;
  const auto mean = [&](int32_t length) { p.mask.num_documents = p.len_q / length; };
  using mask::Packed, mask::ShortPacked;
  mean(64);
  CHECK(ShortPacked::serves(p) && !ShortPacked::make_params(p).packed, "64");
  mean(128);
  CHECK(ShortPacked::serves(p) && ShortPacked::make_params(p).packed && Packed::make_params(p).packed, "128");
  mean(380);
  CHECK(ShortPacked::serves(p), "380");
  mean(512);
  CHECK(!ShortPacked::serves(p) && Packed::make_params(p).packed, "512");
  p.mask.num_documents = 0;
  CHECK(!ShortPacked::serves(p) && !Packed::make_params(p).packed, "none");
}

std::vector<int32_t> draw_offsets(Random& random, int32_t documents) {
  std::vector<int32_t> offsets = {random.between(0, 3) == 0 ? random.between(1, 70) : 0};
  for (int32_t d = 0; d < documents; ++d) {
    offsets.push_back(offsets.back() + random.pick({0, 1, 63, 64, 65, 127, 128, 129, 300}));
  }
  return offsets;
}

int run() {
  check_lengths();
  Random random(53);
  for (int32_t trial = 0; trial < 600; ++trial) {
    const int32_t documents = random.between(1, 6);
    Call call = {draw_offsets(random, documents), {}, 0, 0, random.pick({64, 128}), random.pick({64, 128}),
                 random.between(0, 1) == 1};
    call.kv_offsets = random.between(0, 1) == 1 ? call.q_offsets : draw_offsets(random, documents);
    // Tokens past the last offset, or offsets past the last token.
    call.len_q = max_of(1, call.q_offsets.back() + random.pick({0, 0, 1, 150, -40}));
    call.len_kv = max_of(1, call.kv_offsets.back() + random.pick({0, 0, 1, 150, -40}));
    check_call(call);
    for (bool packed : {false, true}) check_blocks(call, packed);
  }
  for (int32_t trial = 0; trial < 20000; ++trial) {
    Call call = {{}, {}, random.between(1, 400), random.between(1, 400), 64, 128, random.between(0, 1) == 1};
    const int32_t documents = random.between(1, 5);
    for (std::vector<int32_t>* offsets : {&call.q_offsets, &call.kv_offsets}) {
      for (int32_t d = 0; d <= documents; ++d) {
        offsets->push_back(random.pick({random.between(-500, 500), random.between(0, 400), INT32_MAX, INT32_MIN}));
      }
    }
    check_bounds(call);
    for (bool packed : {false, true}) check_block_bounds(call, packed);
  }
  return report("test_packed");
}

}  // namespace
}  // namespace flashmsa::test

int main() { return flashmsa::test::run(); }
