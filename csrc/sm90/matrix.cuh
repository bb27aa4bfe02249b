// ldmatrix, stmatrix and number conversion of fragments.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flashmsa::sm90 {

// ldmatrix.x4: four 8x8 matrices of 2-byte elements; lane i addresses row i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t shared_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address)
               : "memory");
}

// stmatrix.x4: the inverse of ldmatrix_x4.
__device__ __forceinline__ void stmatrix_x4(uint32_t shared_address, uint32_t r0, uint32_t r1, uint32_t r2,
                                            uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address), "r"(r0),
               "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// Two floats to one register of two elements, the first in the low half, rounded to nearest even.
template <class Element>
__device__ __forceinline__ uint32_t pack2(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack2<__nv_bfloat16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <>
__device__ __forceinline__ uint32_t pack2<__half>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// rcp.approx.ftz: 1 / x to 1 ulp. lg2.approx.ftz: log2 x to 2^-22, relative outside [0.5, 2], else absolute.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ex2.approx.ftz: 2^x to 2 ulp; 2^-inf = 0, NaN stays NaN.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Returns when ldmatrix has read what it brings to these registers. All lanes meet.
// SYNC: before their tile is given back to TMA. An arrival needs none of the registers, so it does not wait for them, and what comes
// next by TMA is no ordinary write that would come behind ordinary reads. The usual way is a fence between the proxies, which
// waits for the thread's stores too.
template <int kCount>
__device__ __forceinline__ void wait_ldmatrix(const uint32_t (&loaded)[kCount][4]) {
  uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) all ^= loaded[i][0];
  // NOTE: a question about all bits, and a meeting of the warp by its answer: in machine code a vote and a NOP. The compiler
  // cannot know the answer.
  asm volatile(
      "{ .reg .pred p; setp.eq.u32 p, %0, 0x9e3779b9;\n"
      "vote.sync.any.pred p, p, 0xffffffff;\n"
      "@p bar.warp.sync 0xffffffff; }" ::"r"(all)
      : "memory");
}

}  // namespace flashmsa::sm90
