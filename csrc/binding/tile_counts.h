// How many tiles a mask makes a kernel visit, counted on the host with the traits the kernels use.
#pragma once

#include <cstdint>

#include "core/params.h"

namespace flashmsa::binding {

struct TileCounts {
  int64_t full = 0;           // visited without a test
  int64_t partial = 0;        // visited with one
  int64_t skipped = 0;
  int64_t allowed_pairs = 0;  // (query, key) pairs that the mask allows
};

// Over all batches and query heads. What params.mask points to is host memory; of a Hash mask, whose rows and keys are the
// sorted ones, row_begin and row_end. A BlockSparse mask's tiles divide its cells of 128 x 128, or std::invalid_argument.
// least_packed: of the kernel that runs a document mask (fwd::KernelInfo); 0 where none does.
TileCounts count_tiles(const AttentionParams& params, int32_t block_q, int32_t block_kv, int32_t least_packed = 0);

}  // namespace flashmsa::binding
