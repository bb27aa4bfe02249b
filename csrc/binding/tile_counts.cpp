#include "binding/tile_counts.h"

#include <bit>
#include <stdexcept>
#include <string>

#include "mask/dilated.h"
#include "mask/list.h"
#include "mask/packed.h"
#include "sched/plan.h"

namespace flashmsa::binding {
namespace {

mask::Interval overlap(mask::Interval a, mask::Interval b) {
  const int32_t begin = max_of(a.begin, b.begin);
  return {begin, max_of(begin, min_of(a.end, b.end))};
}

// How many keys a row sees.
template <class Mask>
int64_t row_pairs(const typename Mask::Params& params, const typename Mask::Block& block, int32_t row) {
  return mask::visible_keys(Mask::row(params, block, row));
}

// Set bits of a row of a cell among `keys`, counted within the cell.
int64_t set_bits(const int32_t* words, mask::Interval keys) {
  int64_t count = 0;
  for (int32_t key = keys.begin; key < keys.end;) {
    const int32_t end = min_of(keys.end, key / 32 * 32 + 32);
    const uint64_t range = (uint64_t{1} << (end - key)) - 1;
    count += std::popcount(static_cast<uint32_t>(words[key / 32]) >> key % 32 & range);
    key = end;
  }
  return count;
}

template <>
int64_t row_pairs<mask::BlockSparse>(const mask::BlockSparse::Params& params, const mask::BlockSparse::Block& block,
                                     int32_t row) {
  using mask::BlockSparse;
  using mask::kCell;
  const mask::TwoRuns keys = BlockSparse::row(params, block, row);
  const int32_t row_in_cell = row % kCell;
  int64_t count = 0;
  for (int32_t e = 0; e < block.whole + block.mixed; ++e) {
    const int32_t entry = block.entry + e;
    const int32_t detail = e < block.whole ? mask::kWholeCell : params.list.detail[entry];
    const int64_t first = int64_t{params.list.cells[entry]} * kCell;
    if (first < 0 || first >= params.interval.len_kv) continue;
    const mask::Interval half = BlockSparse::half_keys(params, detail, row_in_cell / (kCell / 2));
    const int32_t* bits = BlockSparse::row_bits(params, detail, row_in_cell);
    for (mask::Interval run : {mask::main_run(keys), mask::first_run(keys)}) {
      const mask::Interval cell = {static_cast<int32_t>(clamp<int64_t>(run.begin - first, 0, kCell)),
                                   static_cast<int32_t>(clamp<int64_t>(run.end - first, 0, kCell))};
      const mask::Interval here = overlap(cell, half);
      count += bits == nullptr ? mask::visible_keys(here) : set_bits(bits, here);
    }
  }
  return count;
}

template <class Mask>
bool differs_by_head(const MaskArgs& m) {
  return (m.row_begin != nullptr && m.row_stride_head != 0) || (Mask::kListed && m.list.stride_head != 0);
}

// visit(block, first_row, last_row) for the blocks of rows of one slice.
template <class Mask, class Visit>
void for_each_block(const typename Mask::Params& params, int32_t len_q, int32_t batch, int32_t head, int32_t block_q,
                    const Visit& visit) {
  if constexpr (sched::kOwnRows<Mask>) {
    for (int32_t number = 0; number < Mask::row_blocks(params, block_q); ++number) {
      const typename Mask::Block block = Mask::block(params, batch, number, block_q);
      if (block.first_row < block.end_row) visit(block, block.first_row, block.end_row - 1);
    }
  } else {
    for (int64_t first = 0; first < len_q; first += block_q) {
      const int32_t first_row = static_cast<int32_t>(first);
      const int32_t last_row = static_cast<int32_t>(min_of<int64_t>(first + block_q, len_q)) - 1;
      visit(Mask::block(params, batch, head, first_row, last_row), first_row, last_row);
    }
  }
}

template <class Mask>
TileCounts count_tiles_of(const AttentionParams& p, const typename Mask::Params& params, int32_t block_q,
                          int32_t block_kv) {
  const int32_t heads = differs_by_head<Mask>(p.mask) ? p.heads_q : 1;
  TileCounts counts;
  for (int32_t slice = 0; slice < p.batch * heads; ++slice) {
    const auto count = [&](const typename Mask::Block& block, int32_t first_row, int32_t last_row) {
      const typename Mask::Tiles tiles = Mask::tiles(params, block, first_row, last_row, block_kv);
      counts.full += tiles.count() - tiles.partial_count();
      counts.partial += tiles.partial_count();
      counts.skipped += ceil_div(p.len_kv, block_kv) - tiles.count();
      for (int32_t row = first_row; row <= last_row; ++row) counts.allowed_pairs += row_pairs<Mask>(params, block, row);
    };
    for_each_block<Mask>(params, p.len_q, slice / heads, slice % heads, block_q, count);
  }
  const int64_t alike = int64_t{p.residues} * p.heads_q / max_of(heads, 1);
  counts.full *= alike;
  counts.partial *= alike;
  counts.skipped *= alike;
  counts.allowed_pairs *= alike;
  return counts;
}

template <class Mask>
TileCounts count_tiles(const AttentionParams& p, int32_t block_q, int32_t block_kv) {
  typename Mask::Params params = Mask::make_params(p);
  if constexpr (Mask::kKind == MaskKind::kComposite) {
    // As the kernels that drop weights lay them: see fwd/launch.cuh.
    if (p.dropout_p > 0) params.from_begin = false;
  }
  return count_tiles_of<Mask>(p, params, block_q, block_kv);
}

}  // namespace

TileCounts count_tiles(const AttentionParams& params, int32_t block_q, int32_t block_kv, int32_t least_packed) {
  if (params.batch == 0 || params.heads_q == 0) return {};  // nor do the mask's tensors hold anything then
  // Weights are dropped by the composite mask's kernels.
  const bool simple = params.mask.kind < MaskKind::kComposite;
  if (params.dropout_p > 0 && simple) return count_tiles<mask::Composite>(params, block_q, block_kv);
  switch (params.mask.kind) {
    case MaskKind::kDocument:
      if (least_packed == 0) break;
      return count_tiles_of<mask::Packed>(params, mask::Packed::make_params(params, least_packed), block_q, block_kv);
    case MaskKind::kDilated: {
      TileCounts sum;
      for (const AttentionParams& part : mask::split_by_residue(params)) {
        const TileCounts counts = count_tiles<mask::Composite>(part, block_q, block_kv);
        sum.full += counts.full;
        sum.partial += counts.partial;
        sum.skipped += counts.skipped;
        sum.allowed_pairs += counts.allowed_pairs;
      }
      return sum;
    }
    case MaskKind::kHash:
      return count_tiles<mask::Composite>(params, block_q, block_kv);
    case MaskKind::kBlockSparse:
      if (mask::kCell % block_q != 0 || mask::kCell % block_kv != 0) {
        throw std::invalid_argument("tiles: " + std::to_string(block_q) + " x " + std::to_string(block_kv) +
                                    " do not divide a list's cells of 128 x 128");
      }
      break;
    default:
      break;
  }
#define FLASHMSA_COUNT(Mask) \
  if (params.mask.kind == mask::Mask::kKind) return count_tiles<mask::Mask>(params, block_q, block_kv);
  FLASHMSA_FOR_EACH_MASK(FLASHMSA_COUNT)
#undef FLASHMSA_COUNT
  return {};
}

}  // namespace flashmsa::binding
