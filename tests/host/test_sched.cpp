// The order of a persistent grid: every row tile of every slice once, longest first inside groups that fit L2; and the
// buckets that the plan sorts by.
#include <algorithm>
#include <vector>

#include "check.h"
#include "mask/band.h"
#include "mask/list.h"
#include "mask/packed.h"
#include "sched/plan.h"
#include "sched/tile_order.h"

namespace flashmsa::test {
namespace {

using sched::Divisor;
using sched::OrderDivisors;
using sched::PartedOrder;
using sched::TileIndex;
using sched::TileOrder;

void check_divisor(Random& random) {
  const int32_t divisor = random.pick({1, 2, 3, 7, INT32_MAX, random.between(1, 300), random.between(1, INT32_MAX)});
  const Divisor by(divisor);
  const int32_t multiple = INT32_MAX / divisor * divisor;
  for (int32_t n : {0, 1, divisor - 1, divisor, multiple - 1, multiple, INT32_MAX, random.between(0, INT32_MAX)}) {
    CHECK(by.divide(n) == n / divisor, "%d / %d = %d", n, divisor, by.divide(n));
  }
}

void check_order(TileOrder order) {
  CHECK(order.count() == order.row_blocks * order.slices, "%d", order.count());
  std::vector<int> seen(order.count(), 0);
  TileIndex before = {0, 0};
  const OrderDivisors divisors(order);
  for (int32_t tile = 0; tile < order.count(); ++tile) {
    const TileIndex index = order.decode(tile);
    if (!CHECK(
            0 <= index.slice && index.slice < order.slices && 0 <= index.row_rank && index.row_rank < order.row_blocks,
            "tile %d is (%d, %d) of (%d, %d), groups of %d", tile, index.slice, index.row_rank, order.slices,
            order.row_blocks, order.group)) {
      return;
    }
    const TileIndex quickly = divisors.decode(order, tile);
    CHECK(quickly.slice == index.slice && quickly.row_rank == index.row_rank, "tile %d of (%d, %d), groups of %d", tile,
          order.slices, order.row_blocks, order.group);
    ++seen[index.slice * order.row_blocks + index.row_rank];
    const int32_t group = index.slice / order.group, group_before = before.slice / order.group;
    CHECK(group >= group_before, "tile %d returns to group %d", tile, group);
    CHECK(group > group_before || index.row_rank >= before.row_rank, "tile %d: a longer tile after a shorter", tile);
    before = index;
  }
  CHECK(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }), "(%d, %d), groups of %d", order.slices,
        order.row_blocks, order.group);
}

// Every tile once; the longer row blocks of all slices in their order, behind them the shorter ones, longest first.
void check_parted_order(TileOrder order, int32_t late) {
  const PartedOrder parted(order, late);
  const TileOrder early = {order.row_blocks - late, order.slices, order.group};
  for (int32_t tile = 0; tile < order.count(); ++tile) {
    const TileIndex index = parted.decode(tile);
    TileIndex expected;
    if (tile < early.count()) {
      expected = early.decode(tile);
    } else {
      const int32_t within = tile - early.count();
      expected = {within % order.slices, early.row_blocks + within / order.slices};
    }
    CHECK(index.slice == expected.slice && index.row_rank == expected.row_rank,
          "tile %d of (%d, %d), groups of %d, %d late, is (%d, %d)", tile, order.slices, order.row_blocks, order.group,
          late, index.slice, index.row_rank);
  }
}

// How long a causal grid of `ctas` takes, of what it would take with no CTA idle. A tile costs its row blocks of keys and
// kBoundary. A CTA's second tile goes by number, a later one is taken as the one before it begins.
double causal_time(const TileOrder& order, int32_t late, int32_t ctas) {
  constexpr double kBoundary = 1.5;
  const PartedOrder parted(order, late);
  struct Cta {
    double end;  // of the tile at hand
    int32_t next;
  };
  const auto cost = [&](int32_t tile) { return kBoundary + order.row_blocks - parted.decode(tile).row_rank; };
  std::vector<Cta> grid(ctas);
  for (int32_t cta = 0; cta < ctas; ++cta) grid[cta] = {cost(cta), 2 * ctas - 1 - cta};
  double total = 0, last = 0;
  for (int32_t tile = 0; tile < order.count(); ++tile) total += cost(tile);
  int32_t taken = 2 * ctas;
  while (!grid.empty()) {
    const auto first =
        std::min_element(grid.begin(), grid.end(), [](const Cta& a, const Cta& b) { return a.end < b.end; });
    if (first->next < order.count()) {
      *first = {first->end + cost(first->next), taken++};
    } else {
      last = std::max(last, first->end);
      grid.erase(first);
    }
  }
  return last * ctas / total;
}

