// Builds the plan on the device: one CTA counts each row block's key tiles and sorts the blocks by that count. Listed masks,
// whose heads differ, have a CTA and a plan for each slice.
#pragma once

#include "sched/plan.h"

namespace flashmsa::sched {

inline constexpr int kPlanThreads = 1024;
// What a mask may keep at hand of its device data: 32 KB.
inline constexpr int32_t kPlanStaged = 8192;

template <class Mask>
struct PlanParams {
  typename Mask::Params mask;
  int32_t batches;  // with a plan of their own: 1 where heads and batches share one
  int32_t heads;  // listed masks: slice = batch * heads + head
  int32_t row_blocks;  // per batch; kOwnRows: numbers of blocks
  int32_t block_q, block_kv;
  int32_t len_q;
  int32_t max_tiles;  // key tiles of the whole length
  int32_t turns;  // parts of the rows, one planned behind another
};

// Without a plan: only the tile counter is set.
// PERF: by a kernel rather than a memset, because the attention kernel's launch may overlap a kernel.
static __global__ void reset_counter_kernel(int32_t* tile_counter) {
  cudaTriggerProgrammaticLaunchCompletion();
  *tile_counter = 0;
}

// Which bucket an entry falls into: its turn's, there by its count of key tiles.
struct PlanOrder {
  int32_t turn;  // entries in a turn
  int32_t buckets;  // of a turn
  int32_t shift;

  __device__ __forceinline__ PlanOrder(int32_t entries, int32_t turns, int32_t max_tiles)
      : turn(ceil_div(entries, turns)), buckets(kPlanBuckets / turns), shift(turns > 1 ? 0 : bucket_shift(max_tiles)) {}

  // NOTE: a list may hold anything, also more tiles than there are; and of turns the longest entries share a bucket.
  __device__ __forceinline__ int32_t bucket(int32_t number, int32_t tiles) const {
    return (number / turn + 1) * buckets - 1 - min_of(tiles >> shift, buckets - 1);
  }
};

// What a sort keeps in shared memory.
struct PlanSort {
  int32_t bucket_start[kPlanBuckets];
  int32_t warp_sums[kPlanThreads / 32];
};

// Counting sort, longest first, in three steps: histogram of buckets, prefix sum, scatter. A thread keeps its first entry
// where it has the registers, and makes the others again rather than store them. Which of two equal blocks comes first is
// left to the atomics: no result depends on it. `make` gives entry i, `again` does for whoever did not keep it, `finish` adds
// to it where it lies. kSomeEmpty: entries without rows are left out. Returns how many entries this thread's bucket and those
// before it have: the last thread's are all.
// SYNC: sort.bucket_start is zero, and a block barrier has said so.
template <bool kSomeEmpty = false, class Entry, class Make, class Again, class Finish>
__device__ __forceinline__ int32_t sort_entries(PlanSort& sort, int32_t entries, const PlanOrder& order, Entry* plan,
                                                const Make& make, const Again& again, const Finish& finish) {
  static_assert(kPlanBuckets == kPlanThreads, "one thread scans one bucket");
  int32_t (&bucket_start)[kPlanBuckets] = sort.bucket_start;
  int32_t (&warp_sums)[kPlanThreads / 32] = sort.warp_sums;
  const int32_t thread = threadIdx.x;
  const auto left_out = [](const Entry& entry) { return kSomeEmpty && entry.tiles.count() < 0; };

  // 1. Histogram.
  constexpr bool kKeepsFirst = sizeof(Entry) <= 64;
  Entry first = {};
#pragma unroll 1
  for (int32_t i = thread; i < entries; i += kPlanThreads) {
    const Entry entry = make(i);
    if (kKeepsFirst && i == thread) first = entry;
    if (!left_out(entry)) atomicAdd(&bucket_start[order.bucket(i, entry.tiles.count())], 1);
  }
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
  int32_t before = thread % 32 < thread / 32 ? warp_sums[thread % 32] : 0;
#pragma unroll
  for (int32_t step = 16; step > 0; step /= 2) before += __shfl_xor_sync(~0u, before, step);
  bucket_start[thread] = before + sum - count;
  __syncthreads();

  // 3. Scatter.
  for (int32_t i = thread; i < entries; i += kPlanThreads) {
    const Entry entry = kKeepsFirst && i == thread ? first : again(i);
    if (left_out(entry)) continue;
    const int32_t slot = atomicAdd(&bucket_start[order.bucket(i, entry.tiles.count())], 1);
    // Only offsets that another stream changes between the two passes could lead past the plan's end.
    if (slot >= entries) continue;
    plan[slot] = entry;
    finish(plan[slot]);
  }
  return before + sum;
}

// PERF: the attention kernel waits for this one, so latency counts: the mask's offsets are read from memory once, together.
template <class Mask>
__global__ void __launch_bounds__(kPlanThreads)
    plan_kernel(const PlanParams<Mask> p, int32_t* tile_counter, PlanEntry<Mask>* plan) {
  __shared__ PlanSort sort;
  __shared__ int32_t staged[kPlanStaged];
  const int32_t thread = threadIdx.x;
  // A listed mask's CTA plans one slice, any other the one plan that there is.
  const int32_t slice = Mask::kListed ? blockIdx.x : 0;
  const int32_t entries = Mask::kListed ? p.row_blocks : p.batches * p.row_blocks;
  plan += int64_t{slice} * p.row_blocks;

  // The attention kernel may start while this one runs: it waits for the plan where it first needs it.
  cudaTriggerProgrammaticLaunchCompletion();
  typename Mask::Params mask = p.mask;
  if (Mask::staged_size(mask, p.batches) <= kPlanStaged) {
    mask = Mask::stage(mask, p.batches, staged, thread, kPlanThreads);
  }
  if (thread == 0 && slice == 0) *tile_counter = 0;
  sort.bucket_start[thread] = 0;
  __syncthreads();
  const auto make_entry = [&](int32_t index) {
    const int32_t batch = Mask::kListed ? slice / p.heads : index / p.row_blocks;
    return plan_row_block<Mask>(mask, batch, slice % p.heads, index % p.row_blocks, p.block_q, p.block_kv, p.len_q);
  };
  const int32_t count = sort_entries<kOwnRows<Mask>>(
      sort, entries, PlanOrder(entries, p.turns, p.max_tiles), plan, make_entry, make_entry,
      [&](PlanEntry<Mask>& entry) { plan_spans(mask, entry, p.block_q, p.block_kv, p.len_q); });
  if (kOwnRows<Mask> && thread == kPlanThreads - 1) tile_counter[1] = count;
}

}  // namespace flashmsa::sched
