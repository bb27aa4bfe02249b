// The order in which a persistent grid takes its row tiles.
//
// A tile is one row block of one slice; a slice is a (batch, head) pair. Slices run in groups whose keys and values stay
// in L2 together; inside a group the row blocks come longest first, each for all slices of the group, so that the last
// tiles to start are the shortest.
#pragma once

#include "core/params.h"
#include "core/types.h"

namespace flashmsa::sched {

// What one group of slices may hold of keys and values.
// PERF: d128 4x4096 causal, groups of 16 (32 MB) 717 TFLOP/s; 8: 709; 4: 685; 1: 667; 32: 690.
inline constexpr int64_t kGroupBytes = int64_t{32} << 20;
// The same of block lists: tiles that run together read different keys.
// PERF: 10 % of the blocks of 1x16384, d128, groups of 2 (16 MB) are 1 to 2 % faster than of 4, of 1 as fast, of 8 3 % slower.
inline constexpr int64_t kListedGroupBytes = int64_t{16} << 20;

struct TileIndex {
  int32_t slice;
  int32_t row_rank;  // 0: the longest row block
};

struct TileOrder {
  int32_t row_blocks;
  int32_t slices;
  int32_t group;  // slices in a group; the last group may be smaller

  FLASHMSA_HD int32_t count() const { return row_blocks * slices; }

  FLASHMSA_HD TileIndex decode(int32_t tile) const {
    const int32_t group_tiles = group * row_blocks;
    const int32_t first_slice = tile / group_tiles * group;
    const int32_t within = tile % group_tiles;
    const int32_t slices_here = min_of(group, slices - first_slice);
    return {first_slice + within % slices_here, within / slices_here};
  }
};

// Slices in a group for these shapes; heads that share a kv head count its bytes once. Groups are as even as they can be:
// PERF: the longest tiles of a last group of few slices would start when all others end (d96 4x4096 causal, 64 slices in
// groups of 21: a twelfth of the time).
inline int32_t group_size(const AttentionParams& p, int32_t slices) {
  const int64_t kv_bytes = int64_t{p.len_kv} * (p.head_dim + p.head_dim_v) * 2;
  const int64_t ratio = p.heads_q / max_of(p.heads_kv, 1);
  const int64_t bytes = p.mask.kind == MaskKind::kBlockSparse ? kListedGroupBytes : kGroupBytes;
  const int64_t groups = max_of<int64_t>(1, bytes / max_of<int64_t>(kv_bytes, 1));
  const int64_t shared = ceil_div<int64_t>(slices, ratio);  // sets of slices that share a kv head
  const int64_t count = max_of<int64_t>(1, ceil_div(shared, groups));
  return static_cast<int32_t>(ceil_div(shared, count) * ratio);
}

}  // namespace flashmsa::sched
