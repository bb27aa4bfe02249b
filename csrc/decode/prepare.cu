#include "decode/prepare.h"

#include <cuda_runtime.h>

#include "core/cuda_check.h"
#include "sm90/async_copy.cuh"

namespace flashmsa::decode {
namespace {

constexpr int32_t kPrepareThreads = 256;

struct Pages {
  const int32_t* kv_lens;
  const int32_t* block_table;
  int64_t block_table_stride;
  int32_t num_pages, page_size, max_pages, capacity;
};

// One CTA a sequence: the listed pages as bits, and the bits as a list again.
__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(const PrepareParams p, const Pages pages) {
  extern __shared__ uint32_t bits[];
  __shared__ int32_t warp_sums[kPrepareThreads / 32], places[kPrepareThreads];
  const int32_t batch = blockIdx.x, thread = threadIdx.x;
  cudaTriggerProgrammaticLaunchCompletion();

  // PERF: what the steps below wait for is asked for together: three round trips to memory become one.
  const int32_t* listed = p.query_pages + int64_t{batch} * p.pages_per_block;
  const int32_t first = thread < p.pages_per_block ? listed[thread] : -1;
  const int32_t* table = pages.block_table == nullptr ? nullptr : pages.block_table + batch * pages.block_table_stride;
  if (table != nullptr) {
    for (int32_t page = thread * 32; page < pages.max_pages; page += kPrepareThreads * 32) {
      sm90::prefetch_l2(table + page);
    }
  }
  const int32_t kv_len = pages.kv_lens == nullptr ? pages.capacity : clamp(pages.kv_lens[batch], 0, pages.capacity);
  const int32_t in_use = ceil_div(kv_len, pages.page_size), words = ceil_div(in_use, 32);
  for (int32_t word = thread; word < words; word += kPrepareThreads) bits[word] = 0;
  __syncthreads();
  for (int32_t i = thread; i < p.pages_per_block; i += kPrepareThreads) {
    const int32_t page = i == thread ? first : listed[i];
    if (page >= 0 && page < in_use) atomicOr(&bits[page / 32], 1u << page % 32);
  }
  __syncthreads();

  int2* selected = p.selected + int64_t{batch} * p.pages_per_block;
  int32_t count = 0;
  for (int32_t base = 0; base < words; base += kPrepareThreads) {
    const int32_t word = base + thread;
    const uint32_t left = word < words ? bits[word] : 0;
    int32_t sum = __popc(left);
#pragma unroll
    for (int32_t step = 1; step < 32; step *= 2) {
      const int32_t below = __shfl_up_sync(~0u, sum, step);
      if (thread % 32 >= step) sum += below;
    }
    if (thread % 32 == 31) warp_sums[thread / 32] = sum;
    __syncthreads();
    int32_t place = count + sum - __popc(left);
    for (int32_t warp = 0; warp < kPrepareThreads / 32; ++warp) {
      if (warp < thread / 32) place += warp_sums[warp];
      count += warp_sums[warp];
    }
    places[thread] = place;
    __syncthreads();
    // PERF: a lane a page, so that the table is read for many at a time.
    const int32_t lane = thread % 32, here = min_of(words - base, kPrepareThreads);
#pragma unroll 4
    for (int32_t n = thread / 32; n < here; n += kPrepareThreads / 32) {
      const uint32_t listed_here = bits[base + n];
      if ((listed_here >> lane & 1u) == 0) continue;
      const int32_t logical = (base + n) * 32 + lane;
      const int32_t physical = table == nullptr ? batch : __ldg(table + logical);
      selected[places[n] + __popc(listed_here & ((1u << lane) - 1))] = {logical,
                                                                        clamp(physical, 0, pages.num_pages - 1)};
    }
    __syncthreads();
  }
  if (thread == 0) p.selected_count[batch] = count;
}

}  // namespace

void prepare(const PagedParams& call, const PrepareParams& params, int32_t capacity, cudaStream_t stream) {
  if (call.batch == 0) return;
  const Pages pages = {call.kv_lens,   call.block_table, call.block_table_stride, call.num_pages, call.page_size,
                       call.max_pages, capacity};
  const size_t bytes = size_t{4} * ceil_div(call.max_pages, 32);
  if (bytes > 0) {
    FLASHMSA_CHECK_CUDA(
        cudaFuncSetAttribute(prepare_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  }
  prepare_kernel<<<call.batch, kPrepareThreads, bytes, stream>>>(params, pages);
  FLASHMSA_CHECK_CUDA(cudaGetLastError());
}

}  // namespace flashmsa::decode
