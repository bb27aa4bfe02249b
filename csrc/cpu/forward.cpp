// Walks (batch, head, query block) in parallel: plans each block by its mask, then runs attend_block for the element type
// and the instruction set.
#include "cpu/forward.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "cpu/block.h"
#include "cpu/isa.h"
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

using PlanBlock = BlockPlan (*)(const AttentionParams&, int32_t batch, int32_t first_row, int32_t rows);

template <class Mask>
BlockPlan plan_block(const AttentionParams& params, int32_t batch, int32_t first_row, int32_t rows) {
  const typename Mask::Params mask_params = Mask::make_params(params);
  const int32_t last_row = first_row + rows - 1;
  const typename Mask::Block block = Mask::block(mask_params, batch, first_row, last_row);
  BlockPlan plan;
  plan.tiles = mask::block_tiles<Mask>(mask_params, block, first_row, last_row, kBlockKv);
  plan.first_key = params.len_kv;
  plan.last_key = 0;
  for (int32_t r = 0; r < kBlockQ; ++r) {
    const mask::Interval keys = Mask::row(mask_params, block, min_of(first_row + r, last_row));
    plan.begin[r] = keys.begin;
    plan.end[r] = keys.end;
    if (keys.begin < keys.end) {
      plan.first_key = min_of(plan.first_key, keys.begin);
      plan.last_key = max_of(plan.last_key, keys.end);
    }
  }
  return plan;
}

PlanBlock find_plan(MaskKind kind) {
  switch (kind) {
#define FLASHMSA_CASE(Mask) \
  case mask::Mask::kKind:   \
    return plan_block<mask::Mask>;
    FLASHMSA_FOR_EACH_MASK(FLASHMSA_CASE)
#undef FLASHMSA_CASE
  }
  throw std::invalid_argument("mask: the CPU backend has no mask of kind " + std::to_string(static_cast<int>(kind)));
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

template <class T>
Rows<T> rows_of(const TensorRef& tensor, int64_t batch, int64_t head, int64_t row) {
  T* data = static_cast<T*>(tensor.data);
  return {data + batch * tensor.stride_batch + head * tensor.stride_head + row * tensor.stride_seq, tensor.stride_seq};
}

// The block of rows number `block` of the head number `head` (counted over the batch).
template <class T>
BlockTask<T> make_task(const AttentionParams& params, PlanBlock plan_block, int64_t head, int32_t block) {
  const int32_t batch = static_cast<int32_t>(head / params.heads_q);
  const int32_t head_q = static_cast<int32_t>(head % params.heads_q);
  const int32_t head_kv = head_q / (params.heads_q / params.heads_kv);
  const int32_t first_row = block * kBlockQ;
  const int32_t rows = min_of(kBlockQ, params.len_q - first_row);

  BlockTask<T> task;
  task.rows = rows;
  task.head_dim = params.head_dim;
  task.head_dim_v = params.head_dim_v;
  task.scale = static_cast<AccumulateType<T>>(params.scale);
  task.q = rows_of<const T>(params.q, batch, head_q, first_row);
  task.k = rows_of<const T>(params.k, batch, head_kv, 0);
  task.v = rows_of<const T>(params.v, batch, head_kv, 0);
  task.out = rows_of<T>(params.out, batch, head_q, first_row);
  task.lse = params.lse == nullptr ? nullptr : params.lse + head * params.len_q + first_row;
  task.plan = plan_block(params, batch, first_row, rows);
  return task;
}

template <class T>
void attention(const AttentionParams& params, const ParallelFor& parallel_for, Isa isa) {
  const int32_t blocks = ceil_div(params.len_q, kBlockQ);
  const int64_t count = static_cast<int64_t>(params.batch) * params.heads_q * blocks;
  if (count == 0) return;
  const PlanBlock plan_block = find_plan(params.mask.kind);
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
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
      const int32_t block = blocks - 1 - static_cast<int32_t>(i % blocks);
      attend_block(make_task<T>(params, plan_block, i / blocks, block), scratch);
    }
  });
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

void attention_forward(const AttentionParams& params, const ParallelFor& parallel_for) {
  static const Isa widest = supported_isas().back();
  attention_forward(params, parallel_for, widest);
}

}  // namespace flashmsa::cpu
