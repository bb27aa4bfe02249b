#include "fwd/forward.h"

#include <stdexcept>

#include "fwd/config.h"
#include "fwd/table.h"

namespace flashmsa::fwd {
namespace {

const std::vector<KernelEntry>& table() {
  static const std::vector<KernelEntry> entries = [] {
    std::vector<KernelEntry> all;
    for (const auto& part :
         {entries_d64_bf16(), entries_d64_fp16(), entries_d128_bf16(), entries_d128_fp16(), entries_d256_bf16(),
          entries_d256_fp16(), score_entries_d64_bf16(), score_entries_d64_fp16(), score_entries_d128_bf16(),
          score_entries_d128_fp16(), score_entries_d256_bf16(), score_entries_d256_fp16()}) {
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }();
  return entries;
}

const KernelEntry* find(const AttentionParams& params) {
  // None of these kernels drops weights.
  if (params.dropout_p > 0) return nullptr;
  const int32_t bucket = bucket_of(max_of(params.head_dim, params.head_dim_v));
  const bool softcap = params.softcap > 0, alibi = params.alibi_slopes != nullptr;
  MaskKind kind = params.mask.kind;
  if ((softcap || alibi) && kind != MaskKind::kBlockSparse) kind = MaskKind::kComposite;
  for (const KernelEntry& entry : table()) {
    if (entry.info.mask == kind && entry.info.softcap == softcap && entry.info.alibi == alibi &&
        entry.info.dtype == params.dtype && entry.info.head_dim_bucket == bucket) {
      return &entry;
    }
  }
  return nullptr;
}

const KernelEntry& require(const AttentionParams& params) {
  const KernelEntry* entry = find(params);
  if (entry == nullptr) throw std::runtime_error("flashmsa: no forward kernel was compiled for this mask and dtype");
  return *entry;
}

}  // namespace

std::vector<KernelInfo> kernels() {
  std::vector<KernelInfo> infos;
  for (const KernelEntry& entry : table()) infos.push_back(entry.info);
  return infos;
}

const KernelInfo* find_kernel(const AttentionParams& params) {
  const KernelEntry* entry = find(params);
  return entry == nullptr ? nullptr : &entry->info;
}

size_t workspace_size(const AttentionParams& params, int32_t num_sms) {
  return require(params).workspace_bytes(params, num_sms);
}

void attention_forward(const AttentionParams& params, void* workspace, int32_t num_sms, void* stream) {
  require(params).launch(params, workspace, num_sms, static_cast<cudaStream_t>(stream));
}

}  // namespace flashmsa::fwd
