#include "cpu/plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "mask/list.h"

namespace flashmsa::cpu {
namespace {

// The tiles of the walk. Of a list's mixed cells, only those in which the block's rows have something set.
template <class Mask>
void plan_steps(const typename Mask::Params& params, const typename Mask::Block& block, int32_t first_row,
                int32_t last_row, std::vector<TileStep>& steps) {
  const typename Mask::Tiles tiles = Mask::tiles(params, block, first_row, last_row, kBlockKv);
  steps.clear();
  for (int32_t step = 0; step < tiles.count(); ++step) {
    const int32_t index = tiles.visit(step);
    if constexpr (Mask::kListed) {
      static_assert(mask::kCell == 2 * kBlockKv && kBlockQ == kBlockKv && kWordStep == mask::kCell / 32);
      const int32_t entry = Mask::entry(block, index, kBlockKv);
      const int32_t detail = entry < block.entry + block.whole ? mask::kWholeCell : params.list.detail[entry];
      const int32_t half = index % 2;
      const int32_t row_in_cell = first_row % mask::kCell;
      if (!contains(Mask::half_keys(params, detail, row_in_cell / kBlockQ), half * kBlockKv)) continue;
      const int32_t* bits = Mask::row_bits(params, detail, row_in_cell);
      steps.push_back({int64_t{Mask::key_tile(params, block, index, kBlockKv)} * kBlockKv,
                       bits == nullptr ? nullptr : bits + half * (kBlockKv / 32)});
    } else {
      steps.push_back({int64_t{Mask::origin(params, block)} + int64_t{index} * kBlockKv, nullptr});
    }
  }
}

template <class Mask>
void plan_block(const AttentionParams& params, const Place& place, BlockPlan& plan) {
  const typename Mask::Params mask_params = Mask::make_params(params);
  const int32_t last_row = place.first_row + place.rows - 1;
  const typename Mask::Block block = Mask::block(mask_params, place.batch, place.head, place.first_row, last_row);
  plan_steps<Mask>(mask_params, block, place.first_row, last_row, plan.steps);
  plan.two_runs = false;
  for (int32_t r = 0; r < kBlockQ; ++r) {
    const int32_t i = min_of(place.first_row + r, last_row);
    const typename Mask::Row keys = Mask::row(mask_params, block, i);
    plan.main[r] = mask::main_run(keys);
    plan.first[r] = mask::first_run(keys);
    plan.two_runs |= plan.first[r].begin < plan.first[r].end;
    if constexpr (std::is_same_v<typename Mask::Row, mask::TwoRuns>) {
      if (params.alibi_slopes != nullptr) plan.position[r] = Mask::position(mask_params, block, i);
    }
  }
}

}  // namespace

PlanBlock find_plan(const AttentionParams& params) {
  const MaskKind kind = params.mask.kind;
  const PlanBlock plan = [&]() -> PlanBlock {
    switch (kind) {
#define FLASHMSA_CASE(Mask) \
  case mask::Mask::kKind:   \
    return plan_block<mask::Mask>;
      FLASHMSA_FOR_EACH_MASK(FLASHMSA_CASE)
#undef FLASHMSA_CASE
      default:
        throw std::invalid_argument("mask: the CPU backend has no mask of kind " +
                                    std::to_string(static_cast<int>(kind)));
    }
  }();
  // Positions, which ALiBi needs, are known to the masks that every other can be written as.
  if (params.alibi_slopes != nullptr && kind != MaskKind::kBlockSparse) return plan_block<mask::Composite>;
  return plan;
}

BlockDropout make_dropout(const AttentionParams& params, const Place& place) {
  BlockDropout dropout;
  if (params.dropout_p <= 0) return dropout;
  const MaskArgs& m = params.mask;
  const int32_t head_kv = place.head / (params.heads_q / params.heads_kv);
  dropout.head = flashmsa::make_dropout(params.rng_state, dropout_threshold(params.dropout_p), place.batch, place.head,
                                        params.heads_q);
  dropout.step = params.token_step;
  dropout.first_query = int64_t{params.first_query} + place.residue + place.first_row * dropout.step;
  dropout.first_key = int64_t{params.first_key} + place.residue;
  if (m.q_order != nullptr) {
    dropout.q_order =
        m.q_order + place.batch * m.q_order_stride_batch + place.head * m.q_order_stride_head + place.first_row;
    dropout.kv_order = m.kv_order + place.batch * m.kv_order_stride_batch + head_kv * m.kv_order_stride_head;
  }
  return dropout;
}

namespace {

// Rows and keys that follow one another in the caller's order: a call of philox gives 16 keys of a row.
void find_kept_in_order(const BlockDropout& dropout, int32_t rows, int64_t first, int32_t count, uint64_t* kept) {
  const uint32_t first_key = dropout.key(first), threshold = dropout.head.threshold;
  const uint32_t begin = first_key / 64, end = (first_key + static_cast<uint32_t>(count) - 1) / 64 + 1;
  for (int32_t row = 0; row < rows; ++row) {
    const uint32_t i = dropout.query(row), multiplier = draw_multiplier(i % 32 / 8);
    const Dropout::QueryCalls calls = dropout.head.calls_of_query(i);
    for (uint32_t group = begin; group < end; ++group) {
      uint64_t bits = 0;
      for (uint32_t pair = 0; pair < 8; pair += 2) {
        const PhiloxBlock block = calls.at(Dropout::key_count(group * 64 + pair));
        for (uint32_t n = 0; n < 8; ++n) {
          const uint32_t word = draw_word(block, multiplier, n);
          const uint32_t two = static_cast<uint32_t>(bf16_rank(word & 0xFFFFu) >= threshold) |
                               static_cast<uint32_t>(bf16_rank(word >> 16) >= threshold) << 1;
          bits |= uint64_t{two} << (8 * n + pair);
        }
      }
      const int32_t shift = static_cast<int32_t>(group * 64 - first_key);
      kept[row] |= shift >= 0 ? bits << shift : bits >> -shift;
    }
  }
}

}  // namespace

void find_kept(const BlockDropout& dropout, int32_t rows, int64_t first, int32_t count, uint64_t* kept) {
  std::fill_n(kept, kBlockQ, uint64_t{0});
  if (dropout.q_order == nullptr && dropout.step == 1) return find_kept_in_order(dropout, rows, first, count, kept);
  for (int32_t row = 0; row < rows; ++row) {
    const uint32_t i = dropout.query(row);
    for (int32_t k = 0; k < count; ++k) kept[row] |= uint64_t{dropout.head.keeps(i, dropout.key(first + k))} << k;
  }
}

}  // namespace flashmsa::cpu
