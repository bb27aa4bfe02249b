// A dilated window is a sliding window among the tokens of one residue class: query i at position p sees the keys
// p + t * dilation, all congruent to p. So a call with such a mask is a few calls of a composite one over strided tensors.
//
// Queries i = i' * D + rq of class rq stand at p = i + shift = (i' + c) * D + rk, with rk = (rq + shift) mod D and
// c = floor((rq + shift) / D); the class's keys are j = j' * D + rk, and row i' sees i' + c - left <= j' <= i' + c + right.
// Neighbouring classes that agree in c and in both lengths are one call with that many residues.
#pragma once

#include <cstdint>
#include <vector>

#include "core/params.h"
#include "core/types.h"
#include "mask/interval.h"

namespace flashmsa::mask {

// The tokens of one residue class, or of several that are alike.
struct ResidueClass {
  int32_t first_q, first_kv;  // residues of queries and keys
  int32_t len_q, len_kv;  // tokens
  int32_t offset;  // c: query i' stands at key i' + c
};

inline ResidueClass residue_class(const AttentionParams& p, int32_t residue) {
  const int64_t step = p.mask.dilation;
  const auto tokens = [&](int64_t length, int64_t first) {
    return static_cast<int32_t>(first < length ? ceil_div<int64_t>(length - first, step) : 0);
  };
  const int64_t position = int64_t{residue} + position_shift(p);
  const int64_t offset = position >= 0 ? position / step : -ceil_div<int64_t>(-position, step);
  const int64_t first_kv = position - offset * step;
  return {residue, static_cast<int32_t>(first_kv), tokens(p.len_q, residue), tokens(p.len_kv, first_kv),
          static_cast<int32_t>(offset)};
}

inline int64_t element_bytes(DType dtype) { return dtype == DType::kF64 ? 8 : dtype == DType::kF32 ? 4 : 2; }

// The rows of a class: its first row, every dilation-th from there.
inline TensorRef class_rows(TensorRef tensor, int64_t element_bytes, int32_t first, int32_t rows, int64_t dilation) {
  tensor.stride_residue = tensor.stride_seq;
  if (rows > 0) tensor.data = static_cast<char*>(tensor.data) + first * tensor.stride_seq * element_bytes;
  if (rows > 1) tensor.stride_seq *= dilation;
  return tensor;
}

// The `residues` classes that begin with `first`, as one call.
inline AttentionParams class_params(const AttentionParams& p, const ResidueClass& first, int32_t residues) {
  const MaskArgs& m = p.mask;
  const int64_t bytes = element_bytes(p.dtype);
  AttentionParams part = p;
  part.residues = residues;
  part.len_q = first.len_q;
  part.len_kv = first.len_kv;
  part.q = class_rows(p.q, bytes, first.first_q, first.len_q, m.dilation);
  part.out = class_rows(p.out, bytes, first.first_q, first.len_q, m.dilation);
  part.k = class_rows(p.k, bytes, first.first_kv, first.len_kv, m.dilation);
  part.v = class_rows(p.v, bytes, first.first_kv, first.len_kv, m.dilation);
  if (p.lse != nullptr) part.lse = p.lse + first.first_q * p.lse_stride_seq;
  part.lse_stride_residue = p.lse_stride_seq;
  part.lse_stride_seq = p.lse_stride_seq * m.dilation;
  part.alibi_step = p.alibi_step * m.dilation;
  part.first_query = first.first_q;
  part.first_key = first.first_kv;
  part.token_step = m.dilation;

  const auto shifted = [](int32_t bound, int64_t by) {
    if (bound == kUnbounded) return bound;
    return static_cast<int32_t>(clamp<int64_t>(bound + by, -kUnbounded, kUnbounded));
  };
  part.mask = MaskArgs();
  part.mask.kind = MaskKind::kComposite;
  part.mask.global.left[1] = shifted(m.left, -int64_t{first.offset});
  part.mask.global.right[1] = shifted(m.right, first.offset);
  part.mask.positions_top_left = true;
  part.mask.position_offset = first.offset;
  return part;
}

// The calls that a kDilated call comes to, together every row of out and lse once; at most four.
inline std::vector<AttentionParams> split_by_residue(const AttentionParams& p) {
  std::vector<AttentionParams> parts;
  const int32_t step = p.mask.dilation;
  const int32_t classes = min_of(step, p.len_q);
  for (int32_t begin = 0; begin < classes;) {
    const ResidueClass first = residue_class(p, begin);
    // Up to where the queries get fewer, where the keys do, where the keys' residues start again.
    int64_t end = min_of<int64_t>(classes, int64_t{begin} + step - first.first_kv);
    if (begin < p.len_q % step) end = min_of<int64_t>(end, p.len_q % step);
    if (first.first_kv < p.len_kv % step) end = min_of<int64_t>(end, int64_t{begin} + p.len_kv % step - first.first_kv);
    parts.push_back(class_params(p, first, static_cast<int32_t>(end - begin)));
    begin = static_cast<int32_t>(end);
  }
  return parts;
}

// The same of a backward pass. Together they write every row of dq, and the rows of dk and dv that lie in a query's
// residue class. Their deltas follow one another in `delta`.
inline std::vector<BackwardParams> split_by_residue(const BackwardParams& p) {
  std::vector<BackwardParams> parts;
  const AttentionParams& whole = p.forward;
  const int64_t bytes = element_bytes(whole.dtype);
  int64_t rows_before = 0;
  for (const AttentionParams& forward : split_by_residue(whole)) {
    BackwardParams part = p;
    part.forward = forward;
    const auto queries = [&](const TensorRef& tensor) {
      return class_rows(tensor, bytes, forward.first_query, forward.len_q, forward.token_step);
    };
    const auto keys = [&](const TensorRef& tensor) {
      return class_rows(tensor, bytes, forward.first_key, forward.len_kv, forward.token_step);
    };
    part.dout = queries(p.dout);
    part.dq = queries(p.dq);
    part.dk = keys(p.dk);
    part.dv = keys(p.dv);
    if (p.dlse != nullptr) part.dlse = p.dlse + forward.first_query * p.dlse_stride_seq;
    part.dlse_stride_residue = p.dlse_stride_seq;
    part.dlse_stride_seq = p.dlse_stride_seq * forward.token_step;
    part.delta = p.delta + rows_before;
    if (p.sink_terms != nullptr) part.sink_terms = p.sink_terms + rows_before;
    rows_before += int64_t{forward.batch} * forward.heads_q * forward.residues * forward.len_q;
    parts.push_back(part);
  }
  return parts;
}

}  // namespace flashmsa::mask
