// New keys and values into their pages, K turned by the rotary embedding on its way.
//
// With c and s of a token's position, a pair (x, y) of rotated columns becomes (x c - y s, y c + x s): columns (2i, 2i + 1)
// interleaved, else (i, i + rotary_dim / 2). One CTA a token; fp32 inside, rounded once.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>

#include "core/cuda_check.h"
#include "pages/pages.h"

namespace flashmsa::pages {
namespace {

constexpr int32_t kThreads = 128;

__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void from_float(__half& y, float x) { y = __float2half_rn(x); }
__device__ __forceinline__ void from_float(__nv_bfloat16& y, float x) { y = __float2bfloat16_rn(x); }

// kCount neighbouring elements, moved together.
template <class Element, int kCount>
struct alignas(sizeof(Element) * kCount) Vector {
  Element element[kCount];
};

// Where a new token comes from and goes to.
struct Token {
  int32_t batch, index;  // index: in its sequence, packed over all
  int32_t position;
  int64_t page;
  int32_t slot;
  bool kept;  // it has a place
};

// The sequence of packed token i: the last b with cu[b] <= i. In bounds whatever cu holds.
__device__ __forceinline__ int32_t find_sequence(const int32_t* cu, int32_t batch, int32_t i) {
  int32_t low = 0, high = batch;
  while (low < high) {
    const int32_t mid = low + (high - low) / 2;
    if (cu[mid + 1] > i) {
      high = mid;
    } else {
      low = mid + 1;
    }
  }
  return low;
}

__device__ __forceinline__ Token find_token(const AppendParams& p, int32_t i) {
  Token token = {};
  int64_t place;
  if (p.cu_seqlens != nullptr) {
    const int32_t b = find_sequence(p.cu_seqlens, p.batch, i);
    if (b >= p.batch || i < p.cu_seqlens[b]) return token;
    token.batch = b;
    token.index = i;
    place = i - max_of(p.cu_seqlens[b], 0);
  } else {
    token.batch = i / p.len_new;
    token.index = i % p.len_new;
    place = token.index;
  }
  place += max_of(p.kv_lens[token.batch], 0);
  if (place >= int64_t{p.max_pages} * p.page_size) return token;
  token.position = static_cast<int32_t>(place);
  token.page = p.block_table[token.batch * p.block_table_stride + token.position / p.page_size];
  token.slot = token.position % p.page_size;
  token.kept = token.page >= 0 && token.page < p.num_pages;
  return token;
}

// An entry of the rotary tables, which may be of K's type.
template <class Element>
__device__ __forceinline__ float table_entry(const AppendParams& p, const void* table, int32_t position, int32_t pair) {
  const int64_t at = int64_t{min_of(position, p.rope_positions - 1)} * (p.rotary_dim / 2) + pair;
  return p.rope_fp32 ? static_cast<const float*>(table)[at] : to_float(static_cast<const Element*>(table)[at]);
}

// Rotates the columns from `column` on. NOTE: kCount columns are all rotated or none; see vectors_fit.
template <class Element, int kCount>
__device__ __forceinline__ Vector<Element, kCount> rotate(const AppendParams& p, const Element* row, int32_t column,
                                                          int32_t position) {
  using Elements = Vector<Element, kCount>;
  const Elements own = *reinterpret_cast<const Elements*>(row + column);
  const int32_t half = p.rotary_dim / 2;
  const bool interleaved = p.rope_interleaved;
  const bool second = column >= half;  // not interleaved
  Elements other = own;
  if (!interleaved) {
    other = *reinterpret_cast<const Elements*>(row + (second ? column - half : column + half));
  } else if constexpr (kCount == 1) {
    other.element[0] = row[column ^ 1];
  }
  Elements result;
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    const int32_t pair = interleaved ? (column + e) / 2 : column + e - (second ? half : 0);
    const float x = to_float(own.element[e]);
    const float y = to_float(interleaved && kCount > 1 ? own.element[e ^ 1] : other.element[e]);
    const float c = table_entry<Element>(p, p.rope_cos, position, pair);
    const float s = table_entry<Element>(p, p.rope_sin, position, pair);
    const bool last_of_pair = interleaved ? (column + e) % 2 == 1 : second;
    from_float(result.element[e], last_of_pair ? fmaf(x, c, y * s) : fmaf(x, c, -(y * s)));
  }
  return result;
}

// One token's rows of K or of V.
template <class Element, int kCount, bool kRotates>
__device__ __forceinline__ void append_rows(const AppendParams& p, const Token& token, const TensorRef& from,
                                            const PoolRef& to, int32_t head_dim) {
  using Elements = Vector<Element, kCount>;
  const int32_t vectors = head_dim / kCount;
  const int64_t first = p.cu_seqlens != nullptr ? 0 : token.batch * from.stride_batch;
  const Element* source = static_cast<const Element*>(from.data) + first + token.index * from.stride_seq;
  Element* target = static_cast<Element*>(to.data) + token.page * to.stride_page + token.slot * to.stride_slot;
  for (int32_t i = threadIdx.x; i < p.heads_kv * vectors; i += kThreads) {
    const int32_t head = i / vectors, column = i % vectors * kCount;
    const Element* row = source + head * from.stride_head;
    Elements value;
    if (kRotates && p.rope_cos != nullptr && column < p.rotary_dim) {
      value = rotate<Element, kCount>(p, row, column, token.position);
    } else {
      value = *reinterpret_cast<const Elements*>(row + column);
    }
    *reinterpret_cast<Elements*>(target + head * to.stride_head + column) = value;
  }
}

template <class Element, int kCount>
__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ AppendParams p) {
  const Token token = find_token(p, blockIdx.x);
  if (!token.kept) return;
  append_rows<Element, kCount, true>(p, token, p.k_new, p.k_pages, p.head_dim);
  append_rows<Element, kCount, false>(p, token, p.v_new, p.v_pages, p.head_dim_v);
}

