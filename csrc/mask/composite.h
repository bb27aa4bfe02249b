// Sliding windows, prefix-LM, causal, documents with windows of their own, and every intersection of these: one mask,
// chosen at run time. The bounds are BandArgs's (core/params.h), once over the whole lengths and once inside each document.
// Also rows whose intervals are given as they are (hash buckets in sorted order).
//
// Like a document mask's offsets, prefixes and used lengths are device data that no host code has looked at; whatever they
// hold, every interval stays inside [0, len_kv].
#pragma once

#include <cstdint>

#include "mask/document.h"
#include "mask/interval.h"

namespace flashmsa::mask {

// BandArgs of one pair of lengths, both alignments in one: query i sees [i + low, i + high) and of these, where it has a
// prefix, what ends by max(prefix[a], i + causal[a]) for both a; and before that [i + outer, keep).
struct Bounds {
  int32_t low, high;
  int32_t outer, keep;
  int32_t causal[2], prefix[2];
  bool has_prefix;
};

// Rows among queries that begin at q_begin and end at q_end, keys alike. `which` selects from prefixes given by a tensor.
FLASHMSA_HD Bounds make_bounds(const BandArgs& band, int32_t which, int64_t q_begin, int64_t q_end, int64_t kv_begin,
                               int64_t kv_end) {
  // NOTE: 64 bits, then cut to 32: bounds and unchecked offsets may be anything.
  const auto cut = [](int64_t x) { return static_cast<int32_t>(clamp<int64_t>(x, -kUnbounded, kUnbounded)); };
  const auto cut_offset = [&](int64_t shift, int32_t bound) {
    return bound == kUnbounded ? -kUnbounded : cut(shift - bound);
  };
  Bounds bounds = {-kUnbounded, kUnbounded, -kUnbounded, cut(kv_begin + band.keep_first), {0, 0}, {0, 0}, false};
  FLASHMSA_UNROLL
  for (int a = 0; a < 2; ++a) {
    const int64_t shift = a == 0 ? kv_end - q_end : kv_begin - q_begin;
    bounds.low = max_of(bounds.low, cut_offset(shift, band.left[a]));
    bounds.outer = max_of(bounds.outer, cut_offset(shift, band.outer[a]));
    if (band.right[a] != kUnbounded) bounds.high = min_of(bounds.high, cut(shift + band.right[a] + 1));
    const bool tensor = band.prefixes[a] != nullptr;
    bounds.has_prefix |= tensor || band.prefix[a] != kUnbounded;
    bounds.causal[a] = cut(shift + 1);
    bounds.prefix[a] = cut(kv_begin + (tensor ? band.prefixes[a][which] : band.prefix[a]));
  }
  return bounds;
}

struct Composite {
  static constexpr const char* kName = "composite";
  static constexpr MaskKind kKind = MaskKind::kComposite;
  static constexpr bool kPlanned = true;
  static constexpr bool kSpansPlanned = true;
  static constexpr bool kListed = false;
  using Row = TwoRuns;
  using Tiles = TwoRunTiles;

  struct Params {
    Bounds global;
    const int32_t* prefixes[2];  // instead of global.prefix: one per batch
    BandArgs local;
    bool has_global, has_local;  // some bound is set
    bool two_runs;  // rows may have first keys apart from their window
    bool from_begin;  // tiles begin where the first row's keys do, see Document::origin
    bool positions_local, positions_top_left;
    int32_t position_offset;
    Document::Params documents;  // without: q_offsets null
    const int32_t* kv_used;
    const int32_t* row_begin;
    const int32_t* row_end;
    int64_t row_stride_batch, row_stride_head;
    int32_t len_q, len_kv;
  };

  // What a document's rows may see.
  struct Place {
    Interval keys;
    Bounds bounds;  // Params::has_local
    int32_t position_shift;  // position of query i, for ALiBi: i + this
  };

  struct Block {
    int32_t batch;
    int32_t head;
    int32_t prefix[2];  // of Params::global, this batch's
    int32_t origin;  // Params::from_begin: where the first row's keys begin
    int32_t doc_begin, doc_end;  // the documents that the rows lie in
    bool one_document;
    Place place;  // of the first
  };

  static Params make_params(const AttentionParams& p) {
    const MaskArgs& m = p.mask;
    Params params = {};
    BandArgs global = m.global;
    params.local = m.local;
    // The simpler kinds in these terms, for options that only this mask's kernels have.
    if (m.kind == MaskKind::kCausal) global.right[m.top_left] = 0;
    if (m.kind == MaskKind::kDocument && m.causal) params.local.right[0] = 0;
    params.has_global = bounded(global);
    for (int a = 0; a < 2; ++a) {
      params.prefixes[a] = global.prefixes[a];
      if (global.prefixes[a] == nullptr) continue;
      global.prefixes[a] = nullptr;  // read by block()
      global.prefix[a] = 0;
    }
    params.global = make_bounds(global, 0, 0, p.len_q, 0, p.len_kv);
    params.has_local = bounded(params.local);
    params.two_runs = global.keep_first > 0 || params.local.keep_first > 0;
    params.from_begin =
        !params.two_runs && !ends_move(global, p.len_q, p.len_kv) && !ends_move(params.local, kUnbounded, kUnbounded);
    params.positions_local = m.positions_local;
    params.positions_top_left = m.positions_top_left || (m.kind == MaskKind::kCausal && m.top_left);
    params.position_offset = m.position_offset;
    params.documents = Document::make_params(p);
    params.kv_used = m.kv_used;
    params.row_begin = m.row_begin;
    params.row_end = m.row_end;
    params.row_stride_batch = m.row_stride_batch;
    params.row_stride_head = m.row_stride_head;
    params.len_q = p.len_q;
    params.len_kv = p.len_kv;
    return params;
  }

