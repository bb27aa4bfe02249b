// Stable sort of bucket ids. Only the bits that a segment's range of ids needs are sorted: 64 buckets take one pass.
//
//   up to 4096 keys    one CTA a segment, in shared memory
//   up to 65536        a cluster of 8 CTAs a segment: each ranks an eighth, and learns from the others, through their
//                      shared memory, where its keys of a digit go
//   beyond             chunks of 8192 keys, three kernels a pass (count, scan, scatter) over all chunks; passes that the
//                      ids do not need return at once, as the host does not know them
#include <cooperative_groups.h>

#include <stdexcept>
#include <utility>

#include "core/cuda_check.h"
#include "hash/block_radix.cuh"
#include "hash/rows.h"

namespace flashmsa::hash {
namespace {

constexpr int32_t kSegmentItems = 4;
constexpr int32_t kMaxSegmentLength = kSegmentItems * kSortThreads;
constexpr int32_t kClusterCtas = 8;
constexpr int32_t kMaxClusterItems = 8;
constexpr int32_t kMaxClusterLength = kMaxClusterItems * kSortThreads * kClusterCtas;

// ---- One CTA a segment

template <int kItems>
struct SegmentStorage {
  BlockRadix<kItems> radix;
  int32_t lowest[kSortWarps], highest[kSortWarps];
};

// Loads `length` keys and returns the smallest and the largest, (INT32_MAX, INT32_MIN) of none.
template <int kItems>
__device__ __forceinline__ int2 load_keys(SegmentStorage<kItems>& s, const int32_t* bucket, int32_t length) {
  const int32_t warp = threadIdx.x / 32;
  const int32_t lane = threadIdx.x % 32;
  int32_t lowest = INT32_MAX, highest = INT32_MIN;
#pragma unroll
  for (int32_t k = 0; k < kItems; ++k) {
    const int32_t at = k * kSortThreads + threadIdx.x;
    if (at < length) {
      const int32_t value = bucket[at];
      s.radix.keys[at] = static_cast<uint32_t>(value);
      lowest = min_of(lowest, value);
      highest = max_of(highest, value);
    }
  }
  lowest = __reduce_min_sync(~0u, lowest);
  highest = __reduce_max_sync(~0u, highest);
  if (lane == 0) {
    s.lowest[warp] = lowest;
    s.highest[warp] = highest;
  }
  __syncthreads();
  return {__reduce_min_sync(~0u, s.lowest[lane]), __reduce_max_sync(~0u, s.highest[lane])};
}

__global__ void __launch_bounds__(kSortThreads, 1) sort_segment_kernel(const SortParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& s = *reinterpret_cast<SegmentStorage<kSegmentItems>*>(memory);
  // What comes next may start, and waits for this kernel where it first needs the order.
  cudaTriggerProgrammaticLaunchCompletion();
  const int64_t segment = blockIdx.x;
  int32_t* order = p.order + segment * p.length;
  const int2 extremes = load_keys(s, p.bucket.row(segment / p.heads, segment % p.heads), p.length);
  const Digits digits = digits_of(key_of(extremes.y, extremes.x));
  if (digits.passes == 0) {
    for (int32_t i = threadIdx.x; i < p.length; i += kSortThreads) order[i] = i;
    return;
  }
  radix_pass<true>(s.radix, p.length, extremes.x, 0, digits.bits);
  for (int32_t pass = 1; pass < digits.passes; ++pass) {
    radix_pass<false>(s.radix, p.length, extremes.x, pass * digits.bits, digits.bits);
  }
  for (int32_t i = threadIdx.x; i < p.length; i += kSortThreads) order[i] = s.radix.sorted[i];
}

void launch_segments(const SortParams& p, cudaStream_t stream) {
  constexpr int32_t kBytes = sizeof(SegmentStorage<kSegmentItems>);
  FLASHMSA_CHECK_CUDA(cudaFuncSetAttribute(sort_segment_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  sort_segment_kernel<<<p.batch * p.heads, kSortThreads, kBytes, stream>>>(p);
  FLASHMSA_CHECK_CUDA(cudaGetLastError());
}

// ---- A cluster a segment

template <int kItems>
struct ClusterStorage {
  SegmentStorage<kItems> segment;
  int32_t index[kItems * kSortThreads];  // of each key in the segment, from the second pass on
  int2 extremes[kClusterCtas];  // written by each CTA of the cluster
  int32_t counts[kClusterCtas][kMaxDigits];  // of each digit; the same
  int32_t target[kMaxDigits];  // where this CTA's keys of a digit go, less their local start
  int32_t warp_sums[kMaxDigits / 32];
};

// The smallest and largest of the cluster's keys.
template <int kItems>
__device__ __forceinline__ int2 share_extremes(const cooperative_groups::cluster_group& cluster,
                                               ClusterStorage<kItems>& s, const int2& own) {
  if (threadIdx.x < kClusterCtas) {
    *cluster.map_shared_rank(&s.extremes[cluster.block_rank()], threadIdx.x) = own;
  }
  cluster.sync();
  int2 all = s.extremes[0];
#pragma unroll
  for (int32_t rank = 1; rank < kClusterCtas; ++rank) {
    all.x = min_of(all.x, s.extremes[rank].x);
    all.y = max_of(all.y, s.extremes[rank].y);
  }
  return all;
}

// Fills `target`, of the digits that a pass has ranked: by lower digits first, then by lower ranks.
template <int kItems>
__device__ __forceinline__ void share_counts(const cooperative_groups::cluster_group& cluster,
                                             ClusterStorage<kItems>& s, int32_t length, int32_t digits) {
  const auto& start = s.segment.radix.digit_start;
  const int32_t rank = static_cast<int32_t>(cluster.block_rank());
  for (int32_t i = threadIdx.x; i < kClusterCtas * digits; i += kSortThreads) {
    const int32_t digit = i % digits;
    const int32_t next = digit + 1 < digits ? start[digit + 1] : length;
    *cluster.map_shared_rank(&s.counts[rank][digit], i / digits) = next - start[digit];
  }
  // SYNC: every CTA has read what the next pass overwrites, and every count is there.
  cluster.sync();
  const int32_t digit = threadIdx.x;
  const int32_t lane = threadIdx.x % 32;
  int32_t total = 0, before = 0, inclusive = 0;
  if (threadIdx.x < kMaxDigits) {
#pragma unroll
    for (int32_t other = 0; other < kClusterCtas; ++other) {
      const int32_t count = digit < digits ? s.counts[other][digit] : 0;
      if (other < rank) before += count;
      total += count;
    }
    inclusive = warp_inclusive_sum(total, lane);
    if (lane == 31) s.warp_sums[digit / 32] = inclusive;
  }
  __syncthreads();
  if (digit < digits) {
    for (int32_t warp = 0; warp < digit / 32; ++warp) before += s.warp_sums[warp];
    s.target[digit] = before + inclusive - total - start[digit];
  }
  __syncthreads();
}

template <int kItems>
__global__ void __cluster_dims__(kClusterCtas, 1, 1) __launch_bounds__(kSortThreads, 1)
    sort_cluster_kernel(const SortParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& s = *reinterpret_cast<ClusterStorage<kItems>*>(memory);
  cudaTriggerProgrammaticLaunchCompletion();
  auto& radix = s.segment.radix;
  const auto cluster = cooperative_groups::this_cluster();
  // SYNC: a CTA's shared memory may be written to once it runs.
  auto started = cluster.barrier_arrive();
  const int64_t segment = blockIdx.x / kClusterCtas;
  const int32_t chunk = ceil_div(p.length, kClusterCtas);
  const int32_t first = min_of(chunk * static_cast<int32_t>(cluster.block_rank()), p.length);
  const int32_t count = min_of(chunk, p.length - first);
  const int32_t* bucket = p.bucket.row(segment / p.heads, segment % p.heads);
  int32_t* order = p.order + segment * p.length;
  const int2 own = load_keys(s.segment, bucket + first, count);
  cluster.barrier_wait(std::move(started));
  const int2 extremes = share_extremes(cluster, s, own);
  const Digits digits = digits_of(key_of(extremes.y, extremes.x));
  if (digits.passes == 0) {
    for (int32_t i = threadIdx.x; i < count; i += kSortThreads) order[first + i] = first + i;
    return;
  }
  for (int32_t pass = 0; pass < digits.passes; ++pass) {
    const int32_t shift = pass * digits.bits;
    if (pass > 0) {
      // SYNC: the pass before has written all of `order`.
      cluster.sync();
#pragma unroll
      for (int32_t k = 0; k < kItems; ++k) {
        const int32_t at = k * kSortThreads + threadIdx.x;
        if (at < count) {
          s.index[at] = order[first + at];
          radix.keys[at] = static_cast<uint32_t>(bucket[s.index[at]]);
        }
      }
    }
    // Begins with a barrier.
    radix_pass<true>(radix, count, extremes.x, shift, digits.bits);
    share_counts(cluster, s, count, 1 << digits.bits);
    for (int32_t i = threadIdx.x; i < count; i += kSortThreads) {
      const int32_t place = radix.sorted[i];
      const int32_t digit = digit_of(key_of(static_cast<int32_t>(radix.keys[place]), extremes.x), shift, digits.bits);
      order[s.target[digit] + i] = pass == 0 ? first + place : s.index[place];
    }
  }
}

template <int kItems>
void launch_clusters(const SortParams& p, cudaStream_t stream) {
  constexpr int32_t kBytes = sizeof(ClusterStorage<kItems>);
  static_assert(kBytes <= 227 * 1024, "more than an SM's shared memory");
  FLASHMSA_CHECK_CUDA(
      cudaFuncSetAttribute(sort_cluster_kernel<kItems>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  sort_cluster_kernel<kItems><<<p.batch * p.heads * kClusterCtas, kSortThreads, kBytes, stream>>>(p);
  FLASHMSA_CHECK_CUDA(cudaGetLastError());
}

// ---- Chunks

constexpr int32_t kChunkItems = 8;
constexpr int32_t kChunk = kChunkItems * kSortThreads;

// Device memory of a sort in chunks. Two orders take turns; the last pass writes to the result.
struct ChunkParams {
  SortParams sort;
  int32_t chunks;  // of a segment
  uint32_t* extremes;  // (segments, 2): the complement of the smallest key, the largest; 0 to begin with
  int32_t* histogram;  // (segments, chunks, kMaxDigits): counts, then where each chunk's keys of a digit go
  int32_t* scratch;  // (segments, length)
};

// int32 in the order of uint32.
__device__ __forceinline__ uint32_t unsigned_of(int32_t bucket) { return static_cast<uint32_t>(bucket) ^ 0x80000000u; }

// One pass over one chunk.
struct ChunkPass {
  const int32_t* bucket;
  const int32_t* source;  // nullptr: 0, 1, 2 ...
  int32_t* target;
  int32_t* histogram;  // of this chunk
  int32_t first, count;  // its places
  int32_t lowest, shift, bits;
  bool needed;

  __device__ __forceinline__ ChunkPass(const ChunkParams& p, int64_t segment, int32_t chunk, int32_t pass) {
    const uint32_t lowest_key = ~p.extremes[2 * segment];
    const Digits digits = digits_of(p.extremes[2 * segment + 1] - lowest_key);
    // Equal keys take one pass of no bits: the identity.
    const int32_t passes = max_of(digits.passes, 1);
    int32_t* const buffers[2] = {p.sort.order + segment * p.sort.length, p.scratch + segment * p.sort.length};
    const bool to_order = (passes - 1 - pass) % 2 == 0;
    bucket = p.sort.bucket.row(segment / p.sort.heads, segment % p.sort.heads);
    source = pass == 0 ? nullptr : to_order ? buffers[1] : buffers[0];
    target = to_order ? buffers[0] : buffers[1];
    histogram = p.histogram + (segment * p.chunks + chunk) * kMaxDigits;
    first = chunk * kChunk;
    count = min_of(kChunk, p.sort.length - first);
    lowest = static_cast<int32_t>(lowest_key ^ 0x80000000u);
    shift = pass * digits.bits;
    bits = digits.bits;
    needed = pass < passes;
  }

  __device__ __forceinline__ int32_t place(int32_t i) const {
    return source == nullptr ? first + i : source[first + i];
  }
};

__global__ void __launch_bounds__(kSortThreads) extremes_kernel(const ChunkParams p) {
  const int64_t segment = blockIdx.x / p.chunks;
  const int32_t first = blockIdx.x % p.chunks * kChunk;
  const int32_t* bucket = p.sort.bucket.row(segment / p.sort.heads, segment % p.sort.heads);
  uint32_t inverse = 0, highest = 0;
#pragma unroll
  for (int32_t k = 0; k < kChunkItems; ++k) {
    const int32_t at = k * kSortThreads + threadIdx.x;
    if (at < p.sort.length - first) {
      const uint32_t key = unsigned_of(bucket[first + at]);
      inverse = max_of(inverse, ~key);
      highest = max_of(highest, key);
    }
  }
  inverse = __reduce_max_sync(~0u, inverse);
  highest = __reduce_max_sync(~0u, highest);
  if (threadIdx.x % 32 == 0) {
    atomicMax(&p.extremes[2 * segment], inverse);
    atomicMax(&p.extremes[2 * segment + 1], highest);
  }
}

__global__ void __launch_bounds__(kSortThreads) count_kernel(const ChunkParams p, int32_t pass_number) {
  __shared__ int32_t counts[kMaxDigits];
  const ChunkPass pass(p, blockIdx.x / p.chunks, blockIdx.x % p.chunks, pass_number);
  if (!pass.needed) return;
  if (threadIdx.x < kMaxDigits) counts[threadIdx.x] = 0;
  __syncthreads();
#pragma unroll
  for (int32_t k = 0; k < kChunkItems; ++k) {
    const int32_t i = k * kSortThreads + threadIdx.x;
    if (i < pass.count) {
      atomicAdd(&counts[digit_of(key_of(pass.bucket[pass.place(i)], pass.lowest), pass.shift, pass.bits)], 1);
    }
  }
  __syncthreads();
  if (threadIdx.x < kMaxDigits) pass.histogram[threadIdx.x] = counts[threadIdx.x];
}

// One CTA a segment. A quarter of the threads sums a quarter of the chunks, one digit a thread.
__global__ void __launch_bounds__(kSortThreads) scan_kernel(const ChunkParams p, int32_t pass_number) {
  constexpr int32_t kParts = kSortThreads / kMaxDigits;
  __shared__ int32_t sums[kParts][kMaxDigits];
  __shared__ int32_t warp_sums[kMaxDigits / 32];
  const ChunkPass pass(p, blockIdx.x, 0, pass_number);
  if (!pass.needed) return;
  const int32_t digit = threadIdx.x % kMaxDigits;
  const int32_t part = threadIdx.x / kMaxDigits;
  const int32_t own = ceil_div(p.chunks, kParts);
  const int32_t first = min_of(part * own, p.chunks);
  const int32_t last = min_of(first + own, p.chunks);
  const auto at = [&](int32_t chunk) -> int32_t& { return pass.histogram[int64_t{chunk} * kMaxDigits + digit]; };

  int32_t sum = 0;
#pragma unroll 4
  for (int32_t chunk = first; chunk < last; ++chunk) sum += at(chunk);
  sums[part][digit] = sum;
  __syncthreads();
  int32_t before = 0, total = 0;
#pragma unroll
  for (int32_t other = 0; other < kParts; ++other) {
    if (other < part) before += sums[other][digit];
    total += sums[other][digit];
  }
  // The sum over lower digits, by each part's warps for themselves.
  const int32_t lane = threadIdx.x % 32;
  const int32_t inclusive = warp_inclusive_sum(total, lane);
  if (part == 0 && lane == 31) warp_sums[digit / 32] = inclusive;
  __syncthreads();
  for (int32_t warp = 0; warp < digit / 32; ++warp) before += warp_sums[warp];
  before += inclusive - total;
#pragma unroll 4
  for (int32_t chunk = first; chunk < last; ++chunk) {
    const int32_t count = at(chunk);
    at(chunk) = before;
    before += count;
  }
}

__global__ void __launch_bounds__(kSortThreads, 1) scatter_kernel(const ChunkParams p, int32_t pass_number) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& s = *reinterpret_cast<BlockRadix<kChunkItems>*>(memory);
  const ChunkPass pass(p, blockIdx.x / p.chunks, blockIdx.x % p.chunks, pass_number);
  if (!pass.needed) return;
#pragma unroll
  for (int32_t k = 0; k < kChunkItems; ++k) {
    const int32_t i = k * kSortThreads + threadIdx.x;
    if (i < pass.count) s.keys[i] = static_cast<uint32_t>(pass.bucket[pass.place(i)]);
  }
  // radix_pass begins with a barrier.
  radix_pass<true>(s, pass.count, pass.lowest, pass.shift, pass.bits);
  for (int32_t i = threadIdx.x; i < pass.count; i += kSortThreads) {
    const int32_t from = s.sorted[i];
    const int32_t digit = digit_of(key_of(static_cast<int32_t>(s.keys[from]), pass.lowest), pass.shift, pass.bits);
    const int32_t to = pass.histogram[digit] + i - s.digit_start[digit];
    // Only buckets that another stream changes between the kernels could lead past the end.
    if (static_cast<uint32_t>(to) < static_cast<uint32_t>(p.sort.length)) pass.target[to] = pass.place(from);
  }
}

size_t aligned(size_t bytes) { return (bytes + 15) / 16 * 16; }

int64_t segments_of(const SortParams& p) { return int64_t{p.batch} * p.heads; }
size_t extremes_bytes(const SortParams& p) { return aligned(segments_of(p) * 2 * sizeof(uint32_t)); }
size_t histogram_bytes(const SortParams& p) {
  return aligned(segments_of(p) * ceil_div(p.length, kChunk) * kMaxDigits * sizeof(int32_t));
}

void launch_chunks(const SortParams& sort, void* workspace, cudaStream_t stream) {
  constexpr int32_t kBytes = sizeof(BlockRadix<kChunkItems>);
  char* memory = static_cast<char*>(workspace);
  ChunkParams p;
  p.sort = sort;
  p.chunks = ceil_div(sort.length, kChunk);
  p.extremes = reinterpret_cast<uint32_t*>(memory);
  p.histogram = reinterpret_cast<int32_t*>(memory + extremes_bytes(sort));
  p.scratch = reinterpret_cast<int32_t*>(memory + extremes_bytes(sort) + histogram_bytes(sort));
  const int32_t segments = sort.batch * sort.heads;
  const int32_t ctas = segments * p.chunks;
  FLASHMSA_CHECK_CUDA(cudaMemsetAsync(p.extremes, 0, extremes_bytes(sort), stream));
  FLASHMSA_CHECK_CUDA(cudaFuncSetAttribute(scatter_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  extremes_kernel<<<ctas, kSortThreads, 0, stream>>>(p);
  for (int32_t pass = 0; pass < kMaxPasses; ++pass) {
    count_kernel<<<ctas, kSortThreads, 0, stream>>>(p, pass);
    scan_kernel<<<segments, kSortThreads, 0, stream>>>(p, pass);
    scatter_kernel<<<ctas, kSortThreads, kBytes, stream>>>(p, pass);
  }
  FLASHMSA_CHECK_CUDA(cudaGetLastError());
}

}  // namespace

size_t sort_workspace_size(const SortParams& p) {
  if (p.length <= kMaxClusterLength) return 0;
  return extremes_bytes(p) + histogram_bytes(p) + aligned(segments_of(p) * p.length * sizeof(int32_t));
}

void sort_buckets(const SortParams& p, void* workspace, void* stream_handle) {
  cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  if (segments_of(p) == 0 || p.length == 0) return;
  const int64_t ctas = segments_of(p) * max_of(ceil_div(p.length, kChunk), kClusterCtas);
  if (ctas > INT32_MAX) throw std::runtime_error("flashmsa: too many buckets in one sort; split the batch");
  if (p.length <= kMaxSegmentLength) return launch_segments(p, stream);
  if (p.length <= kMaxClusterLength / 4) return launch_clusters<kMaxClusterItems / 4>(p, stream);
  if (p.length <= kMaxClusterLength / 2) return launch_clusters<kMaxClusterItems / 2>(p, stream);
  if (p.length <= kMaxClusterLength) return launch_clusters<kMaxClusterItems>(p, stream);
  launch_chunks(p, workspace, stream);
}

}  // namespace flashmsa::hash
