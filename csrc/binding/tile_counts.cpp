#include "binding/tile_counts.h"

#include "mask/list.h"

namespace flashmsa::binding {
namespace {

template <class Mask>
TileCounts count_tiles(const AttentionParams& p, int32_t block_q, int32_t block_kv) {
  const typename Mask::Params params = Mask::make_params(p);
  TileCounts counts;
  for (int32_t batch = 0; batch < p.batch; ++batch) {
    for (int64_t first = 0; first < p.len_q; first += block_q) {
      const int32_t first_row = static_cast<int32_t>(first);
      const int32_t last_row = static_cast<int32_t>(min_of<int64_t>(first + block_q, p.len_q)) - 1;
      const typename Mask::Block block = Mask::block(params, batch, first_row, last_row);
      const mask::KeyTiles tiles = mask::block_tiles<Mask>(params, block, first_row, last_row, block_kv);
      counts.full += tiles.full_end - tiles.full_begin;
      counts.partial += tiles.partial_count();
      counts.skipped += ceil_div(p.len_kv, block_kv) - tiles.count();
      for (int32_t row = first_row; row <= last_row; ++row) {
        const mask::Interval interval = Mask::row(params, block, row);
        counts.allowed_pairs += interval.end - interval.begin;
      }
    }
  }
  counts.full *= p.heads_q;
  counts.partial *= p.heads_q;
  counts.skipped *= p.heads_q;
  counts.allowed_pairs *= p.heads_q;
  return counts;
}

}  // namespace

TileCounts count_tiles(const AttentionParams& params, int32_t block_q, int32_t block_kv) {
#define FLASHMSA_COUNT(Mask) \
  if (params.mask.kind == mask::Mask::kKind) return count_tiles<mask::Mask>(params, block_q, block_kv);
  FLASHMSA_FOR_EACH_MASK(FLASHMSA_COUNT)
#undef FLASHMSA_COUNT
  return {};
}

}  // namespace flashmsa::binding