// Of causal calls of four groups, head dim 256 and 128; and where there are none.
void check_late_tiles() {
  constexpr int32_t kCtas = 132;
  AttentionParams p;
  p.mask.kind = MaskKind::kCausal;
  const auto late_of = [&](const TileOrder& order, int32_t len_q) {
    p.len_q = len_q;
    return sched::late_row_blocks(p, order, kCtas);
  };
  for (const TileOrder order : {TileOrder{128, 8, 2}, TileOrder{64, 16, 4}, TileOrder{32, 32, 8}, TileOrder{128, 16, 4},
                                TileOrder{64, 32, 8}, TileOrder{32, 64, 16}, TileOrder{16, 64, 16}}) {
    p.len_kv = 128 * order.row_blocks;
    const int32_t late = late_of(order, p.len_kv);
    CHECK(0 < late && late < order.row_blocks / 2, "%d of %d row blocks are late", late, order.row_blocks);
    const double time = causal_time(order, late, kCtas), before = causal_time(order, 0, kCtas);
    CHECK(time < 1.035 && time < before, "(%d, %d), groups of %d: %.3f, without late tiles %.3f", order.slices,
          order.row_blocks, order.group, time, before);
  }
  p.len_kv = 4096;
  CHECK(late_of({32, 32, 8}, 3072) > 0 && late_of({32, 32, 8}, 2048) == 0, "all rows see half of the keys");
  CHECK(late_of({32, 256, 8}, 4096) == 0 && late_of({8, 128, 32}, 1024) == 0, "many tiles for so few rows");
  for (int32_t row_blocks : {1, 2, 3}) CHECK(late_of({row_blocks, 1, 1}, 4096) == 0, "of %d row blocks", row_blocks);
  p.mask.kind = MaskKind::kDense;
  CHECK(late_of({32, 32, 8}, 4096) == 0, "a dense mask");
}

// The first rows of a window that begins before the keys come last, as many as make four tiles a CTA.
void check_late_windows() {
  constexpr int32_t kCtas = 132;
  const auto short_rows = [](int32_t len_q, int32_t len_kv, int32_t left, int32_t right, int32_t prefix) {
    AttentionParams p;
    p.mask.kind = MaskKind::kComposite;
    p.len_q = len_q;
    p.len_kv = len_kv;
    p.mask.global.left[0] = left;
    p.mask.global.right[0] = right;
    p.mask.global.prefix[0] = prefix;
    return mask::Band::short_rows(p);
  };
  CHECK(short_rows(32768, 32768, 4096, 0, kUnbounded) == 4096, "a causal window");
  CHECK(short_rows(32768, 32768, 4096, 4096, kUnbounded) == 4096, "to both sides");
  CHECK(short_rows(32768, 32768, 1 << 20, 0, kUnbounded) == 32768, "wider than the keys");
  CHECK(short_rows(2048, 30720, 4096, 0, kUnbounded) == 0, "the last rows alone");
  CHECK(short_rows(2048, 4096, 4096, 0, kUnbounded) == 2048, "some keys ahead of the first row");
  CHECK(short_rows(32768, 32768, kUnbounded, 0, kUnbounded) == 0, "no window");
  CHECK(short_rows(32768, 32768, 4096, kUnbounded, kUnbounded) == 0, "the first rows see the most");
  CHECK(short_rows(32768, 32768, 4096, 0, 1000) == 0, "a prefix");
  AttentionParams p;
  p.len_q = p.len_kv = 32768;
  const auto late_of = [&](int32_t shorter) { return sched::late_row_blocks(p, {256, 16, 2}, kCtas, shorter); };
  CHECK(late_of(32) == 32 && late_of(0) == 0, "no more than are short");
  CHECK(late_of(256) == 33, "four tiles a CTA");
  p.len_q = p.len_kv = 1024;
  CHECK(sched::late_row_blocks(p, {8, 128, 32}, kCtas, 4) == 0, "many tiles for so few rows");
}

