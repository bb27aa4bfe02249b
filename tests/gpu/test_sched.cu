// The plan that one CTA makes of a document mask's row blocks.
#include <map>
#include <utility>

#include "gpu_test.cuh"
#include "mask/document.h"
#include "sched/plan.cuh"

namespace flashmsa::test {
namespace {

using mask::Document;
using sched::PlanEntry;
using sched::PlanParams;

struct PlanCase {
  int32_t batches, len_q, len_kv, block_q, block_kv, num_documents;
  bool causal, same_offsets;
  std::vector<int32_t> q_offsets, kv_offsets;  // (batches, num_documents + 1)

  int32_t row_blocks() const { return ceil_div(len_q, block_q); }
  int32_t entries() const { return batches * row_blocks(); }

  PlanParams<Document> params(const int32_t* q, const int32_t* kv) const {
    const int64_t stride = batches > 1 ? num_documents + 1 : 0;
    return {{q, same_offsets ? q : kv, num_documents, stride, len_kv, causal},
            batches,
            1,  // heads
            row_blocks(),
            block_q,
            block_kv,
            len_q,
            ceil_div(len_kv, block_kv)};
  }
};

// Cuts of [0, length] in order, some documents empty, the last one not always at the end.
std::vector<int32_t> random_cuts(Random& random, int32_t batches, int32_t documents, int32_t length) {
  std::vector<int32_t> all;
  for (int32_t batch = 0; batch < batches; ++batch) {
    std::vector<int32_t> cuts = {0};
    for (int32_t i = 0; i < documents; ++i) cuts.push_back(random.between(0, length));
    for (int32_t i = 2; i <= documents; ++i) {
      if (random.between(0, 9) == 0) cuts[i] = cuts[i - 1];
    }
    if (random.coin()) cuts.back() = length;
    std::sort(cuts.begin(), cuts.end());
    all.insert(all.end(), cuts.begin(), cuts.end());
  }
  return all;
}

PlanCase random_case(Random& random, int32_t max_length) {
  PlanCase c;
  c.batches = random.pick({1, 1, 2, 5});
  c.len_q = random.between(1, max_length);
  c.same_offsets = random.coin();
  c.len_kv = c.same_offsets ? c.len_q : random.between(0, max_length);
  c.block_q = random.pick({64, 128, 192});
  c.block_kv = random.pick({64, 128});
  c.num_documents = random.pick({1, 2, 16, 300});
  c.causal = random.coin();
  c.q_offsets = random_cuts(random, c.batches, c.num_documents, c.len_q);
  c.kv_offsets = random_cuts(random, c.batches, c.num_documents, c.len_kv);
  return c;
}

// Runs the kernel with poison behind the plan and in the tile counter.
std::vector<PlanEntry<Document>> run_plan(const PlanCase& c) {
  constexpr int32_t kGuard = 64;
  const std::vector<int32_t> poison(4, 0x5A5A5A5A);
  const DeviceArray<int32_t> q(c.q_offsets), kv(c.kv_offsets), counter(poison);
  const DeviceArray<PlanEntry<Document>> plan(c.entries() + kGuard);
  launch(sched::plan_kernel<Document>, 1, sched::kPlanThreads, 0, c.params(q.data(), kv.data()), counter.data(),
         plan.data());
  const std::vector<int32_t> count = counter.read();
  EXPECT(count[0] == 0, "the tile counter starts at %d", count[0]);
  for (int i = 1; i < 4; ++i) EXPECT(count[i] == poison[i], "wrote past the tile counter, at %d", i);
  std::vector<PlanEntry<Document>> entries = plan.read();
  for (int32_t i = c.entries(); i < c.entries() + kGuard; ++i) {
    EXPECT(entries[i].row_block == -1 && entries[i].tiles.end == -1, "wrote entry %d of %d", i, c.entries());
  }
  entries.resize(c.entries());
  return entries;
}

// Every row block of every batch once, with its own block and tiles; in an order where no entry's bucket is above the
// bucket of the one before it.
void expect_plan(const PlanCase& c, const std::vector<PlanEntry<Document>>& plan) {
  const PlanParams<Document> p = c.params(c.q_offsets.data(), c.kv_offsets.data());
  const int32_t shift = sched::bucket_shift(p.max_tiles);
  std::map<std::pair<int32_t, int32_t>, int> seen;
  for (int32_t i = 0; i < c.entries(); ++i) {
    const PlanEntry<Document>& entry = plan[i];
    const int32_t batch = entry.block.batch, row_block = entry.row_block;
    EXPECT(batch >= 0 && batch < c.batches && row_block >= 0 && row_block < p.row_blocks,
           "entry %d: batch %d, block %d", i, batch, row_block);
    if (batch < 0 || batch >= c.batches || row_block < 0 || row_block >= p.row_blocks) continue;
    EXPECT(++seen[std::make_pair(batch, row_block)] == 1, "batch %d, block %d comes twice", batch, row_block);
    const int32_t first = row_block * c.block_q, last = std::min(first + c.block_q, c.len_q) - 1;
    const Document::Block block = Document::block(p.mask, batch, 0, first, last);
    const mask::KeyTiles tiles = Document::tiles(p.mask, block, first, last, c.block_kv);
    EXPECT(entry.block.doc_begin == block.doc_begin && entry.block.doc_end == block.doc_end,
           "batch %d, block %d: documents [%d, %d), not [%d, %d)", batch, row_block, entry.block.doc_begin,
           entry.block.doc_end, block.doc_begin, block.doc_end);
    const mask::KeyTiles& t = entry.tiles;
    EXPECT(t.begin == tiles.begin && t.full_begin == tiles.full_begin && t.full_end == tiles.full_end &&
               t.end == tiles.end,
           "batch %d, block %d: tiles %d %d %d %d, not %d %d %d %d", batch, row_block, t.begin, t.full_begin,
           t.full_end, t.end, tiles.begin, tiles.full_begin, tiles.full_end, tiles.end);
    EXPECT(0 <= t.begin && t.begin <= t.full_begin && t.full_begin <= t.full_end && t.full_end <= t.end &&
               t.end <= p.max_tiles,
           "batch %d, block %d: tiles %d %d %d %d of %d", batch, row_block, t.begin, t.full_begin, t.full_end, t.end,
           p.max_tiles);
    EXPECT(i == 0 || plan[i - 1].tiles.count() >> shift >= t.count() >> shift, "entry %d: %d tiles after %d", i,
           t.count(), plan[i - 1].tiles.count());
  }
}

GPU_TEST(plan_small) {
  for (int i = 0; i < 40; ++i) {
    const PlanCase c = random_case(random, random.pick({1, 200, 3000}));
    expect_plan(c, run_plan(c));
  }
}

// More row blocks than threads, more documents than row blocks.
GPU_TEST(plan_many_blocks) {
  for (int i = 0; i < 6; ++i) {
    PlanCase c = random_case(random, 300000);
    c.block_q = 64;
    c.num_documents = random.pick({1000, 20000});
    c.q_offsets = random_cuts(random, c.batches, c.num_documents, c.len_q);
    c.kv_offsets = random_cuts(random, c.batches, c.num_documents, c.len_kv);
    expect_plan(c, run_plan(c));
  }
}

// One causal document: every count of tiles from few to all, in descending order though blocks come ascending.
GPU_TEST(plan_one_causal_document) {
  for (const int32_t length : {1, 127, 128, 129, 20000}) {
    const PlanCase c = {1, length, length, 128, 128, 1, true, true, {0, length}, {0, length}};
    const std::vector<PlanEntry<Document>> plan = run_plan(c);
    expect_plan(c, plan);
    for (int32_t i = 0; i < c.entries(); ++i) {
      EXPECT(plan[i].row_block == c.entries() - 1 - i, "entry %d is block %d", i, plan[i].row_block);
    }
  }
}

// More key tiles than buckets: a bucket holds several counts.
GPU_TEST(plan_wide_buckets) {
  for (const int32_t length : {64 * 1023, 64 * 1024, 64 * 1024 + 1, 64 * 5000}) {
    const PlanCase c = {1, length, length, 192, 64, 2, true, true, {0, length / 3, length}, {0, length / 3, length}};
    expect_plan(c, run_plan(c));
  }
}

// Offsets that nobody checked: any 32 bits, decreasing, negative, far past the length. The plan is still one of all blocks,
// and its tiles lie inside the tensor.
GPU_TEST(plan_garbage_offsets) {
  for (int i = 0; i < 30; ++i) {
    PlanCase c = random_case(random, 5000);
    for (std::vector<int32_t>* offsets : {&c.q_offsets, &c.kv_offsets}) {
      for (int32_t& x : *offsets) {
        switch (i % 4) {
          case 0:
            x = static_cast<int32_t>(random.bits());
            break;
          case 1:
            x = random.between(-2 * c.len_q, 2 * c.len_q);
            break;
          case 2:
            x = c.len_q - x;
            break;
          default:
            x = random.pick({INT32_MIN, INT32_MAX, 0, -1, x});
        }
      }
    }
    expect_plan(c, run_plan(c));
  }
}

// The order of equal counts is the atomics' choice; all else repeats.
GPU_TEST(plan_repeats) {
  const PlanCase c = random_case(random, 100000);
  for (int i = 0; i < 10; ++i) expect_plan(c, run_plan(c));
}

}  // namespace
}  // namespace flashmsa::test

int main(int argc, char** argv) { return flashmsa::test::run_tests(argc, argv); }
