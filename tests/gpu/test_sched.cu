// The plan that the device makes of masks whose row blocks differ by device data: documents, composites with documents,
// lists of cells. Against the same code on the host, and against the masks' definition.
#include <map>
#include <memory>
#include <utility>

#include "../host/mask_cases.h"
#include "gpu_test.cuh"
#include "mask/block_sparse.h"
#include "mask/composite.h"
#include "mask/document.h"
#include "sched/plan.cuh"

namespace flashmsa::test {
namespace {

using mask::BlockSparse;
using mask::Composite;
using mask::Document;
using sched::PlanEntry;
using sched::PlanParams;

// ---- Cases ------------------------------------------------------------------------------------------------------------

struct PlanCase {
  MaskCase mask;
  int32_t block_q = 128, block_kv = 128;
  int32_t turns = 1;

  bool listed() const { return mask.kind == MaskKind::kBlockSparse; }
  int32_t row_blocks() const { return ceil_div(mask.len_q, block_q); }
  int32_t max_tiles() const { return ceil_div(mask.len_kv, block_kv); }
  // Batches with a plan of their own.
  int32_t batches() const {
    const bool apart = !mask.shared_offsets || !mask.global.prefixes[0].empty() || !mask.global.prefixes[1].empty();
    return listed() || apart ? mask.batch : 1;
  }
  // A list has a plan for every head of every batch, by a CTA each; other masks have one plan.
  int32_t plans() const { return listed() ? mask.batch * mask.heads : 1; }
  int32_t plan_entries() const { return (listed() ? 1 : batches()) * row_blocks(); }
};

template <class Mask>
PlanParams<Mask> plan_params(const PlanCase& c, const AttentionParams& p) {
  return {Mask::make_params(p), c.batches(),  c.mask.heads,  c.row_blocks(), c.block_q,
          c.block_kv,           c.mask.len_q, c.max_tiles(), c.turns};
}

// A mask's parameters with its data on the device.
class DeviceMask {
 public:
  explicit DeviceMask(const MaskCase& mask) {
    mask.fill(params);
    MaskArgs& m = params.mask;
    move(m.q_offsets, mask.q_offsets);
    move(m.kv_offsets, mask.kv_offsets);
    move(m.kv_used, mask.kv_used);
    for (int a : {0, 1}) {
      move(m.global.prefixes[a], mask.global.prefixes[a]);
      move(m.local.prefixes[a], mask.local.prefixes[a]);
    }
    move(m.list.row_start, mask.list.row_start);
    move(m.list.whole_count, mask.list.whole_count);
    move(m.list.cells, mask.list.cells);
    move(m.list.detail, mask.list.detail);
    move(m.list.bits, mask.list.bits);
  }

  AttentionParams params;

 private:
  void move(const int32_t*& pointer, const std::vector<int32_t>& values) {
    if (pointer == nullptr) return;
    arrays_.push_back(std::make_unique<DeviceArray<int32_t>>(values));
    pointer = arrays_.back()->data();
  }

