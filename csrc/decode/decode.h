// Attention of few queries to long caches on sm_90a: split over CTAs, paged or dense. No torch, no CUDA headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/paged.h"

namespace flashmsa::decode {

// Facts about one compiled kernel, for explain() and `python -m flashmsa info`.
struct KernelInfo {
  std::string name;         // e.g. "decode_d128_bf16"
  DType dtype;
  int32_t head_dim_bucket;  // serves head_dim and head_dim_v up to this
  int32_t block_kv;         // keys of a tile
  int32_t threads;
  int32_t shared_memory;    // bytes
};

std::vector<KernelInfo> kernels();

// The kernel that would run these params; nullptr: too many query rows for a kv head, or no such dtype or head dim.
const KernelInfo* find_kernel(const PagedParams& params);

// Bytes of device memory beside the outputs: parts of rows and their marks. 16-byte aligned; its content does not matter.
// Depends on shapes alone, not on what lengths and tables hold, so that a captured graph keeps its own.
size_t workspace_size(const PagedParams& params, int32_t num_sms);

// Launches on `stream` (a cudaStream_t) of the current device. Does not synchronise, reads no device value on the host.
void paged_decode(const PagedParams& params, void* workspace, int32_t num_sms, void* stream);

}  // namespace flashmsa::decode
