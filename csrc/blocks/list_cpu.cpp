// The lists of list.h on the CPU; the size of the workspace.
#include <algorithm>

#include "blocks/cell.h"
#include "blocks/list.h"

namespace flashmsa::blocks {
namespace {

constexpr int64_t kRowsOfATask = 16;

uint32_t cell_word(const ListParams& p, const RowIndex& at, uint32_t set, int32_t column, int32_t row, int32_t word) {
  const int64_t query = int64_t{kCell} * at.row + row;
  const uint32_t inside = inside_word(p, column, word);
  if (query >= p.len_q || inside == 0 || !word_is_set(set, row, word)) return 0;
  const int64_t key = int64_t{kCell} * column + 32 * word;
  return read_word(mask_plane(p, at) + query * p.mask_stride_row + key * p.mask_stride_key, p.mask_stride_key, inside);
}

Cell masked_cell(const ListParams& p, const RowIndex& at, const Quarters& q, int32_t column) {
  if (q.set == 0) return Cell::kAbsent;
  bool any = false, all = true;
  const int32_t rows = static_cast<int32_t>(min_of<int64_t>(kCell, p.len_q - int64_t{kCell} * at.row));
  for (int32_t row = 0; row < rows; ++row) {
    for (int32_t word = 0; word < kTileWords; ++word) {
      const uint32_t bits = cell_word(p, at, q.set, column, row, word);
      any = any || bits != 0;
      all = all && bits == inside_word(p, column, word);
    }
  }
  return all ? Cell::kWhole : any ? Cell::kMixed : Cell::kAbsent;
}

void write_tile(const ListParams& p, const RowIndex& at, int32_t column, uint32_t* tile) {
  const uint32_t set = quarters(p, cell_row(p, at), column).set;
  for (int32_t row = 0; row < kCell; ++row) {
    for (int32_t word = 0; word < kTileWords; ++word) {
      tile[kTileWords * row + word] = cell_word(p, at, set, column, row, word);
    }
  }
}

// Calls body(column, cell, quarters) for the cells of a row that are there.
template <class Body>
void for_each_cell(const ListParams& p, const Workspace& w, int64_t index, const Body& body) {
  const CellRow row = cell_row(p, row_index(p, index));
  for (int32_t column = 0; column < p.cell_columns(); ++column) {
    const Quarters q = quarters(p, row, column);
    const Cell cell = p.mask == nullptr ? cell_of(q) : static_cast<Cell>(w.cells[index * p.cell_columns() + column]);
    if (cell != Cell::kAbsent) body(column, cell, q);
  }
}

void count_row(const ListParams& p, const Workspace& w, int64_t index) {
  if (p.mask != nullptr) {
    const RowIndex at = row_index(p, index);
    const CellRow row = cell_row(p, at);
    for (int32_t column = 0; column < p.cell_columns(); ++column) {
      w.cells[index * p.cell_columns() + column] =
          static_cast<uint8_t>(masked_cell(p, at, quarters(p, row, column), column));
    }
  }
  RowCount count{0, 0};
  for_each_cell(p, w, index,
                [&](int32_t, Cell cell, const Quarters&) { ++(cell == Cell::kWhole ? count.whole : count.mixed); });
  w.counts[index] = count;
}

void fill_row(const ListParams& p, const Workspace& w, int64_t index) {
  const int64_t start = p.row_start[start_index(p, index)];
  const int64_t end = p.row_start[start_index(p, index) + 1];
  int64_t whole_at = start;
  int64_t mixed_at = start + w.counts[index].whole;
  for_each_cell(p, w, index, [&](int32_t column, Cell cell, const Quarters& q) {
    const int64_t at = cell == Cell::kWhole ? whole_at++ : mixed_at++;
    if (at >= end) return;
    p.cells[at] = column;
    if (cell == Cell::kWhole) {
      p.detail[at] = -1;
    } else if (p.mask == nullptr) {
      p.detail[at] = static_cast<int32_t>(q.set);
    } else {
      const int64_t tile = w.tile_before[index] + (at - start - w.counts[index].whole);
      p.detail[at] = static_cast<int32_t>(tile);
      write_tile(p, row_index(p, index), column, p.bits + tile * kCell * kTileWords);
    }
  });
}

}  // namespace

size_t list_workspace_size(const ListParams& p) {
  const size_t whole =
      aligned(sizeof(Totals)) + aligned(p.rows() * sizeof(RowCount)) + aligned((p.rows() + 1) * sizeof(int32_t));
  return p.mask == nullptr ? whole : whole + aligned(p.rows() * p.cell_columns());
}

void count_list_cpu(const ListParams& p, void* workspace, const cpu::ParallelFor& parallel_for) {
  const Workspace w = workspace_at(p, workspace);
  parallel_for(p.rows(), kRowsOfATask, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) count_row(p, w, index);
  });
  Totals totals;
  int64_t kept_entries = 0;
  for (int64_t index = 0; index < p.rows(); ++index) {
    const RowCount count = w.counts[index];
    w.tile_before[index] = static_cast<int32_t>(min_of<int64_t>(totals.tiles, kMaxCapacity));
    const RowKept kept = keep_row(p, count, kept_entries, totals.tiles);
    p.row_start[start_index(p, index)] = kept.start;
    p.row_start[start_index(p, index) + 1] = kept.end;
    p.whole_count[index] = kept.whole;
    kept_entries += count.whole + kept.mixed;
    totals.entries += count.whole + count.mixed;
    totals.tiles += count.mixed;
  }
  w.tile_before[p.rows()] = static_cast<int32_t>(min_of<int64_t>(totals.tiles, kMaxCapacity));
  *w.totals = totals;
}

void fill_list_cpu(const ListParams& p, void* workspace, const cpu::ParallelFor& parallel_for) {
  const Workspace w = workspace_at(p, workspace);
  parallel_for(p.rows(), kRowsOfATask, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) fill_row(p, w, index);
  });
}

}  // namespace flashmsa::blocks
