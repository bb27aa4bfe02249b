// One block of query rows as plain data: what the masks and strides came to, and where the numbers lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/types.h"
#include "cpu/convert.h"
#include "mask/interval.h"

namespace flashmsa::cpu {

constexpr int32_t kBlockQ = 64;   // query rows of a block
constexpr int32_t kBlockKv = 64;  // keys of a tile
constexpr int32_t kSlack = 8;     // the logits of a tile are computed this many keys at a time, at most
constexpr int32_t kLine = 64;     // bytes: a cache line, the widest vector

// What the mask says about a block. Rows past the last one repeat its interval: they are computed and not stored.
struct BlockPlan {
  mask::KeyTiles tiles;
  int32_t first_key, last_key;              // [first_key, last_key) holds every key that some row may see
  int32_t begin[kBlockQ], end[kBlockQ];     // row r may see the keys [begin[r], end[r])
};

// Rows of one head: element c of row r lies at data[r * stride + c].
template <class T>
struct Rows {
  T* data;
  int64_t stride;
};

template <class T>
struct BlockTask {
  int32_t rows, head_dim, head_dim_v;
  AccumulateType<T> scale;
  Rows<const T> q;      // from the block's first row
  Rows<const T> k, v;   // from key 0
  Rows<T> out;          // from the block's first row
  float* lse;           // the same
  BlockPlan plan;
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
        decay(kBlockQ) {}

  // Zeros at first: the columns of v that pad it to whole vectors, and slack rows that no key has reached yet.
  class Array {
   public:
    explicit Array(int32_t count) : lines_(ceil_div(count, kLineValues)) {}
    operator Acc*() { return lines_.data()->values; }

   private:
    struct alignas(kLine) Line {
      Acc values[kLine / sizeof(Acc)];
    };
    std::vector<Line> lines_;
  };

  static constexpr int32_t kLineValues = kLine / static_cast<int32_t>(sizeof(Acc));
  const int32_t padded_dim_v;
  Array q;      // (head_dim, kBlockQ), transposed: a vector holds one column of several rows
  Array k;      // (keys, head_dim)
  Array v;      // (keys, padded_dim_v)
  Array p;      // (keys, kBlockQ): logits, then their exponentials
  Array o;      // (kBlockQ, padded_dim_v), not yet divided by sum
  Array top;    // (kBlockQ) the largest logit so far
  Array sum;    // (kBlockQ) of exp(logit - top)
  Array decay;  // (kBlockQ) exp(old top - new top)
  int32_t begin[kBlockQ], end[kBlockQ];  // the rows' keys in the current tile, counted from its first loaded key
};

}  // namespace flashmsa::cpu
