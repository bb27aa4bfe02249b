// Masks whose rows' keys move along with the rows: dense, causal, windows. Which queries see some keys, and which of their
// pairs are hidden, is then a matter of two numbers, where other masks have a plan in memory.
#pragma once

#include "core/params.h"
#include "core/types.h"
#include "mask/composite.h"

namespace flashmsa::bwd {

// Rows of queries, keys, or tiles of either.
struct Range {
  int32_t begin, end;
};

// Query i sees [i + low, i + high) of the keys that there are.
struct KeyBand {
  int32_t low, high;

  // NOTE: sums of a bound and a place fit in 32 bits.
  static constexpr int32_t kFarthest = int32_t{1} << 29;

  static KeyBand of(const AttentionParams& p) {
    const mask::Bounds bounds = mask::Composite::make_params(p).global;
    return {clamp(bounds.low, -kFarthest, kFarthest), clamp(bounds.high, -kFarthest, kFarthest)};
  }

  // NOTE: not where no row sees anything: tiles of rows and of keys would not agree on who meets whom.
  static bool serves(const AttentionParams& p) {
    if (max_of(p.len_q, p.len_kv) >= kFarthest || p.token_step != 1) return false;
    const MaskArgs& m = p.mask;
    if (m.kind == MaskKind::kDense || m.kind == MaskKind::kCausal) return true;
    const BandArgs& global = m.global;
    const bool prefix = global.prefix[0] != kUnbounded || global.prefix[1] != kUnbounded ||
                        global.prefixes[0] != nullptr || global.prefixes[1] != nullptr;
    if (m.kind != MaskKind::kComposite || m.q_offsets != nullptr || m.row_begin != nullptr || prefix) return false;
    const KeyBand band = of(p);
    return global.keep_first == 0 && band.low < band.high;
  }

  // Which of len_q rows see some of the keys [first_key, end_key).
  FLASHMSA_HD Range rows_of(int32_t first_key, int32_t end_key, int32_t len_q) const {
    const int32_t begin = max_of(first_key + 1 - high, 0), end = min_of(end_key - low, len_q);
    return {begin, max_of(begin, end)};
  }

  // Which key tiles rows [first_row, last_row] see some key of.
  FLASHMSA_HD Range key_tiles_of(int32_t first_row, int32_t last_row, int32_t len_kv, int32_t block_kv) const {
    const int32_t begin = max_of(first_row + low, 0), end = min_of(last_row + high, len_kv);
    if (begin >= end) return {0, 0};
    return {begin / block_kv, ceil_div(end, block_kv)};
  }

  // How many pairs of tiles see each other.
  int64_t visited(int32_t len_q, int32_t len_kv, int32_t block_q, int32_t block_kv) const {
    int64_t count = 0;
    for (int32_t key = 0; key < len_kv; key += block_kv) {
      const Range rows = rows_of(key, min_of(key + block_kv, len_kv), len_q);
      if (rows.begin < rows.end) count += ceil_div(rows.end, block_q) - rows.begin / block_q;
    }
    return count;
  }
};

// Tiles of queries: [begin, end) see some key of a key tile, [full_begin, full_end) with every row all of a CTA's keys.
struct BandKeys {
  int32_t begin, full_begin, full_end, end;
};

// Of the key tile whose keys begin at `tile_key`, for the CTA whose own begin at `own_key`.
template <class Config>
FLASHMSA_HD BandKeys make_band_keys(const KeyBand& band, int32_t len_q, int32_t len_kv, int32_t tile_key,
                                    int32_t own_key) {
  constexpr int32_t kRows = Config::kBlockQ;
  const Range rows = band.rows_of(tile_key, min_of(tile_key + Config::kBlockKv, len_kv), len_q);
  if (rows.begin == rows.end) return {0, 0, 0, 0};
  BandKeys keys;
  keys.begin = rows.begin / kRows;
  keys.end = ceil_div(rows.end, kRows);
  const int32_t own_end = own_key + Config::kCtaKeys;
  // Rows from the first on see the last of the own keys, rows before the second the first.
  const int32_t sees_last = max_of(own_end - band.high, 0), sees_first = max_of(own_key + 1 - band.low, 0);
  keys.full_begin = clamp(ceil_div(sees_last, kRows), keys.begin, keys.end);
  keys.full_end = own_end <= len_kv ? clamp(sees_first / kRows, keys.full_begin, keys.end) : keys.full_begin;
  return keys;
}

}  // namespace flashmsa::bwd
