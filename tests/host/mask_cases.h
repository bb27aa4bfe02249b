// Masks by their definition, pair by pair, and a generator of random ones. Shares nothing with csrc/mask but MaskArgs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "core/params.h"

namespace flashmsa::test {

// One mask with the lengths it applies to. Offsets are held by vectors of exactly their size, so that a sanitizer sees
// any read past them.
struct MaskCase {
  MaskKind kind = MaskKind::kDense;
  int32_t batch = 1, len_q = 0, len_kv = 0;
  bool causal = false, top_left = false;
  bool shared_offsets = true;
  int32_t left = 0, right = 0, prefix = 0;
  std::vector<int32_t> q_offsets, kv_offsets;  // (documents + 1) or (batch, documents + 1)

  int32_t documents() const {
    return kind == MaskKind::kDocument ? static_cast<int32_t>(q_offsets.size()) / (shared_offsets ? 1 : batch) - 1 : 0;
  }

  void fill(AttentionParams& params) const {
    params.batch = batch;
    params.len_q = len_q;
    params.len_kv = len_kv;
    params.mask = {
        kind, causal, top_left, q_offsets.data(), kv_offsets.data(), documents(), shared_offsets ? 0 : documents() + 1,
        left, right,  prefix};
  }

  // The definition.
  bool allowed(int32_t b, int32_t i, int32_t j) const {
    switch (kind) {
      case MaskKind::kDense:
        return true;
      case MaskKind::kCausal:
        return j <= (top_left ? i : i + len_kv - len_q);
      case MaskKind::kBand: {
        const int64_t p = top_left ? i : int64_t{i} + len_kv - len_q;
        return j - p >= -int64_t{left} && j - p <= right && (j < prefix || j <= p);
      }
      case MaskKind::kDocument: {
        const int32_t* q = q_offsets.data() + (shared_offsets ? 0 : b * (documents() + 1));
        const int32_t* kv = kv_offsets.data() + (shared_offsets ? 0 : b * (documents() + 1));
        for (int32_t d = 0; d < documents(); ++d) {
          const bool together = q[d] <= i && i < q[d + 1] && kv[d] <= j && j < kv[d + 1];
          // Counted from the document's last query and last key.
          if (together && (!causal || kv[d + 1] - j >= q[d + 1] - i)) return true;
        }
        return false;
      }
    }
    return false;
  }

  std::string text() const {
    std::string out = kind == MaskKind::kDense ? "dense" : kind == MaskKind::kCausal ? "causal" : "document";
    if (kind == MaskKind::kBand) {
      out = "band";
      for (int32_t x : {left, right, prefix}) out.append(" ").append(std::to_string(x));
    }
    if (top_left) out += " top-left";
    if (kind == MaskKind::kDocument && causal) out += " causal";
    out.append(" len_q ").append(std::to_string(len_q)).append(" len_kv ").append(std::to_string(len_kv));
    for (const auto* offsets : {&q_offsets, &kv_offsets}) {
      if (offsets->empty()) continue;
      out += offsets == &q_offsets ? " q_offsets" : " kv_offsets";
      for (int32_t x : *offsets) out.append(" ").append(std::to_string(x));
    }
    return out;
  }
};

// Offsets of `documents` documents that start at 0 and never decrease. They end where the tensor does, short of it or
// past it; many documents are empty when there are more of them than tokens.
inline void append_offsets(Random& random, int32_t documents, int32_t len, std::vector<int32_t>& offsets) {
  const int32_t total = random.pick({len, len, random.between(0, len), len + random.between(0, 100)});
  std::vector<int32_t> cuts(documents + 1, 0);
  cuts[documents] = documents == 0 ? 0 : total;
  for (int32_t d = 1; d < documents; ++d) cuts[d] = random.between(0, total);
  for (int32_t d = 1; d < documents; ++d) {
    for (int32_t e = d; e > 1 && cuts[e] < cuts[e - 1]; --e) std::swap(cuts[e], cuts[e - 1]);
  }
  offsets.insert(offsets.end(), cuts.begin(), cuts.end());
}

inline MaskCase random_mask(Random& random, int32_t batch, int32_t len_q, int32_t len_kv) {
  MaskCase mask;
  mask.kind = random.pick({MaskKind::kDense, MaskKind::kCausal, MaskKind::kBand, MaskKind::kBand, MaskKind::kDocument,
                           MaskKind::kDocument});
  mask.batch = batch;
  mask.len_q = len_q;
  mask.len_kv = len_kv;
  mask.top_left = (mask.kind == MaskKind::kCausal || mask.kind == MaskKind::kBand) && random.coin();
  if (mask.kind == MaskKind::kBand) {
    for (int32_t* bound : {&mask.left, &mask.right, &mask.prefix}) {
      *bound = random.pick({0, 1, random.between(0, 70), random.between(0, len_kv + 3), INT32_MAX, INT32_MAX - 1});
    }
  }
  if (mask.kind == MaskKind::kDocument) {
    mask.causal = random.coin();
    mask.shared_offsets = random.coin();
    const int32_t documents = random.pick({0, 1, 2, random.between(3, 12), random.between(0, 2 * len_q + 4)});
    for (int32_t b = 0; b < (mask.shared_offsets ? 1 : batch); ++b) {
      append_offsets(random, documents, len_q, mask.q_offsets);
      append_offsets(random, documents, len_kv, mask.kv_offsets);
    }
    if (len_q == len_kv && random.coin()) mask.kv_offsets = mask.q_offsets;
  }
  return mask;
}

// A document mask whose offsets no one has checked: negative, decreasing, huge.
inline MaskCase garbage_mask(Random& random, int32_t batch, int32_t len_q, int32_t len_kv) {
  MaskCase mask;
  mask.kind = MaskKind::kDocument;
  mask.batch = batch;
  mask.len_q = len_q;
  mask.len_kv = len_kv;
  mask.causal = random.coin();
  mask.shared_offsets = random.coin();
  const int32_t documents = random.between(0, 9);
  for (int32_t n = (mask.shared_offsets ? 1 : batch) * (documents + 1); n > 0; --n) {
    for (auto* offsets : {&mask.q_offsets, &mask.kv_offsets}) {
      offsets->push_back(
          random.pick({random.between(-3, len_q + 3), random.between(-3, len_kv + 3), INT32_MIN, INT32_MIN + 1,
                       INT32_MAX, INT32_MAX - 1, -1, 0, static_cast<int32_t>(random.bits())}));
    }
  }
  return mask;
}

}  // namespace flashmsa::test
