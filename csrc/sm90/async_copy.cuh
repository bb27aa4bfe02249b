// cp.async: 16-byte copies to shared memory, each by the thread that asks for it.
#pragma once

#include <cstdint>

#include "sm90/barrier.cuh"

namespace flashmsa::sm90 {

// cp.async.cg: 16 bytes past the L1; both addresses aligned to them. `bytes` of them are read, the others become zero.
__device__ __forceinline__ void copy_async_16(uint32_t shared_address, const void* global, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address), "l"(global), "r"(bytes)
               : "memory");
}

// mad.wide.u32: `pieces` of 16 bytes on, in one instruction.
template <class T>
__device__ __forceinline__ const T* advance_16(const T* address, uint32_t pieces) {
  uint64_t result;
  asm("mad.wide.u32 %0, %1, 16, %2;" : "=l"(result) : "r"(pieces), "l"(address));
  return reinterpret_cast<const T*>(result);
}

// cp.async.wait_all: this thread's copies are there.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// prefetch.global.L2: the line that an address lies in.
__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global) : "memory");
}

// cp.async.mbarrier.arrive.noinc: this thread arrives when all copies that it asked for so far are there. It is one of the
// arrivals that the barrier was made for.
__device__ __forceinline__ void arrive_after_copies(Barrier& barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(&barrier.word)))
               : "memory");
}

}  // namespace flashmsa::sm90
