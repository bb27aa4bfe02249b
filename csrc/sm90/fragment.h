// Which matrix elements a thread of a warpgroup holds. PTX ISA, "wgmma register fragments".
#pragma once

#include "core/types.h"

namespace flashmsa::sm90 {

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupRows = 64;  // M of every wgmma
inline constexpr int kWarpRows = 16;

// Accumulator of m64nN, fp32: element e of thread t (of the warpgroup) is (row, column).
struct Accumulator {
  static FLASHMSA_HD constexpr int first_row(int thread) { return thread / 32 * kWarpRows + thread % 32 / 4; }
  static FLASHMSA_HD constexpr int first_column(int thread) { return thread % 4 * 2; }

  // Of a thread's two rows, 8 apart, the one that element e belongs to.
  static FLASHMSA_HD constexpr int row_slot(int e) { return e / 2 % 2; }
  // Column of element e minus first_column.
  static FLASHMSA_HD constexpr int column_offset(int e) { return e / 4 * 8 + e % 2; }

  static FLASHMSA_HD constexpr int row(int thread, int e) { return first_row(thread) + 8 * row_slot(e); }
  static FLASHMSA_HD constexpr int column(int thread, int e) { return first_column(thread) + column_offset(e); }
};

// A operand of m64k16, 2-byte elements, from registers: half `half` of 32-bit register r (0..3) is (row, column).
// For a k-step j it takes exactly the accumulator elements 8j .. 8j+7 of the same thread, packed in order: P needs no
// exchange between threads on its way from S = QK^T to PV.
struct OperandA {
  static FLASHMSA_HD constexpr int row(int thread, int r) { return Accumulator::first_row(thread) + 8 * (r % 2); }
  static FLASHMSA_HD constexpr int column(int thread, int r, int half) {
    return Accumulator::first_column(thread) + 8 * (r / 2) + half;
  }
};

// ldmatrix / stmatrix .x4 on a 16 x 16 block: the row and the 8-column half that lane `lane` addresses, so that the four
// registers come out (go in) as OperandA orders them.
struct Matrix16x16 {
  static FLASHMSA_HD constexpr int row(int lane) { return lane % 16; }
  static FLASHMSA_HD constexpr int half(int lane) { return lane / 16; }
};

}  // namespace flashmsa::sm90
