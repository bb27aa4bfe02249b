// Sliding windows, prefix-LM, and what causal, window and prefix masks have in common: query i at position p = i + shift
// among the keys sees key j where
//   p - left <= j <= p + right   and   (j < prefix or j <= p)
// A bound of INT32_MAX is none. The family is closed: the intersection of two takes the smaller of each bound.
#pragma once

#include <cstdint>

#include "mask/interval.h"

namespace flashmsa::mask {

struct Band {
  static constexpr const char* kName = "band";
  static constexpr MaskKind kKind = MaskKind::kBand;
  static constexpr bool kPlanned = false;

  struct Params {
    int32_t shift;  // position_shift()
    int32_t left, right, prefix;
    int32_t len_kv;
  };
  struct Block {};

  static Params make_params(const AttentionParams& p) {
    return {position_shift(p), p.mask.left, p.mask.right, p.mask.prefix, p.len_kv};
  }

  static FLASHMSA_HD Block block(const Params&, int32_t /*batch*/, int32_t /*first_row*/, int32_t /*last_row*/) {
    return {};
  }

  static FLASHMSA_HD Interval row(const Params& params, const Block&, int32_t i) {
    // 64 bits: bounds may be anything up to INT32_MAX.
    const int64_t p = int64_t{i} + params.shift;
    const int64_t len_kv = params.len_kv;
    const int64_t begin = clamp<int64_t>(p - params.left, 0, len_kv);
    const int64_t end = min_of<int64_t>(p + params.right, max_of<int64_t>(params.prefix - int64_t{1}, p)) + 1;
    // NOTE: an empty row lies where its window begins, so that both ends still grow with the row.
    return {static_cast<int32_t>(begin), static_cast<int32_t>(clamp<int64_t>(end, begin, len_kv))};
  }
};

}  // namespace flashmsa::mask