// As many slices as fit, whole sets of heads that share keys, at least one set.
void check_group_size(Random& random) {
  AttentionParams p;
  p.batch = random.between(1, 8);
  p.heads_kv = random.between(1, 16);
  p.heads_q = p.heads_kv * random.pick({1, 2, 8});
  p.len_kv = random.pick({0, random.between(1, 500), random.between(1, 200000), INT32_MAX});
  p.head_dim = 8 * random.between(1, 32);
  p.head_dim_v = 8 * random.between(1, 32);
  const bool listed = random.coin();
  if (listed) p.mask.kind = MaskKind::kBlockSparse;
  const int32_t slices = p.batch * p.heads_q, shared = p.heads_q / p.heads_kv;
  const bool even = !listed && random.coin();
  const int64_t bytes = even ? sched::kEvenGroupBytes : listed ? sched::kListedGroupBytes : sched::kGroupBytes;
  const int32_t group = even ? sched::group_size(p, slices, bytes) : sched::group_size(p, slices);
  CHECK(1 <= group && group <= slices, "%d of %d slices", group, slices);
  CHECK(group % shared == 0, "%d slices, %d share a kv head", group, shared);
  const int64_t head_bytes = 2 * int64_t{p.len_kv} * (p.head_dim + p.head_dim_v);
  CHECK(group == shared || group / shared * head_bytes <= bytes, "%d slices of len_kv %d", group, p.len_kv);
  // No more groups than have to be, and these as even as they can be.
  const int64_t most = max_of<int64_t>(1, bytes / max_of<int64_t>(1, head_bytes)) * shared;
  const int64_t count = ceil_div<int64_t>(slices, group);
  CHECK(count == ceil_div<int64_t>(slices, most), "%d of %d slices of len_kv %d could be more", group, slices,
        p.len_kv);
  CHECK(group == shared || ceil_div<int64_t>(slices, group - shared) > count, "%d of %d slices: a small group is left",
        group, slices);
}

void check_buckets(int32_t max_count) {
  const int32_t shift = sched::bucket_shift(max_count);
  CHECK(max_count >> shift < sched::kPlanBuckets, "count %d shift %d", max_count, shift);
  CHECK(shift == 0 || max_count >> (shift - 1) >= sched::kPlanBuckets, "count %d shift %d is too coarse", max_count,
        shift);
}

int run() {
  for (int32_t row_blocks : {1, 2, 3, 7, 64}) {
    for (int32_t slices : {1, 2, 5, 16, 33}) {
      for (int32_t group = 1; group <= slices; ++group) {
        check_order({row_blocks, slices, group});
        for (int32_t late : {0, 1, row_blocks / 2}) check_parted_order({row_blocks, slices, group}, late);
      }
    }
  }
  check_late_tiles();
  check_late_windows();
  Random random(31);
  for (int32_t trial = 0; trial < 2000; ++trial) {
    check_group_size(random);
    check_divisor(random);
  }
  for (int32_t count : {0, 1, 1023, 1024, 1025, 2047, 2048, 1 << 20, INT32_MAX}) check_buckets(count);
  CHECK(sched::plan_bytes<mask::Composite>(0) == 0, "no plan");
  // Entries are copied 16 bytes at a time.
  CHECK(sizeof(sched::PlanEntry<mask::Document>) % 16 == 0 && sizeof(sched::PlanEntry<mask::Composite>) % 16 == 0 &&
            sizeof(sched::PlanEntry<mask::BlockSparse>) % 16 == 0 && sizeof(sched::PlanEntry<mask::Packed>) % 16 == 0,
        "entries are not whole steps");
  CHECK(sched::plan_bytes<mask::Document>(100) == 100 * sizeof(sched::PlanEntry<mask::Document>), "one entry a block");
  return report("test_sched");
}

}  // namespace
}  // namespace flashmsa::test

int main() { return flashmsa::test::run(); }
