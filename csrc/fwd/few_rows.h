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

// PERF: fitted to calls of 64 … 4096 rows and 1 … 256 slices at head dims 64 and 128: benchmarks/NOTES.md. Where all small tiles run
// at a time they take 0.6 … 0.9 of the time; beyond that keys are read once too often.
// NOTE: batch 0: a call whose shape is not known has the larger tiles.
constexpr bool has_few_rows(const AttentionParams& p, SmallTiles small) {
  if (p.mask.kind != MaskKind::kDense && p.mask.kind != MaskKind::kCausal) return false;
  const int64_t tiles = int64_t{p.batch} * p.heads_q * ceil_div(p.len_q, small.block_q);
  return tiles > 0 && tiles <= small.slots();
}

}  // namespace flashmsa::fwd
