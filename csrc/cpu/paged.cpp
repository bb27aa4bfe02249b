// Attention over pages: rows of a block are a few queries times the query heads that share a kv head, so that a key is
// loaded once for all of them. Tiles of 64 keys are read in place where they lie in one page, else put together first.
#include "cpu/paged.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/block.h"
#include "cpu/isa.h"
#include "mask/composite.h"

#define FLASHMSA_CPU_BODY "cpu/attend_block.h"
#include "cpu/each_isa.h"

namespace flashmsa::cpu {
namespace {

// The queries and keys of one sequence, whatever the offsets and lengths hold.
struct Sequence {
  int32_t batch;
  int64_t first_row;  // packed: its first row of q; else 0
  int32_t len_q, len_kv;
};

Sequence find_sequence(const PagedParams& p, int32_t batch) {
  Sequence s = {batch, 0, p.len_q, 0};
  if (p.cu_seqlens_q != nullptr) {
    const int32_t begin = clamp(p.cu_seqlens_q[batch], 0, p.total_q);
    s.first_row = begin;
    s.len_q = clamp(p.cu_seqlens_q[batch + 1], begin, p.total_q) - begin;
  }
  if (p.num_pages > 0) {
    const int64_t capacity = min_of<int64_t>(int64_t{p.max_pages} * p.page_size, kUnbounded);
    const int64_t length = p.kv_lens == nullptr ? capacity : p.kv_lens[batch];
    s.len_kv = static_cast<int32_t>(clamp<int64_t>(length, 0, capacity));
  }
  return s;
}

// Rows that are computed together: row r is query first_query + r / heads, head first_head + r % heads.
struct RowBlock {
  int32_t batch, head_kv, first_head, heads, first_query, queries;

  int32_t rows() const { return heads * queries; }
  int32_t query(int32_t row) const { return first_query + row / heads; }
  int32_t head(int32_t row) const { return first_head + row % heads; }
};

// Of all sequences. A block's queries share a list of pages.
std::vector<RowBlock> find_blocks(const PagedParams& p) {
  const int32_t group = p.heads_q / p.heads_kv;
  // NOTE: a block has one slope.
  const int32_t most_heads = p.alibi_slopes != nullptr ? 1 : min_of(group, kBlockQ);
  const int32_t most_queries = kBlockQ / most_heads;
  const int32_t span = p.query_pages != nullptr ? p.query_block : kUnbounded;
  std::vector<RowBlock> blocks;
  for (int32_t batch = 0; batch < p.batch; ++batch) {
    const int32_t len_q = find_sequence(p, batch).len_q;
    for (int32_t head_kv = 0; head_kv < p.heads_kv; ++head_kv) {
      for (int32_t head = 0; head < group; head += most_heads) {
        int32_t queries = 0;
        for (int64_t query = 0; query < len_q; query += queries) {
          const int64_t span_end = min_of<int64_t>(query / span * span + span, len_q);
          queries = static_cast<int32_t>(min_of<int64_t>(span_end - query, most_queries));
          blocks.push_back({batch, head_kv, head_kv * group + head, min_of(most_heads, group - head),
                            static_cast<int32_t>(query), queries});
        }
      }
    }
  }
  return blocks;
}

// What the rows of a block may see.
class Visibility {
 public:
  Visibility(const PagedParams& p, const Sequence& s, const RowBlock& place)
      : sequence_(s), heads_(place.heads), queries_(place.queries), page_size_(p.page_size) {
    AttentionParams attention;
    attention.len_q = s.len_q;
    attention.len_kv = s.len_kv;
    attention.mask.kind = MaskKind::kComposite;
    attention.mask.global = p.band;
    const auto params = mask::Composite::make_params(attention);
    const int32_t last = place.first_query + place.queries - 1;
    const auto block = mask::Composite::block(params, place.batch, 0, place.first_query, last);
    if (p.tree_bits != nullptr) tail_ = s.len_kv - s.len_q;
    for (int32_t q = 0; q < place.queries; ++q) {
      mask::TwoRuns keys = mask::Composite::row(params, block, place.first_query + q);
      main_[q] = mask::main_run(keys);
      first_[q] = mask::first_run(keys);
      if (p.tree_bits != nullptr) {
        tree_[q] = static_cast<uint32_t>(p.tree_bits[int64_t{place.batch} * p.len_q + place.first_query + q]);
      }
    }
    if (p.query_pages != nullptr) select_pages(p, place);
  }

