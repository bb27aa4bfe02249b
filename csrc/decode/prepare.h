// What runs ahead of the decode kernel where pages are selected: their lists are sorted.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "core/paged.h"

namespace flashmsa::decode {

// Most logical pages of a sequence among which pages can be selected: their bits, and counts of them, lie in shared memory.
inline constexpr int32_t kMaxSelectable = 32 * 48 * 1024;

struct PrepareParams {
  const int32_t* query_pages;  // (batch, pages_per_block)
  int32_t pages_per_block;
  int2* selected;              // (batch, pages_per_block): (logical, physical) pages in use, ascending, each once
  int32_t* selected_count;     // (batch)
};

// The kernel behind it on the stream may be launched to overlap it, and waits for it where it needs to.
void prepare(const PagedParams& call, const PrepareParams& params, int32_t capacity, cudaStream_t stream);

}  // namespace flashmsa::decode
