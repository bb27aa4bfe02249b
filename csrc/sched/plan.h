// The plan of masks whose row blocks differ by device data (documents): one entry per row block, longest first.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/types.h"
#include "mask/interval.h"

namespace flashmsa::sched {

template <class Mask>
struct alignas(16) PlanEntry {
  int32_t row_block;
  mask::KeyTiles tiles;
  typename Mask::Block block;  // block.batch: the batch, where each has its own plan
};

// The entry of one row block, wherever it is made: on the device ahead of the kernel, or by the kernel's producer.
template <class Mask>
FLASHMSA_HD PlanEntry<Mask> plan_row_block(const typename Mask::Params& params, int32_t batch, int32_t row_block,
                                           int32_t block_q, int32_t block_kv, int32_t len_q) {
  const int32_t first_row = row_block * block_q;
  const int32_t last_row = min_of(first_row + block_q, len_q) - 1;
  PlanEntry<Mask> entry;
  entry.row_block = row_block;
  entry.block = Mask::block(params, batch, first_row, last_row);
  entry.tiles = mask::block_tiles<Mask>(params, entry.block, first_row, last_row, block_kv);
  return entry;
}

// Device workspace of one call: the grid's tile counter, then the plan.
inline constexpr size_t kCounterBytes = 16;

template <class Mask>
size_t plan_bytes(int64_t entries) {
  return Mask::kPlanned ? entries * sizeof(PlanEntry<Mask>) : 0;
}

// Key-tile counts are sorted by bucket: count >> shift, so that the largest possible count falls into the last bucket.
inline constexpr int32_t kPlanBuckets = 1024;

FLASHMSA_HD int32_t bucket_shift(int32_t max_count) {
  int32_t shift = 0;
  while ((max_count >> shift) >= kPlanBuckets) ++shift;
  return shift;
}

}  // namespace flashmsa::sched
