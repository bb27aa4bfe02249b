// Counted tiles and pairs against the definition.
#include <algorithm>
#include <vector>

#include "binding/tile_counts.h"
#include "mask_cases.h"

namespace flashmsa::test {
namespace {

int64_t count_pairs(const MaskCase& mask) {
  int64_t pairs = 0;
  for (int32_t b = 0; b < mask.batch; ++b) {
    for (int32_t h = 0; h < mask.heads; ++h) {
      for (int32_t i = 0; i < mask.len_q; ++i) {
        for (int32_t j = 0; j < mask.len_kv; ++j) pairs += mask.allowed(b, h, i, j);
      }
    }
  }
  return pairs;
}

// Pairs exactly; every tile of every block of rows once, in one class or another; full ones hold pairs alone.
void check(const MaskCase& mask, int32_t block_q, int32_t block_kv) {
  AttentionParams params;
  mask.fill(params);
  const binding::TileCounts counts = binding::count_tiles(params, block_q, block_kv);
  const int64_t pairs = count_pairs(mask);
  CHECK(counts.allowed_pairs == pairs, "%lld, not %lld, %s", static_cast<long long>(counts.allowed_pairs),
        static_cast<long long>(pairs), mask.text().c_str());
  CHECK(counts.full >= 0 && counts.partial >= 0 && counts.skipped >= 0, "%s", mask.text().c_str());
  const int64_t whole = counts.full * block_kv;  // of at least one row
  CHECK(whole <= pairs && pairs <= (counts.full + counts.partial) * block_q * block_kv, "%s", mask.text().c_str());
  if (mask.kind == MaskKind::kDilated) return;  // tiles of residue classes
  const int64_t blocks = int64_t{mask.batch} * mask.heads * ceil_div(mask.len_q, block_q);
  CHECK(counts.full + counts.partial + counts.skipped == blocks * ceil_div(mask.len_kv, block_kv), "%s",
        mask.text().c_str());
}

// Documents as the GPU's kernels lay them: the same pairs, and no more tiles outside of documents than rows at their ends.
void check_packed(const MaskCase& mask, int32_t block_q, int32_t block_kv) {
  AttentionParams params;
  mask.fill(params);
  const binding::TileCounts grid = binding::count_tiles(params, block_q, block_kv);
  const binding::TileCounts never = binding::count_tiles(params, block_q, block_kv, INT32_MAX);
  CHECK(never.full == grid.full && never.partial == grid.partial && never.skipped == grid.skipped &&
            never.allowed_pairs == grid.allowed_pairs,
        "%s", mask.text().c_str());
  const binding::TileCounts packed = binding::count_tiles(params, block_q, block_kv, 1);
  CHECK(packed.allowed_pairs == grid.allowed_pairs, "%lld, not %lld, %s", static_cast<long long>(packed.allowed_pairs),
        static_cast<long long>(grid.allowed_pairs), mask.text().c_str());
  const int64_t whole = packed.full * block_kv;  // of at least one row
  CHECK(whole <= packed.allowed_pairs && packed.allowed_pairs <= (packed.full + packed.partial) * block_q * block_kv,
        "%s", mask.text().c_str());
}

// A dense mask by hand, and a list of one whole and one mixed cell that differs from head to head.
void check_known() {
  MaskCase mask;
  mask.batch = 2;
  mask.heads = 3;
  mask.len_q = 200;
  mask.len_kv = 300;
  AttentionParams params;
  mask.fill(params);
  const binding::TileCounts dense = binding::count_tiles(params, 128, 128);
  CHECK(dense.full == 24 && dense.partial == 12 && dense.skipped == 0 && dense.allowed_pairs == 360000, "%lld %lld",
        static_cast<long long>(dense.full), static_cast<long long>(dense.partial));

  mask.kind = MaskKind::kBlockSparse;
  mask.batch = 1;
  mask.heads = 2;
  mask.len_q = 128;
  mask.len_kv = 256;
  mask.list.slices_head = 2;
  mask.list.row_start = {0, 2, 2, 3};
  mask.list.whole_count = {1, 0};
  mask.list.cells = {1, 0, 1};
  mask.list.detail = {-1, 0b0001, 0b0111};
  mask.fill(params);
  const binding::TileCounts list = binding::count_tiles(params, 128, 128);
  CHECK(list.full == 1 && list.partial == 2 && list.skipped == 1, "%lld %lld %lld", static_cast<long long>(list.full),
        static_cast<long long>(list.partial), static_cast<long long>(list.skipped));
  CHECK(list.allowed_pairs == 128 * 128 + 4 * 64 * 64, "%lld", static_cast<long long>(list.allowed_pairs));
}

int run() {
  check_known();
  Random random(99);
  for (int32_t trial = 0; trial < 400; ++trial) {
    const MaskCase mask =
        random_mask(random, random.between(1, 2), random.between(1, 260), random.between(0, 260), random.between(1, 3));
    const bool list = mask.kind == MaskKind::kBlockSparse;
    check(mask, list ? random.pick({64, 128}) : 64 * random.between(1, 3), random.pick({64, 128}));
    if (mask.kind == MaskKind::kDocument) check_packed(mask, 64, 128);
  }
  return report("test_tile_counts");
}

}  // namespace
}  // namespace flashmsa::test

int main() { return flashmsa::test::run(); }
