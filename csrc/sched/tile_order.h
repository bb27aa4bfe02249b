// The order in which a persistent grid takes its row tiles.
//
// A tile is one row block of one slice; a slice is a (batch, head) pair. Slices run in groups whose keys and values stay
// in L2 together; inside a group the row blocks come longest first, each for all slices of the group. Under a causal mask
// or a window the first row blocks of all slices, which are shorter, are left for the end: the last tiles to start end the grid.
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

// Division by a number that the host knows, of 0 <= n < 2^31: n / d = floor(n m / 2^(31 + s)), with s = ceil(log2 d) and
// m = ceil(2^(31 + s) / d).
// PERF: a division is 35 instructions, and those that run once come from memory.
struct Divisor {
  uint32_t multiplier;
  int32_t shift;

  Divisor() = default;
  explicit Divisor(int32_t divisor) : shift(0) {
    while ((int64_t{1} << shift) < divisor) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + divisor - 1) / divisor);
  }

  FLASHMSA_HD int32_t divide(int32_t n) const {
#ifdef __CUDA_ARCH__
    return static_cast<int32_t>(__umulhi(2 * static_cast<uint32_t>(n), multiplier) >> shift);
#else
    return static_cast<int32_t>(uint64_t{static_cast<uint32_t>(n)} * multiplier >> (31 + shift));
#endif
  }
};

// Where all row blocks are equally long, none has to come first: a slice's stand beside each other, which read the same keys.
// PERF: forward, L2 flushed, d128 dense 8x512 48.5 -> 41.4 us, 8x1024 139 -> 134, 16x1024 262 -> 256, 4x4096 812 -> 808.
inline constexpr int64_t kEvenGroupBytes = int64_t{1} << 20;

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

// What decoding a tile divides by.
struct OrderDivisors {
  Divisor group_tiles, group, last_group;

  OrderDivisors() = default;
  explicit OrderDivisors(const TileOrder& order)
      : group_tiles(max_of(order.group * order.row_blocks, 1)),
        group(order.group),
        last_group(order.slices - (order.slices - 1) / order.group * order.group) {}

  // order.decode(tile).
  FLASHMSA_HD TileIndex decode(const TileOrder& order, int32_t tile) const {
    const int32_t number = group_tiles.divide(tile);
    const int32_t first_slice = number * order.group;
    const int32_t within = tile - number * order.group * order.row_blocks;
    const bool last = first_slice + order.group >= order.slices;
    const int32_t rank = (last ? last_group : group).divide(within);
    return {first_slice + within - rank * (last ? order.slices - first_slice : order.group), rank};
  }
};

// The shorter row blocks of all slices behind the longer ones: two orders one behind the other.
// PERF: in groups alone the last group's tiles of all lengths begin where the others end, as many as there are CTAs or twice
// as many: d256 1x16384 causal waited for the longest of them for 11 % of its time.
struct PartedOrder {
  TileOrder parts[2];
  OrderDivisors divisors[2];

  PartedOrder() = default;
  PartedOrder(const TileOrder& order, int32_t late)
      : parts{{order.row_blocks - late, order.slices, order.group}, {late, order.slices, order.slices}},
        divisors{OrderDivisors(parts[0]), OrderDivisors(parts[1])} {}

  FLASHMSA_HD TileIndex decode(int32_t tile) const {
    const int32_t early = parts[0].count();
    const int32_t part = tile < early ? 0 : 1;
    TileIndex index = divisors[part].decode(parts[part], tile - part * early);
    index.row_rank += part * parts[0].row_blocks;
    return index;
  }
};

// Slices in a group for these shapes; heads that share a kv head count its bytes once. Groups are as even as they can be:
// PERF: the longest tiles of a last group of few slices would start when all others end (d96 4x4096 causal, 64 slices in
// groups of 21: a twelfth of the time).
inline int32_t group_size(const AttentionParams& p, int32_t slices, int64_t bytes) {
  const int64_t kv_bytes = int64_t{p.len_kv} * (p.head_dim + p.head_dim_v) * 2;
  const int64_t ratio = p.heads_q / max_of(p.heads_kv, 1);
  const int64_t groups = max_of<int64_t>(1, bytes / max_of<int64_t>(kv_bytes, 1));
  const int64_t shared = ceil_div<int64_t>(slices, ratio);  // sets of slices that share a kv head
  const int64_t count = max_of<int64_t>(1, ceil_div(shared, groups));
  return static_cast<int32_t>(ceil_div(shared, count) * ratio);
}
inline int32_t group_size(const AttentionParams& p, int32_t slices) {
  return group_size(p, slices, p.mask.kind == MaskKind::kBlockSparse ? kListedGroupBytes : kGroupBytes);
}

// How many row blocks of each slice are late: kLateTiles for each CTA. The more tiles a CTA has, the less the grid's end
// weighs; the longer the rows, the less it weighs that late tiles read keys and values from memory once more. So there are
// none where a CTA has more than a tile for every kRowsPerTile rows of a slice.
// PERF: d256 1x16384 1.09, 2x8192 1.07, 4x4096 1.06, 8x2048 1.035; d64, d128 1.00 ... 1.015. Where there are none they
// cost: d128 8x2048, 32x2048 .99, 16x1024 .93 ... .99. With 2, 3, 6 tiles for each CTA d256 1x16384 1.04, 1.07, 1.09, 4x4096
// 1.05, 1.06, 1.06.
// `shorter`: how many of a slice's first row blocks are shorter than those behind them.
inline int32_t late_row_blocks(const AttentionParams& p, const TileOrder& order, int32_t ctas, int32_t shorter) {
  constexpr int64_t kLateTiles = 4, kRowsPerTile = 256;
  if (order.count() * kRowsPerTile > int64_t{ctas} * p.len_q) return 0;
  const int32_t most = min_of(shorter, max_of(order.row_blocks / 2 - 2, 0));
  return static_cast<int32_t>(min_of<int64_t>(ceil_div(kLateTiles * ctas, int64_t{max_of(order.slices, 1)}), most));
}

// The same of a causal mask; others have none.
inline int32_t late_row_blocks(const AttentionParams& p, const TileOrder& order, int32_t ctas) {
  // Where the first rows see most of the keys already, they are as long as others and read as much.
  const bool triangle = p.mask.kind == MaskKind::kCausal && p.len_kv - p.len_q <= p.len_kv / 4;
  return triangle ? late_row_blocks(p, order, ctas, order.row_blocks) : 0;
}

}  // namespace flashmsa::sched
