// Atomics with an order.
#pragma once

#include <cstdint>

namespace flashmsa::sm90 {

// atom.add.acq_rel.gpu: what this thread has seen done before it, by a barrier too, is visible to whoever sees the sum; and
// the other way round.
__device__ __forceinline__ int32_t add_acq_rel(int32_t* counter, int32_t x) {
  int32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(x) : "memory");
  return before;
}

// ld.relaxed.gpu: the value as it stands in the L2. It orders nothing.
__device__ __forceinline__ int32_t load_relaxed(const int32_t* address) {
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// ld.acquire.gpu: what was done before the store_release() of the value is visible behind it.
__device__ __forceinline__ uint64_t load_acquire(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

// st.release.gpu: what this thread has seen done before it, by a barrier too, is visible to whoever sees the value.
__device__ __forceinline__ void store_release(uint64_t* address, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// fence.acq_rel.gpu: what this thread has seen done is visible to the whole GPU before what it does next.
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// red.add.v4.f32: four sums at once. The address is a multiple of 16.
__device__ __forceinline__ void add4(float* to, float4 x) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}

// red.relaxed.gpu.add, to come behind a fence_gpu().
__device__ __forceinline__ void add_relaxed(int32_t* counter, int32_t x) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(x) : "memory");
}

}  // namespace flashmsa::sm90
