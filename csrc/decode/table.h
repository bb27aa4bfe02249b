// The dispatch table: one entry per compiled kernel, built from the instances.
#pragma once

#include <cuda_runtime_api.h>

#include "decode/decode.h"

namespace flashmsa::decode {

struct KernelEntry {
  KernelInfo info;
  size_t (*workspace_bytes)(const PagedParams&, int32_t num_sms);
  void (*launch)(const PagedParams&, void* workspace, int32_t num_sms, cudaStream_t stream);
};

// Defined by the files under instances/, one each.
KernelEntry entry_d64_bf16();
KernelEntry entry_d64_fp16();
KernelEntry entry_d128_bf16();
KernelEntry entry_d128_fp16();
KernelEntry entry_d256_bf16();
KernelEntry entry_d256_fp16();

}  // namespace flashmsa::decode
