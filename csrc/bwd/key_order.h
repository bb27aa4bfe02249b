// In which order the key tiles of a head start. In deterministic mode they add to dQ in the same order, so that a CTA waits
// only for such as started before it.
//
// Blocks of tiles start one after another, the even ones from their last tile to their first and the odd ones from first to
// last. Under a causal mask the tiles of an even block, started together, each on its own diagonal, come to a tile of queries
// in this order by themselves; they end in it too, and so leave their places to the longest of the next block first, and all
// of that one end together.
#pragma once

#include "core/types.h"

namespace flashmsa::bwd {

struct KeyOrder {
  int32_t tiles;
  int32_t block;  // tiles of one; the last may be smaller; 1: from first to last throughout

  FLASHMSA_HD bool ascends(int32_t tile) const { return tile / block % 2 != 0; }
  FLASHMSA_HD int32_t begin(int32_t tile) const { return tile - tile % block; }
  FLASHMSA_HD int32_t end(int32_t tile) const { return min_of(begin(tile) + block, tiles); }

  // The tile that starts in this place.
  FLASHMSA_HD int32_t nth(int32_t place) const {
    return ascends(place) ? place : begin(place) + (end(place) - 1 - place);
  }

  FLASHMSA_HD bool starts_before(int32_t a, int32_t b) const {
    return a < begin(b) || (a < end(b) && (ascends(b) ? a < b : a > b));
  }

  // How many of some tiles start before `tile`; count(a, b) says how many of them lie in [a, b).
  template <class Count>
  FLASHMSA_HD int32_t before(int32_t tile, const Count& count) const {
    return count(0, begin(tile)) + (ascends(tile) ? count(begin(tile), tile) : count(tile + 1, end(tile)));
  }
};

}  // namespace flashmsa::bwd
