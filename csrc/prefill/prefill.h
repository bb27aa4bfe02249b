// Attention of many queries to a paged cache on sm_90a: chunked prefill and mixed batches, fused. No torch, no CUDA headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/paged.h"

namespace flashmsa::prefill {

// Facts about one compiled kernel, for explain() and `python -m flashmsa info`.
struct KernelInfo {
  std::string
      name;  // e.g. "prefill_d128_bf16", "prefill_pages_d128_bf16" (query_pages), "prefill_pages_score_d128_bf16"
  bool query_pages;
  bool score;  // soft cap and ALiBi, or one of them; the others have neither
  DType dtype;
  int32_t head_dim_bucket;  // serves head_dim and head_dim_v up to this
  int32_t block_q;  // rows of a tile
  int32_t block_kv;  // keys of a tile
  int32_t threads;
  int32_t shared_memory;  // bytes
};

std::vector<KernelInfo> kernels();

// The kernel that would run these params; nullptr where none does, and gathering the pages for the forward kernel is the
// way: page_size no multiple of 8, head_dim or head_dim_v above 64 and no multiple of 64, a query_block that is no multiple
// of 64, pools whose strides make no tensor map or that are not aligned to 16 bytes, soft cap or ALiBi without
// query_pages, tree_bits, and grids of 2^31 tiles. Reads no device data. num_splits and batch_invariant do not matter: a
// row's keys are never split.
const KernelInfo* find_kernel(const PagedParams& params);

// Bytes of device memory beside the outputs: the plan, and the sorted lists of query_pages. 16-byte aligned; its content
// does not matter. Depends on shapes alone, not on what lengths and tables hold, so that a captured graph keeps its own.
size_t workspace_size(const PagedParams& params, int32_t num_sms);

// Launches on `stream` (a cudaStream_t) of the current device. Does not synchronise, reads no device value on the host.
// Requires, and does not check again: find_kernel(params) != nullptr; scale > 0; strides of q and out that are multiples of
// 8 elements and 16-byte aligned data pointers; batch, heads_q and len_q (packed: total_q) > 0. num_pages and max_pages may
// be 0. Writes every row of out and lse, also those that no sequence owns.
void paged_prefill(const PagedParams& params, void* workspace, int32_t num_sms, void* stream);

}  // namespace flashmsa::prefill
