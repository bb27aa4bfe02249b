// Moving keys and values between pages and dense tensors on the CPU.
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu/convert.h"
#include "cpu/paged.h"

namespace flashmsa::cpu {
namespace {

using pages::AppendParams;
using pages::GatherParams;

// Tokens that a thread moves at least.
constexpr int64_t kTokensAtOnce = 64;

const char* bytes(const void* data, int64_t elements, int32_t element_bytes) {
  return static_cast<const char*>(data) + elements * element_bytes;
}

// One tensor's heads of a token: from its slot, or zeros.
void gather_token(const GatherParams& p, const PoolRef& pool, const TensorRef& to, int32_t columns, int64_t batch,
                  int64_t key, int64_t page) {
  const int64_t row_bytes = int64_t{columns} * p.element_bytes;
  for (int64_t head = 0; head < p.heads_kv; ++head) {
    const int64_t place = batch * to.stride_batch + head * to.stride_head + key * to.stride_seq;
    char* target = const_cast<char*>(bytes(to.data, place, p.element_bytes));
    if (page < 0) {
      std::memset(target, 0, row_bytes);
    } else {
      const int64_t from = page * pool.stride_page + key % p.page_size * pool.stride_slot + head * pool.stride_head;
      std::memcpy(target, bytes(pool.data, from, p.element_bytes), row_bytes);
    }
  }
}

// Where a new token of a sequence goes.
struct Token {
  int64_t batch, index, row;  // row: of k_new, counted in its batch or over all
};

// False for what lies in no sequence.
bool find_token(const AppendParams& p, int64_t number, Token& token) {
  if (p.cu_seqlens == nullptr) {
    token = {number / p.len_new, number % p.len_new, number % p.len_new};
    return true;
  }
  // The first sequence that ends behind the token.
  int32_t low = 0, high = p.batch;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (p.cu_seqlens[middle + 1] > number) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  if (low == p.batch || number < p.cu_seqlens[low]) return false;
  token = {low, number - p.cu_seqlens[low], number};
  return true;
}

// cos and sin of a position, in the type of the computation.
template <class T>
class Rope {
 public:
  using Acc = AccumulateType<T>;
  Rope(const AppendParams& p, int64_t position) : params_(p) {
    // NOTE: a table that is too short gives its last row: nothing outside it is read.
    row_ = clamp<int64_t>(position, 0, p.rope_positions - 1) * (p.rotary_dim / 2);
  }
  Acc cos(int32_t i) const { return value(params_.rope_cos, i); }
  Acc sin(int32_t i) const { return value(params_.rope_sin, i); }

 private:
  Acc value(const void* table, int32_t i) const {
    if (params_.rope_fp32) return static_cast<const float*>(table)[row_ + i];
    return widen(static_cast<const T*>(table)[row_ + i]);
  }

  const AppendParams& params_;
  int64_t row_;
};

// The first rotary_dim columns as pairs, each turned by its angle; the rest as it is.
template <class T>
void rotate(const AppendParams& p, const T* from, T* to, int64_t position) {
  const Rope<T> rope(p, position);
  const int32_t half = p.rotary_dim / 2;
  for (int32_t i = 0; i < half; ++i) {
    const int32_t a = p.rope_interleaved ? 2 * i : i, b = p.rope_interleaved ? 2 * i + 1 : i + half;
    const auto x = widen(from[a]), y = widen(from[b]);
    narrow(x * rope.cos(i) - y * rope.sin(i), to[a]);
    narrow(y * rope.cos(i) + x * rope.sin(i), to[b]);
  }
  std::memcpy(to + p.rotary_dim, from + p.rotary_dim, (p.head_dim - p.rotary_dim) * sizeof(T));
}

template <class T>
void append_token(const AppendParams& p, const Token& token) {
  const int64_t position = int64_t{max_of(p.kv_lens[token.batch], 0)} + token.index;
  const int64_t logical = position / p.page_size;
  if (logical >= p.max_pages) return;
  const int64_t page = p.block_table[token.batch * p.block_table_stride + logical];
  if (page < 0 || page >= p.num_pages) return;
  const int64_t slot = position % p.page_size;
  const auto source = [&](const TensorRef& t, int64_t head) {
    return static_cast<const T*>(t.data) + token.batch * t.stride_batch + head * t.stride_head +
           token.row * t.stride_seq;
  };
  const auto target = [&](const PoolRef& pool, int64_t head) {
    return static_cast<T*>(pool.data) + page * pool.stride_page + slot * pool.stride_slot + head * pool.stride_head;
  };
  for (int64_t head = 0; head < p.heads_kv; ++head) {
    if (p.rope_cos != nullptr) {
      rotate<T>(p, source(p.k_new, head), target(p.k_pages, head), position);
    } else {
      std::memcpy(target(p.k_pages, head), source(p.k_new, head), p.head_dim * sizeof(T));
    }
    std::memcpy(target(p.v_pages, head), source(p.v_new, head), p.head_dim_v * sizeof(T));
  }
}

template <class T>
void append(const AppendParams& p, const ParallelFor& parallel_for) {
  const int64_t count = p.cu_seqlens == nullptr ? int64_t{p.batch} * p.len_new : p.total_new;
  parallel_for(count, kTokensAtOnce, [&](int64_t begin, int64_t end) {
    for (int64_t number = begin; number < end; ++number) {
      Token token;
      if (find_token(p, number, token)) append_token<T>(p, token);
    }
  });
}

}  // namespace

void gather_pages(const GatherParams& p, const ParallelFor& parallel_for) {
  const int64_t keys = int64_t{p.max_pages} * p.page_size;
  parallel_for(p.batch * keys, kTokensAtOnce, [&](int64_t begin, int64_t end) {
    for (int64_t number = begin; number < end; ++number) {
      const int64_t batch = number / keys, key = number % keys;
      int64_t page = -1;
      if (key < p.kv_lens[batch] && p.num_pages > 0) {
        const int32_t entry = p.block_table[batch * p.block_table_stride + key / p.page_size];
        page = clamp(entry, 0, p.num_pages - 1);
      }
      gather_token(p, p.k_pages, p.k, p.head_dim, batch, key, page);
      gather_token(p, p.v_pages, p.v, p.head_dim_v, batch, key, page);
    }
  });
}

void append_kv(const AppendParams& p, const ParallelFor& parallel_for) {
  switch (p.dtype) {
    case DType::kF16:
      return append<Float16>(p, parallel_for);
    case DType::kBF16:
      return append<BFloat16>(p, parallel_for);
    case DType::kF32:
      return append<float>(p, parallel_for);
    case DType::kF64:
      return append<double>(p, parallel_for);
  }
  throw std::invalid_argument("dtype: the CPU backend has no element type " +
                              std::to_string(static_cast<int>(p.dtype)));
}

}  // namespace flashmsa::cpu
