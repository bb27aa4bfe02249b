// Every query sees every key.
#pragma once

#include "mask/interval.h"

namespace flashmsa::mask {

struct Dense {
  static constexpr const char* kName = "dense";
  static constexpr MaskKind kKind = MaskKind::kDense;
  static constexpr bool kPlanned = false;
  static constexpr bool kSpansPlanned = false;
  static constexpr bool kListed = false;
  using Row = Interval;
  using Tiles = KeyTiles;

  struct Params {
    int32_t len_kv;
  };
  struct Block {};

  static Params make_params(const AttentionParams& p) { return {p.len_kv}; }

  static FLASHMSA_HD Block block(const Params&, int32_t /*batch*/, int32_t /*head*/, int32_t /*first_row*/,
                                 int32_t /*last_row*/) {
    return {};
  }
  static FLASHMSA_HD Interval row(const Params& params, const Block&, int32_t /*i*/) { return {0, params.len_kv}; }

  static FLASHMSA_HD int32_t origin(const Params&, const Block&) { return 0; }
  static FLASHMSA_HD Tiles tiles(const Params& params, const Block& block, int32_t first_row, int32_t last_row,
                                 int32_t tile_size) {
    return row_tiles<Dense>(params, block, first_row, last_row, tile_size);
  }
};

}  // namespace flashmsa::mask
