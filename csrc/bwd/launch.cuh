// From BackwardParams to the three launches, for one kernel instance; and the table entry that describes it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <string>

#include "bwd/backward.h"
#include "bwd/kernel.cuh"
#include "bwd/postprocess.cuh"
#include "bwd/preprocess.cuh"
#include "bwd/table.h"
#include "core/cuda_check.h"
#include "sched/tile_order.h"

namespace flashmsa::bwd {

// Sizes of one call, and where its workspace holds what.
struct Layout {
  int32_t q_tiles, key_tiles;
  int64_t sequences, plans;
  int32_t plan_stride_batch, plan_stride_head;
  int32_t orders, order_stride_batch, order_stride_head;
  bool two_runs, packs;
  size_t stats, terms, dq, tiles, mains, firsts, positions, suspects, turns, longest, packed,
      bytes;  // offsets, and the sum
};

template <class Config>
Layout make_layout(const BackwardParams& b) {
  const AttentionParams& p = b.forward;
  const MaskArgs& m = p.mask;
  Layout layout = {};
  if constexpr (Config::kPacked) {
    layout.q_tiles = PackedTiles::count(m.num_documents, p.len_q, Config::kBlockQ);
    layout.key_tiles = PackedTiles::count(m.num_documents, p.len_kv, Config::kBlockKv);
  } else {
    layout.q_tiles = ceil_div(p.len_q, Config::kBlockQ);
    layout.key_tiles = ceil_div(p.len_kv, Config::kBlockKv);
  }
  layout.sequences = int64_t{p.batch} * p.heads_q * p.residues;
  const bool by_head = m.row_begin != nullptr;
  const bool by_batch =
      by_head || m.offsets_stride != 0 || m.global.prefixes[0] != nullptr || m.global.prefixes[1] != nullptr;
  layout.plan_stride_head = by_head ? 1 : 0;
  layout.plan_stride_batch = by_head ? p.heads_q : by_batch ? 1 : 0;
  layout.plans = by_head ? int64_t{p.batch} * p.heads_q : by_batch ? p.batch : 1;
  // Where lengths follow no rule. Deterministic mode has an order of its own.
  const bool uneven = m.q_offsets != nullptr || by_head || m.kind == MaskKind::kBlockSparse;
  if (uneven && !b.deterministic && layout.key_tiles <= (Config::kPacked ? kMostPacked : kMostOrdered)) {
    const bool order_by_head = by_head || m.list.stride_head != 0;
    const bool order_by_batch = order_by_head || by_batch || m.list.stride_batch != 0;
    layout.order_stride_head = order_by_head ? 1 : 0;
    layout.order_stride_batch = order_by_head ? p.heads_kv : order_by_batch ? 1 : 0;
    layout.orders = order_by_head ? p.batch * p.heads_kv : order_by_batch ? p.batch : 1;
  }
  const auto take = [&](size_t count, size_t each) {
    const size_t at = layout.bytes;
    layout.bytes += (count * each + 1023) / 1024 * 1024;
    return at;
  };
  const size_t padded_rows = size_t{1} * layout.q_tiles * Config::kBlockQ;
  layout.stats = take(layout.sequences * padded_rows, 2 * sizeof(float));
  layout.terms = take(Config::kTerms ? layout.sequences * padded_rows : 0, Shared<Config>::RowTerms::kRowBytes);
  layout.dq = take(layout.sequences * padded_rows, Config::kHeadDim * sizeof(float));
  layout.tiles = take(layout.plans * layout.q_tiles, sizeof(QueryTile));
  layout.mains = take(layout.plans * padded_rows, sizeof(mask::Interval));
  layout.two_runs = mask::Composite::make_params(p).two_runs;
  layout.firsts = take(layout.two_runs ? layout.plans * padded_rows : 0, sizeof(mask::Interval));
  layout.positions = take(p.alibi_slopes != nullptr ? layout.plans * padded_rows : 0, sizeof(int32_t));
  layout.suspects =
      take(size_t{1} * layout.key_tiles * p.batch * p.residues * p.heads_kv * 8 * Config::kCluster, sizeof(int32_t));
  layout.turns = take(b.deterministic ? layout.sequences * layout.q_tiles * 4 * Config::kCluster : 0, sizeof(int32_t));
  layout.packs = Config::kPacked;
  const size_t ordered = size_t{1} * layout.orders * layout.key_tiles;
  layout.longest = take(Config::kPacked ? 0 : ordered, sizeof(int32_t));
  layout.packed = take(Config::kPacked ? ordered : 0, sizeof(PackedKeys));
  return layout;
}

template <class Config>
size_t workspace_bytes(const BackwardParams& b) {
  return make_layout<Config>(b).bytes;
}

inline Prepared make_prepared(const BackwardParams& b, const Layout& layout, char* space) {
  Prepared prepared = {};
  prepared.stats = reinterpret_cast<float*>(space + layout.stats);
  prepared.terms = space + layout.terms;
  prepared.dq = reinterpret_cast<float*>(space + layout.dq);
  prepared.tiles = reinterpret_cast<QueryTile*>(space + layout.tiles);
  prepared.mains = reinterpret_cast<mask::Interval*>(space + layout.mains);
  if (layout.two_runs) prepared.firsts = reinterpret_cast<mask::Interval*>(space + layout.firsts);
  if (b.forward.alibi_slopes != nullptr) prepared.positions = reinterpret_cast<int32_t*>(space + layout.positions);
  prepared.suspects = reinterpret_cast<int32_t*>(space + layout.suspects);
  if (b.deterministic) prepared.turns = reinterpret_cast<int32_t*>(space + layout.turns);
  if (layout.orders > 0 && !layout.packs) prepared.longest = reinterpret_cast<int32_t*>(space + layout.longest);
  prepared.order_stride_batch = layout.order_stride_batch;
  prepared.order_stride_head = layout.order_stride_head;
  prepared.plan_stride_batch = layout.plan_stride_batch;
  prepared.plan_stride_head = layout.plan_stride_head;
  return prepared;
}

// From S to the exponent of 2.
// NOTE: a scale near fp32's end stays finite: infinity times a logit of 0 would be NaN.
inline float exponent_scale(const AttentionParams& p) {
  constexpr float kLog2E = 1.44269504088896341f;
  return std::min(static_cast<float>(p.scale) * kLog2E, std::numeric_limits<float>::max());
}

inline PreprocessParams make_preprocess(const BackwardParams& b, const Layout& layout, const Prepared& prepared,
                                        int32_t block_kv) {
  const AttentionParams& p = b.forward;
  PreprocessParams params = {};
  params.out = p.out;
  params.dout = b.dout;
  params.lse = p.lse;
  params.lse_stride_batch = p.lse_stride_batch;
  params.lse_stride_head = p.lse_stride_head;
  params.lse_stride_seq = p.lse_stride_seq;
  params.lse_stride_residue = p.lse_stride_residue;
  params.dlse = b.dlse;
  params.dlse_stride_batch = b.dlse_stride_batch;
  params.dlse_stride_head = b.dlse_stride_head;
  params.dlse_stride_seq = b.dlse_stride_seq;
  params.dlse_stride_residue = b.dlse_stride_residue;
  params.sinks = p.sinks;
  params.delta = b.delta;
  params.mask = mask::Composite::make_params(p);
  params.prepared = prepared;
  params.heads_q = p.heads_q;
  params.residues = p.residues;
  params.len_q = p.len_q;
  params.scale_log2 = exponent_scale(p);
  params.q_tiles = layout.q_tiles;
  params.head_dim_v = p.head_dim_v;
  params.block_kv = block_kv;
  params.key_tiles = layout.key_tiles;
  params.heads_kv = p.heads_kv;
  params.orders = layout.orders;
  if (p.mask.kind == MaskKind::kBlockSparse) params.list = p.mask.list;
  return params;
}

// Deterministic mode: key tiles start such that those of a head which run together come to the same queries one after
// another. The order is part of the result, so it does not ask how many SMs there are.
// PERF: what was measured beside these and lost is in benchmarks/NOTES.md.
template <class Config>
void order_turns(const MaskArgs& mask, sched::TileOrder& order, KeyOrder& keys) {
  constexpr int32_t kCtas = 132;  // of an H200
  const BandArgs& band = mask.global;
  const bool local = mask.q_offsets != nullptr || mask.row_begin != nullptr || band.left[0] != kUnbounded ||
                     band.left[1] != kUnbounded;
  if (mask.kind == MaskKind::kDense) return;  // they start together everywhere
  if (local) {
    // Few tiles of queries see a key: a key tile's queries begin soon after those of the one before.
    order.group = static_cast<int32_t>(std::min<int64_t>(int64_t{4} * order.group, order.slices));
    keys.block = keys.tiles;
  } else if (Config::kSplit == Split::kByKeys) {
    order.group = static_cast<int32_t>(std::min<int64_t>(int64_t{2} * order.group, order.slices));
    keys.block = std::max(kCtas / order.group, 1);
  } else {
    order.group = std::max(order.group / 4, 1);
    keys.block = keys.tiles;
  }
}

template <class Config>
KernelParams make_params(const BackwardParams& b, const Layout& layout, const Prepared& prepared) {
  using S = Shared<Config>;
  constexpr int kRank = sm90::kStridedRank;
  const AttentionParams& p = b.forward;
  const auto extent = [&](int32_t heads, int32_t length, int32_t head_dim) {
    return sm90::TensorExtent{p.batch, heads, length, head_dim, p.residues};
  };
  const sm90::TensorExtent keys = extent(p.heads_kv, p.len_kv, p.head_dim);
  const sm90::TensorExtent values = extent(p.heads_kv, p.len_kv, p.head_dim_v);
  KernelParams params = {};
  params.q = sm90::make_tile_map<typename S::QTile>(p.q, extent(p.heads_q, p.len_q, p.head_dim), p.dtype, "q", kRank);
  params.dout =
      sm90::make_tile_map<typename S::QTile>(b.dout, extent(p.heads_q, p.len_q, p.head_dim_v), p.dtype, "dout", kRank);
  params.k = sm90::make_tile_map<typename S::KTile>(p.k, keys, p.dtype, "k", kRank);
  params.v = sm90::make_tile_map<typename S::KTile>(p.v, values, p.dtype, "v", kRank);
  params.dk = sm90::make_tensor_map(b.dk, keys, p.dtype, sm90::kWarpRows, "dk", kRank);
  params.dv = sm90::make_tensor_map(b.dv, values, p.dtype, sm90::kWarpRows, "dv", kRank);
  params.q_rows = p.q;
  params.dout_rows = b.dout;
  params.k_rows = p.k;
  params.v_rows = p.v;
  params.dq_rows = b.dq;
  params.dk_rows = b.dk;
  params.dv_rows = b.dv;
  params.prepared = prepared;
  if constexpr (Config::Extra::kBand) params.band = KeyBand::of(p);
  if (p.mask.kind == MaskKind::kBlockSparse) params.list = p.mask.list;
  const int32_t slices = p.batch * p.residues * p.heads_kv;
  params.order = {layout.key_tiles, slices, sched::group_size(p, slices)};
  params.key_order = {layout.key_tiles, 1};
  if (b.deterministic) order_turns<Config>(p.mask, params.order, params.key_order);
  params.batch = p.batch;
  params.heads_q = p.heads_q;
  params.heads_kv = p.heads_kv;
  params.residues = p.residues;
  params.len_q = p.len_q;
  params.len_kv = p.len_kv;
  params.q_tiles = layout.q_tiles;
  params.head_dim = p.head_dim;
  params.head_dim_v = p.head_dim_v;
  params.scale = static_cast<float>(p.scale);
  params.scale_log2 = exponent_scale(p);
  params.softcap = p.softcap > 0;
  params.cap = attn::make_cap(p.scale, p.softcap);
  params.alibi_slopes = p.alibi_slopes;
  params.alibi_stride_batch = p.alibi_stride_batch;
  params.alibi_factor = std::min(static_cast<float>(p.alibi_step / p.scale), std::numeric_limits<float>::max());
  params.dropout = attn::make_dropout_params(p);
  return params;
}

template <class Kernel, class... Args>
void launch_behind(Kernel kernel, int64_t ctas, int cluster, int threads, size_t shared_bytes, cudaStream_t stream,
                   Args... args) {
  FLASHMSA_CHECK_CUDA(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
  // The kernel's launch and prologue overlap the one before (programmatic dependent launch).
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  FLASHMSA_CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, args...));
}

