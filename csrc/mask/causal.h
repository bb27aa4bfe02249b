// Query i sees the keys j <= p, where p = i + shift is its position among the keys.
#pragma once

#include "mask/interval.h"

namespace flashmsa::mask {

struct Causal {
  static constexpr const char* kName = "causal";
  static constexpr MaskKind kKind = MaskKind::kCausal;
  static constexpr bool kPlanned = false;
  static constexpr bool kSpansPlanned = false;
  static constexpr bool kListed = false;
  using Row = Interval;
  using Tiles = KeyTiles;

  struct Params {
    int32_t shift;  // position_shift()
    int32_t len_kv;
  };
  struct Block {};

  static Params make_params(const AttentionParams& p) { return {position_shift(p), p.len_kv}; }

  static FLASHMSA_HD Block block(const Params&, int32_t /*batch*/, int32_t /*head*/, int32_t /*first_row*/,
                                 int32_t /*last_row*/) {
    return {};
  }
  static FLASHMSA_HD Interval row(const Params& params, const Block&, int32_t i) {
    return {0, clamp(i + params.shift + 1, 0, params.len_kv)};
  }

  // Where query i stands among the keys, for ALiBi. Whatever its row sees lies at or before that.
  static constexpr bool kSeesNonePast = true;
  static FLASHMSA_HD int32_t position(const Params& params, const Block&, int32_t i) { return i + params.shift; }
  static FLASHMSA_HD bool positions_in_order(const Params&, const Block&) { return true; }
  static FLASHMSA_HD bool sees_none_past(const Params&, const Block&, int32_t /*i*/) { return true; }

  static FLASHMSA_HD int32_t origin(const Params&, const Block&) { return 0; }
  static FLASHMSA_HD Tiles tiles(const Params& params, const Block& block, int32_t first_row, int32_t last_row,
                                 int32_t tile_size) {
    return row_tiles<Causal>(params, block, first_row, last_row, tile_size);
  }
};

}  // namespace flashmsa::mask
