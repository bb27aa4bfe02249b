// The dispatch table, one entry per compiled kernel, and what pools and shapes must be for one.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <vector>

#include "prefill/paged.h"
#include "prefill/prefill.h"

namespace flashmsa::prefill {

struct KernelEntry {
  KernelInfo info;
  int64_t (*most_row_blocks)(const PagedParams&);
  size_t (*workspace_bytes)(const PagedParams&);
  void (*launch)(const PagedParams&, void* workspace, int32_t num_sms, cudaStream_t stream);
};

// A pool's last two dimensions of five, and how pages step through them.
struct PoolView {
  int64_t eights, heads;  // extents: eights of slots; heads, or pages and heads together
  int64_t head_stride;    // of the fifth dimension, in elements
  PoolSteps steps;
};

// Empty where no tensor map describes the pool.
std::optional<PoolView> pool_view(const PoolRef& pool, const PagedParams& params);

// Rows of a key tile that lie on one page: a power of two of at least 8, where page_size is a multiple of 8.
constexpr int32_t piece_rows(int32_t page_size, int32_t block_kv) { return min_of(page_size & -page_size, block_kv); }

// The longest sequence that the table can hold; 0 without pages.
int32_t longest(const PagedParams& params);

// Pages of a sorted list at most.
inline int32_t list_capacity(const PagedParams& p) { return min_of(p.pages_per_block, p.max_pages); }

// Defined by the files under instances/, one each.
std::vector<KernelEntry> entries_d64_bf16();
std::vector<KernelEntry> entries_d64_fp16();
std::vector<KernelEntry> entries_d128_bf16();
std::vector<KernelEntry> entries_d128_fp16();
std::vector<KernelEntry> entries_d256_bf16();
std::vector<KernelEntry> entries_d256_fp16();

}  // namespace flashmsa::prefill
