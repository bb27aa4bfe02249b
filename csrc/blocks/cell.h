// What one cell of a block mask is: shared by the kernels and the CPU.
#pragma once

#include <cstdint>

#include "blocks/list.h"

namespace flashmsa::blocks {

enum class Cell : uint8_t { kAbsent = 0, kWhole = 1, kMixed = 2 };

// The two 64-row halves of a cell row among the blocks of one head; nullptr where a half begins past len_q.
struct CellRow {
  const uint8_t* half[2];
};

// A row of a head of a batch, counted over everything.
struct RowIndex {
  int64_t batch, head;
  int32_t row;
};

FLASHMSA_HD RowIndex row_index(const ListParams& p, int64_t index) {
  const int64_t segment = index / p.cell_rows();
  return {segment / p.heads, segment % p.heads, static_cast<int32_t>(index % p.cell_rows())};
}

// row_start has one column more than there are cell rows.
FLASHMSA_HD int64_t start_index(const ListParams& p, int64_t index) { return index + index / p.cell_rows(); }

FLASHMSA_HD CellRow cell_row(const ListParams& p, const RowIndex& at) {
  const uint8_t* plane = p.blocks + at.batch * p.blocks_stride_batch + at.head * p.blocks_stride_head;
  CellRow result;
  for (int32_t a = 0; a < 2; ++a) {
    const int64_t first = int64_t{kCell} * at.row + kHalf * a;
    result.half[a] = first < p.len_q ? plane + first / p.block_q * p.blocks_stride_row : nullptr;
  }
  return result;
}

// Four bits each, bit 2a + b for row half a and key half b.
struct Quarters {
  uint32_t set;     // the block is set
  uint32_t inside;  // begins inside the lengths; `set` has no other
};

FLASHMSA_HD Quarters quarters(const ListParams& p, const CellRow& row, int32_t column) {
  const int32_t blocks_of_halves = p.block_kv / kHalf;
  const int32_t first = 2 * column / blocks_of_halves;
  const int32_t second = blocks_of_halves == 1 ? first + 1 : (2 * column + 1) / blocks_of_halves;
  const bool has_second = int64_t{kCell} * column + kHalf < p.len_kv;
  Quarters result{0, 0};
  uint32_t of_half[2] = {0, 0};
  for (int32_t a = 0; a < 2; ++a) {
    if (row.half[a] == nullptr) continue;
    result.inside |= (has_second ? 3u : 1u) << (2 * a);
    if (a == 1 && row.half[0] == row.half[1]) {
      of_half[1] = of_half[0];
      continue;
    }
    const bool left = row.half[a][first * p.blocks_stride_key] != 0;
    const bool right = second == first ? left : has_second && row.half[a][second * p.blocks_stride_key] != 0;
    of_half[a] = (left ? 1u : 0u) | (right && has_second ? 2u : 0u);
  }
  result.set = of_half[0] | of_half[1] << 2;
  return result;
}

FLASHMSA_HD Cell cell_of(const Quarters& q) {
  return q.set == 0 ? Cell::kAbsent : q.set == q.inside ? Cell::kWhole : Cell::kMixed;
}

// ---- With a mask of pairs

FLASHMSA_HD const uint8_t* mask_plane(const ListParams& p, const RowIndex& at) {
  return p.mask + at.batch * p.mask_stride_batch + at.head * p.mask_stride_head;
}

// Bits of word `word` of a cell's row that are keys inside len_kv.
FLASHMSA_HD uint32_t inside_word(const ListParams& p, int32_t column, int32_t word) {
  const int64_t left = p.len_kv - (int64_t{kCell} * column + 32 * word);
  return left >= 32 ? ~0u : left <= 0 ? 0u : (1u << left) - 1;
}

// Whether the quarter that word `word` of row `row` of a cell lies in is set.
FLASHMSA_HD bool word_is_set(uint32_t set, int32_t row, int32_t word) {
  return (set >> (2 * (row / kHalf) + word / (kHalf / 32)) & 1) != 0;
}

// 32 keys from `keys` on, of which the bits of `inside` exist.
FLASHMSA_HD uint32_t read_word(const uint8_t* keys, int64_t stride, uint32_t inside) {
  uint32_t result = 0;
  for (int32_t k = 0; k < 32 && (inside >> k & 1) != 0; ++k) result |= (keys[k * stride] != 0 ? 1u : 0u) << k;
  return result;
}

// ---- The workspace

// A cell row's entries, capacities aside.
struct RowCount {
  int32_t whole;
  int32_t mixed;
};

// What the capacities leave of a row.
struct RowKept {
  int32_t start, end;  // of its entries
  int32_t whole;       // of them
  int32_t mixed;       // that have a tile; those beyond `end` among them
};

// `entries`: kept of the rows before, `tiles`: mixed cells of the rows before.
FLASHMSA_HD RowKept keep_row(const ListParams& p, const RowCount& count, int64_t entries, int64_t tiles) {
  RowKept kept;
  kept.mixed = count.mixed;
  if (p.mask != nullptr) kept.mixed = static_cast<int32_t>(clamp<int64_t>(p.tile_capacity - tiles, 0, count.mixed));
  const int64_t capacity = p.capacity;
  kept.start = static_cast<int32_t>(min_of(entries, capacity));
  kept.end = static_cast<int32_t>(min_of(entries + count.whole + kept.mixed, capacity));
  kept.whole = min_of(count.whole, kept.end - kept.start);
  return kept;
}

struct Workspace {
  Totals* totals;
  RowCount* counts;      // (rows)
  int32_t* tile_before;  // (rows + 1): mixed cells of the rows before, at most kMaxCapacity; with a mask only
  uint8_t* cells;        // (rows, cell columns) Cell; with a mask only
};

inline size_t aligned(size_t bytes) { return (bytes + 15) / 16 * 16; }

inline Workspace workspace_at(const ListParams& p, void* memory) {
  char* at = static_cast<char*>(memory);
  Workspace w;
  w.totals = reinterpret_cast<Totals*>(at);
  at += aligned(sizeof(Totals));
  w.counts = reinterpret_cast<RowCount*>(at);
  at += aligned(p.rows() * sizeof(RowCount));
  w.tile_before = reinterpret_cast<int32_t*>(at);
  at += aligned((p.rows() + 1) * sizeof(int32_t));
  w.cells = reinterpret_cast<uint8_t*>(at);
  return w;
}

}  // namespace flashmsa::blocks
