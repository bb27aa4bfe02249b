// Rows computed one by one, looking only at the keys that each may see.
//
// In a partial tile masked keys have P = 0, but 0 * V is NaN where V is NaN or infinite. What may not be seen must not be
// touched, so rows whose fast result is not finite are computed again here, from global memory. Slow, and right:
// ordinary data never come here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attn/dropout.cuh"
#include "attn/score.cuh"
#include "attn/softmax.cuh"
#include "core/params.h"
#include "mask/interval.h"
#include "sm90/matrix.cuh"
#include "sm90/tma.cuh"

namespace flashmsa::attn {

__device__ __forceinline__ float2 unpack2(uint32_t packed, __nv_bfloat16 /*element*/) {
  return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xFFFF0000u)};
}

__device__ __forceinline__ float2 unpack2(uint32_t packed, __half /*element*/) {
  return __half22float2(*reinterpret_cast<const __half2*>(&packed));
}

// Eight neighbouring elements of a row as floats.
template <class Element>
__device__ __forceinline__ void load8(const Element* address, float (&values)[8]) {
  const uint4 packed = *reinterpret_cast<const uint4*>(address);
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack2(words[i], Element{});
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

template <class Element>
__device__ __forceinline__ Element* row_of(const TensorRef& tensor, sm90::Sequence sequence, int32_t row) {
  return static_cast<Element*>(tensor.data) + sequence.batch * tensor.stride_batch +
         sequence.head * tensor.stride_head + sequence.residue * tensor.stride_residue + row * tensor.stride_seq;
}

// Where the rows of K and V lie: one after another.
template <class Element>
struct StridedRows {
  const Element* k_head;
  const Element* v_head;
  int64_t k_stride, v_stride;

  __device__ __forceinline__ const Element* k(int32_t key) const { return k_head + key * k_stride; }
  __device__ __forceinline__ const Element* v(int32_t key) const { return v_head + key * v_stride; }
};

// One row by one warp: the keys of a step of 32 are spread over the lanes, then the columns of O.
template <class Element, class Score, class KeyRows = StridedRows<Element>>
struct SlowRow {
  const Element* q_row;
  KeyRows rows;
  int32_t head_dim, head_dim_v;
  float scale_log2;
  CapParams cap;  // Score::kSoftcap
  float alibi_slope;  // Score::kAlibi
  int32_t position;
  // Score::kDropout. NOTE: not [[no_unique_address]]: nvcc 13.0 then initialises what follows in the wrong places.
  std::conditional_t<Score::kDropout, RowDraws<Score::kGeneral>, NoRowDraws> draws;

  float reference = kNegativeInfinity, sum = 0.0f;
  float o[8] = {};

  __device__ __forceinline__ int32_t lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ bool owns_columns() const { return lane() * 8 < head_dim_v; }  // 8 * lane … 8 * lane + 7

  // The exponent of q.k for one key.
  __device__ __forceinline__ float exponent(int32_t key) const {
    const Element* k_row = rows.k(key);
    float s = 0.0f;
#pragma unroll 1
    for (int32_t column = 0; column < head_dim; column += 8) {
      float a[8], b[8];
      load8(q_row + column, a);
      load8(k_row + column, b);
#pragma unroll
      for (int i = 0; i < 8; ++i) s = fmaf(a[i], b[i], s);
    }
    if constexpr (Score::kSoftcap) {
      if (!Score::kGeneral || cap.used()) s = tanh_exact(s * cap.factor) * cap.inverse;
    }
    if constexpr (Score::kAlibi) s -= alibi_slope * fabsf(static_cast<float>(position - key));
    return s * scale_log2;
  }

  // Takes the keys of an interval, of these only those whose bit is set (bit k of word w: key first_bit + 32 w + k).
  // NOTE: only what may be seen is read; there is no masked product to spoil O.
  __device__ __forceinline__ void attend(mask::Interval keys, const int32_t* bits = nullptr, int32_t first_bit = 0) {
#pragma unroll 1
    for (int32_t first = keys.begin; first < keys.end; first += 32) {
      const int32_t key = first + lane();
      bool visible = key < keys.end;
      if (visible && bits != nullptr) {
        visible = (bits[(key - first_bit) / 32] >> ((key - first_bit) % 32) & 1) != 0;
      }
      const float s = visible ? exponent(key) : kNegativeInfinity;

      // Online softmax over the warp.
      float maximum = s;
#pragma unroll
      for (int32_t step = 16; step > 0; step /= 2) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
      const float old_reference = reference;
      reference = fmaxf(reference, maximum);
      const float offset = reference == kNegativeInfinity ? 0.0f : -reference;
      const float factor = sm90::exp2_approx(old_reference + offset);
      const float p = visible ? sm90::exp2_approx(s + offset) : 0.0f;
      float p_sum = p;
#pragma unroll
      for (int32_t step = 16; step > 0; step /= 2) p_sum += __shfl_xor_sync(~0u, p_sum, step);
      sum = sum * factor + p_sum;

      // O of this lane's columns.
#pragma unroll
      for (int i = 0; i < 8; ++i) o[i] *= factor;
      // NOTE: a dropped weight is 0 and its key still visible: a value of NaN is not dropped with it.
      float kept = p;
      if constexpr (Score::kDropout) kept = visible && draws.keeps(key) ? p : 0.0f;
      uint32_t left = __ballot_sync(~0u, visible);
#pragma unroll 1
      for (; left != 0; left &= left - 1) {
        const int32_t source = __ffs(left) - 1;
        const float weight = __shfl_sync(~0u, kept, source);
        if (!owns_columns()) continue;
        float v[8];
        load8(rows.v(first + source) + lane() * 8, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) o[i] = fmaf(weight, v[i], o[i]);
      }
    }
  }

  // Writes out_row (head_dim_v elements) and returns lse. `sink` as in OnlineSoftmax::finish.
  __device__ __forceinline__ float store(Element* out_row, float sink) {
    constexpr float kLn2 = 0.693147180559945309f;
    float factor = 1.0f;
    const bool empty = sum == 0.0f;
    if (!empty && sink != kNegativeInfinity) {
      const float top = fmaxf(reference, sink);
      factor = sm90::exp2_approx(reference - top);
      sum = fmaf(sum, factor, sm90::exp2_approx(sink - top));
      reference = top;
    }
    float inverse = empty ? 0.0f : factor / sum;
    if constexpr (Score::kDropout) inverse *= draws.keep_scale();
    if (owns_columns()) {
      uint4 packed;
      packed.x = sm90::pack2<Element>(o[0] * inverse, o[1] * inverse);
      packed.y = sm90::pack2<Element>(o[2] * inverse, o[3] * inverse);
      packed.z = sm90::pack2<Element>(o[4] * inverse, o[5] * inverse);
      packed.w = sm90::pack2<Element>(o[6] * inverse, o[7] * inverse);
      *reinterpret_cast<uint4*>(out_row + lane() * 8) = packed;
    }
    // Without keys: the sink, or -inf.
    return empty ? sink * kLn2 : (reference + log2f(sum)) * kLn2;
  }
};

}  // namespace flashmsa::attn
