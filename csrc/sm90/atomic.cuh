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

// ld.acquire.gpu: what the writers of the value did before their release is visible after it.
__device__ __forceinline__ int32_t load_acquire(const int32_t* address) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// red.add.release.gpu: what this thread did before it is visible to whoever acquires the sum.
__device__ __forceinline__ void add_release(int32_t* counter, int32_t x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(x) : "memory");
}

}  // namespace flashmsa::sm90
