// From AttentionParams to a launch, for one kernel instance; and the table entry that describes it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <type_traits>

#include "core/cuda_check.h"
#include "fwd/forward.h"
#include "fwd/kernel.cuh"
#include "fwd/table.h"
#include "mask/packed.h"
#include "sched/plan.cuh"

namespace flashmsa::fwd {

// The grid of one call: its tiles and who plans them.
struct Grid {
  int32_t row_blocks;    // per sequence; the most that there may be, where the plan says how many
  int32_t plan_batches;  // batches with a plan of their own; 0: no plan. Listed masks: slices
  sched::TileOrder order;
  int32_t late_row_blocks;  // per sequence, of order's
  int32_t ctas;
  bool counter;          // more tiles than each CTA knows for itself: the rest is handed out by an atomic counter
};

// How many batches differ in their plans: see Grid.
template <class Mask>
int32_t plan_batches(const AttentionParams& p) {
  const MaskArgs& m = p.mask;
  if (Mask::kListed) return p.batch * p.heads_q;
  if (!Mask::kPlanned || m.q_offsets == nullptr) return 0;
  const bool by_batch = m.offsets_stride != 0 || m.global.prefixes[0] != nullptr || m.global.prefixes[1] != nullptr;
  return by_batch ? p.batch : 1;
}

template <class Mask, class Config>
Grid make_grid(const AttentionParams& p, int32_t num_sms) {
  Grid grid;
  if constexpr (sched::kOwnRows<Mask>) {
    grid.row_blocks = Mask::row_blocks(Mask::make_params(p), Config::kBlockQ);
  } else {
    grid.row_blocks = ceil_div(p.len_q, Config::kBlockQ);
  }
  grid.plan_batches = plan_batches<Mask>(p);
  // Where batches have plans of their own, one plan holds the row blocks of all of them and serves every head.
  const bool joint = !Mask::kListed && grid.plan_batches > 1;
  const int32_t slices = joint ? p.heads_q : p.batch * p.residues * p.heads_q;
  const int32_t group = Mask::kKind == MaskKind::kDense ? sched::group_size(p, slices, sched::kEvenGroupBytes)
                                                        : sched::group_size(p, slices);
  grid.order = {grid.row_blocks * (joint ? grid.plan_batches : 1), slices, group};
  grid.ctas = min_of(grid.order.count(), num_sms * Config::kCtasPerSm);
  if constexpr (std::is_same_v<Mask, mask::Band>) {
    const int32_t shorter = ceil_div(Mask::short_rows(p), Config::kBlockQ);
    grid.late_row_blocks = sched::late_row_blocks(p, grid.order, grid.ctas, shorter);
  } else {
    grid.late_row_blocks = sched::late_row_blocks(p, grid.order, grid.ctas);
  }
  grid.counter = grid.order.count() > grid.ctas * (kKnowsFirstTile<Mask, Config> ? 2 : 1);
  return grid;
}

template <class Mask, class Config>
size_t workspace_bytes(const AttentionParams& p, int32_t num_sms) {
  const Grid grid = make_grid<Mask, Config>(p, num_sms);
  if (grid.plan_batches == 0 && !grid.counter) return 0;
  return sched::kCounterBytes + sched::plan_bytes<Mask>(int64_t{grid.row_blocks} * grid.plan_batches);
}

template <class Mask, class Config>
KernelParams<Mask> make_params(const AttentionParams& p, const Grid& grid, void* workspace) {
  using S = Shared<Mask, Config>;
  constexpr float kLog2E = 1.44269504088896341f;
  constexpr int kRank = kMapRank<Mask>;
  // A tensor without elements may have no address; its map is never used and borrows q's.
  const auto addressable = [&](TensorRef tensor) {
    if (tensor.data == nullptr) tensor.data = p.q.data;
    return tensor;
  };
  const auto extent = [&](int32_t heads, int32_t length, int32_t head_dim) {
    return sm90::TensorExtent{p.batch, heads, length, head_dim, p.residues};
  };
  KernelParams<Mask> params;
  // Rows by index come and go without TMA.
  if constexpr (!kIndexed<Mask>) {
    params.q = sm90::make_tensor_map(p.q, extent(p.heads_q, p.len_q, p.head_dim), p.dtype, S::QTile::kRows / S::kQParts,
                                     "q", kRank);
    params.k = sm90::make_tile_map<typename S::KTile>(addressable(p.k), extent(p.heads_kv, p.len_kv, p.head_dim),
                                                      p.dtype, "k", kRank);
    params.v = sm90::make_tile_map<typename S::VTile>(addressable(p.v), extent(p.heads_kv, p.len_kv, p.head_dim_v),
                                                      p.dtype, "v", kRank);
    params.out =
        sm90::make_tensor_map(p.out, extent(p.heads_q, p.len_q, p.head_dim_v), p.dtype, sm90::kWarpRows, "out", kRank);
  }
  params.q_rows = p.q;
  params.k_rows = p.k;
  params.v_rows = p.v;
  params.out_rows = p.out;
  params.mask = Mask::make_params(p);
  if constexpr (Mask::kKind == MaskKind::kComposite) {
    // Dropout draws for tiles that begin at multiples of 16.
    if (p.dropout_p > 0) params.mask.from_begin = false;
  }
  params.order = grid.order;
  params.parted_order = sched::PartedOrder(grid.order, grid.late_row_blocks);
  params.by_heads_q = sched::Divisor(p.heads_q);
  params.by_q_heads_per_kv_head = sched::Divisor(p.heads_q / p.heads_kv);
  char* space = static_cast<char*>(workspace);
  params.tile_counter = grid.counter ? reinterpret_cast<int32_t*>(space) : nullptr;
  params.plan =
      grid.plan_batches > 0 ? reinterpret_cast<sched::PlanEntry<Mask>*>(space + sched::kCounterBytes) : nullptr;
  if constexpr (sched::kOwnRows<Mask>) params.planned.row_blocks = reinterpret_cast<int32_t*>(space) + 1;
  params.lse = p.lse;
  params.lse_stride_batch = p.lse_stride_batch;
  params.lse_stride_head = p.lse_stride_head;
  params.lse_stride_seq = p.lse_stride_seq;
  params.lse_stride_residue = p.lse_stride_residue;
  params.sinks = p.sinks;
  params.heads_q = p.heads_q;
  params.len_q = p.len_q;
  params.residues = p.residues;
  params.q_heads_per_kv_head = p.heads_q / p.heads_kv;
  params.head_dim = p.head_dim;
  params.head_dim_v = p.head_dim_v;
  // NOTE: a scale near fp32's end stays finite: infinity times a logit of 0 would be NaN.
  params.scale_log2 = std::min(static_cast<float>(p.scale) * kLog2E, std::numeric_limits<float>::max());
  params.inverse_scale_log2 = 1.0f / params.scale_log2;
  params.cap = attn::make_cap(p.scale, p.softcap);
  params.cap_exponents = attn::make_cap_exponents(p.scale, p.softcap);
  params.alibi_slopes = p.alibi_slopes;
  params.alibi_stride_batch = p.alibi_stride_batch;
  params.alibi_factor = std::min(static_cast<float>(p.alibi_step / p.scale), std::numeric_limits<float>::max());
  params.dropout = attn::make_dropout_params(p);
  // As far as rows can be from keys, the penalty stays where the softmax may be lazy.
  const double reach = 1.0 * p.len_q + p.len_kv + std::abs(1.0 * p.mask.position_offset);
  params.largest_place_slope =
      std::min<float>(attn::kLargestPlaceSlope, static_cast<float>(attn::kLazyEnd / (params.scale_log2 * reach)));
  params.largest_gentle_slope = static_cast<float>(attn::kGentlePenalty / (p.scale * Config::kBlockKv));
  return params;
}

// Turns of the plan, each with a part of the rows, longest blocks first: of short documents.
// PERF: boxes reach past a document's end, into rows that the next document wants soon; and long tiles run beside short ones. 512
// documents of 32 … 256 tokens in 16 heads 1.014, causal 1.09.
template <class Mask>
int32_t plan_turns(const AttentionParams& p, const Grid& grid) {
  if (!std::is_same_v<Mask, mask::ShortPacked>) return 1;
  constexpr int64_t kTurnBytes = int64_t{8} << 20;
  const int64_t slice_bytes = (int64_t{p.len_q} * p.head_dim + int64_t{p.len_kv} * (p.head_dim + p.head_dim_v)) * 2;
  const int64_t turns = slice_bytes * grid.order.group * grid.plan_batches / kTurnBytes;
  return static_cast<int32_t>(clamp<int64_t>(turns, 1, sched::kMostTurns));
}

// The plan and the tile counter are set in stream order, by a small kernel ahead. False: there is none.
template <class Mask, class Config>
bool launch_ahead(const AttentionParams& p, const Grid& grid, const KernelParams<Mask>& params, void* workspace,
                  cudaStream_t stream) {
  int32_t* counter = static_cast<int32_t*>(workspace);
  if constexpr (Mask::kPlanned) {
    if (grid.plan_batches > 0) {
      const int32_t batches = Mask::kListed ? p.batch : grid.plan_batches;
      const sched::PlanParams<Mask> plan = {params.mask,
                                            batches,
                                            p.heads_q,
                                            grid.row_blocks,
                                            Config::kBlockQ,
                                            Config::kBlockKv,
                                            p.len_q,
                                            ceil_div(p.len_kv, Config::kBlockKv),
                                            plan_turns<Mask>(p, grid)};
      const int32_t ctas = Mask::kListed ? grid.plan_batches : 1;
      sched::plan_kernel<Mask>
          <<<ctas, sched::kPlanThreads, 0, stream>>>(plan, counter, const_cast<sched::PlanEntry<Mask>*>(params.plan));
      FLASHMSA_CHECK_CUDA(cudaGetLastError());
      return true;
    }
  }
  if (!grid.counter) return false;
  sched::reset_counter_kernel<<<1, 1, 0, stream>>>(counter);
  FLASHMSA_CHECK_CUDA(cudaGetLastError());
  return true;
}

template <class Mask, class Config, class Score>
void launch(const AttentionParams& p, void* workspace, int32_t num_sms, cudaStream_t stream) {
  const Grid grid = make_grid<Mask, Config>(p, num_sms);
  const KernelParams<Mask> params = make_params<Mask, Config>(p, grid, workspace);
  const bool ahead = launch_ahead<Mask, Config>(p, grid, params, workspace, stream);

  const auto kernel = attention_forward_kernel<Mask, Config, Score>;
  constexpr size_t kBytes = kSharedBytes<Mask, Config, Score>;
  // Per device, and cheap: no state of ours to keep.
  FLASHMSA_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
  // The kernel's launch and prologue overlap that one (programmatic dependent launch).
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid.ctas);
  config.blockDim = dim3(Config::kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = ahead ? 1 : 0;
  FLASHMSA_CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, params));
}

