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

}  // namespace flashmsa::sm90
