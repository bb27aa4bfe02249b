#include "bwd/backward.h"

#include <stdexcept>

#include "bwd/band.h"
#include "bwd/packed.h"
#include "bwd/table.h"

namespace flashmsa::bwd {
namespace {

const std::vector<KernelEntry>& table() {
  static const std::vector<KernelEntry> entries = [] {
    std::vector<KernelEntry> all;
    for (const auto& part : {entries_d64_bf16(), entries_d64_fp16(), entries_d128_bf16(), entries_d128_fp16(),
                             entries_d256_bf16(), entries_d256_fp16()}) {
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }();
  return entries;
}

// Whether tiles that begin where documents do are worth it: not for short ones, of which tiles hold several.
bool packs(const BackwardParams& params, const KernelInfo& info) {
  const AttentionParams& p = params.forward;
  if (p.mask.kind != MaskKind::kDocument || params.deterministic) return false;
  const int64_t rows = int64_t{p.mask.num_documents} * least_packed_length(p.mask.causal, info.head_dim_bucket);
  return rows > 0 && rows <= p.len_q && rows <= p.len_kv &&
         PackedTiles::count(p.mask.num_documents, p.len_kv, info.block_kv) <= kMostPacked;
}

// Whether a band's kernel is the faster one. Where its key tiles are of two CTAs, both visit what one of them sees, along the
// mask's edges.
// PERF: d64, of one CTA: .88 … .92 of the time, of 1024 rows .96 … 1. d128, of two, visited tiles and time over those of one
// CTA each: dense 1 and .95 … .96, of 1024 rows .885; causal 16384 1.01 and .955, 8192 1.02 and .961, 4096 1.03 and .981, 2048
// 1.06 and 1.013, 1024 1.11 and 1.019.
bool bands(const BackwardParams& params, const KernelInfo& info) {
  const AttentionParams& p = params.forward;
  if (!KeyBand::serves(p)) return false;
  constexpr int32_t kOneCta = 128;
  if (info.block_kv == kOneCta) return true;
  if (params.deterministic) return false;
  const KeyBand band = KeyBand::of(p);
  const int64_t pairs = 2 * band.visited(p.len_q, p.len_kv, info.block_q, info.block_kv);
  const int64_t singles = band.visited(p.len_q, p.len_kv, info.block_q, kOneCta);
  return pairs <= singles + singles / 25;
}

const KernelEntry* find(const BackwardParams& params) {
  const AttentionParams& p = params.forward;
  const bool general = p.softcap > 0 || p.alibi_slopes != nullptr || (p.dropout_p > 0 && !draws_in_order(p));
  // The smallest bucket that holds both, and of its kernels the first that serves the call.
  for (const KernelEntry& entry : table()) {
    const KernelInfo& info = entry.info;
    if (info.dtype == p.dtype && info.head_dim_bucket >= max_of(p.head_dim, p.head_dim_v) && info.general == general &&
        (general || info.dropout == (p.dropout_p > 0)) && (!info.packed || packs(params, info)) &&
        (!info.band || bands(params, info))) {
      return &entry;
    }
  }
  return nullptr;
}

const KernelEntry& require(const BackwardParams& params) {
  const KernelEntry* entry = find(params);
  if (entry == nullptr)
    throw std::runtime_error("flashmsa: no backward kernel was compiled for this head_dim and dtype");
  return *entry;
}

}  // namespace

std::vector<KernelInfo> kernels() {
  std::vector<KernelInfo> infos;
  for (const KernelEntry& entry : table()) infos.push_back(entry.info);
  return infos;
}

const KernelInfo* find_kernel(const BackwardParams& params) {
  const KernelEntry* entry = find(params);
  return entry == nullptr ? nullptr : &entry->info;
}

size_t workspace_size(const BackwardParams& params, int32_t /*num_sms*/) {
  return require(params).workspace_bytes(params);
}

void attention_backward(const BackwardParams& params, void* workspace, int32_t /*num_sms*/, void* stream) {
  require(params).launch(params, workspace, static_cast<cudaStream_t>(stream));
}

}  // namespace flashmsa::bwd