template <class Element>
inline constexpr DType kDTypeOf = DType::kBF16;
template <>
inline constexpr DType kDTypeOf<__half> = DType::kF16;

template <class Mask, class Config, class Score>
KernelEntry make_entry() {
  constexpr DType kDType = kDTypeOf<typename Config::Element>;
  KernelInfo info;
  info.name = std::string("fwd_") + Mask::kName + Score::kName + (Config::kCtasPerSm > 1 ? "_small" : "") + "_d" +
              std::to_string(Config::kHeadDim);
  if (Config::kHeadDimV != Config::kHeadDim) info.name += "x" + std::to_string(Config::kHeadDimV);
  info.name += kDType == DType::kF16 ? "_fp16" : "_bf16";
  info.mask = Mask::kKind;
  info.short_documents = std::is_same_v<Mask, mask::ShortPacked>;
  if constexpr (sched::kOwnRows<Mask>) info.least_packed = Mask::kLeastLength;
  info.softcap = Score::kSoftcap;
  info.alibi = Score::kAlibi;
  info.dropout = Score::kDropout;
  info.general = Score::kGeneral;
  info.dtype = kDType;
  info.head_dim_bucket = Config::kHeadDim;
  info.head_dim_v_bucket = Config::kHeadDimV;
  info.block_q = Config::kBlockQ;
  info.block_kv = Config::kBlockKv;
  info.stages = Config::kStages;
  info.consumer_warpgroups = Config::kConsumerWarpgroups;
  info.threads = Config::kThreads;
  info.registers_producer = Config::kRegistersProducer;
  info.registers_consumer = Config::kRegistersConsumer;
  info.ctas_per_sm = Config::kCtasPerSm;
  info.shared_memory = kSharedBytes<Mask, Config, Score>;
  return {info, &workspace_bytes<Mask, Config>, &launch<Mask, Config, Score>};
}

