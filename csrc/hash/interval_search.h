// Binary search among sorted keys: by bucket, and within a bucket by original position.
#pragma once

#include <cstdint>

#include "hash/rows.h"

namespace flashmsa::hash {

// One head's keys in sorted order.
struct SortedKeys {
  const int32_t* bucket;  // (length), in original order
  const int32_t* order;   // (length)
  int32_t length;

  // NOTE: clamped, so that an order that is none leads nowhere out of bounds.
  FLASHMSA_HD int32_t position(int32_t sorted) const {
    const uint32_t index = static_cast<uint32_t>(order[sorted]);
    const uint32_t last = static_cast<uint32_t>(length - 1);
    return static_cast<int32_t>(min_of(index, last));
  }
};

// A place in the order of (bucket, original position).
struct Place {
  int32_t bucket;
  int32_t position;
};

FLASHMSA_HD bool lies_behind(const SortedKeys& keys, int32_t sorted, const Place& place) {
  const int32_t position = keys.position(sorted);
  const int32_t bucket = keys.bucket[position];
  return bucket > place.bucket || (bucket == place.bucket && position > place.position);
}

// The first key in [low, high) behind `place`, or high.
FLASHMSA_HD int32_t first_behind(const SortedKeys& keys, int32_t low, int32_t high, const Place& place) {
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (lies_behind(keys, middle, place)) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Before a bucket's first key.
FLASHMSA_HD Place start_of(int32_t bucket) { return {bucket, -1}; }

// At the last key of `bucket` that query row `row` (by its original position) may see. Never before start_of.
FLASHMSA_HD Place end_of(const IntervalParams& p, int32_t bucket, int32_t row) {
  if (!p.causal) return {bucket, INT32_MAX};
  const int64_t position = int64_t{row} + p.len_kv - p.len_q;
  return {bucket, static_cast<int32_t>(clamp<int64_t>(position, -1, INT32_MAX))};
}

// The pointers of head h of the result, counted over the batch.
struct IntervalHead {
  const int32_t* q_bucket;
  const int32_t* q_order;
  SortedKeys keys;
};

FLASHMSA_HD IntervalHead interval_head(const IntervalParams& p, int64_t index) {
  const int64_t batch = index / p.heads;
  const int64_t head = index % p.heads;
  const int64_t head_q = head / (p.heads / p.heads_q);
  const int64_t head_kv = head / (p.heads / p.heads_kv);
  return {p.q_bucket.row(batch, head_q), p.q_order.row(batch, head_q),
          SortedKeys{p.kv_bucket.row(batch, head_kv), p.kv_order.row(batch, head_kv), p.len_kv}};
}

}  // namespace flashmsa::hash
