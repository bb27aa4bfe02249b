// The CPU backend: the same tile plan and mask traits as the kernels, walked by ordinary threads.
#pragma once

#include <cstdint>
#include <functional>

#include "core/params.h"

namespace flashmsa::cpu {

// Runs body(begin, end) over disjoint ranges that cover [0, count), in parallel or not. The binding passes
// at::parallel_for, a host test a plain call.
using ParallelFor =
    std::function<void(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body)>;

// out = softmax(scale * q k^T over the allowed keys) v and lse, for every element of out and lse.
// f16, bf16 and f32 inputs are computed in f32, f64 in f64. Any strides with a unit last stride.
void attention_forward(const AttentionParams& params, const ParallelFor& parallel_for);

}  // namespace flashmsa::cpu