  static FLASHMSA_HD bool has_documents(const Params& params) { return params.documents.q_offsets != nullptr; }

  static FLASHMSA_HD int64_t staged_size(const Params& params, int32_t batches) {
    return has_documents(params) ? Document::staged_size(params.documents, batches) : 0;
  }
  static FLASHMSA_HD Params stage(const Params& params, int32_t batches, int32_t* space, int32_t thread,
                                  int32_t threads) {
    Params staged = params;
    if (has_documents(params)) staged.documents = Document::stage(params.documents, batches, space, thread, threads);
    return staged;
  }

  static FLASHMSA_HD Block block(const Params& params, int32_t batch, int32_t head, int32_t first_row,
                                 int32_t last_row) {
    Block block = block_without_documents(params, batch, head, first_row);
    if (!has_documents(params)) return block;
    const Document::Params& documents = params.documents;
    block.doc_begin = Document::find(documents, batch, 0, documents.num_documents, first_row);
    const int32_t last = Document::find(documents, batch, block.doc_begin, documents.num_documents, last_row);
    block.doc_end = min_of(last + 1, documents.num_documents);
    block.one_document = block.doc_begin == last;
    block.place = place(params, batch, block.doc_begin);
    if (params.from_begin) block.origin = row(params, block, first_row).main.begin;
    return block;
  }

  static FLASHMSA_HD TwoRuns row(const Params& params, const Block& block, int32_t i) {
    TwoRuns row = row_without_documents(params, block, i);
    if (!has_documents(params)) return row;
    const Place at = place_of(params, block, i);
    row = {{at.keys.begin, at.keys.begin}, at.keys};
    if (params.has_local) row = cut(row, at.bounds, at.bounds.prefix, i);
    return params.has_global ? cut(row, params.global, block.prefix, i) : row;
  }

  // PERF: see Document::origin.
  static FLASHMSA_HD int32_t origin(const Params&, const Block& block) { return block.origin; }

  static FLASHMSA_HD Tiles tiles(const Params& params, const Block& block, int32_t first_row, int32_t last_row,
                                 int32_t tile_size) {
    return between(params, block, row(params, block, first_row), row(params, block, last_row), tile_size);
  }

  // The same where it is known that there are no documents: for the scheduler, whose registers are few.
  static FLASHMSA_HD Block block_without_documents(const Params& params, int32_t batch, int32_t head,
                                                   int32_t first_row) {
    Block block = {};
    block.batch = batch;
    block.head = head;
    block.one_document = true;
    FLASHMSA_UNROLL
    for (int a = 0; a < 2; ++a) {
      block.prefix[a] = params.prefixes[a] != nullptr ? params.prefixes[a][batch] : params.global.prefix[a];
    }
    if (!has_documents(params) && params.from_begin) {
      block.origin = row_without_documents(params, block, first_row).main.begin;
    }
    return block;
  }
  static FLASHMSA_HD TwoRuns row_without_documents(const Params& params, const Block& block, int32_t i) {
    if (params.row_begin != nullptr) return given_row(params, block, i);
    const TwoRuns row = {{0, 0}, {0, params.len_kv}};
    return params.has_global ? cut(row, params.global, block.prefix, i) : row;
  }
  static FLASHMSA_HD Tiles tiles_without_documents(const Params& params, const Block& block, int32_t first_row,
                                                   int32_t last_row, int32_t tile_size) {
    return between(params, block, row_without_documents(params, block, first_row),
                   row_without_documents(params, block, last_row), tile_size);
  }

  // Where query i stands among the keys, for ALiBi.
  static FLASHMSA_HD int32_t position(const Params& params, const Block& block, int32_t i) {
    if (params.positions_local && has_documents(params)) return i + place_of(params, block, i).position_shift;
    return i + (params.positions_top_left ? 0 : params.len_kv - params.len_q) + params.position_offset;
  }

  // Whether positions grow with the row inside the block.
  static FLASHMSA_HD bool positions_in_order(const Params& params, const Block& block) {
    return !params.positions_local || !has_documents(params) || block.one_document;
  }

  // Whether it is known that no row of the block from row i on sees a key past its own place.
  // NOTE: inside a document what bounds a row at the right, less the row, never grows with it.
  static FLASHMSA_HD bool sees_none_past(const Params& params, const Block& block, int32_t i) {
    if (params.row_begin != nullptr || !block.one_document) return false;
    const TwoRuns keys = row(params, block, i);
    return max_of(keys.main.end, keys.first.end) - 1 <= position(params, block, i);
  }

