#include "prefill/prefill.h"

#include <limits>
#include <stdexcept>

#include "prefill/table.h"

namespace flashmsa::prefill {
namespace {

// Narrow kernels first.
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

// A map of whole groups of 64 columns: what is left of a group would be read from the next row.
bool columns_fit(int32_t head_dim) { return head_dim <= 64 || head_dim % 64 == 0; }

bool aligned(const PoolRef& pool) {
  return reinterpret_cast<uintptr_t>(pool.data) % 16 == 0 && pool.stride_page % 8 == 0 && pool.stride_slot % 8 == 0 &&
         pool.stride_head % 8 == 0;
}

bool served(const PagedParams& p) {
  const bool pages = p.page_size > 0 && p.page_size % 8 == 0;
  const bool lists = p.query_pages == nullptr || (p.query_block > 0 && p.query_block % 64 == 0);
  return p.tree_bits == nullptr && pages && lists && columns_fit(p.head_dim) && columns_fit(p.head_dim_v) &&
         pool_view(p.k_pages, p) && pool_view(p.v_pages, p);
}

// Tiles are numbered by int32, and handed out beyond the last one once for each SM.
bool countable(const KernelEntry& entry, const PagedParams& p) {
  constexpr int64_t kMaxTiles = std::numeric_limits<int32_t>::max() - 65536;
  return entry.most_row_blocks(p) <= kMaxTiles / max_of(p.heads_q, 1);
}

const KernelEntry* find(const PagedParams& p) {
  if (!served(p)) return nullptr;
  const int32_t widest = max_of(p.head_dim, p.head_dim_v);
  const bool score = p.softcap > 0 || p.alibi_slopes != nullptr;
  for (const KernelEntry& entry : table()) {
    if (entry.info.dtype == p.dtype && entry.info.head_dim_bucket >= widest &&
        entry.info.query_pages == (p.query_pages != nullptr) && entry.info.score == score) {
      return countable(entry, p) ? &entry : nullptr;
    }
  }
  return nullptr;
}

const KernelEntry& require(const PagedParams& params) {
  const KernelEntry* entry = find(params);
  if (entry == nullptr)
    throw std::runtime_error("flashmsa: no prefill kernel was compiled for these pages and options");
  return *entry;
}

}  // namespace

int32_t longest(const PagedParams& p) {
  const int64_t slots = p.num_pages > 0 ? int64_t{p.max_pages} * p.page_size : 0;
  return static_cast<int32_t>(min_of<int64_t>(slots, std::numeric_limits<int32_t>::max() / 2));
}

std::optional<PoolView> pool_view(const PoolRef& pool, const PagedParams& p) {
  if (!aligned(pool)) return std::nullopt;
  const bool many_pages = p.num_pages > 1, many_heads = p.heads_kv > 1;
  const int64_t eights = p.page_size / 8, eight = pool.stride_slot * 8;
  // Strides of 0 or below make no map.
  if (pool.stride_slot <= 0 || (many_pages && pool.stride_page <= 0) || (many_heads && pool.stride_head <= 0)) {
    return std::nullopt;
  }
  // Coordinates are int32.
  const auto checked = [](const PoolView& view) {
    constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
    return view.eights <= kMax && view.heads <= kMax ? std::optional(view) : std::nullopt;
  };
  const auto int32 = [](int64_t x) { return static_cast<int32_t>(x); };
  if (!many_pages) return checked({eights, p.heads_kv, pool.stride_head, {0, 0, 1}});
  if (!many_heads) return checked({eights, p.num_pages, pool.stride_page, {0, 1, 0}});
  if (pool.stride_page % eight == 0) {  // (page, slot, head), also with something between two pages
    const int64_t step = pool.stride_page / eight;
    return checked({(p.num_pages - 1) * step + eights, p.heads_kv, pool.stride_head, {int32(step), 0, 1}});
  }
  if (pool.stride_page % pool.stride_head == 0) {  // (page, head, slot)
    const int64_t step = pool.stride_page / pool.stride_head;
    return checked({eights, (p.num_pages - 1) * step + p.heads_kv, pool.stride_head, {0, int32(step), 1}});
  }
  if (pool.stride_head % pool.stride_page == 0) {  // (head, page, slot)
    const int64_t step = pool.stride_head / pool.stride_page;
    return checked({eights, (p.heads_kv - 1) * step + p.num_pages, pool.stride_page, {0, 1, int32(step)}});
  }
  return std::nullopt;
}

std::vector<KernelInfo> kernels() {
  std::vector<KernelInfo> infos;
  for (const KernelEntry& entry : table()) infos.push_back(entry.info);
  return infos;
}

const KernelInfo* find_kernel(const PagedParams& params) {
  const KernelEntry* entry = find(params);
  return entry == nullptr ? nullptr : &entry->info;
}

size_t workspace_size(const PagedParams& params, int32_t /*num_sms*/) {
  return require(params).workspace_bytes(params);
}

void paged_prefill(const PagedParams& params, void* workspace, int32_t num_sms, void* stream) {
  require(params).launch(params, workspace, num_sms, static_cast<cudaStream_t>(stream));
}

}  // namespace flashmsa::prefill
