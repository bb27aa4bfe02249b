// Rows computed one by one, looking only at the keys that each may see.
//
// In a partial tile masked keys have P = 0, but 0 * V is NaN where V is NaN or infinite. What may not be seen must not be
// touched, so rows whose fast result is not finite are computed again here, from global memory. Slow, and right:
// ordinary data never come here.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attn/softmax.cuh"
#include "core/params.h"
#include "mask/interval.h"
#include "sm90/matrix.cuh"

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
__device__ __forceinline__ Element* row_of(const TensorRef& tensor, int32_t batch, int32_t head, int32_t row) {
  return static_cast<Element*>(tensor.data) + batch * tensor.stride_batch + head * tensor.stride_head +
         row * tensor.stride_seq;
}

// One row by one warp: the keys of a step of 32 are spread over the lanes, then the columns of O.
// Writes out_row (head_dim_v elements) and returns lse.
template <class Element>
__device__ __forceinline__ float slow_row(const Element* q_row, const Element* k_head, int64_t k_stride,
                                          const Element* v_head, int64_t v_stride, Element* out_row, int32_t head_dim,
                                          int32_t head_dim_v, mask::Interval keys, float scale_log2) {
  constexpr float kLn2 = 0.693147180559945309f;
  const int32_t lane = threadIdx.x % 32;
  const bool owns_columns = lane * 8 < head_dim_v;  // lane i: columns 8i .. 8i + 7
  float reference = kNegativeInfinity, sum = 0.0f;
  float o[8] = {};

#pragma unroll 1
  for (int32_t first = keys.begin; first < keys.end; first += 32) {
    // S of this lane's key.
    const int32_t count = min_of(32, keys.end - first);
    float s = kNegativeInfinity;
    if (lane < count) {
      float dot = 0.0f;
#pragma unroll 1
      for (int32_t column = 0; column < head_dim; column += 8) {
        float a[8], b[8];
        load8(q_row + column, a);
        load8(k_head + (first + lane) * k_stride + column, b);
#pragma unroll
        for (int i = 0; i < 8; ++i) dot = fmaf(a[i], b[i], dot);
      }
      s = dot * scale_log2;
    }

    // Online softmax over the warp.
    float maximum = s;
#pragma unroll
    for (int32_t step = 16; step > 0; step /= 2) maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
    const float old_reference = reference;
    reference = fmaxf(reference, maximum);
    const float offset = reference == kNegativeInfinity ? 0.0f : -reference;
    const float factor = sm90::exp2_approx(old_reference + offset);
    const float p = lane < count ? sm90::exp2_approx(s + offset) : 0.0f;
    float p_sum = p;
#pragma unroll
    for (int32_t step = 16; step > 0; step /= 2) p_sum += __shfl_xor_sync(~0u, p_sum, step);
    sum = sum * factor + p_sum;

    // O of this lane's columns. NOTE: only the keys of the interval are read; there is no masked product to spoil it.
#pragma unroll
    for (int i = 0; i < 8; ++i) o[i] *= factor;
#pragma unroll 1
    for (int32_t key = 0; key < count; ++key) {
      const float weight = __shfl_sync(~0u, p, key);
      if (!owns_columns) continue;
      float v[8];
      load8(v_head + (first + key) * v_stride + lane * 8, v);
#pragma unroll
      for (int i = 0; i < 8; ++i) o[i] = fmaf(weight, v[i], o[i]);
    }
  }

  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  if (owns_columns) {
    uint4 packed;
    packed.x = sm90::pack2<Element>(o[0] * inverse, o[1] * inverse);
    packed.y = sm90::pack2<Element>(o[2] * inverse, o[3] * inverse);
    packed.z = sm90::pack2<Element>(o[4] * inverse, o[5] * inverse);
    packed.w = sm90::pack2<Element>(o[6] * inverse, o[7] * inverse);
    *reinterpret_cast<uint4*>(out_row + lane * 8) = packed;
  }
  return sum == 0.0f ? kNegativeInfinity : (reference + log2f(sum)) * kLn2;
}

}  // namespace flashmsa::attn
