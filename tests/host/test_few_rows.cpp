// When calls of few rows have small tiles.
#include "check.h"
#include "fwd/few_rows.h"

namespace flashmsa::test {
namespace {

using fwd::has_few_rows;
using fwd::SmallTiles;

AttentionParams of_shape(MaskKind kind, int32_t batch, int32_t heads, int32_t len_q) {
  AttentionParams p;
  p.mask.kind = kind;
  p.batch = batch;
  p.heads_q = heads;
  p.len_q = len_q;
  return p;
}

// The last shapes that have small tiles, and the first that have not.
int run() {
  constexpr SmallTiles kSmall = {64, 2};
  const int32_t slots = static_cast<int32_t>(kSmall.slots());
  const auto small = [&](MaskKind kind, int32_t batch, int32_t heads, int32_t len_q, int32_t block_q = 128) {
    return has_few_rows(of_shape(kind, batch, heads, len_q), kSmall, block_q);
  };
  for (const MaskKind kind : {MaskKind::kDense, MaskKind::kCausal}) {
    CHECK(small(kind, 1, slots / 2, 128), "two tiles a head, as many as run");
    CHECK(!small(kind, 1, slots / 2, 129), "three tiles a head");
    CHECK(!small(kind, 1, slots / 2 + 1, 128), "one head too many");
    CHECK(small(kind, slots, 7, 64), "half of a larger tile would be empty");
    CHECK(!small(kind, slots, 7, 65), "less than half");
    CHECK(small(kind, slots, 7, 96, 192) && !small(kind, slots, 7, 97, 192), "half of another tile");
    CHECK(!small(kind, 0, 7, 64) && !small(kind, 7, 0, 64) && !small(kind, 7, 7, 0), "nothing to do");
    CHECK(!small(kind, 1 << 15, 1 << 15, INT32_MAX), "more tiles than 32 bits count");
  }
  const int32_t more = slots * 4 / 3;
  CHECK(small(MaskKind::kCausal, 1, more / 8, 512) && !small(MaskKind::kDense, 1, more / 8, 512), "long and causal");
  CHECK(!small(MaskKind::kCausal, 1, more / 8 + 1, 512), "too many of them");
  CHECK(!small(MaskKind::kCausal, 1, more / 7, 448), "not long");
  for (const MaskKind kind : {MaskKind::kDocument, MaskKind::kComposite, MaskKind::kHash, MaskKind::kBlockSparse}) {
    CHECK(!small(kind, 1, 1, 64), "masks with a plan");
  }
  return report("test_few_rows");
}

}  // namespace
}  // namespace flashmsa::test

int main() { return flashmsa::test::run(); }