template <class Config>
auto main_kernel(bool deterministic) {
  if constexpr (Config::kOrders) {
    if (deterministic) return &attention_backward_kernel<Config, true>;
  }
  return &attention_backward_kernel<Config, false>;
}

template <class Config>
void launch(const BackwardParams& b, void* workspace, cudaStream_t stream) {
  const Layout layout = make_layout<Config>(b);
  const Prepared prepared = make_prepared(b, layout, static_cast<char*>(workspace));
  PreprocessParams preprocess = make_preprocess(b, layout, prepared, Config::kBlockKv);
  KernelParams params = make_params<Config>(b, layout, prepared);
  if (layout.packs) {
    params.packed = preprocess.packed = reinterpret_cast<PackedKeys*>(static_cast<char*>(workspace) + layout.packed);
  }

  const int64_t tiles = layout.sequences * layout.q_tiles;
  preprocess_kernel<typename Config::Tiles>
      <<<static_cast<unsigned>(layout.orders + tiles), kPreprocessThreads, 0, stream>>>(preprocess);
  FLASHMSA_CHECK_CUDA(cudaGetLastError());
  const int64_t key_tiles = params.order.count();
  const auto kernel = main_kernel<Config>(b.deterministic);
  launch_behind(kernel, key_tiles * Config::kCluster, Config::kCluster, Config::kThreads, sizeof(Shared<Config>),
                stream, params);
  const int64_t blocks = tiles * (Config::kBlockQ / 64);
  postprocess_kernel<typename Config::Tiles>
      <<<static_cast<unsigned>(max_of(blocks, kKeyParts<typename Config::Tiles> * key_tiles)), kPostprocessThreads, 0,
         stream>>>(params, static_cast<int32_t>(blocks));
  FLASHMSA_CHECK_CUDA(cudaGetLastError());
}

