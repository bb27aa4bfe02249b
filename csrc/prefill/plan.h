// What is made on the device ahead of the kernel: the row blocks of all sequences, longest first, and sorted page lists.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "prefill/paged.h"
#include "sched/plan.h"

namespace flashmsa::prefill {

// How sequences are cut into row blocks: of block_q rows, or where each query_block has keys of its own, of its rows.
struct RowBlocks {
  int32_t block_q;
  int32_t query_block;  // block_q without lists

  FLASHMSA_HD int32_t parts() const { return ceil_div(query_block, block_q); }  // of a whole query block
  FLASHMSA_HD int32_t count(int32_t rows) const {
    return rows / query_block * parts() + ceil_div(rows % query_block, block_q);
  }
  FLASHMSA_HD Interval rows(int32_t index, int32_t len_q) const {
    const int32_t begin = index / parts() * query_block, first = begin + index % parts() * block_q;
    return {first, min_of(min_of(first + block_q, begin + query_block), len_q)};
  }
};

// Device memory of one call, at the front of the workspace.
struct Counters {
  int32_t next_tile;  // handed out beyond the grid's first
  int32_t row_blocks;  // in the plan
};

// An entry of the plan by rank: longest first.
struct Ranked {
  int32_t entry;
  struct {
    int32_t n;
    FLASHMSA_HD int32_t count() const { return n; }
  } tiles;
};

template <class Mask>
struct PlanArgs {
  typename Mask::Params mask;
  RowBlocks blocks;
  int32_t capacity;  // entries that the plan has room for
  Counters* counters;
  sched::PlanEntry<Mask>* plan;  // in the order of sequences and rows; behind its last place, Ranked ones as many
  int32_t* first_block;  // packed: (batch + 2), row blocks before each sequence
};

// Launches a kernel that the attention kernel may overtake (programmatic dependent launch). kBlockKv: keys of a tile.
template <class Mask, int32_t kBlockKv>
void launch_plan(const PlanArgs<Mask>& args, cudaStream_t stream);

// Sorts query_pages, (batch, query_blocks, pages_per_block), into mask.lists.
void launch_sort_pages(const PagedMaskParams& mask, const int32_t* query_pages, int32_t pages_per_block,
                       cudaStream_t stream);

}  // namespace flashmsa::prefill
