// Each sorted row's interval of sorted keys.
//
// A warp takes 32 rows. All its lanes first search the ends of what the warp's rows see, a level of the search testing
// 32 keys at once; then each lane searches its own row's ends in between, where few keys are left. Where the keys are the
// queries' own, in one order, rows of a bucket are its keys: only the ends of the warp's first and last bucket are searched.
#include <stdexcept>

#include "core/cuda_check.h"
#include "hash/interval_search.h"
#include "hash/rows.h"

namespace flashmsa::hash {
namespace {

constexpr int32_t kThreads = 128;

// One of the warp's two searches. [low, high] holds the answer.
struct WarpSearch {
  Place place;
  int32_t low, high;

  // A level: lane l tests the last key of the l-th of 32 equal steps.
  __device__ __forceinline__ int32_t step() const { return (high - low + 31) / 32; }
  __device__ __forceinline__ int32_t pivot(int32_t lane) const {
    return static_cast<int32_t>(min_of<int64_t>(int64_t{low} + int64_t{step()} * (lane + 1) - 1, high));
  }
  __device__ __forceinline__ void narrow(bool behind) {
    const int64_t steps = __popc(__ballot_sync(~0u, !behind));
    const int64_t size = step();
    const int64_t next = low + steps * size;
    high = static_cast<int32_t>(min_of<int64_t>(high, next + size - 1));
    low = static_cast<int32_t>(min_of<int64_t>(high, next));
  }
};

// Both at once: their loads overlap.
__device__ __forceinline__ void search_together(const SortedKeys& keys, WarpSearch& a, WarpSearch& b) {
  const int32_t lane = threadIdx.x % 32;
  while (a.low < a.high || b.low < b.high) {
    const int32_t at_a = a.pivot(lane), at_b = b.pivot(lane);
    // Past `high` the answer is known, and where a search has ended there is nothing to read.
    const bool behind_a = a.low == a.high || at_a >= a.high || lies_behind(keys, at_a, a.place);
    const bool behind_b = b.low == b.high || at_b >= b.high || lies_behind(keys, at_b, b.place);
    if (a.low < a.high) a.narrow(behind_a);
    if (b.low < b.high) b.narrow(behind_b);
  }
}

// Among keys of one bucket: the first behind `position`.
__device__ __forceinline__ int32_t first_position_behind(const SortedKeys& keys, int32_t low, int32_t high,
                                                         int32_t position) {
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (keys.position(middle) > position) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// The intervals of the warp's rows, `first` and those behind it, among the same rows as keys: begin and end, a lane each.
__device__ __forceinline__ int2 own_interval(const IntervalParams& p, const SortedKeys& keys, int32_t first,
                                             int32_t sorted, int32_t bucket) {
  const int32_t lane = threadIdx.x % 32;
  const int32_t last = min_of(first + 31, p.len_q - 1);
  WarpSearch begin{start_of(__shfl_sync(~0u, bucket, 0)), 0, first};
  WarpSearch end{{__shfl_sync(~0u, bucket, 31), INT32_MAX}, last + 1, p.causal ? last + 1 : p.len_q};
  search_together(keys, begin, end);
  // Where a bucket begins among the warp's rows.
  const int32_t above = __shfl_up_sync(~0u, bucket, 1);
  const uint32_t starts = __ballot_sync(~0u, lane > 0 && bucket != above);
  const uint32_t before = starts & (~0u >> (31 - lane)), behind = starts & ~(~0u >> (31 - lane));
  const int32_t bucket_end = behind == 0 ? end.low : first + __ffs(behind) - 1;
  return {before == 0 ? begin.low : first + 31 - __clz(before), p.causal ? sorted + 1 : bucket_end};
}

template <bool kOwnKeys>
__global__ void __launch_bounds__(kThreads) bucket_rows_kernel(const IntervalParams p, int32_t blocks_of_head) {
  // SYNC: the sort, which this kernel may have overtaken.
  cudaGridDependencySynchronize();
  const int64_t index = blockIdx.x / blocks_of_head;
  const int32_t first = blockIdx.x % blocks_of_head * kThreads + threadIdx.x / 32 * 32;
  if (first >= p.len_q) return;
  const IntervalHead head = interval_head(p, index);
  // Lanes past the end repeat the last row.
  const int32_t sorted = min_of(first + static_cast<int32_t>(threadIdx.x % 32), p.len_q - 1);
  const uint32_t last_row = static_cast<uint32_t>(p.len_q - 1);
  const int32_t row = static_cast<int32_t>(min_of(static_cast<uint32_t>(head.q_order[sorted]), last_row));
  const int32_t bucket = head.q_bucket[row];
  const int64_t at = index * p.len_q + sorted;
  if constexpr (kOwnKeys) {
    const int2 own = own_interval(p, head.keys, first, sorted, bucket);
    p.begin[at] = own.x;
    p.end[at] = own.y;
    return;
  }
  const int32_t first_bucket = __shfl_sync(~0u, bucket, 0);
  const int32_t last_bucket = __shfl_sync(~0u, bucket, 31);

  const Place end_place = end_of(p, bucket, row);
  WarpSearch low{start_of(first_bucket), 0, p.len_kv};
  WarpSearch high{{last_bucket, __shfl_sync(~0u, end_place.position, 31)}, 0, p.len_kv};
  search_together(head.keys, low, high);
  // NOTE: not so only where q_order does not sort.
  const int32_t stop = max_of(low.low, high.low);
  int32_t begin = low.low, end = stop;
  if (first_bucket != last_bucket) {
    begin = first_behind(head.keys, low.low, stop, start_of(bucket));
    end = first_behind(head.keys, begin, stop, end_place);
  } else if (p.causal) {
    end = first_position_behind(head.keys, begin, stop, end_place.position);
  }
  p.begin[at] = begin;
  p.end[at] = end;
}

// Whether the keys are the queries, sorted once.
bool has_own_keys(const IntervalParams& p) {
  const auto same = [](const Plane<const int32_t>& a, const Plane<const int32_t>& b) {
    return a.data == b.data && a.stride_batch == b.stride_batch && a.stride_head == b.stride_head;
  };
  return same(p.q_bucket, p.kv_bucket) && same(p.q_order, p.kv_order) && p.heads_q == p.heads_kv && p.len_q == p.len_kv;
}

}  // namespace

void bucket_rows(const IntervalParams& p, void* stream) {
  const int64_t heads = int64_t{p.batch} * p.heads;
  if (heads == 0 || p.len_q == 0) return;
  const int32_t blocks = ceil_div(p.len_q, kThreads);
  if (heads * blocks > INT32_MAX)
    throw std::runtime_error("flashmsa: too many bucket rows in one launch; split the batch");
  // The kernel's launch overlaps the sort (programmatic dependent launch).
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<uint32_t>(heads * blocks));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &overlap;
  config.numAttrs = 1;
  const auto kernel = has_own_keys(p) ? bucket_rows_kernel<true> : bucket_rows_kernel<false>;
  FLASHMSA_CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, p, blocks));
}

}  // namespace flashmsa::hash
