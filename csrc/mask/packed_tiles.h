// Tiles of packed sequences that begin where a document does, so that none reaches into two of them.
//
// Document d's tiles are numbered from offset[d] / size + d on: these numbers always suffice, and nobody has to add up the
// tiles of the documents before. A number that is left over is an empty tile.
#pragma once

#include <cstdint>

#include "core/types.h"

namespace flashmsa::mask {

// NOTE: offsets are device data that no host code has looked at. Whatever they hold, ranges lie in [0, length]; only where
// they ascend is each token in one tile.
struct PackedTiles {
  const int32_t* offsets;  // (documents + 1)
  int32_t documents;
  int32_t length;  // what lies past the last offset counts as one more document
  int32_t size;  // of a tile

  struct Range {
    int32_t begin, end;
  };

  static FLASHMSA_HD int32_t count(int32_t documents, int32_t length, int32_t size) {
    return length / size + documents + 1;
  }

  // Where document d begins, for 0 <= d <= documents + 1.
  FLASHMSA_HD int32_t begin(int32_t d) const {
    return d == 0 ? 0 : d > documents ? length : clamp(offsets[d], 0, length);
  }
  FLASHMSA_HD int32_t first_tile(int32_t d) const { return begin(d) / size + d; }

  // The document of a tile: the last whose first tile is at or before it.
  FLASHMSA_HD int32_t document_of(int32_t tile) const {
    int32_t low = 0, high = documents + 1;
    while (high - low > 1) {
      const int32_t mid = low + (high - low) / 2;
      if (first_tile(mid) <= tile) {
        low = mid;
      } else {
        high = mid;
      }
    }
    return low;
  }

  FLASHMSA_HD Range range(int32_t tile, int32_t document) const {
    const int32_t end = begin(document + 1);
    const int64_t from = begin(document) + int64_t{tile - first_tile(document)} * size;
    const int32_t first = static_cast<int32_t>(clamp<int64_t>(from, 0, end));
    return {first, static_cast<int32_t>(min_of<int64_t>(int64_t{first} + size, end))};
  }
};

}  // namespace flashmsa::mask
