// The instruction sets that the CPU backend is compiled for. forward.h takes the widest; tests run every one.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/backward.h"
#include "cpu/forward.h"

namespace flashmsa::cpu {

enum class Isa : int32_t { kBaseline, kAvx2, kAvx512 };

const char* name(Isa isa);

// What this processor has, narrowest first.
std::vector<Isa> supported_isas();

// attention_forward by the code compiled for `isa`, which must be supported. Results differ in rounding only.
void attention_forward(const AttentionParams& params, const ParallelFor& parallel_for, Isa isa);
void attention_backward(const BackwardParams& params, const ParallelFor& parallel_for, Isa isa);

}  // namespace flashmsa::cpu
