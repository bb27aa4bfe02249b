// Sequences packed one after another: query i and key j must lie in the same document, given by cumulative offsets.
//
// Offsets are device data that no host code has looked at. Whatever they hold, the binary search stays inside its array
// and every interval inside [0, len_kv]; offsets that do not start at 0 or that decrease give meaningless but safe results.
#pragma once

#include "mask/interval.h"

namespace flashmsa::mask {

struct Document {
  static constexpr const char* kName = "document";
  static constexpr MaskKind kKind = MaskKind::kDocument;
  static constexpr bool kPlanned = true;

  struct Params {
    const int32_t* q_offsets;  // (num_documents + 1), or (batch, num_documents + 1)
    const int32_t* kv_offsets;  // the same shape
    int32_t num_documents;
    int64_t offsets_stride;  // elements between two batches; 0: shared
    int32_t len_kv;
    bool causal;  // aligned at each document's end
  };

  // The documents that the rows of a block lie in: [doc_begin, doc_end). `batch` selects the offsets.
  struct Block {
    int32_t batch;
    int32_t doc_begin;
    int32_t doc_end;
  };

  static Params make_params(const AttentionParams& p) {
    const MaskArgs& m = p.mask;
    return {m.q_offsets, m.kv_offsets, m.num_documents, m.offsets_stride, p.len_kv, m.causal};
  }

  static FLASHMSA_HD Block block(const Params& params, int32_t batch, int32_t first_row, int32_t last_row) {
    const int32_t first = find(params, {batch, 0, params.num_documents}, first_row);
    const int32_t last = find(params, {batch, first, params.num_documents}, last_row);
    return {batch, first, min_of(last + 1, params.num_documents)};
  }

  static FLASHMSA_HD Interval row(const Params& params, const Block& block, int32_t i) {
    const int32_t d = find(params, block, i);
    const int32_t* q = params.q_offsets + block.batch * params.offsets_stride;
    const int32_t* kv = params.kv_offsets + block.batch * params.offsets_stride;
    // NOTE: rows past the last offset see nothing; their empty interval lies where the last document ends.
    if (d >= params.num_documents) {
      const int32_t past = clamp(kv[params.num_documents], 0, params.len_kv);
      return {past, past};
    }
    const int32_t begin = clamp(kv[d], 0, params.len_kv);
    int32_t end = clamp(kv[d + 1], begin, params.len_kv);
    if (params.causal) {
      // 64 bits: offsets are unchecked, their difference may not fit.
      const int64_t visible = static_cast<int64_t>(i) - q[d + 1] + kv[d + 1] + 1;
      end = static_cast<int32_t>(clamp<int64_t>(visible, begin, end));
    }
    return {begin, end};
  }

 private:
  // The document of row i: the d in [doc_begin, doc_end) with q_offsets[d] <= i < q_offsets[d + 1]; of several candidates
  // (empty documents share an offset) the last. num_documents when i lies past the last offset.
  static FLASHMSA_HD int32_t find(const Params& params, const Block& block, int32_t i) {
    const int32_t* q = params.q_offsets + block.batch * params.offsets_stride;
    int32_t low = block.doc_begin;
    int32_t high = block.doc_end;
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
};

}  // namespace flashmsa::mask