template <class Element>
inline constexpr DType kDTypeOf = DType::kBF16;
template <>
inline constexpr DType kDTypeOf<__half> = DType::kF16;

template <class Config>
KernelEntry make_entry() {
  constexpr DType kDType = kDTypeOf<typename Config::Element>;
  KernelInfo info;
  info.name = "bwd" + std::string(Config::Extra::kName) + "_d" + std::to_string(Config::kHeadDim) +
              (kDType == DType::kF16 ? "_fp16" : "_bf16");
  info.packed = Config::kPacked;
  info.band = Config::Extra::kBand;
  info.general = Config::Extra::kGeneral;
  info.dropout = Config::Extra::kDropout;
  info.dtype = kDType;
  info.head_dim_bucket = Config::kHeadDim;
  info.block_q = Config::kBlockQ;
  info.block_kv = Config::kBlockKv;
  info.stages = Config::kStages;
  info.threads = Config::kThreads;
  info.shared_memory = sizeof(Shared<Config>);
  return {info, &workspace_bytes<Config>, &launch<Config>};
}

// The kernels of one head-dim bucket and dtype.
template <template <class, class> class ConfigOf, class Element>
std::vector<KernelEntry> make_entries() {
  std::vector<KernelEntry> entries;
  if constexpr (ConfigOf<Element, Band>::kSplit == Split::kByKeys) {
    entries.push_back(make_entry<ConfigOf<Element, Band>>());
  }
  entries.push_back(make_entry<ConfigOf<Element, Packed>>());
  entries.push_back(make_entry<ConfigOf<Element, Plain>>());
  entries.push_back(make_entry<ConfigOf<Element, Dropping>>());
  entries.push_back(make_entry<ConfigOf<Element, General>>());
  return entries;
}

}  // namespace flashmsa::bwd