// As the forward kernels know a mask of the list.
template <class Mask>
using Known = std::conditional_t<std::is_same_v<Mask, mask::Document>, mask::Packed, Mask>;

// One entry for every mask in the list, and bands before the composite masks that they are. ListConfig: of listed masks,
// whose tiles have a cell's rows. CompositeConfig: of composite masks, DocumentConfig: of documents.
template <class Config, class ListConfig, class CompositeConfig = Config, class DocumentConfig = CompositeConfig>
std::vector<KernelEntry> make_entries() {
  const auto entry_of = []<class Mask>(std::type_identity<Mask>) {
    using Runs = std::conditional_t<std::is_same_v<Mask, mask::Composite>, CompositeConfig, Config>;
    using Narrow = std::conditional_t<std::is_same_v<Mask, mask::Packed>, DocumentConfig, Runs>;
    return make_entry<Mask, std::conditional_t<Mask::kListed, ListConfig, Narrow>, attn::PlainScore>();
  };
#define FLASHMSA_ENTRY(MaskName) entry_of(std::type_identity<Known<mask::MaskName>>()),
  return {make_entry<mask::Band, Config, attn::PlainScore>(), FLASHMSA_FOR_EACH_MASK(FLASHMSA_ENTRY)};
#undef FLASHMSA_ENTRY
}

