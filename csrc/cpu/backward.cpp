// A kv head's dK and dV are sums over its query heads and their blocks of rows. These are dealt out to a few splits, each
// with sums of its own, which are then added in order: how many depends on shapes alone, so that the result does not
// depend on the threads.
#include "cpu/backward.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "cpu/block.h"
#include "cpu/isa.h"
#include "cpu/plan.h"
#include "mask/dilated.h"

#define FLASHMSA_CPU_BODY "cpu/backward_block.h"
#include "cpu/each_isa.h"

namespace flashmsa::cpu {
namespace {

template <class T>
using BackwardBlock = void (*)(const BackwardTask<T>&, BackwardScratch<AccumulateType<T>>&);

template <class T>
BackwardBlock<T> find_backward_block(Isa isa) {
#if FLASHMSA_CPU_X86
  if (isa == Isa::kAvx512) return avx512::backward_block<T>;
  if (isa == Isa::kAvx2) return avx2::backward_block<T>;
#endif
  if (isa == Isa::kBaseline) return baseline::backward_block<T>;
  throw std::invalid_argument(std::string("isa: ") + name(isa) + " code is not part of this build");
}

// How the work of one call is cut.
struct Cut {
  int64_t slices;  // (batch, residue, kv head)
  int32_t group;  // query heads of a kv head
  int32_t blocks;  // of a query head's rows
  int64_t splits;  // of a slice; split s takes every splits-th of its group * blocks blocks, from the s-th on
};

template <class Acc>
Cut make_cut(const AttentionParams& p, int64_t accumulators) {
  constexpr int64_t kTasks = 32;  // enough for the threads of common machines
  constexpr int64_t kMostBytes = int64_t{1} << 28;  // of accumulators
  Cut cut;
  cut.slices = int64_t{p.batch} * p.residues * p.heads_kv;
  cut.group = p.heads_kv > 0 ? p.heads_q / p.heads_kv : 0;
  cut.blocks = ceil_div(p.len_q, kBlockQ);
  const int64_t slice_bytes = max_of<int64_t>(1, cut.slices * accumulators * static_cast<int64_t>(sizeof(Acc)));
  const int64_t most = min_of(max_of<int64_t>(1, kMostBytes / slice_bytes), int64_t{cut.group} * cut.blocks);
  cut.splits = clamp<int64_t>(ceil_div(kTasks, max_of<int64_t>(1, cut.slices)), 1, max_of<int64_t>(1, most));
  return cut;
}

// dK and dV of one split of a slice, in rows of padded length.
template <class Acc>
class KeySums {
 public:
  KeySums(int32_t len_kv, int32_t padded_dim, int32_t padded_dim_v)
      : dk_(int64_t{len_kv} * padded_dim + 1), dv_(int64_t{len_kv} * padded_dim_v + 1) {}
  Acc* dk() { return dk_; }
  Acc* dv() { return dv_; }

 private:
  typename Scratch<Acc>::Array dk_, dv_;  // zeros at first
};

template <class T>
class Backward {
 public:
  using Acc = AccumulateType<T>;

  Backward(const BackwardParams& params, Isa isa)
      : params_(params),
        forward_(params.forward),
        plan_block_(find_plan(forward_)),
        backward_block_(find_backward_block<T>(isa)),
        padded_dim_(padded(forward_.head_dim)),
        padded_dim_v_(padded(forward_.head_dim_v)),
        cut_(make_cut<Acc>(forward_, int64_t{forward_.len_kv} * (padded_dim_ + padded_dim_v_))) {}

  void run(const ParallelFor& parallel_for) {
    const int64_t tasks = cut_.slices * cut_.splits;
    if (tasks == 0) return;
    std::vector<std::unique_ptr<KeySums<Acc>>> sums(tasks);
    const int64_t rows = ceil_div<int64_t>(int64_t{cut_.group} * forward_.len_q, cut_.splits);
    const int64_t cost = max_of<int64_t>(1, rows * (forward_.len_kv + 1) * (forward_.head_dim + forward_.head_dim_v));
    // NOTE: as in the forward pass each thread takes the next task that is left.
    std::atomic<int64_t> next{0};
    parallel_for(tasks, max_of<int64_t>(1, (int64_t{1} << 20) / cost), [&](int64_t, int64_t) {
      BackwardScratch<Acc> scratch(forward_.head_dim, forward_.head_dim_v);
      BlockPlan plan;
      for (int64_t i = next.fetch_add(1); i < tasks; i = next.fetch_add(1)) {
        sums[i] = std::make_unique<KeySums<Acc>>(forward_.len_kv, padded_dim_, padded_dim_v_);
        run_split(i / cut_.splits, i % cut_.splits, *sums[i], scratch, plan);
        if (cut_.splits > 1) continue;
        for (int32_t first = 0; first < forward_.len_kv; first += kBlockKv) store_keys(i, &sums[i], first);
        sums[i].reset();
      }
    });
    if (cut_.splits == 1) return;
    const int64_t blocks = ceil_div(forward_.len_kv, kBlockKv);
    parallel_for(cut_.slices * blocks, 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        store_keys(i / blocks, &sums[i / blocks * cut_.splits], static_cast<int32_t>(i % blocks) * kBlockKv);
      }
    });
  }

