// Masks by their definition, pair by pair, and a generator of random ones. Shares nothing with csrc/mask but MaskArgs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "core/params.h"

namespace flashmsa::test {

// The bounds of BandArgs; a prefix tensor where `prefixes` holds something.
struct Band {
  int32_t left[2] = {kUnbounded, kUnbounded};
  int32_t right[2] = {kUnbounded, kUnbounded};
  int32_t prefix[2] = {kUnbounded, kUnbounded};
  std::vector<int32_t> prefixes[2];
  int32_t keep_first = 0;
  int32_t outer[2] = {kUnbounded, kUnbounded};

  BandArgs args() const {
    BandArgs args;
    for (int a : {0, 1}) {
      args.left[a] = left[a];
      args.right[a] = right[a];
      args.prefix[a] = prefixes[a].empty() ? prefix[a] : 0;
      args.prefixes[a] = prefixes[a].empty() ? nullptr : prefixes[a].data();
      args.outer[a] = outer[a];
    }
    args.keep_first = keep_first;
    return args;
  }

  // Query i of len_q and key j of len_kv; `which` selects from the prefix tensors.
  bool allowed(int64_t i, int64_t j, int64_t len_q, int64_t len_kv, int32_t which) const {
    bool window = true, kept = j < keep_first;
    for (int a : {0, 1}) {
      const int64_t p = a == 0 ? i + len_kv - len_q : i;
      if (right[a] != kUnbounded && j > p + right[a]) return false;
      const int64_t bound = prefixes[a].empty() ? prefix[a] : prefixes[a][which];
      if (bound != kUnbounded && j >= bound && j > p) return false;
      if (left[a] != kUnbounded && j < p - left[a]) window = false;
      if (outer[a] != kUnbounded && j < p - outer[a]) kept = false;
    }
    return window || kept;
  }

  std::string text() const {
    std::string out;
    for (int a : {0, 1}) {
      const auto put = [&](const char* name, int32_t bound) {
        if (bound != kUnbounded) out.append(name).append(a == 0 ? "_br " : "_tl ").append(std::to_string(bound));
      };
      put(" left", left[a]);
      put(" right", right[a]);
      put(" prefix", prefixes[a].empty() ? prefix[a] : kUnbounded);
      put(" outer", outer[a]);
      for (int32_t x : prefixes[a]) out.append(a == 0 ? " pre_br " : " pre_tl ").append(std::to_string(x));
    }
    if (keep_first > 0) out.append(" keep ").append(std::to_string(keep_first));
    return out;
  }
};

// A block mask: which pairs it allows, and the list of cells that says the same.
struct CellList {
  int32_t slices_batch = 1, slices_head = 1;  // 1: shared
  std::vector<char> pairs;                    // (slices, len_q, len_kv)
  std::vector<int32_t> row_start, whole_count, cells, detail, bits;
  bool has_bits = false;
};

// One mask with the lengths it applies to. Device data are held by vectors of exactly their size, so that a sanitizer sees
// any read past them.
struct MaskCase {
  MaskKind kind = MaskKind::kDense;
  int32_t batch = 1, heads = 1, len_q = 0, len_kv = 0;
  bool causal = false, top_left = false;
  bool shared_offsets = true;
  std::vector<int32_t> q_offsets, kv_offsets;  // (documents + 1) or (batch, documents + 1)
  std::vector<int32_t> kv_used;                // (documents)
  Band global, local;
  bool positions_local = false, positions_top_left = false;
  bool rows_given = false;
  int32_t rows_batch = 1, rows_heads = 1;
  std::vector<int32_t> row_begin, row_end;  // (rows_batch, rows_heads, len_q)
  int32_t left = kUnbounded, right = kUnbounded, dilation = 1;
  CellList list;

  int32_t documents() const {
    return q_offsets.empty() ? 0 : static_cast<int32_t>(q_offsets.size()) / (shared_offsets ? 1 : batch) - 1;
  }

