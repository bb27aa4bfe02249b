// Bulk copies of boxes of a pool of pages, with a word to the L2 on what to keep.
#pragma once

#include <cstdint>

#include "sm90/barrier.cuh"
#include "sm90/pool_map.h"
#include "sm90/swizzle.h"

namespace flashmsa::sm90 {

// Cache policies as createpolicy.fractional makes them, for all of an access.
inline constexpr uint64_t kEvictNormal = 0x1000000000000000;
inline constexpr uint64_t kEvictFirst = 0x12F0000000000000;

struct PoolPlace {
  int32_t slot, head, page;
};

// prefetch.tensormap, of a map that is used or not.
__device__ __forceinline__ void prefetch_pool(const PoolMap& pool) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&pool.map) : "memory");
}

// Brings one piece to `shared_address`; its bytes, whatever lies outside the pool, count on `full`. One thread calls it.
__device__ __forceinline__ void load_piece(uint32_t shared_address, const PoolMap& pool, PoolPlace from,
                                           uint32_t group_bytes, Barrier& full, uint64_t policy) {
  const uint32_t barrier = static_cast<uint32_t>(__cvta_generic_to_shared(&full.word));
#pragma unroll 1
  for (int32_t box = 0; box < pool.boxes; ++box) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(shared_address + box * group_bytes),
        "l"(&pool.map), "r"(box * kSwizzleColumns), "r"(from.slot), "r"(0), "r"(from.head), "r"(from.page),
        "r"(barrier), "l"(policy)
        : "memory");
  }
}

// The same to the L2 alone.
__device__ __forceinline__ void prefetch_piece(const PoolMap& pool, PoolPlace from, uint64_t policy) {
#pragma unroll 1
  for (int32_t box = 0; box < pool.boxes; ++box) {
    asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile.L2::cache_hint [%0, {%1, %2, %3, %4, %5}], %6;" ::"l"(
                     &pool.map),
                 "r"(box * kSwizzleColumns), "r"(from.slot), "r"(0), "r"(from.head), "r"(from.page), "l"(policy)
                 : "memory");
  }
}

}  // namespace flashmsa::sm90