// Small tiles, for the masks whose tiles no kernel has to plan.
template <class Config>
std::vector<KernelEntry> make_small_entries() {
  return {make_entry<mask::Dense, Config, attn::PlainScore>(), make_entry<mask::Causal, Config, attn::PlainScore>()};
}

// The same entries with documents, and short ones, in tiles of their own. The short ones' come first: where both would do they
// are meant.
template <class Config, class DocumentConfig, class ShortDocumentConfig>
std::vector<KernelEntry> make_entries_by_length() {
  std::vector<KernelEntry> entries = make_entries<Config, Config, Config, DocumentConfig>();
  entries.insert(entries.begin(), make_entry<mask::ShortPacked, ShortDocumentConfig, attn::PlainScore>());
  return entries;
}

// Rows by index, for whose loading warps Config leaves enough registers.
template <class Config>
std::vector<KernelEntry> make_indexed_entries() {
  return {make_entry<mask::Hash, Config, attn::PlainScore>()};
}

// The masks whose rows see intervals of keys. CompositeConfig: of composite ones.
template <class Config, class CompositeConfig>
std::vector<KernelEntry> make_interval_entries() {
  return {
      make_entry<mask::Dense, Config, attn::PlainScore>(),
      make_entry<mask::Causal, Config, attn::PlainScore>(),
      make_entry<mask::Packed, Config, attn::PlainScore>(),
      make_entry<mask::Composite, CompositeConfig, attn::PlainScore>(),
  };
}

// Softcap, ALiBi, both: for the masks that every other can be written as; one of the two for causal masks too. ListConfig: as
// in make_entries(). ScoreConfig: with both, or ALiBi over a list.
// PERF: causal ALiBi by the composite kernel takes 1.08 (d128 4x4096) to 1.19 (16x1024) times as long: benchmarks/NOTES.md.
template <class Config, class ListConfig, class ScoreConfig>
std::vector<KernelEntry> make_score_entries() {
  using mask::BlockSparse;
  using mask::Causal;
  using mask::Composite;
  using Softcap = attn::Score<true, false>;
  using Alibi = attn::Score<false, true>;
  using Both = attn::Score<true, true>;
  return {
      make_entry<Causal, Config, Softcap>(),         make_entry<Causal, Config, Alibi>(),
      make_entry<Composite, Config, Softcap>(),      make_entry<Composite, Config, Alibi>(),
      make_entry<Composite, ScoreConfig, Both>(),    make_entry<BlockSparse, ListConfig, Softcap>(),
      make_entry<BlockSparse, ScoreConfig, Alibi>(), make_entry<BlockSparse, ScoreConfig, Both>(),
  };
}

// Dropout: in the caller's order alone, and of everything. GeneralConfig: for all that the latter may have to do.
template <class Config, class GeneralConfig>
std::vector<KernelEntry> make_dropout_entries() {
  return {
      make_entry<mask::Composite, Config, attn::Dropping>(),
      make_entry<mask::Composite, GeneralConfig, attn::General>(),
      make_entry<mask::BlockSparse, GeneralConfig, attn::General>(),
  };
}

}  // namespace flashmsa::fwd