  // Calls each(first_key) for the tiles that may hold a key that some row sees, each once.
  template <class Each>
  void for_each_tile(const Each& each) const {
    const mask::Interval first = hull(first_);
    mask::Interval main = hull(main_);
    const mask::Interval tail = {max_of(tail_, 0), sequence_.len_kv};
    if (has_tree() && tail.begin < tail.end) {
      main = main.begin < main.end ? mask::Interval{min_of(main.begin, tail.begin), tail.end} : tail;
    }
    int64_t next = 0;
    for (const mask::Interval& run : {first, main}) {
      if (run.begin >= run.end) continue;
      for (next = max_of<int64_t>(next, run.begin / kBlockKv * kBlockKv); next < run.end; next += kBlockKv) each(next);
    }
  }

  // Which of the 64 keys from first_key on each row sees, in two words of kWordStep; returns those that any row does.
  uint64_t find(int64_t first_key, int32_t* words) const {
    const uint64_t pages = selected_.empty() ? ~uint64_t{0} : selected_keys(first_key);
    uint64_t any = 0;
    for (int32_t row = 0; row < kBlockQ; ++row) {
      const int32_t q = min_of(row / heads_, queries_ - 1);
      const uint64_t keys = pages & seen(q, first_key);
      words[row * kWordStep] = static_cast<int32_t>(static_cast<uint32_t>(keys));
      words[row * kWordStep + 1] = static_cast<int32_t>(static_cast<uint32_t>(keys >> 32));
      any |= keys;
    }
    return any;
  }

 private:
  bool has_tree() const { return tail_ != kUnbounded; }

  mask::Interval hull(const mask::Interval* rows) const {
    mask::Interval result = {kUnbounded, 0};
    for (int32_t q = 0; q < queries_; ++q) {
      if (rows[q].begin >= rows[q].end) continue;
      result = {min_of(result.begin, rows[q].begin), max_of(result.end, rows[q].end)};
    }
    return result;
  }

  uint64_t seen(int32_t q, int64_t first_key) const {
    const uint64_t band = key_bits(main_[q], first_key) | key_bits(first_[q], first_key);
    if (!has_tree()) return band;
    const uint64_t before = key_bits({0, max_of(tail_, 0)}, first_key);
    const int64_t shift = tail_ - first_key;
    const uint64_t bits = shift <= -64 || shift >= 64 ? 0 : shift >= 0 ? tree_[q] << shift : tree_[q] >> -shift;
    return (band & before) | (bits & key_bits({0, sequence_.len_kv}, first_key));
  }

  void select_pages(const PagedParams& p, const RowBlock& place) {
    const int32_t pages = ceil_div(sequence_.len_kv, page_size_);
    // NOTE: one more, so that a list is never taken for none.
    selected_.assign(static_cast<size_t>(pages) + 1, false);
    const int32_t block = place.first_query / p.query_block;
    if (block >= p.query_blocks) return;
    const int64_t entry = (int64_t{place.batch} * p.query_blocks + block) * p.pages_per_block;
    for (int32_t n = 0; n < p.pages_per_block; ++n) {
      const int32_t page = p.query_pages[entry + n];
      if (page >= 0 && page < pages) selected_[page] = true;
    }
  }

  uint64_t selected_keys(int64_t first_key) const {
    uint64_t keys = 0;
    const int64_t end = min_of<int64_t>(first_key + kBlockKv, sequence_.len_kv);
    for (int64_t key = first_key; key < end;) {
      const int64_t page = key / page_size_, next = min_of(end, (page + 1) * page_size_);
      if (selected_[page]) keys |= key_bits({static_cast<int32_t>(key), static_cast<int32_t>(next)}, first_key);
      key = next;
    }
    return keys;
  }

  Sequence sequence_;
  int32_t heads_, queries_, page_size_;
  int32_t tail_ = kUnbounded;  // with a tree: its first key, below 0 where the cache is shorter
  mask::Interval main_[kBlockQ], first_[kBlockQ];
  uint64_t tree_[kBlockQ];
  std::vector<bool> selected_;  // by logical page; empty: all
};

// The code of one instruction set.
template <class T>
struct Code {
  void (*load_columns)(Rows<const T>, int32_t, int32_t, AccumulateType<T>*);
  void (*attend_tile)(const BlockTask<T>&, TileStep, Scratch<AccumulateType<T>>&);
};

template <class T>
Code<T> find_code() {
  using Acc = AccumulateType<T>;
  switch (supported_isas().back()) {
#if FLASHMSA_CPU_X86
    case Isa::kAvx512:
      return {avx512::load_columns<T, Acc>, avx512::attend_tile<T, Acc>};
    case Isa::kAvx2:
      return {avx2::load_columns<T, Acc>, avx2::attend_tile<T, Acc>};
#endif
    default:
      return {baseline::load_columns<T, Acc>, baseline::attend_tile<T, Acc>};
  }
}

// Reads keys of one sequence and head through the block table.
template <class T>
class PageReader {
 public:
  PageReader(const PagedParams& p, const PoolRef& pool, int32_t batch, int32_t head, int32_t columns)
      : params_(p), pool_(pool), batch_(batch), columns_(columns) {
    head_ = static_cast<const T*>(pool.data) + head * pool.stride_head;
  }

