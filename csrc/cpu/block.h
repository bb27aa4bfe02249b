// One block of query rows as plain data: what the masks and strides came to, and where the numbers lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/philox.h"
#include "core/types.h"
#include "cpu/convert.h"
#include "mask/interval.h"

namespace flashmsa::cpu {

constexpr int32_t kBlockQ = 64;   // query rows of a block
constexpr int32_t kBlockKv = 64;  // keys of a tile
constexpr int32_t kSlack = 8;     // the logits of a tile are computed this many keys at a time, at most
constexpr int32_t kLine = 64;     // bytes: a cache line, the widest vector

// One key tile that a block of rows visits.
struct TileStep {
  int64_t first_key;
  // Of a list's mixed cell: the words of the block's first row, for its next kWordStep words further on; null: no bits.
  const int32_t* bits;
};
constexpr int32_t kWordStep = 4;

// What the mask says about a block. Rows past the last one repeat its keys: they are computed and not stored.
// Each thread makes its plans in the same place, so that the steps keep their memory.
struct BlockPlan {
  std::vector<TileStep> steps;  // in the order of the visit, each tile once
  // Row r may see the keys of main[r] and, under `two_runs`, of first[r]; in a tile with bits, those whose bit is set.
  mask::Interval main[kBlockQ], first[kBlockQ];
  bool two_runs;
  int64_t position[kBlockQ];  // where each row stands among the keys; only for ALiBi
};

// Which of the kBlockKv keys from `first` on lie in an interval: bit b is key first + b.
inline uint64_t key_bits(mask::Interval keys, int64_t first) {
  static_assert(kBlockKv == 64);
  const auto below = [](int64_t count) { return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1; };
  const int64_t begin = clamp<int64_t>(keys.begin - first, 0, 64);
  return below(clamp<int64_t>(keys.end - first, begin, 64)) & ~below(begin);
}

// Rows of one head: element c of row r lies at data[r * stride + c].
template <class T>
struct Rows {
  T* data;
  int64_t stride;
};

// Dropout of a block's weights, by the caller's queries and keys.
struct BlockDropout {
  Dropout head;
  const int32_t* q_order = nullptr;  // from the block's first row; null: by the next two
  const int32_t* kv_order = nullptr;  // from key 0
  int64_t first_query = 0, first_key = 0;
  int64_t step = 1;  // between two rows, and two keys

  bool used() const { return head.threshold > 0; }
  uint32_t query(int32_t row) const { return static_cast<uint32_t>(q_order ? q_order[row] : first_query + row * step); }
  uint32_t key(int64_t j) const { return static_cast<uint32_t>(kv_order ? kv_order[j] : first_key + j * step); }
};

// kept[row]: bit b says whether the row keeps its weight for key first + b, for `rows` rows and `count` keys.
void find_kept(const BlockDropout& dropout, int32_t rows, int64_t first, int32_t count, uint64_t* kept);

template <class T>
struct BlockTask {
  int32_t rows, head_dim, head_dim_v;
  AccumulateType<T> scale;
  AccumulateType<T> softcap;  // 0: none
  AccumulateType<T> slope;  // ALiBi's, of a key; used where has_alibi
  bool has_alibi;
  const float* sink;  // null: none
  BlockDropout dropout;
  Rows<const T> q;  // from the block's first row
  Rows<const T> k, v;  // from key 0
  Rows<T> out;  // from the block's first row
  Rows<float> lse;  // the same; data null: not wanted
  const BlockPlan* plan;
};

// Working memory of one thread, reused from block to block.
template <class Acc>
class Scratch {
 public:
  Scratch(int32_t head_dim, int32_t head_dim_v)
      : padded_dim_v(ceil_div(head_dim_v, kLineValues) * kLineValues),
        q(head_dim * kBlockQ),
        k((kBlockKv + kSlack) * head_dim),
        v(kBlockKv * padded_dim_v),
        p((kBlockKv + kSlack) * kBlockQ),
        o(kBlockQ * padded_dim_v),
        top(kBlockQ),
        sum(kBlockQ),
        decay(kBlockQ),
        place(kBlockQ) {}

