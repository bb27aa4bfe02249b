// Bulk tensor copies between global memory and swizzled shared tiles.
#pragma once

#include <cuda/ptx>

#include "sm90/barrier.cuh"
#include "sm90/swizzle.h"
#include "sm90/tensor_map.h"

namespace flashmsa::sm90 {

// One box of any map into shared memory, where `full` counts its bytes; coordinates from the innermost dimension on. One
// thread calls it.
template <int kRank>
__device__ __forceinline__ void load_box(void* shared, const CUtensorMap& map, const int32_t (&coordinates)[kRank],
                                         Barrier& full) {
  ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, shared, &map, coordinates, &full.word);
}

// The way back, as a group of its own; see wait_stores.
template <int kRank>
__device__ __forceinline__ void store_box(const CUtensorMap& map, const int32_t (&coordinates)[kRank],
                                          const void* shared) {
  ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &map, coordinates, shared);
  ptx::cp_async_bulk_commit_group();
}

// One sequence of a tensor.
struct Sequence {
  int32_t head, batch;
  int32_t residue = 0;  // strided maps
};

// Brings rows [row, row + Tile::kRows) of one sequence into a tile, one box per 64 columns; `full` completes after
// Tile::kBytes, whatever part of the boxes lies outside the tensor. One thread calls it.
template <class Tile, int kRank = kPlainRank>
__device__ __forceinline__ void load_tile(void* shared, const TensorMap& tensor, int32_t row, Sequence from,
                                          Barrier& full, int32_t first_column = 0) {
#pragma unroll
  for (int group = 0; group < Tile::kGroups; ++group) {
    char* target = static_cast<char*>(shared) + group * Tile::kGroupBytes;
    const int32_t column = first_column + group * kSwizzleColumns;
    const int32_t head = from.head * tensor.head_step, batch = from.batch * tensor.batch_step;
    if constexpr (kRank == kStridedRank) {
      const int32_t coordinates[kRank] = {column, row, from.residue, head, batch};
      ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, target, &tensor.map, coordinates, &full.word);
    } else {
      const int32_t coordinates[kRank] = {column, row, head, batch};
      ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, target, &tensor.map, coordinates, &full.word);
    }
  }
}

// The groups of 64 columns of a tile that are CTA `rank`'s of kCtas, to the same place in all CTAs of the cluster, whose
// barriers at the place of `full` count the bytes; together they bring the whole tile. One thread calls it.
template <class Tile, int kCtas, int kRank>
__device__ __forceinline__ void load_tile_share(void* shared, const TensorMap& tensor, int32_t row, Sequence from,
                                                Barrier& full, uint32_t rank) {
  static_assert(kRank == kStridedRank && Tile::kGroups % kCtas == 0);
  constexpr uint16_t kAll = (1u << kCtas) - 1;
  const int32_t head = from.head * tensor.head_step, batch = from.batch * tensor.batch_step;
#pragma unroll
  for (int i = 0; i < Tile::kGroups / kCtas; ++i) {
    const int32_t group = rank * (Tile::kGroups / kCtas) + i;
    char* target = static_cast<char*>(shared) + group * Tile::kGroupBytes;
    const int32_t coordinates[kRank] = {group * kSwizzleColumns, row, from.residue, head, batch};
    ptx::cp_async_bulk_tensor(ptx::space_cluster, ptx::space_global, target, &tensor.map, coordinates, &full.word, kAll);
  }
}

// Writes the box of rows that starts at `shared` (its row 0 in each 64-column group of Tile) to rows [row, …) and columns
// [column, column + Tile::kColumns) of one sequence. Rows and columns outside the tensor are dropped. One thread calls it,
// after every writer's fence_async_proxy.
template <class Tile, int kRank = kPlainRank>
__device__ __forceinline__ void store_rows(const TensorMap& tensor, const void* shared, int32_t first_column,
                                           int32_t row, Sequence to) {
#pragma unroll
  for (int group = 0; group < Tile::kGroups; ++group) {
    const char* source = static_cast<const char*>(shared) + group * Tile::kGroupBytes;
    const int32_t column = first_column + group * kSwizzleColumns;
    const int32_t head = to.head * tensor.head_step, batch = to.batch * tensor.batch_step;
    if constexpr (kRank == kStridedRank) {
      const int32_t coordinates[kRank] = {column, row, to.residue, head, batch};
      ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &tensor.map, coordinates, source);
    } else {
      const int32_t coordinates[kRank] = {column, row, head, batch};
      ptx::cp_async_bulk_tensor(ptx::space_global, ptx::space_shared, &tensor.map, coordinates, source);
    }
  }
  ptx::cp_async_bulk_commit_group();
}

// Returns when the calling thread's stores, but for the last kPending groups, have read their shared memory.
template <int kPending = 0>
__device__ __forceinline__ void wait_stores_read() {
  ptx::cp_async_bulk_wait_group_read(ptx::n32_t<kPending>{});
}

// Returns when the calling thread's stores are complete.
__device__ __forceinline__ void wait_stores() { ptx::cp_async_bulk_wait_group(ptx::n32_t<0>{}); }

// elect.sync: true in one thread of the warp, known as one to the compiler: addresses of its copies go to uniform registers
// without a loop over the lanes.
__device__ __forceinline__ bool elect() {
  uint32_t elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p; }" : "=r"(elected)::"memory");
  return elected != 0;
}

// SYNC: makes this thread's ordinary shared-memory writes visible to TMA and wgmma, which read through the async proxy.
__device__ __forceinline__ void fence_async_proxy() { ptx::fence_proxy_async(ptx::space_shared); }

// prefetch.tensormap: brings the descriptor into the cache before its first use.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
__device__ __forceinline__ void prefetch_map(const TensorMap& tensor) { prefetch_map(tensor.map); }

}  // namespace flashmsa::sm90
