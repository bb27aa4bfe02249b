// What runs ahead of the decode kernel where pages are selected: their lists are sorted.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "core/paged.h"
#include "sm90/pool_map.h"

namespace flashmsa::decode {

// Most logical pages of a sequence among which pages can be selected: their bits, and counts of them, lie in shared memory.
inline constexpr int32_t kMaxSelectable = 32 * 48 * 1024;

// Pieces of pages that are brought to the L2 as they were listed, while the lists are sorted.
struct Ahead {
  sm90::PoolMap k_map, v_map;
  int32_t piece_log2;
  int32_t slices, heads_kv;  // slices: shares of the lists, some keys of each; 0: none
  int32_t step;              // entries of a share
  uint64_t policy;
};

struct PrepareParams {
  const int32_t* query_pages;  // (batch, pages_per_block)
  int32_t pages_per_block;
  int2* selected;              // (batch, pages_per_block): (logical, physical) pages in use, ascending, each once
  int32_t* selected_count;     // (batch)
  Ahead ahead;
};

// The kernel behind it on the stream may be launched to overlap it, and waits for it where it needs to.
void prepare(const PagedParams& call, const PrepareParams& params, int32_t capacity, cudaStream_t stream);

}  // namespace flashmsa::decode