  // Whether the last key of one of len_q rows moves with the row.
  static bool ends_move(const BandArgs& band, int32_t len_q, int32_t len_kv) {
    bool any = false;
    for (int a = 0; a < 2; ++a) {
      // So far right that the first row sees the last key: no bound.
      const bool cut = band.right[a] != kUnbounded && band.right[a] < (a == 0 ? len_q : len_kv) - 1;
      any |= cut || band.prefix[a] != kUnbounded || band.prefixes[a] != nullptr;
    }
    return any;
  }

  static bool bounded(const BandArgs& band) {
    bool any = band.keep_first > 0;
    for (int a = 0; a < 2; ++a) {
      any |= band.left[a] != kUnbounded || band.right[a] != kUnbounded || band.prefix[a] != kUnbounded ||
             band.prefixes[a] != nullptr;
    }
    return any;
  }

  // What is left of `row` inside the bounds. At most one of the two has a first run, and it begins at or before the main
  // one: outer bounds are among the left ones.
  // NOTE: an empty row lies where its window begins, so that both ends still grow with the row.
  static FLASHMSA_HD TwoRuns cut(const TwoRuns& row, const Bounds& bounds, const int32_t (&prefix)[2], int32_t i) {
    const bool has_first = row.first.begin < row.first.end;
    const Interval keys = {has_first ? row.first.begin : row.main.begin, row.main.end};
    int32_t end = at(i, bounds.high, keys);
    if (bounds.has_prefix) {
      FLASHMSA_UNROLL
      for (int a = 0; a < 2; ++a) end = min_of(end, max_of(prefix[a], at(i, bounds.causal[a], keys)));
    }
    const int32_t begin = at(i, bounds.low, keys);
    TwoRuns result;
    result.main.begin = max_of(row.main.begin, begin);
    result.main.end = max_of(result.main.begin, end);
    if (has_first) {
      result.first = {begin, min_of(row.first.end, end)};
    } else {
      result.first = {at(i, bounds.outer, keys), min_of(bounds.keep, end)};
    }
    result.first.end = max_of(result.first.begin, result.first.end);
    return result;
  }

 private:
  // The tiles of a block's rows from `first` to `last`.
  static FLASHMSA_HD Tiles between(const Params& params, const Block& block, const TwoRuns& first, const TwoRuns& last,
                                   int32_t tile_size) {
    if (params.two_runs) return key_tiles(first, last, tile_size);
    return {key_tiles(from_origin(first.main, block.origin), from_origin(last.main, block.origin), tile_size), 0, 0};
  }

  // i + offset inside `keys`. The sum may not fit.
  static FLASHMSA_HD int32_t at(int32_t i, int32_t offset, Interval keys) {
    const uint32_t sum = static_cast<uint32_t>(i) + static_cast<uint32_t>(offset);
    const uint32_t capped = offset < 0 ? sum : min_of(sum, static_cast<uint32_t>(kUnbounded));
    return clamp(static_cast<int32_t>(capped), keys.begin, keys.end);
  }

  static FLASHMSA_HD Place place(const Params& params, int32_t batch, int32_t document) {
    const Document::Params& documents = params.documents;
    const int32_t* q = documents.q_offsets + batch * documents.offsets_stride;
    const int32_t* kv = documents.kv_offsets + batch * documents.offsets_stride;
    const int32_t count = documents.num_documents;
    Place place = {};
    // Rows past the last offset see nothing; their empty interval lies where the last document ends.
    if (document >= count) {
      const int32_t past = clamp(kv[count], 0, params.len_kv);
      place.keys = {past, past};
      return place;
    }
    const int32_t begin = clamp(kv[document], 0, params.len_kv);
    int32_t end = clamp(kv[document + 1], begin, params.len_kv);
    // NOTE: positions count from the document's own end, also where it reaches past the tensor.
    int32_t last = kv[document + 1];
    if (params.kv_used != nullptr) last = end = begin + clamp(params.kv_used[document], 0, end - begin);
    place.keys = {begin, end};
    if (params.has_local) place.bounds = make_bounds(params.local, document, q[document], q[document + 1], begin, last);
    const int64_t shift = params.positions_top_left ? int64_t{begin} - q[document] : int64_t{last} - q[document + 1];
    place.position_shift = static_cast<int32_t>(clamp<int64_t>(shift, -kUnbounded, kUnbounded));
    return place;
  }

  static FLASHMSA_HD Place place_of(const Params& params, const Block& block, int32_t i) {
    if (block.one_document) return block.place;
    const int32_t document = Document::find(params.documents, block.batch, block.doc_begin, block.doc_end, i);
    return place(params, block.batch, document);
  }

  static FLASHMSA_HD TwoRuns given_row(const Params& params, const Block& block, int32_t i) {
    const int64_t place = block.batch * params.row_stride_batch + block.head * params.row_stride_head + i;
    const int32_t begin = clamp(params.row_begin[place], 0, params.len_kv);
    return {{begin, begin}, {begin, clamp(params.row_end[place], begin, params.len_kv)}};
  }
};

}  // namespace flashmsa::mask
