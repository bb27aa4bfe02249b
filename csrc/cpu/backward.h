// The backward pass of the CPU backend, over the same tile plan and mask traits as the forward one.
#pragma once

#include "core/params.h"
#include "cpu/forward.h"

namespace flashmsa::cpu {

// Writes every element of dq, dk, dv and delta. f16, bf16 and f32 inputs are computed in f32, f64 in f64. Any strides with
// a unit last stride. Bitwise the same however parallel_for cuts the work.
void attention_backward(const BackwardParams& params, const ParallelFor& parallel_for);

}  // namespace flashmsa::cpu
