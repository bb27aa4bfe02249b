// Sequences packed one after another: query i and key j must lie in the same document, given by cumulative offsets.
//
// Offsets are device data that no host code has looked at. Whatever they hold, the binary search stays inside its array
// and every interval inside [0, len_kv]; offsets that do not start at 0 or that decrease give meaningless but safe results.
#pragma once

#include <cstdint>

#include "mask/interval.h"

namespace flashmsa::mask {

struct Document {
  static constexpr const char* kName = "document";
  static constexpr MaskKind kKind = MaskKind::kDocument;
  static constexpr bool kPlanned = true;
  static constexpr bool kSpansPlanned = false;
  static constexpr bool kListed = false;
  using Row = Interval;
  using Tiles = KeyTiles;

  struct Params {
    const int32_t* q_offsets;  // (num_documents + 1), or (batch, num_documents + 1)
    const int32_t* kv_offsets;  // the same shape
    int32_t num_documents;
    int64_t offsets_stride;  // elements between two batches; 0: shared
    int32_t len_kv;
    bool causal;  // aligned at each document's end
  };

  // What a document's rows see: [begin, end), under causal row i only to i + shift.
  struct Keys {
    int32_t begin;
    int32_t end;
    int32_t shift;
  };

  // The documents that the rows of a block lie in: [doc_begin, doc_end). `batch` selects the offsets.
  struct Block {
    int32_t batch;
    int32_t doc_begin;
    int32_t doc_end;
    // Where all rows lie in one document, its keys: no row has to look at the offsets again.
    bool one_document;
    Keys keys;
  };

  static Params make_params(const AttentionParams& p) {
    const MaskArgs& m = p.mask;
    return {m.q_offsets, m.kv_offsets, m.num_documents, m.offsets_stride, p.len_kv, m.causal};
  }

  // The offsets of `batches` batches as one array, and the mask that reads them there: for those who look at all of them.
  // `threads` callers copy a share each; `space` holds staged_size() elements.
  static FLASHMSA_HD int64_t staged_size(const Params& params, int32_t batches) {
    return 2 * int64_t{batches} * (params.num_documents + 1);
  }

  static FLASHMSA_HD Params stage(const Params& params, int32_t batches, int32_t* space, int32_t thread,
                                  int32_t threads) {
    const int32_t size = params.num_documents + 1;
    int32_t* q = space;
    int32_t* kv = space + batches * size;
    for (int32_t i = thread; i < batches * size; i += threads) {
      const int64_t from = i / size * params.offsets_stride + i % size;
      q[i] = params.q_offsets[from];
      kv[i] = params.kv_offsets[from];
    }
    Params staged = params;
    staged.q_offsets = q;
    staged.kv_offsets = kv;
    staged.offsets_stride = batches > 1 ? size : 0;
    return staged;
  }

  static FLASHMSA_HD Block block(const Params& params, int32_t batch, int32_t /*head*/, int32_t first_row,
                                 int32_t last_row) {
    const int32_t first = find(params, batch, 0, params.num_documents, first_row);
    const int32_t last = find(params, batch, first, params.num_documents, last_row);
    return {batch, first, min_of(last + 1, params.num_documents), first == last, keys(params, batch, first)};
  }

  static FLASHMSA_HD Interval row(const Params& params, const Block& block, int32_t i) {
    if (block.one_document) return visible(params, block.keys, i);
    const int32_t document = find(params, block.batch, block.doc_begin, block.doc_end, i);
    return visible(params, keys(params, block.batch, document), i);
  }

  // PERF: tiles that begin where the first row's document does: up to a tile fewer than on a fixed grid. Under causal, where
  // the grid meets the diagonal in one tile, they would meet it in two (-4 %).
  static FLASHMSA_HD int32_t origin(const Params& params, const Block& block) {
    return params.causal ? 0 : block.keys.begin;
  }

  static FLASHMSA_HD Tiles tiles(const Params& params, const Block& block, int32_t first_row, int32_t last_row,
                                 int32_t tile_size) {
    return row_tiles<Document>(params, block, first_row, last_row, tile_size);
  }

  // What a document's rows see; `document` may be any number from 0 on.
  static FLASHMSA_HD Keys keys(const Params& params, int32_t batch, int32_t document) {
    const int32_t* q = params.q_offsets + batch * params.offsets_stride;
    const int32_t* kv = params.kv_offsets + batch * params.offsets_stride;
    // NOTE: rows past the last offset see nothing; their empty interval lies where the last document ends.
    if (document >= params.num_documents) {
      const int32_t past = clamp(kv[params.num_documents], 0, params.len_kv);
      return {past, past, 0};
    }
    const int32_t begin = clamp(kv[document], 0, params.len_kv);
    const int32_t end = clamp(kv[document + 1], begin, params.len_kv);
    const int64_t shift = int64_t{kv[document + 1]} - q[document + 1] + 1;
    return {begin, end, static_cast<int32_t>(clamp<int64_t>(shift, INT32_MIN, INT32_MAX))};
  }

  // The document of row i among [low, high): the d with q_offsets[d] <= i < q_offsets[d + 1]; of several candidates
  // (empty documents share an offset) the last. `high` when i lies past q_offsets[high].
  static FLASHMSA_HD int32_t find(const Params& params, int32_t batch, int32_t low, int32_t high, int32_t i) {
    const int32_t* q = params.q_offsets + batch * params.offsets_stride;
    // Smallest d with q_offsets[d + 1] > i.
    while (low < high) {
      const int32_t mid = low + (high - low) / 2;
      if (q[mid + 1] > i) {
        high = mid;
      } else {
        low = mid + 1;
      }
    }
    return low;
  }

 private:
  static FLASHMSA_HD Interval visible(const Params& params, const Keys& keys, int32_t i) {
    if (!params.causal) return {keys.begin, keys.end};
    // 64 bits: offsets are unchecked, the sum may not fit.
    const int64_t end = int64_t{i} + keys.shift;
    return {keys.begin, static_cast<int32_t>(clamp<int64_t>(end, keys.begin, keys.end))};
  }
};

}  // namespace flashmsa::mask
