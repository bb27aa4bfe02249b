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
