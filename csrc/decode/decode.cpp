#include "decode/decode.h"

#include <stdexcept>

#include "decode/config.h"
#include "decode/prepare.h"
#include "decode/table.h"

namespace flashmsa::decode {
namespace {

const std::vector<KernelEntry>& table() {
  static const std::vector<KernelEntry> entries = {entry_d64_bf16(),  entry_d64_fp16(),  entry_d128_bf16(),
                                                   entry_d128_fp16(), entry_d256_bf16(), entry_d256_fp16()};
  return entries;
}

bool fits(const PagedParams& p) {
  if (p.heads_kv <= 0 || p.heads_q % p.heads_kv != 0) return false;
  // Trees no other kernel takes, however many rows they have.
  if (p.tree_bits == nullptr && int64_t{p.heads_q} / p.heads_kv * p.len_q > kMaxRows) return false;
  if (p.head_dim > 256 || p.head_dim_v > 256 || p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0) return false;
  if (p.query_pages == nullptr) return true;
  return p.query_blocks == 1 && p.len_q <= p.query_block && p.max_pages <= kMaxSelectable;
}

const KernelEntry* find(const PagedParams& params) {
  if (!fits(params)) return nullptr;
  const int32_t bucket = bucket_of(max_of(params.head_dim, params.head_dim_v));
  for (const KernelEntry& entry : table()) {
    if (entry.info.dtype == params.dtype && entry.info.head_dim_bucket == bucket) return &entry;
  }
  return nullptr;
}

const KernelEntry& require(const PagedParams& params) {
  const KernelEntry* entry = find(params);
  if (entry == nullptr) throw std::runtime_error("flashmsa: no decode kernel was compiled for this call");
  return *entry;
}

}  // namespace

std::vector<KernelInfo> kernels() {
  std::vector<KernelInfo> infos;
  for (const KernelEntry& entry : table()) infos.push_back(entry.info);
  return infos;
}

const KernelInfo* find_kernel(const PagedParams& params) {
  const KernelEntry* entry = find(params);
  return entry == nullptr ? nullptr : &entry->info;
}

size_t workspace_size(const PagedParams& params, int32_t num_sms) {
  return require(params).workspace_bytes(params, num_sms);
}

void paged_decode(const PagedParams& params, void* workspace, int32_t num_sms, void* stream) {
  require(params).launch(params, workspace, num_sms, static_cast<cudaStream_t>(stream));
}

}  // namespace flashmsa::decode
