// Documents as the forward kernels see them: where they are long enough, blocks of rows begin where a document does.
//
// A block's rows then see the keys of one document, and its tiles of keys begin where those do: one of them is partial at most,
// the document's last, or under causal the diagonal's. On a fixed grid a block reaches into several documents, and all of
// their keys are visited for all of its rows.
#pragma once

#include <cstdint>

#include "core/params.h"
#include "mask/document.h"
#include "mask/packed_tiles.h"

namespace flashmsa::mask {

struct Packed {
  // Mean length of documents from which on they have blocks of their own: of shorter ones a block holds several.
  // PERF: means of 96 | 145 | 183 | 314 | 474, as the time over that of a fixed grid. d64 1.01 | .91 | .89 | .88 | .89, causal
  // 1.05 | .95 | .90 | .88 | .88; d256 .99 | .89 | .85 | .85 | .90, causal 1.14 | .99 | 1.00 | .97 | .98.
  static constexpr int32_t kLeastLength = 128;

  static constexpr const char* kName = Document::kName;
  static constexpr MaskKind kKind = Document::kKind;
  static constexpr bool kPlanned = true;
  static constexpr bool kSpansPlanned = false;
  static constexpr bool kListed = false;
  static constexpr bool kOwnRows = true;  // a block brings its rows along
  using Row = Interval;
  using Tiles = KeyTiles;

  struct Params : Document::Params {
    bool packed;  // else on a fixed grid
    int32_t len_q;
  };
  struct Block : Document::Block {
    int32_t first_row, end_row;  // no rows: a number that is left over
  };

  // Whether a call's documents have this mean length.
  static bool reach(const AttentionParams& p, int32_t mean) {
    return p.mask.num_documents > 0 && int64_t{p.mask.num_documents} * mean <= p.len_q;
  }

  static Params make_params(const AttentionParams& p, int32_t least_length = kLeastLength) {
    return {Document::make_params(p), reach(p, least_length), p.len_q};
  }

  // Numbers of blocks, of one batch.
  static int32_t row_blocks(const Params& params, int32_t block_q) {
    return params.packed ? PackedTiles::count(params.num_documents, params.len_q, block_q)
                         : ceil_div(params.len_q, block_q);
  }

  static FLASHMSA_HD int64_t staged_size(const Params& params, int32_t batches) {
    return Document::staged_size(params, batches);
  }
  static FLASHMSA_HD Params stage(const Params& params, int32_t batches, int32_t* space, int32_t thread,
                                  int32_t threads) {
    return {Document::stage(params, batches, space, thread, threads), params.packed, params.len_q};
  }

  // NOTE: offsets are unchecked. Whatever they hold, rows lie in [0, len_q); only where they ascend is each in one block.
  static FLASHMSA_HD Block block(const Params& params, int32_t batch, int32_t number, int32_t block_q) {
    if (!params.packed) {
      const int32_t first_row = number * block_q, end_row = min_of(first_row + block_q, params.len_q);
      return {Document::block(params, batch, 0, first_row, end_row - 1), first_row, end_row};
    }
    const PackedTiles tiles = {params.q_offsets + batch * params.offsets_stride, params.num_documents, params.len_q,
                               block_q};
    const int32_t d = tiles.document_of(number);
    const PackedTiles::Range rows = tiles.range(number, d);
    const Document::Block document = {batch, d, min_of(d + 1, params.num_documents), true,
                                      Document::keys(params, batch, d)};
    return {document, rows.begin, rows.end};
  }

  static FLASHMSA_HD Interval row(const Params& params, const Block& block, int32_t i) {
    return Document::row(params, block, i);
  }
  static FLASHMSA_HD int32_t origin(const Params& params, const Block& block) {
    return params.packed ? block.keys.begin : Document::origin(params, block);
  }
  static FLASHMSA_HD Tiles tiles(const Params& params, const Block& block, int32_t first_row, int32_t last_row,
                                 int32_t tile_size) {
    return row_tiles<Packed>(params, block, first_row, last_row, tile_size);
  }
};

// The same for kernels of short documents.
struct ShortPacked : Packed {
  static constexpr const char* kName = "short_document";
  // PERF: means of 63 | 96, as above: .97 | .90, causal 1.00 | .93; on a fixed grid .96 | .97, 1.00 | .98.
  static constexpr int32_t kLeastLength = 80;
  static constexpr int32_t kMostLength = 384;

  static bool serves(const AttentionParams& p) { return p.mask.num_documents > 0 && !reach(p, kMostLength + 1); }

  static Params make_params(const AttentionParams& p) { return Packed::make_params(p, kLeastLength); }
};

}  // namespace flashmsa::mask
