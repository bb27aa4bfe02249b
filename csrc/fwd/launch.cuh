// From AttentionParams to a launch, for one kernel instance; and the table entry that describes it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <string>

#include "core/cuda_check.h"
#include "fwd/forward.h"
#include "fwd/kernel.cuh"
#include "fwd/table.h"
#include "sched/plan.cuh"

namespace flashmsa::fwd {

// The grid of one call: its tiles and who plans them.
struct Grid {
  int32_t row_blocks;    // per batch
  int32_t plan_batches;  // batches with a plan of their own; 0: no plan
  sched::TileOrder order;
  int32_t ctas;
  bool counter;          // more tiles than CTAs: tiles are handed out by an atomic counter
};

template <class Mask, class Config>
Grid make_grid(const AttentionParams& p, int32_t num_sms) {
  Grid grid;
  grid.row_blocks = ceil_div(p.len_q, Config::kBlockQ);
  grid.plan_batches = Mask::kPlanned ? (p.mask.offsets_stride != 0 ? p.batch : 1) : 0;
  const bool per_batch = grid.plan_batches > 1;
  const int32_t slices = per_batch ? p.heads_q : p.batch * p.heads_q;
  grid.order = {grid.row_blocks * max_of(grid.plan_batches, 1), slices, sched::group_size(p, slices)};
  grid.ctas = min_of(grid.order.count(), num_sms);
  grid.counter = grid.order.count() > grid.ctas;
  return grid;
}

template <class Mask, class Config>
size_t workspace_bytes(const AttentionParams& p, int32_t num_sms) {
  const Grid grid = make_grid<Mask, Config>(p, num_sms);
  if (!Mask::kPlanned && !grid.counter) return 0;
  return sched::kCounterBytes + sched::plan_bytes<Mask>(grid.order.row_blocks);
}

template <class Mask, class Config>
KernelParams<Mask> make_params(const AttentionParams& p, const Grid& grid, void* workspace) {
  using S = Shared<Mask, Config>;
  constexpr float kLog2E = 1.44269504088896341f;
  // A tensor without elements may have no address; its map is never used and borrows q's.
  const auto addressable = [&](TensorRef tensor) {
    if (tensor.data == nullptr) tensor.data = p.q.data;
    return tensor;
  };
  KernelParams<Mask> params;
  params.q = sm90::make_tile_map<typename S::QTile>(p.q, {p.batch, p.heads_q, p.len_q, p.head_dim}, p.dtype, "q");
  params.k = sm90::make_tile_map<typename S::KTile>(addressable(p.k), {p.batch, p.heads_kv, p.len_kv, p.head_dim},
                                                    p.dtype, "k");
  params.v = sm90::make_tile_map<typename S::VTile>(addressable(p.v), {p.batch, p.heads_kv, p.len_kv, p.head_dim_v},
                                                    p.dtype, "v");
  params.out =
      sm90::make_tensor_map(p.out, {p.batch, p.heads_q, p.len_q, p.head_dim_v}, p.dtype, sm90::kWarpRows, "out");
  params.q_rows = p.q;
  params.k_rows = p.k;
  params.v_rows = p.v;
  params.out_rows = p.out;
  params.mask = Mask::make_params(p);
  params.order = grid.order;
  char* space = static_cast<char*>(workspace);
  params.tile_counter = grid.counter ? reinterpret_cast<int32_t*>(space) : nullptr;
  params.plan = Mask::kPlanned ? reinterpret_cast<sched::PlanEntry<Mask>*>(space + sched::kCounterBytes) : nullptr;
  params.lse = p.lse;
  params.heads_q = p.heads_q;
  params.len_q = p.len_q;
  params.q_heads_per_kv_head = p.heads_q / p.heads_kv;
  params.head_dim = p.head_dim;
  params.head_dim_v = p.head_dim_v;
  // NOTE: a scale near fp32's end stays finite: infinity times a logit of 0 would be NaN.
  params.scale_log2 = std::min(static_cast<float>(p.scale) * kLog2E, std::numeric_limits<float>::max());
  params.inverse_scale_log2 = 1.0f / params.scale_log2;
  return params;
}

template <class Mask, class Config>
void launch(const AttentionParams& p, void* workspace, int32_t num_sms, cudaStream_t stream) {
  const Grid grid = make_grid<Mask, Config>(p, num_sms);
  const KernelParams<Mask> params = make_params<Mask, Config>(p, grid, workspace);

  // The workspace is set in stream order, by a small kernel ahead.
  if constexpr (Mask::kPlanned) {
    const sched::PlanParams<Mask> plan = {
        params.mask, max_of(grid.plan_batches, 1),        grid.row_blocks, Config::kBlockQ, Config::kBlockKv,
        p.len_q,     ceil_div(p.len_kv, Config::kBlockKv)};
    sched::plan_kernel<Mask><<<1, sched::kPlanThreads, 0, stream>>>(plan, static_cast<int32_t*>(workspace),
                                                                    const_cast<sched::PlanEntry<Mask>*>(params.plan));
    FLASHMSA_CHECK_CUDA(cudaGetLastError());
  } else if (grid.counter) {
    sched::reset_counter_kernel<<<1, 1, 0, stream>>>(params.tile_counter);
    FLASHMSA_CHECK_CUDA(cudaGetLastError());
  }

  const auto kernel = attention_forward_kernel<Mask, Config>;
  constexpr size_t kSharedBytes = sizeof(Shared<Mask, Config>);
  // Per device, and cheap: no state of ours to keep.
  FLASHMSA_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  // The kernel's launch and prologue overlap that one (programmatic dependent launch).
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid.ctas);
  config.blockDim = dim3(Config::kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = Mask::kPlanned || grid.counter ? 1 : 0;
  FLASHMSA_CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, params));
}

template <class Element>
inline constexpr DType kDTypeOf = DType::kBF16;
template <>
inline constexpr DType kDTypeOf<__half> = DType::kF16;

template <class Mask, class Config>
KernelEntry make_entry() {
  constexpr DType kDType = kDTypeOf<typename Config::Element>;
  KernelInfo info;
  info.name = std::string("fwd_") + Mask::kName + "_d" + std::to_string(Config::kHeadDim) +
              (kDType == DType::kF16 ? "_fp16" : "_bf16");
  info.mask = Mask::kKind;
  info.dtype = kDType;
  info.head_dim_bucket = Config::kHeadDim;
  info.block_q = Config::kBlockQ;
  info.block_kv = Config::kBlockKv;
  info.stages = Config::kStages;
  info.consumer_warpgroups = Config::kConsumerWarpgroups;
  info.threads = Config::kThreads;
  info.registers_producer = Config::kRegistersProducer;
  info.registers_consumer = Config::kRegistersConsumer;
  info.shared_memory = sizeof(Shared<Mask, Config>);
  return {info, &workspace_bytes<Mask, Config>, &launch<Mask, Config>};
}

// One entry for every mask in the list.
template <class Config>
std::vector<KernelEntry> make_entries() {
#define FLASHMSA_ENTRY(MaskName) make_entry<mask::MaskName, Config>(),
  return {FLASHMSA_FOR_EACH_MASK(FLASHMSA_ENTRY)};
#undef FLASHMSA_ENTRY
}

}  // namespace flashmsa::fwd
