// The dispatch table: one entry per compiled kernel, built from the instances.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "fwd/forward.h"
#include "mask/list.h"

namespace flashmsa::fwd {

struct KernelEntry {
  KernelInfo info;
  size_t (*workspace_bytes)(const AttentionParams&, int32_t num_sms);
  void (*launch)(const AttentionParams&, void* workspace, int32_t num_sms, cudaStream_t stream);
};

// Defined by the files under instances/, one each.
std::vector<KernelEntry> entries_d64_bf16();
std::vector<KernelEntry> entries_d64_fp16();
std::vector<KernelEntry> entries_d96_bf16();
std::vector<KernelEntry> entries_d96_fp16();
std::vector<KernelEntry> entries_d128_bf16();
std::vector<KernelEntry> entries_d128_fp16();
std::vector<KernelEntry> entries_d192x128_bf16();
std::vector<KernelEntry> entries_d192x128_fp16();
std::vector<KernelEntry> entries_d192_bf16();
std::vector<KernelEntry> entries_d192_fp16();
std::vector<KernelEntry> entries_d256_bf16();
std::vector<KernelEntry> entries_d256_fp16();
std::vector<KernelEntry> small_entries_d64_bf16();
std::vector<KernelEntry> small_entries_d64_fp16();
std::vector<KernelEntry> small_entries_d128_bf16();
std::vector<KernelEntry> small_entries_d128_fp16();
std::vector<KernelEntry> score_entries_d64_bf16();
std::vector<KernelEntry> score_entries_d64_fp16();
std::vector<KernelEntry> score_entries_d128_bf16();
std::vector<KernelEntry> score_entries_d128_fp16();
std::vector<KernelEntry> score_entries_d256_bf16();
std::vector<KernelEntry> score_entries_d256_fp16();
std::vector<KernelEntry> dropout_entries_d64_bf16();
std::vector<KernelEntry> dropout_entries_d64_fp16();
std::vector<KernelEntry> dropout_entries_d128_bf16();
std::vector<KernelEntry> dropout_entries_d128_fp16();
std::vector<KernelEntry> dropout_entries_d256_bf16();
std::vector<KernelEntry> dropout_entries_d256_fp16();
std::vector<KernelEntry> hash_entries_d64_bf16();
std::vector<KernelEntry> hash_entries_d64_fp16();
std::vector<KernelEntry> hash_entries_d128_bf16();
std::vector<KernelEntry> hash_entries_d128_fp16();
std::vector<KernelEntry> hash_entries_d256_bf16();
std::vector<KernelEntry> hash_entries_d256_fp16();

}  // namespace flashmsa::fwd
