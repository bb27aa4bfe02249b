// From PagedParams to a launch, for one kernel instance; and the table entry that describes it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>

#include "core/cuda_check.h"
#include "prefill/kernel.cuh"
#include "prefill/table.h"

namespace flashmsa::prefill {

template <class Mask, class Config>
RowBlocks row_blocks(const PagedParams& p) {
  return {Config::kBlockQ, Mask::kScattered ? p.query_block : Config::kBlockQ};
}

// Row blocks of all sequences at most, whatever the offsets hold: each has one broken query block beside its whole ones.
template <class Mask, class Config>
int64_t most_row_blocks(const PagedParams& p) {
  const RowBlocks blocks = row_blocks<Mask, Config>(p);
  if (p.cu_seqlens_q == nullptr) return int64_t{p.batch} * blocks.count(p.len_q);
  return int64_t{blocks.parts()} * (p.total_q / blocks.query_block + p.batch + 2);
}

// The parts of a workspace, each aligned to 16 bytes.
template <class Mask, class Config>
struct Workspace {
  size_t plan, first_block, counts, pages, total;

  explicit Workspace(const PagedParams& p) {
    size_t at = 0;
    const auto take = [&](int64_t bytes) {
      const size_t begin = at;
      at += static_cast<size_t>(ceil_div(bytes, int64_t{16}) * 16);
      return begin;
    };
    take(sizeof(Counters));
    plan =
        take(most_row_blocks<Mask, Config>(p) * static_cast<int64_t>(sizeof(sched::PlanEntry<Mask>) + sizeof(Ranked)));
    first_block = take(p.cu_seqlens_q != nullptr ? int64_t{4} * (p.batch + 2) : 0);
    const int64_t lists = Mask::kScattered ? int64_t{p.batch} * p.query_blocks : 0;
    counts = take(lists * 4);
    pages = take(lists * list_capacity(p) * static_cast<int64_t>(sizeof(ListedPage)));
    total = at;
  }
};

template <class Mask, class Config>
PagedMaskParams make_mask(const PagedParams& p, char* workspace) {
  const Workspace<Mask, Config> parts(p);
  PagedMaskParams mask = {};
  mask.band = p.band;
  mask.bounded = mask::Composite::bounded(p.band);
  mask.two_runs = p.band.keep_first > 0;
  mask.kv_lens = p.kv_lens;
  mask.cu_seqlens_q = p.cu_seqlens_q;
  mask.batch = p.batch;
  mask.len_q = p.len_q;
  mask.total_q = p.total_q;
  mask.max_len = longest(p);
  mask.block_table = p.block_table;
  mask.block_table_stride = p.block_table_stride;
  mask.num_pages = p.num_pages;
  mask.page_size = p.page_size;
  const int32_t piece = piece_rows(p.page_size, Config::kBlockKv);
  mask.piece_log2 = 31 - __builtin_clz(piece);
  mask.by_page_size = Divisor::of(p.page_size);
  mask.k_pages = p.k_pages;
  mask.v_pages = p.v_pages;
  mask.k_steps = pool_view(p.k_pages, p)->steps;
  mask.v_steps = pool_view(p.v_pages, p)->steps;
  if constexpr (Mask::kScattered) {
    mask.lists = {reinterpret_cast<const ListedPage*>(workspace + parts.pages),
                  reinterpret_cast<const int32_t*>(workspace + parts.counts), p.query_block, p.query_blocks,
                  list_capacity(p)};
  }
  return mask;
}

// A pool as (64 columns, 8 slots, groups of 64 columns, eights of slots, heads and pages), a box a piece of a page.
template <class Config>
sm90::TensorMap make_pool_map(const PoolRef& pool, const PagedParams& p, int32_t head_dim, const char* name) {
  const PoolView view = *pool_view(pool, p);
  const int32_t piece = piece_rows(p.page_size, Config::kBlockKv);
  const sm90::MapDimension dimensions[5] = {
      {min_of(head_dim, sm90::kSwizzleColumns), 2, sm90::kSwizzleColumns},
      {8, pool.stride_slot * 2, 8},
      {ceil_div(head_dim, sm90::kSwizzleColumns), sm90::kSwizzleRowBytes, Config::kHeadDim / sm90::kSwizzleColumns},
      {view.eights, pool.stride_slot * 16, piece / 8},
      {view.heads, view.head_stride * 2, 1}};
  // Without pages nothing is loaded; the map borrows q's address.
  void* data = p.num_pages > 0 ? pool.data : p.q.data;
  return {sm90::encode_map(data, {sm90::element_type(p.dtype)}, dimensions, 5, name), 0, 0};
}

template <class Mask, class Config>
fwd::KernelParams<Mask> make_params(const PagedParams& p, char* workspace) {
  using S = fwd::Shared<Mask, Config>;
  constexpr float kLog2E = 1.44269504088896341f;
  const bool packed = p.cu_seqlens_q != nullptr;
  const int32_t rows = packed ? p.total_q : p.len_q, batch = packed ? 1 : p.batch;
  fwd::KernelParams<Mask> params = {};
  params.q = sm90::make_tile_map<typename S::QTile>(p.q, {batch, p.heads_q, rows, p.head_dim}, p.dtype, "q",
                                                    fwd::kMapRank<Mask>);
  params.out = sm90::make_tensor_map(p.out, {batch, p.heads_q, rows, p.head_dim_v}, p.dtype, sm90::kWarpRows, "out",
                                     fwd::kMapRank<Mask>);
  params.k = make_pool_map<Config>(p.k_pages, p, p.head_dim, "k_pages");
  params.v = make_pool_map<Config>(p.v_pages, p, p.head_dim_v, "v_pages");
  params.q_rows = p.q;
  params.out_rows = p.out;
  params.mask = make_mask<Mask, Config>(p, workspace);
  AttentionParams shape;
  shape.len_kv = longest(p);
  shape.head_dim = p.head_dim;
  shape.head_dim_v = p.head_dim_v;
  shape.heads_q = p.heads_q;
  shape.heads_kv = p.heads_kv;
  params.order = {static_cast<int32_t>(most_row_blocks<Mask, Config>(p)), p.heads_q,
                  sched::group_size(shape, p.heads_q)};
  params.plan = reinterpret_cast<const sched::PlanEntry<Mask>*>(workspace + Workspace<Mask, Config>(p).plan);
  params.tile_counter = &reinterpret_cast<Counters*>(workspace)->next_tile;
  params.lse = p.lse;
  params.lse_stride_batch = p.lse_stride_batch;
  params.lse_stride_head = p.lse_stride_head;
  params.lse_stride_seq = p.lse_stride_seq;
  params.sinks = p.sinks;
  params.heads_q = p.heads_q;
  params.len_q = rows;
  params.residues = 1;
  params.q_heads_per_kv_head = p.heads_q / p.heads_kv;
  params.head_dim = p.head_dim;
  params.head_dim_v = p.head_dim_v;
  // NOTE: as in fwd/launch.cuh.
  params.scale_log2 = std::min(static_cast<float>(p.scale) * kLog2E, std::numeric_limits<float>::max());
  params.inverse_scale_log2 = 1.0f / params.scale_log2;
  params.cap = attn::make_cap(p.scale, p.softcap);
  params.alibi_slopes = p.alibi_slopes;
  params.alibi_stride_batch = p.alibi_stride_batch;
  params.alibi_factor = std::min(static_cast<float>(1.0 / p.scale), std::numeric_limits<float>::max());
  return params;
}

template <class Mask, class Config>
size_t workspace_bytes(const PagedParams& p) {
  return Workspace<Mask, Config>(p).total;
}

template <class Mask, class Config, class Score>
void launch(const PagedParams& p, void* workspace_address, int32_t num_sms, cudaStream_t stream) {
  char* workspace = static_cast<char*>(workspace_address);
  const fwd::KernelParams<Mask> params = make_params<Mask, Config>(p, workspace);
  const Workspace<Mask, Config> parts(p);
  if constexpr (Mask::kScattered) launch_sort_pages(params.mask, p.query_pages, p.pages_per_block, stream);
  launch_plan<Mask, Config::kBlockKv>(
      {params.mask, row_blocks<Mask, Config>(p), params.order.row_blocks, reinterpret_cast<Counters*>(workspace),
       reinterpret_cast<sched::PlanEntry<Mask>*>(workspace + parts.plan),
       reinterpret_cast<int32_t*>(workspace + parts.first_block)},
      stream);

  const auto kernel = paged_attention_kernel<Mask, Config, Score>;
  constexpr size_t kSharedBytes = sizeof(fwd::Shared<Mask, Config>);
  FLASHMSA_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(min_of(params.order.count(), num_sms));
  config.blockDim = dim3(Config::kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  FLASHMSA_CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, params));
}

template <class Mask, class Config, class Score>
KernelEntry make_entry() {
  constexpr bool kFp16 = std::is_same_v<typename Config::Element, __half>;
  KernelInfo info;
  info.name =
      std::string(Mask::kName) + Score::kName + "_d" + std::to_string(Config::kHeadDim) + (kFp16 ? "_fp16" : "_bf16");
  info.query_pages = Mask::kScattered;
  info.score = !Score::kPlain;
  info.dtype = kFp16 ? DType::kF16 : DType::kBF16;
  info.head_dim_bucket = Config::kHeadDim;
  info.block_q = Config::kBlockQ;
  info.block_kv = Config::kBlockKv;
  info.threads = Config::kThreads;
  info.shared_memory = sizeof(fwd::Shared<Mask, Config>);
  return {info, &most_row_blocks<Mask, Config>, &workspace_bytes<Mask, Config>, &launch<Mask, Config, Score>};
}

template <class Config>
std::vector<KernelEntry> make_entries() {
  return {make_entry<Paged<false>, Config, attn::PlainScore>(), make_entry<Paged<true>, Config, attn::PlainScore>(),
          make_entry<Paged<true>, Config, attn::Chosen>()};
}

}  // namespace flashmsa::prefill
