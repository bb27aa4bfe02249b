// Shared-memory tiles as TMA writes and wgmma reads them: columns in groups of 64 elements (128 bytes), 128-byte swizzle.
#pragma once

#include <cstdint>

#include "core/types.h"

namespace flashmsa::sm90 {

inline constexpr int kSwizzleColumns = 64;  // 2-byte elements in one 128-byte row of the pattern
inline constexpr int kSwizzleRowBytes = 128;
inline constexpr int kSwizzleAtomBytes = 1024;  // 8 rows: the pattern's period and the alignment of a tile

// Where 16-byte chunk `chunk` (0..7) of row `row` lies inside its 128-byte row.
FLASHMSA_HD constexpr uint32_t swizzled_chunk(uint32_t row, uint32_t chunk) { return chunk ^ (row & 7u); }

// A tile of kRows x kColumns 2-byte elements: [kColumns / 64][kRows][64], each 128-byte row swizzled.
template <int kRowsValue, int kColumnsValue>
struct SwizzledTile {
  static constexpr int kRows = kRowsValue;
  static constexpr int kColumns = kColumnsValue;
  static constexpr int kGroups = kColumns / kSwizzleColumns;
  static constexpr uint32_t kGroupBytes = kRows * kSwizzleRowBytes;  // from 64 columns to the next
  static constexpr uint32_t kAtomBytes = kSwizzleAtomBytes;  // from 8 rows to the next
  static constexpr uint32_t kBytes = kGroups * kGroupBytes;
  static_assert(kColumns % kSwizzleColumns == 0 && kRows % 8 == 0);

  // Byte offset of the 16-byte chunk that holds columns [8 * chunk, 8 * chunk + 8) of a row; chunk counts over the tile.
  static FLASHMSA_HD constexpr uint32_t chunk_offset(uint32_t row, uint32_t chunk) {
    return (chunk / 8) * kGroupBytes + row * kSwizzleRowBytes + swizzled_chunk(row, chunk % 8) * 16;
  }

  // Byte offset of one element.
  static FLASHMSA_HD constexpr uint32_t offset(uint32_t row, uint32_t column) {
    return chunk_offset(row, column / 8) + (column % 8) * 2;
  }
};

// The same rows and columns as [kRows / 8][kColumns / 64][8][64]: 8 rows are one run of bytes, so that any number of them,
// all columns of each, come by one box.
template <int kRowsValue, int kColumnsValue>
struct RowMajorTile {
  static constexpr int kRows = kRowsValue;
  static constexpr int kColumns = kColumnsValue;
  static constexpr int kGroups = kColumns / kSwizzleColumns;
  static constexpr uint32_t kGroupBytes = kSwizzleAtomBytes;
  static constexpr uint32_t kAtomBytes = kGroups * kSwizzleAtomBytes;
  static constexpr uint32_t kBytes = kRows / 8 * kAtomBytes;
  static_assert(kColumns % kSwizzleColumns == 0 && kRows % 8 == 0);

  static FLASHMSA_HD constexpr uint32_t chunk_offset(uint32_t row, uint32_t chunk) {
    return row / 8 * kAtomBytes + chunk / 8 * kGroupBytes + row % 8 * kSwizzleRowBytes +
           swizzled_chunk(row, chunk % 8) * 16;
  }

  static FLASHMSA_HD constexpr uint32_t offset(uint32_t row, uint32_t column) {
    return chunk_offset(row, column / 8) + (column % 8) * 2;
  }
};

}  // namespace flashmsa::sm90