  // Rows such that row k is key first_key + k, for the keys [begin, end): in their page, or copied to `space`.
  Rows<const T> rows(int64_t first_key, int64_t begin, int64_t end, T* space) const {
    if (begin / params_.page_size == (end - 1) / params_.page_size) {
      return {slot(begin) - (begin - first_key) * pool_.stride_slot, pool_.stride_slot};
    }
    for (int64_t key = begin; key < end; ++key) {
      std::memcpy(space + (key - first_key) * columns_, slot(key), columns_ * sizeof(T));
    }
    return {space, columns_};
  }

 private:
  const T* slot(int64_t key) const {
    const int64_t page = key / params_.page_size;
    int32_t place = batch_;
    if (params_.block_table != nullptr) {
      place = clamp(params_.block_table[batch_ * params_.block_table_stride + page], 0, params_.num_pages - 1);
    }
    return head_ + place * pool_.stride_page + (key - page * params_.page_size) * pool_.stride_slot;
  }

  const PagedParams& params_;
  const PoolRef& pool_;
  const T* head_;
  int64_t batch_;
  int32_t columns_;
};

// What one thread works in.
template <class T>
struct Bench {
  Bench(int32_t head_dim, int32_t head_dim_v)
      : scratch(head_dim, head_dim_v),
        q(kBlockQ * head_dim),
        k(kBlockKv * head_dim),
        v(kBlockKv * head_dim_v),
        words(kBlockQ * kWordStep) {
    plan.two_runs = false;
    std::fill_n(plan.main, kBlockQ, mask::Interval{0, kBlockKv});
  }

