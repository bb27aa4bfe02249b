// Windows and prefixes over whole lengths: those composite masks whose rows see one run of keys, bounded by the same numbers
// in every batch. Without a plan, without documents to look for: what a row sees is a few instructions.
#pragma once

#include "mask/composite.h"
#include "mask/interval.h"

namespace flashmsa::mask {

// Of kernels alone: no call's mask is of this kind.
inline constexpr MaskKind kBandKind = MaskKind{7};

struct Band {
  static constexpr const char* kName = "band";
  static constexpr MaskKind kKind = kBandKind;
  static constexpr bool kPlanned = false;
  static constexpr bool kSpansPlanned = false;
  static constexpr bool kListed = false;
  using Row = Interval;
  using Tiles = KeyTiles;

  struct Params {
    Bounds bounds;
    int32_t len_kv;
  };
  struct Block {};

  // Whether a call's mask is one. Not of strided tensors, whose maps have a dimension more.
  // NOTE: where ends stay put while rows move on, Composite's tiles begin where the first row's keys do: one tile fewer.
  static bool serves(const AttentionParams& p) {
    const MaskArgs& m = p.mask;
    return m.kind == MaskKind::kComposite && m.q_offsets == nullptr && m.row_begin == nullptr && p.token_step == 1 &&
           m.global.keep_first == 0 && m.global.prefixes[0] == nullptr && m.global.prefixes[1] == nullptr &&
           Composite::ends_move(m.global, p.len_q, p.len_kv);
  }

  static Params make_params(const AttentionParams& p) {
    return {make_bounds(p.mask.global, 0, 0, p.len_q, 0, p.len_kv), p.len_kv};
  }

  // How many of the first rows see fewer keys than those behind them, as their window begins before the first key.
  static int32_t short_rows(const AttentionParams& p) {
    const Bounds bounds = make_params(p).bounds;
    const bool window = bounds.low != -kUnbounded && bounds.high != kUnbounded && !bounds.has_prefix;
    return window ? clamp(-bounds.low, 0, p.len_q) : 0;
  }

  static FLASHMSA_HD Block block(const Params&, int32_t /*batch*/, int32_t /*head*/, int32_t /*first_row*/,
                                 int32_t /*last_row*/) {
    return {};
  }
  static FLASHMSA_HD Interval row(const Params& params, const Block&, int32_t i) {
    return Composite::cut({{0, 0}, {0, params.len_kv}}, params.bounds, params.bounds.prefix, i).main;
  }

  static FLASHMSA_HD int32_t origin(const Params&, const Block&) { return 0; }
  static FLASHMSA_HD Tiles tiles(const Params& params, const Block& block, int32_t first_row, int32_t last_row,
                                 int32_t tile_size) {
    return row_tiles<Band>(params, block, first_row, last_row, tile_size);
  }
};

}  // namespace flashmsa::mask
