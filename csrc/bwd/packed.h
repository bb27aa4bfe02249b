// Tiles of packed sequences that begin where a document does, so that none reaches into two of them.
#pragma once

#include "core/params.h"
#include "core/types.h"
#include "mask/packed_tiles.h"

namespace flashmsa::bwd {

// Key tiles that one CTA sorts in its shared memory.
inline constexpr int32_t kMostPacked = 2048;

// Mean length of documents from which on the tiles below are faster: shorter ones leave most of a tile empty.
// PERF: means of 64 | 145 | 190 | 310, as the time over that of tiles on a fixed grid. d128 causal 1.28 | .92 | .96 | .94,
// plain 1.16 | .82 | .84 | .84; d64 1.51 | 1.07 | 1.08 | .99, 1.28 | .93 | .92 | .87; d256 1.19 | 1.11 | .95 | .93,
// .99 | .85 | .73 | .80.
constexpr int32_t least_packed_length(bool causal, int32_t head_dim) { return causal && head_dim != 128 ? 256 : 128; }

using mask::PackedTiles;

// A tile of keys and the tiles of its document's queries: [begin, end) see some of the keys, [full_begin, full_end) all of
// them with every row.
struct alignas(32) PackedKeys {
  int32_t first_key, end_key;
  int32_t begin, full_begin, full_end, end;
  int32_t first_row;  // of the queries' tile `begin`
  int32_t place;  // of the tile among its document's

  // Where its document begins: packed kernels count a document's keys from there, so that tiles begin at whole multiples.
  FLASHMSA_HD int32_t origin(int32_t size) const { return first_key - place * size; }
  FLASHMSA_HD bool empty() const { return first_key >= end_key; }
  FLASHMSA_HD int32_t steps() const { return end - begin; }
};

// NOTE: what may be seen is Document's business (mask/document.h): rows' intervals come from there, and here only which tiles
// need not be visited and which need not be tested.
FLASHMSA_HD PackedKeys make_packed_keys(const PackedTiles& keys, const PackedTiles& queries, bool causal,
                                        int32_t tile) {
  const int32_t d = keys.document_of(tile);
  const PackedTiles::Range range = keys.range(tile, d);
  PackedKeys made = {range.begin, range.end, 0, 0, 0, 0, 0, tile - keys.first_tile(d)};
  if (d >= keys.documents || made.empty()) return made;
  const int32_t first_row = queries.begin(d), end_row = max_of(queries.begin(d + 1), first_row);
  const int32_t first_tile = queries.first_tile(d), tiles = ceil_div(end_row - first_row, queries.size);
  // Offsets as the mask takes them.
  const int64_t shift = causal ? int64_t{keys.offsets[d + 1]} - queries.offsets[d + 1] + 1 : 0;
  const auto tile_of = [&](int64_t row) {
    return static_cast<int32_t>(clamp<int64_t>((row - first_row) / queries.size, 0, tiles));
  };
  // Under causal row i sees the keys before i + shift.
  int32_t skipped = 0, cut = 0;
  if (causal) {
    skipped = tile_of(max_of<int64_t>(range.begin + 1 - shift, first_row));
    cut = tile_of(max_of<int64_t>(range.begin + int64_t{keys.size} - shift, first_row) + queries.size - 1);
  }
  const bool whole = range.begin >= keys.offsets[d] && range.end - range.begin == keys.size;
  made.begin = first_tile + skipped;
  made.end = first_tile + tiles;
  made.first_row = first_row + skipped * queries.size;
  made.full_begin = clamp(first_tile + cut, made.begin, made.end);
  made.full_end = whole ? max_of(first_tile + (end_row - first_row) / queries.size, made.full_begin) : made.full_begin;
  return made;
}

}  // namespace flashmsa::bwd