  Scratch<AccumulateType<T>> scratch;
  BlockPlan plan;  // of one tile at a time, keys counted from its first: the words say what each row sees
  std::vector<T> q, k, v;
  std::vector<int32_t> words;
};

template <class T>
T* row_of(const TensorRef& tensor, const Sequence& s, const RowBlock& place, int32_t row) {
  return static_cast<T*>(tensor.data) + place.batch * tensor.stride_batch + place.head(row) * tensor.stride_head +
         (s.first_row + place.query(row)) * tensor.stride_seq;
}

template <class T>
BlockTask<T> make_task(const PagedParams& p, const Sequence& s, const RowBlock& place, Bench<T>& bench) {
  using Acc = AccumulateType<T>;
  BlockTask<T> task = {};
  task.rows = place.rows();
  task.head_dim = p.head_dim;
  task.head_dim_v = p.head_dim_v;
  task.scale = static_cast<Acc>(p.scale);
  task.softcap = static_cast<Acc>(p.softcap);
  task.has_alibi = p.alibi_slopes != nullptr;
  if (task.has_alibi) {
    task.slope = static_cast<Acc>(p.alibi_slopes[place.batch * p.alibi_stride_batch + place.first_head]);
  }
  for (int32_t row = 0; row < task.rows; ++row) {
    std::memcpy(bench.q.data() + int64_t{row} * p.head_dim, row_of<T>(p.q, s, place, row), p.head_dim * sizeof(T));
  }
  task.q = {bench.q.data(), p.head_dim};
  task.plan = &bench.plan;
  return task;
}

// O = O / sum and lse = top + log(sum), as attend_block.h's store_rows has it; each row to its own head.
template <class T>
void store_rows(const PagedParams& p, const Sequence& s, const RowBlock& place, Scratch<AccumulateType<T>>& scratch) {
  using Acc = AccumulateType<T>;
  constexpr Acc kNone = -std::numeric_limits<Acc>::infinity();
  const TensorRef lse = {p.lse, p.lse_stride_batch, p.lse_stride_head, p.lse_stride_seq};
  for (int32_t row = 0; row < place.rows(); ++row) {
    Acc top = scratch.top[row], sum = scratch.sum[row], factor = 1;
    // NOTE: before the sink, which makes the sum of a row without keys 1, or NaN where it is infinite or NaN itself.
    const bool empty = sum == Acc(0);
    const Acc sink = p.sinks == nullptr ? kNone : static_cast<Acc>(p.sinks[place.head(row)]);
    if (sink != kNone) {
      const Acc highest = max_of(top, sink);
      factor = std::exp(top - highest);
      sum = sum * factor + std::exp(sink - highest);
      top = highest;
    }
    const Acc* from = scratch.o + row * scratch.padded_dim_v;
    T* to = row_of<T>(p.out, s, place, row);
    for (int32_t c = 0; c < p.head_dim_v; ++c) narrow(empty ? Acc(0) : from[c] * factor / sum, to[c]);
    if (p.lse != nullptr) {
      *row_of<float>(lse, s, place, row) = static_cast<float>(empty ? sink : top + std::log(sum));
    }
  }
}

template <class T>
void attend(const PagedParams& p, const RowBlock& place, const Code<T>& code, Bench<T>& bench) {
  using Acc = AccumulateType<T>;
  const Sequence s = find_sequence(p, place.batch);
  const Visibility visibility(p, s, place);
  BlockTask<T> task = make_task(p, s, place, bench);
  Scratch<Acc>& scratch = bench.scratch;
  code.load_columns(task.q, task.rows, task.head_dim, static_cast<Acc*>(scratch.q));
  std::fill_n(static_cast<Acc*>(scratch.top), kBlockQ, -std::numeric_limits<Acc>::infinity());
  std::fill_n(static_cast<Acc*>(scratch.sum), kBlockQ, Acc(0));
  std::fill_n(static_cast<Acc*>(scratch.o), kBlockQ * scratch.padded_dim_v, Acc(0));
  const PageReader<T> keys(p, p.k_pages, place.batch, place.head_kv, p.head_dim);
  const PageReader<T> values(p, p.v_pages, place.batch, place.head_kv, p.head_dim_v);
  visibility.for_each_tile([&](int64_t first_key) {
    const uint64_t any = visibility.find(first_key, bench.words.data());
    if (any == 0) return;
    const int64_t begin = first_key + std::countr_zero(any), end = first_key + kBlockKv - std::countl_zero(any);
    task.k = keys.rows(first_key, begin, end, bench.k.data());
    task.v = values.rows(first_key, begin, end, bench.v.data());
    for (int32_t row = 0; row < kBlockQ && task.has_alibi; ++row) {
      const int32_t query = place.query(min_of(row, place.rows() - 1));
      bench.plan.position[row] = int64_t{query} + s.len_kv - s.len_q - first_key;
    }
    code.attend_tile(task, {0, bench.words.data()}, scratch);
  });
  store_rows<T>(p, s, place, scratch);
}

// Rows of packed queries that lie in no sequence stay as this leaves them.
template <class T>
void clear(const PagedParams& p) {
  for (int32_t head = 0; head < p.heads_q; ++head) {
    for (int64_t row = 0; row < p.total_q; ++row) {
      T* out = static_cast<T*>(p.out.data) + head * p.out.stride_head + row * p.out.stride_seq;
      std::memset(out, 0, p.head_dim_v * sizeof(T));
      if (p.lse != nullptr) {
        p.lse[head * p.lse_stride_head + row * p.lse_stride_seq] = -std::numeric_limits<float>::infinity();
      }
    }
  }
}

template <class T>
void attention(const PagedParams& p, const ParallelFor& parallel_for) {
  if (p.cu_seqlens_q != nullptr) clear<T>(p);
  if (p.heads_kv == 0) return;
  const std::vector<RowBlock> blocks = find_blocks(p);
  if (blocks.empty()) return;
  const Code<T> code = find_code<T>();

  // As in forward.cpp: a thread gets at least about 2^20 multiply-adds, and takes the next block that is left.
  int64_t longest = 0;
  for (int32_t batch = 0; batch < p.batch; ++batch) {
    longest = max_of<int64_t>(longest, find_sequence(p, batch).len_kv);
  }
  const int64_t block_cost = int64_t{blocks.front().rows()} * (longest + 1) * (p.head_dim + p.head_dim_v);
  const int64_t grain = max_of<int64_t>(1, (int64_t{1} << 20) / block_cost);
  const int64_t count = static_cast<int64_t>(blocks.size());
  std::atomic<int64_t> next{0};
  parallel_for(count, grain, [&](int64_t, int64_t) {
    Bench<T> bench(p.head_dim, p.head_dim_v);
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) attend(p, blocks[i], code, bench);
  });
}

}  // namespace

void paged_attention(const PagedParams& params, const ParallelFor& parallel_for) {
  switch (params.dtype) {
    case DType::kF16:
      return attention<Float16>(params, parallel_for);
    case DType::kBF16:
      return attention<BFloat16>(params, parallel_for);
    case DType::kF32:
      return attention<float>(params, parallel_for);
    case DType::kF64:
      return attention<double>(params, parallel_for);
  }
  throw std::invalid_argument("dtype: the CPU backend has no element type " +
                              std::to_string(static_cast<int>(params.dtype)));
}

}  // namespace flashmsa::cpu