  void fill(AttentionParams& params) const {
    params.batch = batch;
    params.heads_q = heads;
    params.len_q = len_q;
    params.len_kv = len_kv;
    MaskArgs& m = params.mask = MaskArgs();
    m.kind = kind;
    m.causal = causal;
    m.top_left = top_left;
    if (!q_offsets.empty()) {
      m.q_offsets = q_offsets.data();
      m.kv_offsets = kv_offsets.data();
      m.num_documents = documents();
      m.offsets_stride = shared_offsets ? 0 : documents() + 1;
    }
    m.kv_used = kv_used.empty() ? nullptr : kv_used.data();
    m.global = global.args();
    m.local = local.args();
    m.positions_local = positions_local;
    m.positions_top_left = positions_top_left;
    if (rows_given) {
      m.row_begin = row_begin.data();
      m.row_end = row_end.data();
      m.row_stride_batch = rows_batch > 1 ? int64_t{rows_heads} * len_q : 0;
      m.row_stride_head = rows_heads > 1 ? len_q : 0;
    }
    m.left = left;
    m.right = right;
    m.dilation = dilation;
    if (kind != MaskKind::kBlockSparse) return;
    m.list.row_start = list.row_start.data();
    m.list.whole_count = list.whole_count.data();
    m.list.cells = list.cells.data();
    m.list.detail = list.detail.data();
    m.list.bits = list.has_bits ? list.bits.data() : nullptr;
    m.list.rows = ceil_div(len_q, 128);
    m.list.capacity = static_cast<int32_t>(list.cells.size());
    m.list.tiles = static_cast<int32_t>(list.bits.size() / 512);
    m.list.stride_batch = list.slices_batch > 1 ? list.slices_head : 0;
    m.list.stride_head = list.slices_head > 1 ? 1 : 0;
  }

  const int32_t* offsets_of(const std::vector<int32_t>& offsets, int32_t b) const {
    return offsets.data() + (shared_offsets ? 0 : b * (documents() + 1));
  }
  // The document of query i, or -1.
  int32_t document_of(int32_t b, int32_t i) const {
    const int32_t* q = offsets_of(q_offsets, b);
    for (int32_t d = 0; d < documents(); ++d) {
      if (q[d] <= i && i < q[d + 1]) return d;
    }
    return -1;
  }

  // The definition.
  bool allowed(int32_t b, int32_t h, int32_t i, int32_t j) const {
    switch (kind) {
      case MaskKind::kDense:
        return true;
      case MaskKind::kCausal:
        return j <= (top_left ? i : i + len_kv - len_q);
      case MaskKind::kDilated: {
        const int64_t distance = int64_t{j} - (top_left ? i : i + len_kv - len_q);
        const int64_t step = distance / dilation;
        return distance % dilation == 0 && (left == kUnbounded || step >= -int64_t{left}) &&
               (right == kUnbounded || step <= right);
      }
      case MaskKind::kBlockSparse: {
        const int32_t slice = (list.slices_batch > 1 ? b * list.slices_head : 0) + (list.slices_head > 1 ? h : 0);
        if (!list.pairs[(int64_t{slice} * len_q + i) * len_kv + j]) return false;
        break;
      }
      default:
        break;
    }
    if (rows_given) {
      const int32_t slice = (rows_batch > 1 ? b * rows_heads : 0) + (rows_heads > 1 ? h : 0);
      return row_begin[slice * len_q + i] <= j && j < row_end[slice * len_q + i];
    }
    if (!global.allowed(i, j, len_q, len_kv, b)) return false;
    if (q_offsets.empty()) return true;
    const int32_t d = document_of(b, i);
    if (d < 0) return false;
    const int32_t *q = offsets_of(q_offsets, b), *kv = offsets_of(kv_offsets, b);
    const int32_t keys = kv_used.empty() ? kv[d + 1] - kv[d] : kv_used[d];
    if (j < kv[d] || j >= kv[d] + keys) return false;
    // Counted from the document's last query and last key.
    if (causal && kv[d + 1] - j < q[d + 1] - i) return false;
    return local.allowed(i - q[d], j - kv[d], q[d + 1] - q[d], keys, d);
  }

