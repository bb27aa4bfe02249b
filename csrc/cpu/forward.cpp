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
#include "cpu/plan.h"
#include "mask/dilated.h"

#define FLASHMSA_CPU_BODY "cpu/attend_block.h"
#include "cpu/each_isa.h"

namespace flashmsa::cpu {
namespace {

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
