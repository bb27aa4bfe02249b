// Which pairs of queries and keys exist, seen from the keys: row intervals, and cells of a list.
#pragma once

#include "bwd/shared.cuh"
#include "mask/block_sparse.h"

namespace flashmsa::bwd {

inline constexpr int32_t kNoCell = -2;  // beside a list's details, which are mask::kWholeCell or at least 0

// The detail of a cell of the list, or kNoCell.
// PERF: kAtOnce entries are looked at with all loads at the same time; halving alone is a chain of loads.
template <int32_t kAtOnce = 1>
__device__ __forceinline__ int32_t find_cell(const CellListArgs& list, int64_t slice, int32_t row, int32_t column) {
  if (row >= list.rows) return kNoCell;
  const int32_t* start = list.row_start + slice * (list.rows + 1) + row;
  const int32_t begin = clamp(start[0], 0, list.capacity);
  const int32_t end = clamp(start[1], begin, list.capacity);
  const int32_t middle = begin + clamp(list.whole_count[slice * list.rows + row], 0, end - begin);
  // Whole cells ascend, and mixed ones after them.
  const auto search = [&](int32_t low, int32_t high) {
    while (high - low > kAtOnce) {
      const int32_t mid = low + (high - low) / 2;
      if (list.cells[mid] <= column) {
        low = mid;
      } else {
        high = mid;
      }
    }
    int32_t at = -1;
#pragma unroll
    for (int32_t i = 0; i < kAtOnce; ++i) {
      if (low + i < high && list.cells[low + i] == column) at = low + i;
    }
    return at;
  };
  if (search(begin, middle) >= 0) return mask::kWholeCell;
  const int32_t mixed = search(middle, end);
  return mixed >= 0 ? list.detail[mixed] : kNoCell;
}

// How many of the key tiles that a row of cells lists are `counted`; parts: key tiles in a cell.
template <class Counted>
__device__ __forceinline__ int32_t count_listed(const CellListArgs& list, int64_t slice, int32_t row, int32_t parts,
                                                const Counted& counted) {
  if (row >= list.rows) return 0;
  const int32_t* start = list.row_start + slice * (list.rows + 1) + row;
  const int32_t begin = clamp(start[0], 0, list.capacity), end = clamp(start[1], begin, list.capacity);
  int32_t count = 0;
#pragma unroll 1
  for (int32_t entry = begin; entry < end; ++entry) {
    const int32_t first = list.cells[entry] * parts;
    for (int32_t part = 0; part < parts; ++part) count += counted(first + part) ? 1 : 0;
  }
  return count;
}

// Whether a pair of such a cell is set; row and column within it.
__device__ __forceinline__ bool cell_shows(const CellListArgs& list, int32_t detail, uint32_t row, uint32_t column) {
  if (detail == mask::kWholeCell) return true;
  if (list.bits == nullptr) return (detail >> (2 * (row / 64) + column / 64) & 1) != 0;
  const int32_t tile = clamp(detail, 0, list.tiles - 1);
  const uint32_t word = list.bits[(int64_t{tile} * mask::kCell + row) * (mask::kCell / 32) + column / 32];
  return (word >> (column % 32) & 1) != 0;
}

__device__ __forceinline__ int64_t list_slice(const CellListArgs& list, int32_t batch, int32_t head) {
  return int64_t{batch} * list.stride_batch + int64_t{head} * list.stride_head;
}

// One pair, by everything there is. `keys` are the row's.
__device__ __forceinline__ bool visible(const KernelParams& params, const mask::TwoRuns& keys, int32_t batch,
                                        int32_t head, int32_t row, int32_t key) {
  if (!mask::contains(keys, key)) return false;
  if (params.list.rows == 0) return true;
  const int32_t detail =
      find_cell(params.list, list_slice(params.list, batch, head), row / mask::kCell, key / mask::kCell);
  return detail != kNoCell && cell_shows(params.list, detail, row % mask::kCell, key % mask::kCell);
}

}  // namespace flashmsa::bwd