// Whether `count` elements can be moved together everywhere.
bool vectors_fit(const AppendParams& p, int32_t count, int32_t element_bytes) {
  int64_t strides = int64_t{p.head_dim} | p.head_dim_v;
  for (const PoolRef* pool : {&p.k_pages, &p.v_pages})
    strides |= pool->stride_page | pool->stride_slot | pool->stride_head;
  for (const TensorRef* t : {&p.k_new, &p.v_new}) strides |= t->stride_batch | t->stride_head | t->stride_seq;
  if (p.rope_cos != nullptr) strides |= p.rope_interleaved ? p.rotary_dim : p.rotary_dim / 2;
  uintptr_t addresses = 0;
  for (const void* data : {p.k_pages.data, p.v_pages.data, p.k_new.data, p.v_new.data}) {
    addresses |= reinterpret_cast<uintptr_t>(data);
  }
  return strides % count == 0 && addresses % (count * element_bytes) == 0;
}

template <class Element>
void launch(const AppendParams& p, int32_t tokens, cudaStream_t stream) {
  constexpr int kCount = 16 / sizeof(Element);
  if (vectors_fit(p, kCount, sizeof(Element))) {
    append_kernel<Element, kCount><<<tokens, kThreads, 0, stream>>>(p);
  } else {
    append_kernel<Element, 1><<<tokens, kThreads, 0, stream>>>(p);
  }
  FLASHMSA_CHECK_CUDA(cudaGetLastError());
}

}  // namespace

void append_kv(const AppendParams& p, void* stream_handle) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  const int32_t tokens = p.cu_seqlens != nullptr ? p.total_new : p.batch * p.len_new;
  if (tokens == 0 || p.batch == 0 || p.heads_kv == 0 || p.num_pages == 0 || p.max_pages == 0) return;
  switch (p.dtype) {
    case DType::kBF16:
      return launch<__nv_bfloat16>(p, tokens, stream);
    case DType::kF16:
      return launch<__half>(p, tokens, stream);
    default:
      throw std::runtime_error("flashmsa: append_kv has kernels for bf16 and fp16 alone");
  }
}

}  // namespace flashmsa::pages
