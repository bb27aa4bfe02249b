// What one block of rows belongs to, which tiles its mask lets it meet, and where its numbers lie.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "core/params.h"
#include "cpu/block.h"

namespace flashmsa::cpu {

// What one block of rows belongs to, and the block.
struct Place {
  int32_t batch, residue, head, first_row, rows;
};

using PlanBlock = void (*)(const AttentionParams&, const Place&, BlockPlan&);

// The planning of a mask's blocks. Throws std::invalid_argument for a mask that is not one of intervals or lists.
PlanBlock find_plan(const AttentionParams& params);

BlockDropout make_dropout(const AttentionParams& params, const Place& place);

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
  task.dropout = make_dropout(params, place);
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

}  // namespace flashmsa::cpu
