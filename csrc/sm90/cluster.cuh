// Thread block clusters: their barrier, each other's shared memory.
#pragma once

#include <cstdint>

namespace flashmsa::sm90 {

// All threads of all CTAs of the cluster; orders shared memory accesses before it ahead of those behind it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// Both halves of it, with nothing to be seen behind them: who has passed the second knows that all have come to the first.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// mapa: where a variable in shared memory lies in CTA `rank` of the cluster, for the stores below.
__device__ __forceinline__ uint32_t map_shared(const void* shared, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "r"(rank));
  return address;
}

// mbarrier.arrive in a CTA of the cluster; by map_shared.
// PERF: with .release.cluster it would be a fence of the whole GPU. What was read through the async proxy and waited for needs
// none.
__device__ __forceinline__ void arrive_at(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// cp.async.bulk from this CTA's shared memory to another one's, whose barrier counts the bytes; addresses there by map_shared.
// One thread, behind the writers' fence_async_proxy.
__device__ __forceinline__ void copy_across(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(static_cast<uint32_t>(__cvta_generic_to_shared(from))), "r"(bytes), "r"(barrier)
               : "memory");
}

// st.async: stores into a CTA's shared memory; their bytes count on a barrier of the same CTA. Both addresses by map_shared.
__device__ __forceinline__ void store_async(uint32_t cluster_address, float4 x, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   cluster_address),
               "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void store_async(uint32_t cluster_address, float2 x, uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(cluster_address),
      "f"(x.x), "f"(x.y), "r"(barrier)
      : "memory");
}

}  // namespace flashmsa::sm90
