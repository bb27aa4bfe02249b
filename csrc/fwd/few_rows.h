// Calls of few rows: whether small tiles, several CTAs an SM, are the better choice for dense and causal masks. Host only.
#pragma once

#include "core/params.h"
#include "core/types.h"

namespace flashmsa::fwd {

// Small tiles: their rows, and how many of their CTAs run at a time.
struct SmallTiles {
  int32_t block_q;
  int32_t ctas_per_sm;

  static constexpr int64_t kSms = 132;  // of the H100 and H200 that this was measured on
  constexpr int64_t slots() const { return kSms * ctas_per_sm; }
};

// Whether a call has small tiles instead of those of `block_q` rows.
// PERF: fitted to 74 calls of 64 … 16384 rows and 1 … 2048 slices. Where it chooses small tiles they take .53 … 1.02 of
// the time of the others; in seven calls the other choice was faster, by 1 … 9 %.
// NOTE: a call whose shape is not known, of batch 0, has the larger ones.
constexpr bool has_few_rows(const AttentionParams& p, SmallTiles small, int32_t block_q) {
  const bool causal = p.mask.kind == MaskKind::kCausal;
  if (!causal && p.mask.kind != MaskKind::kDense) return false;
  const int64_t tiles = int64_t{p.batch} * p.heads_q * ceil_div<int64_t>(p.len_q, small.block_q);
  if (tiles == 0) return false;
  // All run at a time; or half of a larger tile and more would be empty.
  if (tiles <= small.slots() || 2 * int64_t{p.len_q} <= block_q) return true;
  // Under a causal mask most tiles of a long sequence end early, and others take their place.
  return causal && p.len_q >= 8 * small.block_q && 3 * tiles <= 4 * small.slots();
}

}  // namespace flashmsa::fwd
