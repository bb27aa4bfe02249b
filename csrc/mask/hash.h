// Hash buckets without a sorted copy of anything: rows and keys count in the order of their buckets, and lie in memory in
// the caller's. Each row's keys are one run of sorted keys, as csrc/hash finds it.
//
// Orders and runs are device data that no host code has looked at; whatever they hold, every row, key and run stays inside
// the tensors.
#pragma once

#include <cstdint>

#include "mask/interval.h"

namespace flashmsa::mask {

struct Hash {
  static constexpr const char* kName = "hash";
  static constexpr MaskKind kKind = MaskKind::kHash;
  static constexpr bool kPlanned = false;
  static constexpr bool kSpansPlanned = false;
  static constexpr bool kListed = false;
  static constexpr bool kIndexed = true;
  using Row = Interval;
  using Tiles = KeyTiles;

  // An int32 (batch, heads, length) tensor, the strides in elements.
  struct Plane {
    const int32_t* data;
    int64_t stride_batch, stride_head;

    FLASHMSA_HD const int32_t* row(int32_t batch, int32_t head) const {
      return data + batch * stride_batch + head * stride_head;
    }
  };

  struct Params {
    Plane q_order, kv_order;  // of sorted rows and keys the caller's
    Plane row_begin, row_end;  // of sorted rows the sorted keys
    int32_t heads_per_kv_order;  // query heads that share an order of keys
    int32_t len_q, len_kv;
  };

  struct Block {
    const int32_t* q_order;
    const int32_t* kv_order;
    const int32_t* row_begin;
    const int32_t* row_end;
    int32_t origin;
  };

  static Params make_params(const AttentionParams& p) {
    const MaskArgs& m = p.mask;
    Params params = {};
    params.q_order = {m.q_order, m.q_order_stride_batch, m.q_order_stride_head};
    params.kv_order = {m.kv_order, m.kv_order_stride_batch, m.kv_order_stride_head};
    params.row_begin = {m.row_begin, m.row_stride_batch, m.row_stride_head};
    params.row_end = {m.row_end, m.row_stride_batch, m.row_stride_head};
    params.heads_per_kv_order = m.kv_order_heads == p.heads_q ? 1 : p.heads_q / max_of(p.heads_kv, 1);
    params.len_q = p.len_q;
    params.len_kv = p.len_kv;
    return params;
  }

  // All but the origin.
  static FLASHMSA_HD Block block(const Params& params, int32_t batch, int32_t head) {
    return {params.q_order.row(batch, head), params.kv_order.row(batch, head / params.heads_per_kv_order),
            params.row_begin.row(batch, head), params.row_end.row(batch, head), 0};
  }

  // PERF: tiles begin where the first row's keys do: in buckets of a few tiles one partial tile less.
  static FLASHMSA_HD Block block(const Params& params, int32_t batch, int32_t head, int32_t first_row,
                                 int32_t /*last_row*/) {
    Block result = block(params, batch, head);
    result.origin = row(params, result, first_row).begin;
    return result;
  }

  static FLASHMSA_HD Interval row(const Params& params, const Block& block, int32_t i) {
    const int32_t begin = clamp(block.row_begin[i], 0, params.len_kv);
    return {begin, clamp(block.row_end[i], begin, params.len_kv)};
  }

  static FLASHMSA_HD int32_t origin(const Params&, const Block& block) { return block.origin; }

  static FLASHMSA_HD KeyTiles tiles(const Params& params, const Block& block, int32_t first_row, int32_t last_row,
                                    int32_t tile_size) {
    return row_tiles<Hash>(params, block, first_row, last_row, tile_size);
  }

  // The caller's row of a sorted one, the caller's key of a sorted one.
  static FLASHMSA_HD int32_t query(const Params& params, const Block& block, int32_t row) {
    return inside(block.q_order[row], params.len_q);
  }
  static FLASHMSA_HD int32_t key(const Params& params, const Block& block, int32_t key) {
    return inside(block.kv_order[key], params.len_kv);
  }

 private:
  static FLASHMSA_HD int32_t inside(int32_t index, int32_t length) {
    return static_cast<int32_t>(min_of(static_cast<uint32_t>(index), static_cast<uint32_t>(length - 1)));
  }
};

}  // namespace flashmsa::mask
