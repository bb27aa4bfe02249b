// Walks (batch, head, query block) in parallel: plans each block by its mask, then runs attend_block for the element type
// and the instruction set.
#include "cpu/forward.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/block.h"
#include "cpu/isa.h"
#include "mask/dilated.h"
#include "mask/list.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define FLASHMSA_CPU_X86 1
#endif

#define FLASHMSA_CPU_ISA baseline
#define FLASHMSA_CPU_TARGET
#define FLASHMSA_CPU_VECTOR 16
#include "cpu/attend_block.h"
#undef FLASHMSA_CPU_ISA
#undef FLASHMSA_CPU_TARGET
#undef FLASHMSA_CPU_VECTOR

#if FLASHMSA_CPU_X86
#define FLASHMSA_CPU_ISA avx2
#define FLASHMSA_CPU_TARGET __attribute__((target("avx2,fma")))
#define FLASHMSA_CPU_VECTOR 32
#include "cpu/attend_block.h"
#undef FLASHMSA_CPU_ISA
#undef FLASHMSA_CPU_TARGET
#undef FLASHMSA_CPU_VECTOR

#define FLASHMSA_CPU_ISA avx512
#define FLASHMSA_CPU_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define FLASHMSA_CPU_VECTOR 64
#include "cpu/attend_block.h"
#undef FLASHMSA_CPU_ISA
#undef FLASHMSA_CPU_TARGET
#undef FLASHMSA_CPU_VECTOR
#endif

