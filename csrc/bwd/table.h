// The dispatch table: one entry per compiled kernel, built from the instances.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "bwd/backward.h"

namespace flashmsa::bwd {

struct KernelEntry {
  KernelInfo info;
  size_t (*workspace_bytes)(const BackwardParams&);
  void (*launch)(const BackwardParams&, void* workspace, cudaStream_t stream);
};

// Defined by the files under instances/, one each.
std::vector<KernelEntry> entries_d64_bf16();
std::vector<KernelEntry> entries_d64_fp16();
std::vector<KernelEntry> entries_d128_bf16();
std::vector<KernelEntry> entries_d128_fp16();
std::vector<KernelEntry> entries_d256_bf16();
std::vector<KernelEntry> entries_d256_fp16();

}  // namespace flashmsa::bwd
