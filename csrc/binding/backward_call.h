// A backward pass by its mask's kind: over strided tensors (dilated), sorted ones (hash), or as it is.
#pragma once

#include <vector>

#include "binding/backend.h"
#include "binding/sorted_call.h"
#include "mask/dilated.h"

namespace flashmsa::binding {

// The classes of a dilated mask, one call each; keys that no query's class meets keep a gradient of 0.
template <class Backend, class Run>
std::vector<DeltaRows> run_dilated_backward(BackwardCall& call, const BackwardParams& params, const Run& run) {
  call.dq.zero_();
  call.dk.zero_();
  call.dv.zero_();
  std::vector<DeltaRows> rows;
  for (const BackwardParams& part : mask::split_by_residue(params)) {
    const AttentionParams& p = part.forward;
    const int64_t sizes[] = {p.batch, p.heads_q, p.residues, p.len_q};
    const int64_t strides[] = {p.lse_stride_batch, p.lse_stride_head, p.lse_stride_residue, p.lse_stride_seq};
    const auto of_part = [&](const at::Tensor& tensor) {
      return tensor.as_strided(sizes, strides, tensor.storage_offset() + p.first_query);
    };
    const int64_t first = part.delta - params.delta;
    const int64_t count = sizes[0] * sizes[1] * sizes[2] * sizes[3];
    const auto rows_of_part = [&](const at::Tensor& tensor) { return tensor.narrow(0, first, count).view(sizes); };
    const at::Tensor delta = rows_of_part(call.delta);
    if (p.len_kv > 0 || Backend::kRunsWithoutKeys) {
      run(part);
    } else if (call.dlse.defined()) {
      delta.copy_(of_part(call.dlse).neg());
    } else {
      delta.zero_();
    }
    rows.push_back(
        {of_part(call.lse), delta, call.sink_terms.defined() ? rows_of_part(call.sink_terms) : at::Tensor()});
  }
  return rows;
}

// `run` takes the BackwardParams of a kind that has kernels.
template <class Backend, class Prepare, class Run>
std::vector<DeltaRows> run_backward_by_kind(BackwardCall& call, const Run& run) {
  BackwardParams params = call.params;
  params.forward = call.call.params;
  const at::Tensor delta = call.delta.view(call.lse.sizes());
  const at::Tensor terms = call.sink_terms.defined() ? call.sink_terms.view(call.lse.sizes()) : at::Tensor();
  switch (params.forward.mask.kind) {
    case MaskKind::kDilated:
      return run_dilated_backward<Backend>(call, params, run);
    case MaskKind::kHash: {
      SortedBackward<Backend, Prepare> sorted(call);
      run(sorted.params());
      sorted.finish();
      return {{sorted.lse(), delta, terms}};
    }
    default:
      run(params);
      return {{call.lse, delta, terms}};
  }
}

}  // namespace flashmsa::binding