 private:
  static int32_t padded(int32_t dim) { return ceil_div(dim, Scratch<Acc>::kLineValues) * Scratch<Acc>::kLineValues; }

  Place place_of(int64_t slice) const {
    const int64_t sequence = slice / forward_.heads_kv;
    Place place = {};
    place.batch = static_cast<int32_t>(sequence / forward_.residues);
    place.residue = static_cast<int32_t>(sequence % forward_.residues);
    return place;
  }

  void run_split(int64_t slice, int64_t split, KeySums<Acc>& sums, BackwardScratch<Acc>& scratch, BlockPlan& plan) {
    Place place = place_of(slice);
    for (int64_t unit = split; unit < int64_t{cut_.group} * cut_.blocks; unit += cut_.splits) {
      place.head = static_cast<int32_t>(slice % forward_.heads_kv * cut_.group + unit / cut_.blocks);
      place.first_row = static_cast<int32_t>(unit % cut_.blocks) * kBlockQ;
      place.rows = min_of(kBlockQ, forward_.len_q - place.first_row);
      plan_block_(forward_, place, plan);
      BackwardTask<T> task = make_backward_task(place);
      task.forward.plan = &plan;
      task.dk = sums.dk();
      task.dv = sums.dv();
      backward_block_(task, scratch);
    }
  }

  BackwardTask<T> make_backward_task(const Place& place) const {
    BackwardTask<T> task = {};
    task.forward = make_task<T>(forward_, place);
    task.dout = rows_of<const T>(params_.dout, place, place.head, place.first_row);
    task.dq = rows_of<T>(params_.dq, place, place.head, place.first_row);
    if (params_.dlse != nullptr) {
      const TensorRef dlse = {const_cast<float*>(params_.dlse), params_.dlse_stride_batch, params_.dlse_stride_head,
                              params_.dlse_stride_seq, params_.dlse_stride_residue};
      task.dlse = rows_of<const float>(dlse, place, place.head, place.first_row);
    }
    const int64_t sequence = (int64_t{place.batch} * forward_.heads_q + place.head) * forward_.residues + place.residue;
    const int64_t rows_before = sequence * forward_.len_q + place.first_row;
    task.delta = params_.delta + rows_before;
    if (params_.sink_terms != nullptr) task.sink_terms = params_.sink_terms + rows_before;
    return task;
  }

  // Up to kBlockKv keys of a slice from `first` on, from the sums of its splits.
  void store_keys(int64_t slice, std::unique_ptr<KeySums<Acc>>* sums, int32_t first) const {
    const Place place = place_of(slice);
    const int64_t head = slice % forward_.heads_kv;
    const int32_t keys = min_of(kBlockKv, forward_.len_kv - first);
    const auto store = [&](const TensorRef& to, int32_t columns, int32_t stride, Acc factor, auto part) {
      const Rows<T> rows = rows_of<T>(to, place, head, first);
      for (int32_t key = 0; key < keys; ++key) {
        for (int32_t c = 0; c < columns; ++c) {
          const int64_t at = int64_t{first + key} * stride + c;
          Acc sum = part(*sums[0])[at];
          for (int64_t split = 1; split < cut_.splits; ++split) sum += part(*sums[split])[at];
          narrow(sum * factor, rows.data[key * rows.stride + c]);
        }
      }
    };
    const Acc scale = static_cast<Acc>(forward_.scale);
    store(params_.dk, forward_.head_dim, padded_dim_, scale, [](KeySums<Acc>& x) { return x.dk(); });
    store(params_.dv, forward_.head_dim_v, padded_dim_v_, Acc(1), [](KeySums<Acc>& x) { return x.dv(); });
  }

  const BackwardParams& params_;
  const AttentionParams& forward_;
  const PlanBlock plan_block_;
  const BackwardBlock<T> backward_block_;
  const int32_t padded_dim_, padded_dim_v_;
  const Cut cut_;
};

void differentiate(const BackwardParams& params, const ParallelFor& parallel_for, Isa isa) {
  switch (params.forward.dtype) {
    case DType::kF16:
      return Backward<Float16>(params, isa).run(parallel_for);
    case DType::kBF16:
      return Backward<BFloat16>(params, isa).run(parallel_for);
    case DType::kF32:
      return Backward<float>(params, isa).run(parallel_for);
    case DType::kF64:
      return Backward<double>(params, isa).run(parallel_for);
  }
  throw std::invalid_argument("dtype: the CPU backend has no element type " +
                              std::to_string(static_cast<int>(params.forward.dtype)));
}

}  // namespace

void attention_backward(const BackwardParams& params, const ParallelFor& parallel_for, Isa isa) {
  if (params.forward.mask.kind != MaskKind::kDilated) return differentiate(params, parallel_for, isa);
  for (const BackwardParams& part : mask::split_by_residue(params)) differentiate(part, parallel_for, isa);
}

void attention_backward(const BackwardParams& params, const ParallelFor& parallel_for) {
  static const Isa widest = supported_isas().back();
  attention_backward(params, parallel_for, widest);
}

}  // namespace flashmsa::cpu
