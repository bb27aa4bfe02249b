// Builds the plan on the device: one CTA counts each row block's key tiles and sorts the blocks by that count.
#pragma once

#include "sched/plan.h"

namespace flashmsa::sched {

inline constexpr int kPlanThreads = 1024;

template <class Mask>
struct PlanParams {
  typename Mask::Params mask;
  int32_t batches;     // with a plan of their own: 1 where offsets are shared
  int32_t row_blocks;  // per batch
  int32_t block_q, block_kv;
  int32_t len_q;
  int32_t max_tiles;   // key tiles of the whole length
};

template <class Mask>
__device__ __forceinline__ PlanEntry<Mask> make_entry(const PlanParams<Mask>& p, int32_t index) {
  return plan_row_block<Mask>(p.mask, index / p.row_blocks, index % p.row_blocks, p.block_q, p.block_kv, p.len_q);
}

// Without a plan: only the tile counter is set.
// PERF: by a kernel rather than a memset, because the attention kernel's launch may overlap a kernel.
static __global__ void reset_counter_kernel(int32_t* tile_counter) {
  cudaTriggerProgrammaticLaunchCompletion();
  *tile_counter = 0;
}

// Counting sort, longest first, in three steps: histogram of buckets, prefix sum, scatter. Entries are made twice rather
// than stored twice. Which of two equal blocks comes first is left to the atomics: no result depends on it.
template <class Mask>
__global__ void __launch_bounds__(kPlanThreads)
    plan_kernel(const PlanParams<Mask> p, int32_t* tile_counter, PlanEntry<Mask>* plan) {
  static_assert(kPlanBuckets == kPlanThreads, "one thread scans one bucket");
  __shared__ int32_t bucket_start[kPlanBuckets];
  __shared__ int32_t warp_sums[kPlanThreads / 32];
  const int32_t thread = threadIdx.x;
  const int32_t entries = p.batches * p.row_blocks;
  const int32_t shift = bucket_shift(p.max_tiles);
  const auto bucket_of = [&](const PlanEntry<Mask>& entry) {
    return kPlanBuckets - 1 - (entry.tiles.count() >> shift);
  };

  // The attention kernel may start while this one runs: it waits for the plan where it first needs it.
  cudaTriggerProgrammaticLaunchCompletion();
  if (thread == 0) *tile_counter = 0;
  bucket_start[thread] = 0;
  __syncthreads();

  // 1. Histogram.
  for (int32_t i = thread; i < entries; i += kPlanThreads) atomicAdd(&bucket_start[bucket_of(make_entry(p, i))], 1);
  __syncthreads();

  // 2. Exclusive prefix sum over the buckets: within warps, then over the warps' totals.
  const int32_t count = bucket_start[thread];
  int32_t sum = count;
#pragma unroll
  for (int32_t step = 1; step < 32; step *= 2) {
    const int32_t below = __shfl_up_sync(~0u, sum, step);
    if (thread % 32 >= step) sum += below;
  }
  if (thread % 32 == 31) warp_sums[thread / 32] = sum;
  __syncthreads();
  int32_t before = 0;
  for (int32_t warp = 0; warp < thread / 32; ++warp) before += warp_sums[warp];
  bucket_start[thread] = before + sum - count;
  __syncthreads();

  // 3. Scatter.
  for (int32_t i = thread; i < entries; i += kPlanThreads) {
    const PlanEntry<Mask> entry = make_entry(p, i);
    const int32_t slot = atomicAdd(&bucket_start[bucket_of(entry)], 1);
    // Only offsets that another stream changes between the two passes could lead past the plan's end.
    if (slot < entries) plan[slot] = entry;
  }
}

}  // namespace flashmsa::sched
