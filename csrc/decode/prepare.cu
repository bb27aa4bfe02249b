#include "decode/prepare.h"

#include <cuda_runtime.h>

#include "core/cuda_check.h"
#include "sm90/async_copy.cuh"
#include "sm90/pool_box.cuh"

namespace flashmsa::decode {
namespace {

constexpr int32_t kPrepareThreads = 256;
constexpr int32_t kGroupWords = 8;  // words of bits that have one count together

struct Pages {
  const int32_t* kv_lens;
  const int32_t* block_table;
  int64_t block_table_stride;
  int32_t num_pages, page_size, max_pages, capacity;

  __device__ __forceinline__ int32_t in_use(int32_t batch) const {
    return ceil_div(kv_lens == nullptr ? capacity : clamp(kv_lens[batch], 0, capacity), page_size);
  }
  // Of a page in use: as the table has it, then as it is in the pool.
  __device__ __forceinline__ int32_t table_entry(int32_t batch, int32_t logical) const {
    return block_table == nullptr ? batch : __ldg(block_table + batch * block_table_stride + logical);
  }
  __device__ __forceinline__ int32_t physical(int32_t entry) const { return clamp(entry, 0, num_pages - 1); }
};

// K and V of kAheadKeys keys, all heads, where a share of the lists begins, to the L2. PERF: who attends to them, and when, is
// not known before the lists are sorted, but memory has nothing else to do until then.
constexpr int32_t kAheadKeys = 128;
__device__ void bring_ahead(const PrepareParams& p, const Pages& pages, int32_t batches, int32_t slice) {
  const Ahead& ahead = p.ahead;
  const int32_t boxes = (kAheadKeys >> ahead.piece_log2) * ahead.heads_kv * 2;
  for (int32_t box = threadIdx.x; box < boxes; box += kPrepareThreads) {
    const uint32_t heads = ahead.heads_kv, piece = box / 2 / heads, head = box / 2 - piece * heads;
    const int32_t key = static_cast<int32_t>(piece << ahead.piece_log2);
    const int32_t place = static_cast<int32_t>(static_cast<uint32_t>(key) / static_cast<uint32_t>(pages.page_size));
    const int32_t entry = slice * ahead.step + place;
    const int32_t batch = static_cast<int32_t>(static_cast<uint32_t>(entry) / static_cast<uint32_t>(p.pages_per_block));
    if (batch >= batches) continue;
    const int32_t logical = p.query_pages[entry];
    if (logical < 0 || logical >= pages.in_use(batch)) continue;
    sm90::prefetch_piece(
        box % 2 == 0 ? ahead.k_map : ahead.v_map,
        {key - place * pages.page_size, static_cast<int32_t>(head), pages.physical(pages.table_entry(batch, logical))},
        ahead.policy);
  }
}

// One CTA a sequence: the listed pages as bits, which say where in the ascending list each one goes. Groups of words are
// counted, so that a page has few words before it in its group. Behind these CTAs one for each share that is brought ahead.
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_kernel(const __grid_constant__ PrepareParams p, const Pages pages, int32_t batches) {
  extern __shared__ uint32_t bits[];
  __shared__ int32_t warp_sums[kPrepareThreads / 32];
  const int32_t batch = blockIdx.x, thread = threadIdx.x;
  cudaTriggerProgrammaticLaunchCompletion();
  if (batch >= batches) return bring_ahead(p, pages, batches, batch - batches);

  // PERF: what the steps below wait for is asked for together: three round trips to memory become one.
  const int32_t* listed = p.query_pages + int64_t{batch} * p.pages_per_block;
  const int32_t first = thread < p.pages_per_block ? listed[thread] : -1;
  if (pages.block_table != nullptr) {
    const int32_t* table = pages.block_table + batch * pages.block_table_stride;
    for (int32_t page = thread * 32; page < pages.max_pages; page += kPrepareThreads * 32) {
      sm90::prefetch_l2(table + page);
    }
  }
  const int32_t in_use = pages.in_use(batch), groups = ceil_div(in_use, 32 * kGroupWords);
  const auto is_in_use = [&](int32_t page) { return page >= 0 && page < in_use; };
  // PERF: on its way while the bits are set and counted.
  const int32_t first_entry = is_in_use(first) ? pages.table_entry(batch, first) : 0;
  int32_t* before = reinterpret_cast<int32_t*>(bits + groups * kGroupWords);  // pages of the groups before each
  for (int32_t word = thread; word < groups * kGroupWords; word += kPrepareThreads) bits[word] = 0;
  __syncthreads();
  for (int32_t i = thread; i < p.pages_per_block; i += kPrepareThreads) {
    const int32_t page = i == thread ? first : listed[i];
    if (is_in_use(page)) atomicOr(&bits[page / 32], 1u << page % 32);
  }
  __syncthreads();

  int32_t count = 0;
  for (int32_t base = 0; base < groups; base += kPrepareThreads) {
    const int32_t group = base + thread;
    int32_t own = 0;
    if (group < groups) {
#pragma unroll
      for (int32_t word = 0; word < kGroupWords; ++word) own += __popc(bits[group * kGroupWords + word]);
    }
    int32_t sum = own;
#pragma unroll
    for (int32_t step = 1; step < 32; step *= 2) {
      const int32_t below = __shfl_up_sync(~0u, sum, step);
      if (thread % 32 >= step) sum += below;
    }
    if (thread % 32 == 31) warp_sums[thread / 32] = sum;
    __syncthreads();
    int32_t place = count + sum - own;
    for (int32_t warp = 0; warp < kPrepareThreads / 32; ++warp) {
      if (warp < thread / 32) place += warp_sums[warp];
      count += warp_sums[warp];
    }
    if (group < groups) before[group] = place;
    __syncthreads();
  }

  // A page that is listed twice is written twice, to the same place.
  int2* selected = p.selected + int64_t{batch} * p.pages_per_block;
#pragma unroll 4
  for (int32_t i = thread; i < p.pages_per_block; i += kPrepareThreads) {
    const int32_t page = i == thread ? first : listed[i];
    if (!is_in_use(page)) continue;
    int32_t place = before[page / (32 * kGroupWords)] + __popc(bits[page / 32] & ((1u << page % 32) - 1));
    for (int32_t word = page / 32 / kGroupWords * kGroupWords; word < page / 32; ++word) place += __popc(bits[word]);
    selected[place] = {page, pages.physical(i == thread ? first_entry : pages.table_entry(batch, page))};
  }
  if (thread == 0) p.selected_count[batch] = count;
}

}  // namespace

void prepare(const PagedParams& call, const PrepareParams& params, int32_t capacity, cudaStream_t stream) {
  if (call.batch == 0) return;
  const Pages pages = {call.kv_lens,   call.block_table, call.block_table_stride, call.num_pages, call.page_size,
                       call.max_pages, capacity};
  const size_t bytes = size_t{4} * ceil_div(call.max_pages, 32 * kGroupWords) * (kGroupWords + 1);
  if (bytes > 0) {
    FLASHMSA_CHECK_CUDA(
        cudaFuncSetAttribute(prepare_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  }
  prepare_kernel<<<call.batch + params.ahead.slices, kPrepareThreads, bytes, stream>>>(params, pages, call.batch);
  FLASHMSA_CHECK_CUDA(cudaGetLastError());
}

}  // namespace flashmsa::decode