  // Zeros at first: the columns of v that pad it to whole vectors, and slack rows that no key has reached yet.
  class Array {
   public:
    explicit Array(int64_t count) : lines_(ceil_div<int64_t>(count, kLineValues)) {}
    operator Acc*() { return lines_.data()->values; }
    Acc* operator+(int64_t offset) { return lines_.data()->values + offset; }

   private:
    struct alignas(kLine) Line {
      Acc values[kLine / sizeof(Acc)];
    };
    std::vector<Line> lines_;
  };

  static constexpr int32_t kLineValues = kLine / static_cast<int32_t>(sizeof(Acc));
  const int32_t padded_dim_v;
  Array q;  // (head_dim, kBlockQ), transposed: a vector holds one column of several rows
  Array k;  // (keys, head_dim)
  Array v;  // (keys, padded_dim_v)
  Array p;  // (keys, kBlockQ): logits, then their exponentials
  Array o;  // (kBlockQ, padded_dim_v), not yet divided by sum
  Array top;  // (kBlockQ) the largest logit so far
  Array sum;  // (kBlockQ) of exp(logit - top)
  Array decay;  // (kBlockQ) exp(old top - new top)
  Array place;  // (kBlockQ) the rows' positions, counted as below
  uint64_t visible[kBlockQ];  // the rows' keys in the current tile, counted from its first loaded key
  uint64_t kept[kBlockQ];  // the keys that dropout keeps, counted alike; only with dropout
};

// A block's backward pass.
template <class T>
struct BackwardTask {
  BlockTask<T> forward;  // its out and lse are read
  Rows<const T> dout;  // from the block's first row
  Rows<const float> dlse;  // the same; data null: zero
  Rows<T> dq;  // the same
  float* delta;  // the same
  double* sink_terms;  // the same; null: not wanted
  AccumulateType<T>*dk, *dv;  // from key 0, rows of padded_dim and padded_dim_v elements: summed into
};

template <class Acc>
struct BackwardScratch {
  using Array = typename Scratch<Acc>::Array;

  BackwardScratch(int32_t head_dim, int32_t head_dim_v)
      : block(head_dim, head_dim_v),
        padded_dim(ceil_div(head_dim, Scratch<Acc>::kLineValues) * Scratch<Acc>::kLineValues),
        q(kBlockQ * padded_dim),
        dout(kBlockQ * block.padded_dim_v),
        dout_columns(head_dim_v * kBlockQ),
        k((kBlockKv + kSlack) * padded_dim),
        v((kBlockKv + kSlack) * head_dim_v),
        dp((kBlockKv + kSlack) * kBlockQ),
        kept(kBlockKv * kBlockQ),
        transposed(kBlockQ * kBlockKv),
        dq(kBlockQ * padded_dim),
        lse(kBlockQ),
        delta(kBlockQ) {}

  Scratch<Acc> block;  // its q, p (the weights), place, visible and kept; the rest where lse is made again
  const int32_t padded_dim;
  Array q;  // (kBlockQ, padded_dim)
  Array dout;  // (kBlockQ, padded_dim_v)
  Array dout_columns;  // (head_dim_v, kBlockQ)
  Array k;  // (keys, padded_dim)
  Array v;  // (keys, head_dim_v)
  Array dp;  // (keys, kBlockQ): dO V^T, then dS
  Array kept;  // (keys, kBlockQ): what dropout multiplies by
  Array transposed;  // (kBlockQ, keys): weights or dS
  Array dq;  // (kBlockQ, padded_dim)
  Array lse, delta;  // (kBlockQ)
  bool live[kBlockQ];  // rows that have gradients
};

}  // namespace flashmsa::cpu
