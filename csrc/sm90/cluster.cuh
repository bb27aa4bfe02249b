// Thread block clusters: who is in them, their barrier, each other's shared memory.
#pragma once

#include <cstdint>

namespace flashmsa::sm90 {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of all CTAs of the cluster; orders shared memory accesses before it ahead of those behind it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// The same where there is nothing to be seen behind it: it waits for no store.
__device__ __forceinline__ void cluster_sync_relaxed() {
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.aligned;" ::
          : "memory");
}

// mapa: where the variable at `shared_address` lies in CTA `rank` of the cluster, for the loads below.
__device__ __forceinline__ uint32_t map_shared(uint32_t shared_address, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address), "r"(rank));
  return address;
}

__device__ __forceinline__ float4 load_cluster_float4(uint32_t cluster_address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(cluster_address)
               : "memory");
  return x;
}

__device__ __forceinline__ float2 load_cluster_float2(uint32_t cluster_address) {
  float2 x;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(cluster_address) : "memory");
  return x;
}

}  // namespace flashmsa::sm90