  // Where query i stands among the keys, for ALiBi. Only of a query in a document where positions are local.
  int64_t position(int32_t b, int32_t i) const {
    if (positions_local && !q_offsets.empty()) {
      const int32_t d = document_of(b, i);
      const int32_t *q = offsets_of(q_offsets, b), *kv = offsets_of(kv_offsets, b);
      const int32_t keys = kv_used.empty() ? kv[d + 1] - kv[d] : kv_used[d];
      return int64_t{i} - q[d] + kv[d] + (positions_top_left ? 0 : keys - (q[d + 1] - q[d]));
    }
    return positions_top_left || top_left ? i : int64_t{i} + len_kv - len_q;
  }

  std::string text() const {
    static const char* const kNames[] = {"dense", "causal", "document", "composite", "dilated", "hash", "block_sparse"};
    std::string out = kNames[static_cast<int>(kind)];
    if (top_left) out += " top-left";
    if (causal) out += " causal";
    if (kind == MaskKind::kDilated) {
      for (int32_t x : {left, right, dilation}) out.append(" ").append(std::to_string(x));
    }
    out += " global" + global.text() + " local" + local.text();
    if (rows_given) out += " rows given";
    if (kind == MaskKind::kBlockSparse) out += list.has_bits ? " bits" : " halves";
    out.append(" len_q ").append(std::to_string(len_q)).append(" len_kv ").append(std::to_string(len_kv));
    for (const auto& [name, values] : {std::pair(" q_offsets", &q_offsets), std::pair(" kv_offsets", &kv_offsets),
                                       std::pair(" kv_used", &kv_used)}) {
      if (!values->empty()) out += name;
      for (int32_t x : *values) out.append(" ").append(std::to_string(x));
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

inline void add_documents(Random& random, MaskCase& mask) {
  mask.shared_offsets = random.coin();
  const int32_t documents = random.pick({0, 1, 2, random.between(3, 12), random.between(0, 2 * mask.len_q + 4)});
  for (int32_t b = 0; b < (mask.shared_offsets ? 1 : mask.batch); ++b) {
    append_offsets(random, documents, mask.len_q, mask.q_offsets);
    append_offsets(random, documents, mask.len_kv, mask.kv_offsets);
  }
  if (mask.len_q == mask.len_kv && random.coin()) mask.kv_offsets = mask.q_offsets;
}

// `prefixes`: how many a prefix tensor holds.
inline Band random_band(Random& random, int32_t len_kv, int32_t prefixes, bool keep) {
  Band band;
  const auto bound = [&] {
    return random.pick({0, 1, random.between(0, 70), random.between(0, len_kv + 3), INT32_MAX - 1,
                        -random.between(0, 40), random.between(0, len_kv / 2)});
  };
  const auto sometimes = [&](int32_t one_in) { return random.between(1, one_in) == 1; };
  for (int a : {0, 1}) {
    if (sometimes(2)) band.left[a] = bound();
    if (sometimes(3)) band.right[a] = bound();
    if (sometimes(4)) band.prefix[a] = bound();
    if (sometimes(6)) {
      for (int32_t n = 0; n < prefixes; ++n) band.prefixes[a].push_back(random.pick({bound(), kUnbounded}));
    }
    // Those of the left bounds that hold for the first keys too.
    if (keep && band.left[a] != kUnbounded && sometimes(2)) band.outer[a] = std::max(band.left[a], bound());
  }
  if (keep) band.keep_first = random.pick({1, 4, random.between(1, 70), random.between(1, len_kv + 3), INT32_MAX});
  return band;
}

inline void make_composite(Random& random, MaskCase& mask) {
  const int32_t keep = random.between(0, 3);  // at most one band has first keys
  if (random.coin()) add_documents(random, mask);
  if (mask.q_offsets.empty() || random.coin()) {
    mask.global = random_band(random, mask.len_kv, mask.batch, keep == 0);
  }
  if (mask.q_offsets.empty()) return;
  if (random.coin()) mask.local = random_band(random, mask.len_kv / 2, mask.documents(), keep == 1);
  mask.positions_local = random.coin();
  if (!mask.shared_offsets || random.coin()) return;
  // A document that reaches past the tensor uses at most what is there.
  for (int32_t d = 0; d < mask.documents(); ++d) {
    const int32_t keys = std::clamp(mask.len_kv - mask.kv_offsets[d], 0, mask.kv_offsets[d + 1] - mask.kv_offsets[d]);
    mask.kv_used.push_back(random.pick({keys, 0, random.between(0, keys)}));
  }
}

// Both ends grow with the row.
inline void give_rows(Random& random, MaskCase& mask) {
  mask.rows_given = true;
  mask.rows_batch = random.coin() ? mask.batch : 1;
  mask.rows_heads = random.coin() ? mask.heads : 1;
  for (int32_t n = mask.rows_batch * mask.rows_heads; n > 0; --n) {
    std::vector<int32_t> begin(mask.len_q), end(mask.len_q);
    for (int32_t& x : begin) x = random.between(0, mask.len_kv);
    for (int32_t& x : end) x = random.between(0, mask.len_kv);
    std::sort(begin.begin(), begin.end());
    std::sort(end.begin(), end.end());
    for (int32_t i = 0; i < mask.len_q; ++i) end[i] = std::max(end[i], begin[i]);
    mask.row_begin.insert(mask.row_begin.end(), begin.begin(), begin.end());
    mask.row_end.insert(mask.row_end.end(), end.begin(), end.end());
  }
}

// The entry of one cell, if it has any pair: {detail}, and its bit tile behind list.bits.
struct Cell {
  bool any = false, all = true;
  int32_t halves = 0;
  std::vector<int32_t> bits = std::vector<int32_t>(512, 0);
};

inline Cell read_cell(const MaskCase& mask, int32_t slice, int32_t row, int32_t column) {
  Cell cell;
  for (int32_t i = row * 128; i < std::min(row * 128 + 128, mask.len_q); ++i) {
    for (int32_t j = column * 128; j < std::min(column * 128 + 128, mask.len_kv); ++j) {
      const bool set = mask.list.pairs[(int64_t{slice} * mask.len_q + i) * mask.len_kv + j];
      cell.any |= set;
      cell.all &= set;
      if (!set) continue;
      cell.halves |= 1 << (2 * (i % 128 / 64) + j % 128 / 64);
      uint32_t word = static_cast<uint32_t>(cell.bits[i % 128 * 4 + j % 128 / 32]);
      word |= 1u << j % 32;
      cell.bits[i % 128 * 4 + j % 128 / 32] = static_cast<int32_t>(word);
    }
  }
  return cell;
}

// The list that says what list.pairs does.
inline void write_list(Random& random, MaskCase& mask) {
  CellList& list = mask.list;
  for (int32_t slice = 0; slice < list.slices_batch * list.slices_head; ++slice) {
    for (int32_t row = 0; row < ceil_div(mask.len_q, 128); ++row) {
      list.row_start.push_back(static_cast<int32_t>(list.cells.size()));
      std::vector<std::pair<int32_t, Cell>> mixed;
      int32_t whole = 0;
      for (int32_t column = 0; column < ceil_div(mask.len_kv, 128); ++column) {
        const Cell cell = read_cell(mask, slice, row, column);
        if (!cell.any) continue;
        if (!cell.all) {
          mixed.push_back({column, cell});
          continue;
        }
        list.cells.push_back(column);
        list.detail.push_back(-1);
        ++whole;
      }
      for (const auto& [column, cell] : mixed) {
        list.cells.push_back(column);
        list.detail.push_back(list.has_bits ? static_cast<int32_t>(list.bits.size() / 512) : cell.halves);
        if (list.has_bits) list.bits.insert(list.bits.end(), cell.bits.begin(), cell.bits.end());
      }
      list.whole_count.push_back(whole);
    }
    list.row_start.push_back(static_cast<int32_t>(list.cells.size()));
  }
  // Room that no row uses.
  for (int32_t n = random.between(1, 3); n > 0; --n) {
    list.cells.push_back(12345678);
    list.detail.push_back(12345678);
  }
}

inline void make_block_sparse(Random& random, MaskCase& mask) {
  CellList& list = mask.list;
  list.slices_batch = random.coin() ? mask.batch : 1;
  list.slices_head = random.coin() ? mask.heads : 1;
  list.has_bits = random.coin();
  const int32_t block_q = 64 * random.between(1, 3), block_kv = 64 * random.between(1, 3);
  const int32_t columns = ceil_div(mask.len_kv, block_kv);
  const double density = random.pick({0.2, 0.5, 0.9, 1.0}), bit_density = random.pick({0.02, 0.5, 0.97});
  for (int32_t slice = 0; slice < list.slices_batch * list.slices_head; ++slice) {
    std::vector<int> blocks(ceil_div(mask.len_q, block_q) * columns);  // 0 none, 1 whole, 2 some pairs
    for (int& block : blocks) block = random.uniform() > density ? 0 : list.has_bits && random.coin() ? 2 : 1;
    for (int32_t i = 0; i < mask.len_q; ++i) {
      for (int32_t j = 0; j < mask.len_kv; ++j) {
        const int block = blocks[i / block_q * columns + j / block_kv];
        list.pairs.push_back(block == 1 || (block == 2 && random.uniform() < bit_density));
      }
    }
  }
  write_list(random, mask);
}

inline MaskCase random_mask(Random& random, int32_t batch, int32_t len_q, int32_t len_kv, int32_t heads = 1) {
  using enum MaskKind;
  MaskCase mask;
  mask.kind = random.pick({kDense, kCausal, kDocument, kDocument, kComposite, kComposite, kComposite, kComposite,
                           kDilated, kBlockSparse, kBlockSparse});
  mask.batch = batch;
  mask.heads = heads;
  mask.len_q = len_q;
  mask.len_kv = len_kv;
  if (mask.kind == kCausal || mask.kind == kDilated) mask.top_left = random.coin();
  if (mask.kind == kDocument) {
    mask.causal = random.coin();
    add_documents(random, mask);
  }
  if (mask.kind == kComposite && random.between(0, 5) == 0) {
    give_rows(random, mask);
  } else if (mask.kind == kComposite || (mask.kind == kBlockSparse && random.coin())) {
    make_composite(random, mask);
  }
  if (mask.kind == kComposite || mask.kind == kBlockSparse) mask.positions_top_left = random.coin();
  if (mask.kind == kBlockSparse) make_block_sparse(random, mask);
  if (mask.kind == kDilated) {
    mask.dilation = random.pick({1, 2, 3, random.between(1, 20), random.between(1, len_kv + 5), INT32_MAX});
    for (int32_t* bound : {&mask.left, &mask.right}) {
      *bound = random.pick({0, 1, random.between(0, 9), random.between(0, 70), INT32_MAX, INT32_MAX - 1});
    }
  }
  return mask;
}

// Offsets, prefixes, used lengths, rows and lists that no one has checked: negative, decreasing, huge.
inline MaskCase garbage_mask(Random& random, int32_t batch, int32_t len_q, int32_t len_kv) {
  using enum MaskKind;
  MaskCase mask = random_mask(random, batch, len_q, len_kv, 2);
  const auto garbage = [&](std::vector<int32_t>& values) {
    for (int32_t& x : values) {
      if (random.between(0, 4) == 0) continue;
      x = random.pick({random.between(-3, len_q + 3), random.between(-3, len_kv + 3), INT32_MIN, INT32_MIN + 1,
                       INT32_MAX, INT32_MAX - 1, -1, 0, 1, static_cast<int32_t>(random.bits())});
    }
  };
  for (std::vector<int32_t>* values :
       {&mask.q_offsets, &mask.kv_offsets, &mask.kv_used, &mask.row_begin, &mask.row_end, &mask.global.prefixes[0],
        &mask.global.prefixes[1], &mask.local.prefixes[0], &mask.local.prefixes[1], &mask.list.row_start,
        &mask.list.whole_count, &mask.list.cells, &mask.list.detail, &mask.list.bits}) {
    garbage(*values);
  }
  return mask;
}

}  // namespace flashmsa::test
