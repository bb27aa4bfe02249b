#include "prefill/plan.h"

#include "core/cuda_check.h"
#include "sched/plan.cuh"

namespace flashmsa::prefill {
namespace {

// ---- Page lists -------------------------------------------------------------------------------------------------------------

constexpr int32_t kListThreads = 256;
constexpr int32_t kListWords = 4096;  // of a bitmap in shared memory, 32 pages each: 16 KB

// The sum over the threads before this one, and over all.
__device__ __forceinline__ int32_t sum_before(int32_t x, int32_t (&warp_sums)[kListThreads / 32], int32_t& total) {
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t sum = x;
#pragma unroll
  for (int32_t step = 1; step < 32; step *= 2) {
    const int32_t below = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += below;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int32_t before = 0;
  total = 0;
#pragma unroll
  for (int32_t w = 0; w < kListThreads / 32; ++w) {
    if (w < warp) before += warp_sums[w];
    total += warp_sums[w];
  }
  __syncthreads();
  return before + sum - x;
}

// One CTA a list: its pages as bits, which come out sorted and once each; then their places in the pool.
__global__ void __launch_bounds__(kListThreads)
    sort_pages_kernel(const PagedMaskParams p, const int32_t* query_pages, int32_t pages_per_block) {
  __shared__ uint32_t bits[kListWords];
  __shared__ int32_t warp_sums[kListThreads / 32];
  // The plan may start while this kernel runs: it waits for the lists.
  cudaTriggerProgrammaticLaunchCompletion();
  const int32_t thread = threadIdx.x;
  const int32_t sequence = blockIdx.x / p.lists.query_blocks;
  const int32_t* listed = query_pages + int64_t{blockIdx.x} * pages_per_block;
  ListedPage* sorted = const_cast<ListedPage*>(p.lists.pages) + int64_t{blockIdx.x} * p.lists.capacity;
  const int32_t in_use = ceil_div(p.length(sequence), p.page_size);

  int32_t count = 0;
  for (int32_t base = 0; base < in_use; base += 32 * kListWords) {
    const int32_t pages = min_of(in_use - base, 32 * kListWords), words = ceil_div(pages, 32);
    for (int32_t w = thread; w < words; w += kListThreads) bits[w] = 0;
    __syncthreads();
    for (int32_t i = thread; i < pages_per_block; i += kListThreads) {
      // NOTE: unsigned, so that a negative entry is out of range too.
      const uint32_t page = static_cast<uint32_t>(listed[i]) - static_cast<uint32_t>(base);
      if (page < static_cast<uint32_t>(pages)) atomicOr(&bits[page / 32], 1u << page % 32);
    }
    __syncthreads();
    for (int32_t first = 0; first < words; first += kListThreads) {
      uint32_t word = first + thread < words ? bits[first + thread] : 0;
      int32_t total;
      int32_t place = count + sum_before(__popc(word), warp_sums, total);
      for (; word != 0; word &= word - 1, ++place) {
        // Only a list that another stream changes could hold more than the capacity.
        if (place < p.lists.capacity) sorted[place].logical = base + 32 * (first + thread) + __ffs(word) - 1;
      }
      count += total;
    }
  }
  count = min_of(count, p.lists.capacity);
  __syncthreads();
  for (int32_t i = thread; i < count; i += kListThreads) sorted[i].page = p.table_entry(sequence, sorted[i].logical);
  if (thread == 0) const_cast<int32_t*>(p.lists.counts)[blockIdx.x] = count;
}

// ---- Plan -------------------------------------------------------------------------------------------------------------------

// Rows of Q of a sequence. Packed ones have two more that belong to nobody: the rows behind the last, those before the first.
__device__ __forceinline__ Interval sequence_rows(const PagedMaskParams& p, int32_t sequence) {
  if (p.cu_seqlens_q == nullptr) return {0, p.len_q};
  const auto offset = [&](int32_t i) { return clamp(p.cu_seqlens_q[i], 0, p.total_q); };
  if (sequence == p.batch) return {offset(p.batch), p.total_q};
  if (sequence > p.batch) return {0, offset(0)};
  const int32_t begin = offset(sequence);
  return {begin, max_of(begin, offset(sequence + 1))};
}

// The last sequence whose row blocks begin at or before `index`.
__device__ __forceinline__ int32_t find_sequence(const int32_t* first_block, int32_t sequences, int32_t index) {
  int32_t low = 0, high = sequences - 1;
  while (low < high) {
    const int32_t mid = low + (high - low + 1) / 2;
    if (first_block[mid] <= index) {
      low = mid;
    } else {
      high = mid - 1;
    }
  }
  return low;
}

template <class Mask, int32_t kBlockKv>
__device__ __forceinline__ sched::PlanEntry<Mask> make_entry(const PlanArgs<Mask>& args, int32_t sequence,
                                                             int32_t index) {
  const PagedMaskParams& p = args.mask;
  const Interval all = sequence_rows(p, sequence);
  const int32_t len_q = all.end - all.begin;
  const Interval rows = args.blocks.rows(index, len_q);
  sched::PlanEntry<Mask> entry;
  entry.row_block = index;
  typename Mask::Block& block = entry.block;
  block.owned = sequence < p.batch;
  block.sequence = block.owned ? sequence : 0;
  block.sequence_row = all.begin;
  block.first_row = rows.begin;
  block.end_row = rows.end;
  Mask::fill_block(p, block, len_q);
  if constexpr (Mask::kScattered) {
    entry.tiles = Mask::choose(p, block, kBlockKv);
  } else {
    entry.tiles = Mask::run_tiles(p, block, rows.begin, rows.end - 1, kBlockKv);
  }
  return entry;
}

template <class Mask, int32_t kBlockKv>
__device__ __forceinline__ void write_spans(const PlanArgs<Mask>& args, const sched::PlanEntry<Mask>& entry,
                                            sched::Span* spans) {
  const typename Mask::Tiles& tiles = entry.tiles;
  const typename Mask::Block& block = entry.block;
#pragma unroll 1
  for (int32_t part = 0; part * sched::kSpanRows < args.blocks.block_q; ++part) {
    const int32_t first = block.first_row + part * sched::kSpanRows;
    const int32_t last = min_of(first + sched::kSpanRows, block.end_row) - 1;
    if (first >= block.end_row) {
      spans[part] = {tiles.count(), 0, 0};
    } else if constexpr (Mask::kScattered) {
      spans[part] = {0, tiles.count(), 0};
    } else {
      spans[part] = sched::span_of(tiles, Mask::run_tiles(args.mask, block, first, last, kBlockKv));
    }
  }
}

// Row blocks before each sequence, the total behind the last.
template <class Mask>
__device__ __forceinline__ int32_t count_blocks(const PlanArgs<Mask>& args, int32_t sequences, int32_t* warp_sums) {
  const int32_t thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  int32_t total = 0;
  for (int32_t first = 0; first < sequences; first += sched::kPlanThreads) {
    const int32_t sequence = first + thread;
    int32_t count = 0;
    if (sequence < sequences) {
      const Interval rows = sequence_rows(args.mask, sequence);
      count = args.blocks.count(rows.end - rows.begin);
    }
    int32_t sum = count;
#pragma unroll
    for (int32_t step = 1; step < 32; step *= 2) {
      const int32_t below = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += below;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    int32_t before = lane < warp ? warp_sums[lane] : 0, all = warp_sums[lane];
#pragma unroll
    for (int32_t step = 16; step > 0; step /= 2) {
      before += __shfl_xor_sync(~0u, before, step);
      all += __shfl_xor_sync(~0u, all, step);
    }
    if (sequence < sequences) args.first_block[sequence] = total + before + sum - count;
    total += all;
    __syncthreads();
  }
  return total;
}

// PERF: kBlockKv is known to the compiler, which divides by it a dozen times one after another.
template <class Mask, int32_t kBlockKv>
__global__ void __launch_bounds__(sched::kPlanThreads) paged_plan_kernel(const __grid_constant__ PlanArgs<Mask> args) {
  __shared__ sched::PlanSort sort;
  const int32_t thread = threadIdx.x;
  cudaTriggerProgrammaticLaunchCompletion();
  sort.bucket_start[thread] = 0;
  // SYNC: the lists are the work of the kernel before, and whatever came before that is done when it is.
  if constexpr (Mask::kScattered) cudaGridDependencySynchronize();
  const PagedMaskParams& p = args.mask;
  const bool packed = p.cu_seqlens_q != nullptr;
  const int32_t sequences = packed ? p.batch + 2 : p.batch;
  const int32_t per_sequence = args.blocks.count(p.len_q);
  int32_t entries = packed ? count_blocks(args, sequences, sort.warp_sums) : p.batch * per_sequence;
  // Offsets that rise have no more.
  entries = min_of(entries, args.capacity);
  if (thread == 0) *args.counters = {0, entries};
  __syncthreads();
  // PERF: an entry lies where it is made, and small ones are sorted.
  const auto make = [&](int32_t i) {
    const int32_t sequence = packed ? find_sequence(args.first_block, sequences, i) : i / per_sequence;
    const sched::PlanEntry<Mask> entry =
        make_entry<Mask, kBlockKv>(args, sequence, packed ? i - args.first_block[sequence] : i % per_sequence);
    args.plan[i] = entry;
    write_spans<Mask, kBlockKv>(args, entry, args.plan[i].spans);
    return Ranked{i, {entry.tiles.count()}};
  };
  const int32_t max_tiles = ceil_div(p.max_len, kBlockKv);
  const auto again = [&](int32_t i) { return Ranked{i, {args.plan[i].tiles.count()}}; };
  sched::sort_entries(sort, entries, sched::PlanOrder(entries, 1, max_tiles),
                      reinterpret_cast<Ranked*>(args.plan + args.capacity), make, again, [](Ranked&) {});
}

}  // namespace

template <class Mask, int32_t kBlockKv>
void launch_plan(const PlanArgs<Mask>& args, cudaStream_t stream) {
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(sched::kPlanThreads);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = Mask::kScattered ? 1 : 0;
  FLASHMSA_CHECK_CUDA(cudaLaunchKernelEx(&config, paged_plan_kernel<Mask, kBlockKv>, args));
}

template void launch_plan<Paged<false>, 64>(const PlanArgs<Paged<false>>&, cudaStream_t);
template void launch_plan<Paged<false>, 128>(const PlanArgs<Paged<false>>&, cudaStream_t);
template void launch_plan<Paged<true>, 64>(const PlanArgs<Paged<true>>&, cudaStream_t);
template void launch_plan<Paged<true>, 128>(const PlanArgs<Paged<true>>&, cudaStream_t);

void launch_sort_pages(const PagedMaskParams& mask, const int32_t* query_pages, int32_t pages_per_block,
                       cudaStream_t stream) {
  const int32_t lists = mask.batch * mask.lists.query_blocks;
  if (lists == 0) return;
  sort_pages_kernel<<<lists, kListThreads, 0, stream>>>(mask, query_pages, pages_per_block);
  FLASHMSA_CHECK_CUDA(cudaGetLastError());
}

}  // namespace flashmsa::prefill