namespace flashmsa::cpu {
namespace {

// What one block of rows belongs to, and the block.
struct Place {
  int32_t batch, residue, head, first_row, rows;
};

using PlanBlock = void (*)(const AttentionParams&, const Place&, BlockPlan&);

// The tiles of the walk. Of a list's mixed cells, only those in which the block's rows have something set.
template <class Mask>
void plan_steps(const typename Mask::Params& params, const typename Mask::Block& block, int32_t first_row,
                int32_t last_row, std::vector<TileStep>& steps) {
  const typename Mask::Tiles tiles = Mask::tiles(params, block, first_row, last_row, kBlockKv);
  steps.clear();
  for (int32_t step = 0; step < tiles.count(); ++step) {
    const int32_t index = tiles.visit(step);
    if constexpr (Mask::kListed) {
      static_assert(mask::kCell == 2 * kBlockKv && kBlockQ == kBlockKv && kWordStep == mask::kCell / 32);
      const int32_t entry = Mask::entry(block, index, kBlockKv);
      const int32_t detail = entry < block.entry + block.whole ? mask::kWholeCell : params.list.detail[entry];
      const int32_t half = index % 2;
      const int32_t row_in_cell = first_row % mask::kCell;
      if (!contains(Mask::half_keys(params, detail, row_in_cell / kBlockQ), half * kBlockKv)) continue;
      const int32_t* bits = Mask::row_bits(params, detail, row_in_cell);
      steps.push_back({int64_t{Mask::key_tile(params, block, index, kBlockKv)} * kBlockKv,
                       bits == nullptr ? nullptr : bits + half * (kBlockKv / 32)});
    } else {
      steps.push_back({int64_t{Mask::origin(params, block)} + int64_t{index} * kBlockKv, nullptr});
    }
  }
}

template <class Mask>
void plan_block(const AttentionParams& params, const Place& place, BlockPlan& plan) {
  const typename Mask::Params mask_params = Mask::make_params(params);
  const int32_t last_row = place.first_row + place.rows - 1;
  const typename Mask::Block block = Mask::block(mask_params, place.batch, place.head, place.first_row, last_row);
  plan_steps<Mask>(mask_params, block, place.first_row, last_row, plan.steps);
  plan.two_runs = false;
  for (int32_t r = 0; r < kBlockQ; ++r) {
    const int32_t i = min_of(place.first_row + r, last_row);
    const typename Mask::Row keys = Mask::row(mask_params, block, i);
    plan.main[r] = mask::main_run(keys);
    plan.first[r] = mask::first_run(keys);
    plan.two_runs |= plan.first[r].begin < plan.first[r].end;
    if constexpr (std::is_same_v<typename Mask::Row, mask::TwoRuns>) {
      if (params.alibi_slopes != nullptr) plan.position[r] = Mask::position(mask_params, block, i);
    }
  }
}

PlanBlock find_plan(const AttentionParams& params) {
  const MaskKind kind = params.mask.kind;
  const PlanBlock plan = [&]() -> PlanBlock {
    switch (kind) {
#define FLASHMSA_CASE(Mask) \
  case mask::Mask::kKind:   \
    return plan_block<mask::Mask>;
      FLASHMSA_FOR_EACH_MASK(FLASHMSA_CASE)
#undef FLASHMSA_CASE
      default:
        throw std::invalid_argument("mask: the CPU backend has no mask of kind " +
                                    std::to_string(static_cast<int>(kind)));
    }
  }();
  // Positions, which ALiBi needs, are known to the masks that every other can be written as.
  if (params.alibi_slopes != nullptr && kind != MaskKind::kBlockSparse) return plan_block<mask::Composite>;
  return plan;
}

template <class T>
using AttendBlock = void (*)(const BlockTask<T>&, Scratch<AccumulateType<T>>&);

template <class T>
AttendBlock<T> find_attend_block(Isa isa) {
#if FLASHMSA_CPU_X86
  if (isa == Isa::kAvx512) return avx512::attend_block<T>;
  if (isa == Isa::kAvx2) return avx2::attend_block<T>;
#endif
  if (isa == Isa::kBaseline) return baseline::attend_block<T>;
  throw std::invalid_argument(std::string("isa: ") + name(isa) + " code is not part of this build");
}

// The rows of one sequence from `row` on.
template <class T>
Rows<T> rows_of(const TensorRef& tensor, const Place& place, int64_t head, int64_t row) {
  T* data = static_cast<T*>(tensor.data);
  return {data + place.batch * tensor.stride_batch + place.residue * tensor.stride_residue + head * tensor.stride_head +
              row * tensor.stride_seq,
          tensor.stride_seq};
}

template <class T>
BlockTask<T> make_task(const AttentionParams& params, const Place& place) {
  using Acc = AccumulateType<T>;
  const int32_t head_kv = place.head / (params.heads_q / params.heads_kv);
  BlockTask<T> task = {};
  task.rows = place.rows;
  task.head_dim = params.head_dim;
  task.head_dim_v = params.head_dim_v;
  task.scale = static_cast<Acc>(params.scale);
  task.softcap = static_cast<Acc>(params.softcap);
  task.has_alibi = params.alibi_slopes != nullptr;
  if (task.has_alibi) {
    const double slope = params.alibi_slopes[place.batch * params.alibi_stride_batch + place.head];
    // NOTE: finite where the slope is, however far apart the keys stand: infinity times a distance of 0 would be NaN.
    constexpr double kMost = std::numeric_limits<Acc>::max();
    task.slope = static_cast<Acc>(std::isfinite(slope) ? clamp(slope * params.alibi_step, -kMost, kMost) : slope);
  }
  task.sink = params.sinks == nullptr ? nullptr : params.sinks + place.head;
  task.q = rows_of<const T>(params.q, place, place.head, place.first_row);
  task.k = rows_of<const T>(params.k, place, head_kv, 0);
  task.v = rows_of<const T>(params.v, place, head_kv, 0);
  task.out = rows_of<T>(params.out, place, place.head, place.first_row);
  const TensorRef lse = {params.lse, params.lse_stride_batch, params.lse_stride_head, params.lse_stride_seq,
                         params.lse_stride_residue};
  if (params.lse != nullptr) task.lse = rows_of<float>(lse, place, place.head, place.first_row);
  return task;
}

template <class T>
void attention(const AttentionParams& params, const ParallelFor& parallel_for, Isa isa) {
  const int32_t blocks = ceil_div(params.len_q, kBlockQ);
  const int64_t count = static_cast<int64_t>(params.batch) * params.residues * params.heads_q * blocks;
  if (count == 0) return;
  const PlanBlock plan_block = find_plan(params);
  const AttendBlock<T> attend_block = find_attend_block<T>(isa);

  // A thread gets at least about 2^20 multiply-adds, or starting it costs more than it saves.
  const int64_t block_cost =
      int64_t{min_of(params.len_q, kBlockQ)} * (params.len_kv + 1) * (params.head_dim + params.head_dim_v);
  const int64_t grain = max_of<int64_t>(1, (int64_t{1} << 20) / block_cost);

  // NOTE: the ranges only say how many threads there are. Blocks differ in cost (causal, documents), so each thread takes
  // the next one that is left; a row's result does not depend on who computes it. Last blocks first: causal ones are dear.
  std::atomic<int64_t> next{0};
  parallel_for(count, grain, [&](int64_t, int64_t) {
    Scratch<AccumulateType<T>> scratch(params.head_dim, params.head_dim_v);
    BlockPlan plan;
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
      const int64_t slice = i / blocks, sequence = slice / params.heads_q;
      Place place;
      place.batch = static_cast<int32_t>(sequence / params.residues);
      place.residue = static_cast<int32_t>(sequence % params.residues);
      place.head = static_cast<int32_t>(slice % params.heads_q);
      place.first_row = (blocks - 1 - static_cast<int32_t>(i % blocks)) * kBlockQ;
      place.rows = min_of(kBlockQ, params.len_q - place.first_row);
      BlockTask<T> task = make_task<T>(params, place);
      plan_block(params, place, plan);
      task.plan = &plan;
      attend_block(task, scratch);
    }
  });
}

void attend(const AttentionParams& params, const ParallelFor& parallel_for, Isa isa) {
  switch (params.dtype) {
    case DType::kF16:
      return attention<Float16>(params, parallel_for, isa);
    case DType::kBF16:
      return attention<BFloat16>(params, parallel_for, isa);
    case DType::kF32:
      return attention<float>(params, parallel_for, isa);
    case DType::kF64:
      return attention<double>(params, parallel_for, isa);
  }
  throw std::invalid_argument("dtype: the CPU backend has no element type " +
                              std::to_string(static_cast<int>(params.dtype)));
}

}  // namespace

const char* name(Isa isa) {
  switch (isa) {
    case Isa::kBaseline:
      return "baseline";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
  }
  return "unknown";
}

std::vector<Isa> supported_isas() {
  std::vector<Isa> isas = {Isa::kBaseline};
#if FLASHMSA_CPU_X86
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    isas.push_back(Isa::kAvx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      isas.push_back(Isa::kAvx512);
    }
  }
#endif
  return isas;
}

void attention_forward(const AttentionParams& params, const ParallelFor& parallel_for, Isa isa) {
  if (params.mask.kind != MaskKind::kDilated) return attend(params, parallel_for, isa);
  for (const AttentionParams& part : mask::split_by_residue(params)) attend(part, parallel_for, isa);
}

void attention_forward(const AttentionParams& params, const ParallelFor& parallel_for) {
  static const Isa widest = supported_isas().back();
  attention_forward(params, parallel_for, widest);
}

}  // namespace flashmsa::cpu
