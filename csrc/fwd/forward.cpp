#include "fwd/forward.h"

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/philox.h"
#include "fwd/few_rows.h"
#include "fwd/table.h"
#include "mask/packed.h"

namespace flashmsa::fwd {
namespace {

const std::vector<KernelEntry>& table() {
  static const std::vector<KernelEntry> entries = [] {
    std::vector<KernelEntry> all;
    // Of kernels alike the narrowest first, then those for some calls alone: find() takes the first that serves.
    for (const auto& part : {entries_d64_bf16(),          entries_d64_fp16(),          entries_d96_bf16(),
                             entries_d96_fp16(),          entries_d128_bf16(),         entries_d128_fp16(),
                             entries_d192x128_bf16(),     entries_d192x128_fp16(),     entries_d192_bf16(),
                             entries_d192_fp16(),         entries_d256_bf16(),         entries_d256_fp16(),
                             small_entries_d64_bf16(),    small_entries_d64_fp16(),    small_entries_d128_bf16(),
                             small_entries_d128_fp16(),   score_entries_d64_bf16(),    score_entries_d64_fp16(),
                             score_entries_d128_bf16(),   score_entries_d128_fp16(),   score_entries_d256_bf16(),
                             score_entries_d256_fp16(),   dropout_entries_d64_bf16(),  dropout_entries_d64_fp16(),
                             dropout_entries_d128_bf16(), dropout_entries_d128_fp16(), dropout_entries_d256_bf16(),
                             dropout_entries_d256_fp16(), hash_entries_d64_bf16(),     hash_entries_d64_fp16(),
                             hash_entries_d128_bf16(),    hash_entries_d128_fp16(),    hash_entries_d256_bf16(),
                             hash_entries_d256_fp16()}) {
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }();
  return entries;
}

// For each kernel of the table the one to take instead, by its place there; itself unless tuning has found a faster one.
std::vector<std::atomic<int32_t>>& replacements() {
  static std::vector<std::atomic<int32_t>> places = [] {
    std::vector<std::atomic<int32_t>> all(table().size());
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int32_t>(i);
    return all;
  }();
  return places;
}

int32_t place_of(const std::string& name) {
  for (size_t i = 0; i < table().size(); ++i) {
    if (table()[i].info.name == name) return static_cast<int32_t>(i);
  }
  throw std::invalid_argument("kernel: no forward kernel is named " + name + "; kernels() lists them");
}

// Whether indexed.cuh can count a head's bytes in pieces of 16 by 32 bits.
bool rows_within_reach(const AttentionParams& p) {
  const auto reach = [](const TensorRef& rows, int32_t length) { return rows.stride_seq / 8 * length; };
  return max_of(reach(p.q, p.len_q), max_of(reach(p.k, p.len_kv), reach(p.v, p.len_kv))) <= UINT32_MAX;
}

// The narrowest kernel of a kind of mask that serves a call, or null.
const KernelEntry* find_of(MaskKind kind, const AttentionParams& params) {
  const bool softcap = params.softcap > 0, alibi = params.alibi_slopes != nullptr;
  // So unlikely that no draw is dropped: the same as none.
  const bool dropout = dropout_threshold(params.dropout_p) > 0;
  const bool list = kind == MaskKind::kBlockSparse;
  const bool general = dropout && (list || softcap || alibi || !draws_in_order(params));
  const bool band = kind == MaskKind::kComposite && mask::Band::serves(params);
  const auto serves = [&](const KernelInfo& info) {
    const bool options = info.softcap == softcap && info.alibi == alibi && info.dropout == dropout;
    const bool of_kind = info.mask == kind || (band && info.mask == mask::Band::kKind);
    const bool too_long = info.short_documents && !mask::ShortPacked::serves(params);
    return of_kind && !too_long && info.general == general && (general || options) && info.dtype == params.dtype &&
           info.head_dim_bucket >= params.head_dim && info.head_dim_v_bucket >= params.head_dim_v;
  };
  // Small tiles are a choice beside the narrowest kernel, of the same width.
  const KernelEntry* found = nullptr;
  for (const KernelEntry& entry : table()) {
    if (!serves(entry.info)) continue;
    if (entry.info.ctas_per_sm == 1) {
      if (found == nullptr) found = &entry;
      continue;
    }
    const bool as_narrow = found != nullptr && entry.info.head_dim_bucket == found->info.head_dim_bucket &&
                           entry.info.head_dim_v_bucket == found->info.head_dim_v_bucket;
    if (as_narrow && has_few_rows(params, {entry.info.block_q, entry.info.ctas_per_sm}, found->info.block_q)) {
      found = &entry;
      break;
    }
  }
  if (found == nullptr) return nullptr;
  const KernelEntry& instead = table()[replacements()[found - table().data()].load(std::memory_order_relaxed)];
  return serves(instead.info) ? &instead : found;
}

// Every mask but a list is a composite one too, whose kernels have all options.
const KernelEntry* find(const AttentionParams& params) {
  const MaskKind kind = params.mask.kind;
  if (kind != MaskKind::kHash || rows_within_reach(params)) {
    if (const KernelEntry* entry = find_of(kind, params)) return entry;
  }
  return kind == MaskKind::kBlockSparse ? nullptr : find_of(MaskKind::kComposite, params);
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

void replace_kernel(const std::string& name, const std::string& by) { replacements()[place_of(name)] = place_of(by); }

size_t workspace_size(const AttentionParams& params, int32_t num_sms) {
  return require(params).workspace_bytes(params, num_sms);
}

void attention_forward(const AttentionParams& params, void* workspace, int32_t num_sms, void* stream) {
  require(params).launch(params, workspace, num_sms, static_cast<cudaStream_t>(stream));
}

}  // namespace flashmsa::fwd