  std::vector<std::unique_ptr<DeviceArray<int32_t>>> arrays_;
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

PlanCase document_case(Random& random, int32_t max_length, std::initializer_list<int32_t> documents) {
  PlanCase c;
  MaskCase& m = c.mask;
  m.kind = MaskKind::kDocument;
  m.causal = random.coin();
  m.batch = random.pick({1, 1, 2, 5});
  m.heads = random.between(1, 3);
  m.len_q = random.between(1, max_length);
  const bool same_offsets = random.coin();
  m.len_kv = same_offsets ? m.len_q : random.between(0, max_length);
  m.shared_offsets = m.batch == 1 || random.between(0, 3) == 0;
  const int32_t count = random.pick(documents), rows = m.shared_offsets ? 1 : m.batch;
  m.q_offsets = random_cuts(random, rows, count, m.len_q);
  m.kv_offsets = same_offsets ? m.q_offsets : random_cuts(random, rows, count, m.len_kv);
  c.block_q = random.pick({64, 128, 192, 256});
  c.block_kv = random.pick({32, 64, 128});
  c.turns = random.pick({1, 1, 3, sched::kMostTurns});
  return c;
}

// The same with bounds over all and inside the documents, and keys that are not in use.
PlanCase composite_case(Random& random, int32_t max_length, std::initializer_list<int32_t> documents) {
  PlanCase c = document_case(random, max_length, documents);
  c.block_q = min_of(c.block_q, sched::kMaxSpans * sched::kSpanRows);
  MaskCase& m = c.mask;
  if (random.between(0, 4) == 0) return c;  // as it is: what options need that only this mask's kernels have
  m.kind = MaskKind::kComposite;
  m.causal = false;
  const int32_t keep = random.between(0, 3);  // at most one of the bands has first keys
  if (random.between(0, 2) > 0) m.global = random_band(random, m.len_kv, m.batch, keep == 0);
  if (random.between(0, 2) > 0) m.local = random_band(random, m.len_kv / 2, m.documents(), keep == 1);
  m.positions_local = random.coin();
  m.positions_top_left = random.coin();
  if (!m.shared_offsets || random.coin()) return c;
  for (int32_t d = 0; d < m.documents(); ++d) {
    const int32_t keys = m.kv_offsets[d + 1] - m.kv_offsets[d];
    m.kv_used.push_back(random.pick({keys, 0, random.between(0, keys)}));
  }
  return c;
}

PlanCase list_case(Random& random, int32_t max_length) {
  PlanCase c;
  MaskCase& m = c.mask;
  m.kind = MaskKind::kBlockSparse;
  m.batch = random.between(1, 3);
  m.heads = random.between(1, 3);
  m.len_q = random.between(1, max_length);
  m.len_kv = random.between(1, max_length);
  if (random.coin()) make_composite(random, m);
  make_block_sparse(random, m);
  c.block_kv = random.pick({32, 64, 128});
  return c;
}

// A list of its own for every head: columns of the cells of a row, ascending, the last `mixed` of them mixed ones.
template <class Columns>
PlanCase written_list(int32_t batch, int32_t heads, int32_t cell_rows, int32_t cell_columns, const Columns& columns) {
  PlanCase c;
  MaskCase& m = c.mask;
  m.kind = MaskKind::kBlockSparse;
  m.batch = m.list.slices_batch = batch;
  m.heads = m.list.slices_head = heads;
  m.len_q = 128 * cell_rows;
  m.len_kv = 128 * cell_columns;
  for (int32_t slice = 0; slice < batch * heads; ++slice) {
    for (int32_t row = 0; row < cell_rows; ++row) {
      m.list.row_start.push_back(static_cast<int32_t>(m.list.cells.size()));
      int32_t mixed = 0;
      const std::vector<int32_t> cells = columns(slice, row, mixed);
      for (size_t i = 0; i < cells.size(); ++i) {
        m.list.cells.push_back(cells[i]);
        m.list.detail.push_back(i + mixed < cells.size() ? mask::kWholeCell : 6);
      }
      m.list.whole_count.push_back(static_cast<int32_t>(cells.size()) - mixed);
    }
    m.list.row_start.push_back(static_cast<int32_t>(m.list.cells.size()));
  }
  m.list.cells.push_back(0);  // no list has no room at all
  m.list.detail.push_back(0);
  return c;
}

// ---- Running the kernel -------------------------------------------------------------------------------------------------

// With poison behind the plans and in the tile counter.
template <class Mask>
std::vector<PlanEntry<Mask>> run_plan(const PlanCase& c) {
  constexpr int32_t kGuard = 64;
  const int32_t entries = c.plans() * c.plan_entries();
  const std::vector<int32_t> poison(4, 0x5A5A5A5A);
  const DeviceMask device(c.mask);
  const DeviceArray<int32_t> counter(poison);
  const DeviceArray<PlanEntry<Mask>> plan(entries + kGuard);
  launch(sched::plan_kernel<Mask>, c.plans(), sched::kPlanThreads, 0, plan_params<Mask>(c, device.params),
         counter.data(), plan.data());
  const std::vector<int32_t> count = counter.read();
  EXPECT(count[0] == 0, "the tile counter starts at %d", count[0]);
  for (int i = 1; i < 4; ++i) EXPECT(count[i] == poison[i], "wrote past the tile counter, at %d", i);
  std::vector<PlanEntry<Mask>> found = plan.read();
  const auto* guard = reinterpret_cast<const unsigned char*>(found.data() + entries);
  for (size_t i = 0; i < kGuard * sizeof(PlanEntry<Mask>); ++i) {
    EXPECT(guard[i] == 0xFF, "wrote %zu bytes past the %d entries", i, entries);
  }
  found.resize(entries);
  return found;
}

// ---- An entry as numbers ----

using Numbers = std::vector<int32_t>;

void append(Numbers& to, const mask::Interval& x) { to.insert(to.end(), {x.begin, x.end}); }
void append(Numbers& to, const mask::KeyTiles& x) { to.insert(to.end(), {x.begin, x.full_begin, x.full_end, x.end}); }
void append(Numbers& to, const mask::TwoRunTiles& x) {
  append(to, x.main);
  to.insert(to.end(), {x.first_begin, x.first_end});
}
void append(Numbers& to, const mask::Bounds& x) {
  to.insert(to.end(), {x.low, x.high, x.outer, x.keep, x.causal[0], x.causal[1], x.prefix[0], x.prefix[1],
                       static_cast<int32_t>(x.has_prefix)});
}
void append(Numbers& to, const Document::Block& x) {
  to.insert(to.end(), {x.batch, x.doc_begin, x.doc_end, static_cast<int32_t>(x.one_document), x.keys.begin, x.keys.end,
                       x.keys.shift});
}
void append(Numbers& to, const Composite::Block& x) {
  to.insert(to.end(), {x.batch, x.head, x.prefix[0], x.prefix[1], x.doc_begin, x.doc_end,
                       static_cast<int32_t>(x.one_document), x.place.position_shift});
  append(to, x.place.keys);
  append(to, x.place.bounds);
}
void append(Numbers& to, const BlockSparse::Block& x) {
  append(to, x.interval);
  to.insert(to.end(), {x.entry, x.whole, x.mixed});
}

template <class Mask>
Numbers numbers(const PlanEntry<Mask>& entry, int32_t block_q) {
  Numbers all = {entry.row_block};
  append(all, entry.tiles);
  if constexpr (Mask::kSpansPlanned) {
    for (int32_t part = 0; part < block_q / sched::kSpanRows; ++part) {
      all.insert(all.end(), {entry.spans[part].front, entry.spans[part].steps, entry.spans[part].back});
    }
  }
  append(all, entry.block);
  return all;
}

std::string text(const Numbers& all) {
  std::string out;
  for (const int32_t x : all) out.append(" ").append(std::to_string(x));
  return out;
}

int32_t batch_of(const Document::Block& block) { return block.batch; }
int32_t batch_of(const Composite::Block& block) { return block.batch; }
int32_t batch_of(const BlockSparse::Block& block) { return block.interval.batch; }

// ---- What holds for every plan ----

bool in_order(const mask::KeyTiles& t, int32_t end) {
  return 0 <= t.begin && t.begin <= t.full_begin && t.full_begin <= t.full_end && t.full_end <= t.end && t.end <= end;
}

// Tiles lie inside the tensor, or a list's entries inside the list, whatever the device data hold.
template <class Block>
bool in_bounds(const PlanCase& c, const Block& /*block*/, const mask::KeyTiles& t) {
  return in_order(t, c.max_tiles());
}
bool in_bounds(const PlanCase& c, const Composite::Block& /*block*/, const mask::TwoRunTiles& t) {
  return in_order(t.main, c.max_tiles()) && 0 <= t.first_begin && t.first_begin <= t.first_end &&
         t.first_end <= (t.main.count() > 0 ? t.main.begin : c.max_tiles());
}
bool in_bounds(const PlanCase& c, const BlockSparse::Block& block, const mask::TwoRunTiles& t) {
  const int32_t parts = mask::kCell / c.block_kv, capacity = static_cast<int32_t>(c.mask.list.cells.size());
  return 0 <= block.entry && 0 <= block.whole && 0 <= block.mixed &&
         int64_t{block.entry} + block.whole + block.mixed <= capacity && in_order(t.main, block.whole * parts) &&
         block.whole * parts <= t.first_begin && t.first_begin <= t.first_end &&
         t.first_end <= (block.whole + block.mixed) * parts;
}

// Every row block of every batch once, with what the host makes of it; turn after turn, in an order where no entry's bucket is
// above the bucket of the one before it.
template <class Mask>
void expect_plan(const PlanCase& c, const std::vector<PlanEntry<Mask>>& found) {
  AttentionParams params;
  c.mask.fill(params);
  const PlanParams<Mask> p = plan_params<Mask>(c, params);
  const int32_t shift = c.turns > 1 ? 0 : sched::bucket_shift(p.max_tiles);
  const auto bucket = [&](int32_t count) { return std::min(count >> shift, sched::kPlanBuckets / c.turns - 1); };
  const auto turn = [&](const PlanEntry<Mask>& entry) {
    const int32_t number = (Mask::kListed ? 0 : batch_of(entry.block)) * p.row_blocks + entry.row_block;
    return number / ceil_div(c.plan_entries(), c.turns);
  };
  for (int32_t slice = 0; slice < c.plans(); ++slice) {
    const PlanEntry<Mask>* plan = found.data() + int64_t{slice} * c.plan_entries();
    std::map<std::pair<int32_t, int32_t>, int> seen;
    for (int32_t i = 0; i < c.plan_entries(); ++i) {
      const PlanEntry<Mask>& entry = plan[i];
      const int32_t batch = batch_of(entry.block), row_block = entry.row_block;
      const bool inside = batch >= 0 && batch < c.batches() && row_block >= 0 && row_block < p.row_blocks &&
                          (!Mask::kListed || batch == slice / c.mask.heads);
      EXPECT(inside, "plan %d, entry %d: batch %d, block %d", slice, i, batch, row_block);
      if (!inside) continue;
      EXPECT(++seen[std::make_pair(batch, row_block)] == 1, "plan %d: batch %d, block %d comes twice", slice, batch,
             row_block);
      PlanEntry<Mask> wanted = sched::plan_row_block<Mask>(p.mask, batch, slice % c.mask.heads, row_block, c.block_q,
                                                           c.block_kv, c.mask.len_q);
      sched::plan_spans(p.mask, wanted, c.block_q, c.block_kv, c.mask.len_q);
      const Numbers mine = numbers(entry, c.block_q), hosts = numbers(wanted, c.block_q);
      EXPECT(mine == hosts, "plan %d, batch %d: block and so on%s, not%s", slice, batch, text(mine).c_str(),
             text(hosts).c_str());
      EXPECT(in_bounds(c, entry.block, entry.tiles), "plan %d, batch %d: out of bounds:%s", slice, batch,
             text(mine).c_str());
      const int32_t count = entry.tiles.count();
      if constexpr (Mask::kSpansPlanned) {
        for (int32_t part = 0; part < c.block_q / sched::kSpanRows; ++part) {
          const sched::Span& span = entry.spans[part];
          EXPECT(span.front >= 0 && span.steps >= 0 && span.back >= 0 && span.front + span.steps + span.back == count,
                 "batch %d, block %d, part %d: %d + %d + %d of %d steps", batch, row_block, part, span.front,
                 span.steps, span.back, count);
        }
      }
      const int32_t later = i == 0 ? 1 : turn(entry) - turn(plan[i - 1]);
      EXPECT(later >= 0, "plan %d, entry %d: its turn was before the last one's", slice, i);
      EXPECT(later > 0 || bucket(plan[i - 1].tiles.count()) >= bucket(count), "plan %d, entry %d: %d tiles after %d",
             slice, i, count, plan[i - 1].tiles.count());
    }
  }
}

// ---- What a plan of a valid mask says, pair by pair ----

// The key tile of each step.
template <class Mask>
std::vector<int32_t> visited_tiles(const typename Mask::Params& params, const PlanEntry<Mask>& entry,
                                   int32_t block_kv) {
  std::vector<int32_t> tiles;
  for (int32_t step = 0; step < entry.tiles.count(); ++step) {
    const int32_t index = entry.tiles.visit(step);
    if constexpr (Mask::kListed) {
      tiles.push_back(Mask::key_tile(params, entry.block, index, block_kv));
    } else {
      tiles.push_back(index);
    }
  }
  return tiles;
}

// Each tile with a pair that the mask allows is visited once, by the 64 rows whose pair it is; and what is visited without
// a test is allowed as a whole.
template <class Mask>
void expect_covers(const PlanCase& c, const std::vector<PlanEntry<Mask>>& plan) {
  AttentionParams params;
  c.mask.fill(params);
  const typename Mask::Params mask = Mask::make_params(params);
  for (int32_t n = 0; n < static_cast<int32_t>(plan.size()); ++n) {
    const PlanEntry<Mask>& entry = plan[n];
    const int32_t batch = batch_of(entry.block), head = n / c.plan_entries() % c.mask.heads;
    const std::vector<int32_t> tiles = visited_tiles<Mask>(mask, entry, c.block_kv);
    std::vector<int32_t> step_of(c.max_tiles(), -1);
    for (int32_t step = 0; step < static_cast<int32_t>(tiles.size()); ++step) {
      const bool inside = tiles[step] >= 0 && tiles[step] < c.max_tiles();
      EXPECT(inside && step_of[tiles[step]] == -1, "%s: block %d, step %d: tile %d of %d, or again",
             c.mask.text().c_str(), entry.row_block, step, tiles[step], c.max_tiles());
      if (inside) step_of[tiles[step]] = step;
    }
    const int32_t first_row = entry.row_block * c.block_q;
    const int32_t origin = Mask::origin(mask, entry.block);
    for (int32_t i = first_row; i < std::min(first_row + c.block_q, c.mask.len_q); ++i) {
      for (int32_t j = 0; j < origin; ++j) {
        EXPECT(!c.mask.allowed(batch, head, i, j), "%s: batch %d, head %d, row %d sees key %d before the origin %d",
               c.mask.text().c_str(), batch, head, i, j, origin);
      }
      for (int32_t tile = 0; tile < c.max_tiles(); ++tile) {
        const int32_t step = step_of[tile], first_key = origin + tile * c.block_kv;
        int32_t allowed = 0;
        for (int32_t j = first_key; j < std::min(first_key + c.block_kv, c.mask.len_kv); ++j) {
          allowed += c.mask.allowed(batch, head, i, j) ? 1 : 0;
        }
        bool visited = step >= 0;
        if constexpr (Mask::kSpansPlanned) {
          const sched::Span& span = entry.spans[(i - first_row) / sched::kSpanRows];
          visited = visited && step >= span.front && step < span.front + span.steps;
        }
        EXPECT(visited || allowed == 0, "%s: batch %d, head %d, row %d misses tile %d", c.mask.text().c_str(), batch,
               head, i, tile);
        EXPECT(step < entry.tiles.partial_count() || allowed == c.block_kv,
               "%s: batch %d, head %d, row %d sees %d keys of tile %d, which has no test", c.mask.text().c_str(), batch,
               head, i, allowed, tile);
      }
    }
  }
}

template <class Mask>
void check_plan(const PlanCase& c) {
  expect_plan<Mask>(c, run_plan<Mask>(c));
}

template <class Mask>
void check_plan_and_pairs(const PlanCase& c) {
  const std::vector<PlanEntry<Mask>> plan = run_plan<Mask>(c);
  expect_plan<Mask>(c, plan);
  if (outcome.missed == 0) expect_covers<Mask>(c, plan);
}

// What nobody checked: any 32 bits, negative, far past the length, decreasing.
void spoil(Random& random, std::vector<int32_t>& values, int how, int32_t length) {
  for (int32_t& x : values) {
    switch (how % 4) {
      case 0:
        x = static_cast<int32_t>(random.bits());
        break;
      case 1:
        x = random.between(-2 * length, 2 * length);
        break;
      case 2:
        x = length - x;
        break;
      default:
        x = random.pick({INT32_MIN, INT32_MAX, 0, -1, x});
    }
  }
}

// ---- Documents ----------------------------------------------------------------------------------------------------------

GPU_TEST(plan_small) {
  for (int i = 0; i < 40; ++i) {
    check_plan<Document>(document_case(random, random.pick({1, 200, 3000}), {1, 2, 16, 300}));
  }
}

GPU_TEST(plan_pairs) {
  for (int i = 0; i < 15; ++i) check_plan_and_pairs<Document>(document_case(random, 600, {1, 2, 16}));
}

// More row blocks than threads, more documents than row blocks.
GPU_TEST(plan_many_blocks) {
  for (int i = 0; i < 6; ++i) {
    PlanCase c = document_case(random, 300000, {1000, 20000});
    c.block_q = 64;
    check_plan<Document>(c);
  }
}

// One causal document: every count of tiles from few to all, in descending order though blocks come ascending.
PlanCase one_causal_document(int32_t length, int32_t block_q, int32_t block_kv, std::vector<int32_t> offsets) {
  PlanCase c;
  c.mask.kind = MaskKind::kDocument;
  c.mask.causal = true;
  c.mask.len_q = c.mask.len_kv = length;
  c.mask.q_offsets = c.mask.kv_offsets = std::move(offsets);
  c.block_q = block_q;
  c.block_kv = block_kv;
  return c;
}

template <class Mask>
void check_one_causal_document() {
  for (const int32_t length : {1, 127, 128, 129, 20000}) {
    const PlanCase c = one_causal_document(length, 128, 128, {0, length});
    const std::vector<PlanEntry<Mask>> plan = run_plan<Mask>(c);
    expect_plan<Mask>(c, plan);
    for (int32_t i = 0; i < c.plan_entries(); ++i) {
      EXPECT(plan[i].row_block == c.plan_entries() - 1 - i, "entry %d is block %d", i, plan[i].row_block);
    }
  }
}

GPU_TEST(plan_one_causal_document) { check_one_causal_document<Document>(); }

// More key tiles than buckets: a bucket holds several counts.
GPU_TEST(plan_wide_buckets) {
  for (const int32_t length : {64 * 1023, 64 * 1024, 64 * 1024 + 1, 64 * 5000}) {
    check_plan<Document>(one_causal_document(length, 192, 64, {0, length / 3, length}));
  }
}

// The plan is still one of all blocks, and its tiles lie inside the tensor.
GPU_TEST(plan_garbage_offsets) {
  for (int i = 0; i < 30; ++i) {
    PlanCase c = document_case(random, 5000, {1, 2, 16, 300});
    spoil(random, c.mask.q_offsets, i, c.mask.len_q);
    spoil(random, c.mask.kv_offsets, i, c.mask.len_q);
    check_plan<Document>(c);
  }
}

// The order of equal counts is the atomics' choice; all else repeats.
GPU_TEST(plan_repeats) {
  const PlanCase c = document_case(random, 100000, {1, 2, 16, 300});
  for (int i = 0; i < 10; ++i) check_plan<Document>(c);
}

// ---- Composites with documents ------------------------------------------------------------------------------------------

GPU_TEST(plan_composite) {
  for (int i = 0; i < 60; ++i) {
    check_plan<Composite>(composite_case(random, random.pick({1, 200, 3000}), {1, 2, 16, 300}));
  }
}

GPU_TEST(plan_composite_pairs) {
  for (int i = 0; i < 40; ++i) check_plan_and_pairs<Composite>(composite_case(random, 600, {1, 2, 3, 16}));
}

// More row blocks than threads; documents that fit the kernel's shared memory, and more of them.
GPU_TEST(plan_composite_many_blocks) {
  for (int i = 0; i < 6; ++i) {
    PlanCase c = composite_case(random, 200000, {500, 20000});
    c.block_q = 64;
    check_plan<Composite>(c);
  }
}

GPU_TEST(plan_composite_one_causal_document) { check_one_causal_document<Composite>(); }

// Windows in two documents of 640 rows, blocks of 128 rows and tiles of 64 keys. The last block is cut off, and all of its
// rows are past the documents.
void check_window_spans(int32_t left, std::initializer_list<int32_t> blocks, const sched::Span (&wanted)[2]) {
  PlanCase c = one_causal_document(1300, 128, 64, {0, 640, 1280});
  c.mask.kind = MaskKind::kComposite;
  c.mask.causal = false;
  c.mask.local.left[0] = left;
  c.mask.local.right[0] = 0;
  const std::vector<PlanEntry<Composite>> plan = run_plan<Composite>(c);
  expect_plan<Composite>(c, plan);
  expect_covers<Composite>(c, plan);
  const sched::Span none[2] = {};
  for (const PlanEntry<Composite>& entry : plan) {
    const bool listed = std::count(blocks.begin(), blocks.end(), entry.row_block) == 1;
    if (!listed && entry.row_block != 10) continue;
    for (int part = 0; part < 2; ++part) {
      const sched::Span &found = entry.spans[part], &span = listed ? wanted[part] : none[part];
      EXPECT(found.front == span.front && found.steps == span.steps && found.back == span.back,
             "window of %d, block %d, part %d: %d + %d + %d", left, entry.row_block, part, found.front, found.steps,
             found.back);
    }
  }
}

// 100 keys back: rows 256 … 383 meet tiles 2 … 5, none of them as a whole, in visit order 5, 4, 3, 2; the upper half
// meets 2 … 4, the lower one 3 … 5.
// 300 keys back: rows 512 … 639 meet tiles 3 … 9, and 6 and 7 as a whole, in visit order 9, 8, 5, 4, 3, 7, 6; the upper half
// meets 3 … 8, the lower one 4 … 9, but what it could skip does not come last.
GPU_TEST(plan_composite_spans) {
  check_window_spans(100, {2, 7}, {{1, 3, 0}, {0, 3, 1}});
  check_window_spans(300, {4, 9}, {{1, 6, 0}, {0, 7, 0}});
}

GPU_TEST(plan_composite_garbage) {
  for (int i = 0; i < 40; ++i) {
    PlanCase c = composite_case(random, 5000, {1, 2, 16, 300});
    MaskCase& m = c.mask;
    for (std::vector<int32_t>* values : {&m.q_offsets, &m.kv_offsets, &m.kv_used, &m.global.prefixes[0],
                                         &m.global.prefixes[1], &m.local.prefixes[0], &m.local.prefixes[1]}) {
      if (random.between(0, 3) > 0) spoil(random, *values, i, m.len_q);
    }
    check_plan<Composite>(c);
  }
}

// ---- Lists --------------------------------------------------------------------------------------------------------------

GPU_TEST(plan_lists) {
  for (int i = 0; i < 40; ++i) check_plan_and_pairs<BlockSparse>(list_case(random, random.pick({1, 200, 700})));
}

// Head 0 of batch 0 has r + 1 cells in row r, its neighbours ever fewer: every slice has its own counts, in its own order.
GPU_TEST(plan_lists_differ) {
  constexpr int32_t kRows = 40;
  for (const int32_t block_kv : {32, 64, 128}) {
    PlanCase c = written_list(2, 3, kRows, kRows, [](int32_t slice, int32_t row, int32_t& mixed) {
      std::vector<int32_t> cells;
      for (int32_t column = slice; column <= row; ++column) cells.push_back(column);
      mixed = static_cast<int32_t>(cells.size()) / 2;
      return cells;
    });
    c.block_kv = block_kv;
    const std::vector<PlanEntry<BlockSparse>> plan = run_plan<BlockSparse>(c);
    expect_plan<BlockSparse>(c, plan);
    for (int32_t slice = 0; slice < 6; ++slice) {
      for (int32_t i = 0; i < kRows; ++i) {
        const PlanEntry<BlockSparse>& entry = plan[slice * kRows + i];
        const int32_t cells = std::max(entry.row_block + 1 - slice, 0);
        EXPECT(i >= kRows - slice || entry.row_block == kRows - 1 - i, "slice %d, entry %d is block %d", slice, i,
               entry.row_block);
        EXPECT(entry.tiles.count() == cells * 128 / block_kv && entry.block.mixed == cells / 2,
               "slice %d, block %d: %d tiles, %d mixed cells", slice, entry.row_block, entry.tiles.count(),
               entry.block.mixed);
      }
    }
  }
}

// All cells, the left half of them whole, under a causal window of 192 keys: a block of rows visits what the window meets
// alone, and begins in the middle of a cell.
GPU_TEST(plan_lists_in_a_window) {
  constexpr int32_t kRows = 20;
  PlanCase c = written_list(1, 2, kRows, kRows, [](int32_t, int32_t, int32_t& mixed) {
    std::vector<int32_t> cells;
    for (int32_t column = 0; column < kRows; ++column) cells.push_back(column);
    mixed = kRows / 2;
    return cells;
  });
  c.block_kv = 64;
  c.mask.global.left[0] = 191;
  c.mask.global.right[0] = 0;
  const std::vector<PlanEntry<BlockSparse>> plan = run_plan<BlockSparse>(c);
  expect_plan<BlockSparse>(c, plan);
  AttentionParams params;
  c.mask.fill(params);
  for (const PlanEntry<BlockSparse>& entry : plan) {
    std::vector<int32_t> tiles = visited_tiles<BlockSparse>(BlockSparse::make_params(params), entry, c.block_kv);
    std::sort(tiles.begin(), tiles.end());
    std::vector<int32_t> wanted;
    for (int32_t t = std::max(2 * entry.row_block - 3, 0); t <= 2 * entry.row_block + 1; ++t) wanted.push_back(t);
    EXPECT(tiles == wanted, "block %d visits%s, not%s", entry.row_block, text(tiles).c_str(), text(wanted).c_str());
  }
}

// More rows than threads, some of them with more cells than one bucket stands for.
GPU_TEST(plan_lists_of_many_rows) {
  for (const int32_t rows : {1023, 1024, 1025, 2500}) {
    PlanCase c = written_list(1, 2, rows, 3000, [&](int32_t, int32_t, int32_t& mixed) {
      std::vector<int32_t> cells(random.pick({0, 1, random.between(0, 20), random.between(0, 200)}));
      for (int32_t& x : cells) x = random.between(0, 2999);
      std::sort(cells.begin(), cells.end());
      cells.erase(std::unique(cells.begin(), cells.end()), cells.end());
      mixed = random.between(0, static_cast<int32_t>(cells.size()));
      return cells;
    });
    c.block_kv = random.pick({32, 64, 128});
    if (random.coin()) c.mask.global.right[0] = random.between(-1000, 1000);
    check_plan<BlockSparse>(c);
  }
}

// Whatever a list holds, its plan names entries inside it. Counts may be more than there are key tiles.
GPU_TEST(plan_garbage_lists) {
  for (int i = 0; i < 60; ++i) {
    PlanCase c = list_case(random, 700);
    MaskCase& m = c.mask;
    if (random.coin()) {  // more entries than key tiles, if the rows' starts say so
      m.list.cells.resize(4000, 1);
      m.list.detail.resize(4000, 5);
    }
    const int32_t capacity = static_cast<int32_t>(m.list.cells.size());
    for (std::vector<int32_t>* values : {&m.list.row_start, &m.list.whole_count, &m.list.cells, &m.list.detail,
                                         &m.q_offsets, &m.kv_offsets, &m.kv_used}) {
      if (random.between(0, 2) > 0) spoil(random, *values, i, capacity);
    }
    check_plan<BlockSparse>(c);
  }
}

}  // namespace
}  // namespace flashmsa::test

int main(int argc, char** argv) { return flashmsa::test::run_tests(argc, argv); }
