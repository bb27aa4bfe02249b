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

// fence.acq_rel.gpu: what this thread has seen done is visible to the whole GPU before what it does next.
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// red.relaxed.gpu.add, to come behind a fence_gpu().
__device__ __forceinline__ void add_relaxed(int32_t* counter, int32_t x) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(x) : "memory");
}

}  // namespace flashmsa::sm90
