// Register fragments of wgmma and ldmatrix against the PTX ISA's figures, told from the element's side: which thread and
// register holds (row, column).
#include "sm90/fragment.h"

#include <vector>

#include "check.h"

namespace flashmsa::test {
namespace {

using sm90::Accumulator;
using sm90::Matrix16x16;
using sm90::OperandA;

// Every fragment is made of 8 x 8 blocks: lane 4 * row + column / 2 holds two neighbouring columns. A warp has 16 rows.
int owner(int row, int column) { return row / 16 * 32 + row % 8 * 4 + column % 8 / 2; }

// m64nN accumulator: blocks go down 8 rows first, then right.
void check_accumulator(int columns) {
  std::vector<int> holders(64 * columns, 0);
  for (int thread = 0; thread < 128; ++thread) {
    for (int e = 0; e < columns / 2; ++e) {
      const int row = Accumulator::row(thread, e), column = Accumulator::column(thread, e);
      if (!CHECK(row >= 0 && row < 64 && column >= 0 && column < columns, "thread %d element %d", thread, e)) return;
      ++holders[row * columns + column];
    }
  }
  for (int row = 0; row < 64; ++row) {
    for (int column = 0; column < columns; ++column) {
      const int thread = owner(row, column);
      const int e = column / 8 * 4 + row % 16 / 8 * 2 + column % 2;
      CHECK(holders[row * columns + column] == 1, "(%d, %d) of %d columns", row, column, columns);
      CHECK(Accumulator::row(thread, e) == row && Accumulator::column(thread, e) == column,
            "thread %d element %d is (%d, %d), not (%d, %d)", thread, e, Accumulator::row(thread, e),
            Accumulator::column(thread, e), row, column);
      CHECK(Accumulator::row_slot(e) == (row - Accumulator::first_row(thread)) / 8, "element %d", e);
      CHECK(Accumulator::column_offset(e) == column - Accumulator::first_column(thread), "element %d", e);
    }
  }
}

// m64k16 operand A in registers: the same blocks, two to a column of registers.
void check_operand() {
  for (int row = 0; row < 64; ++row) {
    for (int column = 0; column < 16; ++column) {
      const int thread = owner(row, column);
      const int r = column / 8 * 2 + row % 16 / 8;
      CHECK(OperandA::row(thread, r) == row && OperandA::column(thread, r, column % 2) == column,
            "thread %d register %d", thread, r);
    }
  }
}

// P goes from accumulator to operand inside a thread: k-step j takes the elements 8j … 8j + 7 in order.
void check_reuse(int columns) {
  for (int thread = 0; thread < 128; ++thread) {
    for (int step = 0; step < columns / 16; ++step) {
      for (int x = 0; x < 8; ++x) {
        const int e = 8 * step + x;
        CHECK(OperandA::row(thread, x / 2) == Accumulator::row(thread, e), "thread %d element %d", thread, e);
        CHECK(16 * step + OperandA::column(thread, x / 2, x % 2) == Accumulator::column(thread, e),
              "thread %d element %d", thread, e);
      }
    }
  }
}

// ldmatrix .x4: lanes 8m … 8m + 7 address the rows of matrix m; register m of lane L is row L / 4, columns 2 (L % 4) + h.
void check_ldmatrix() {
  for (int lane = 0; lane < 32; ++lane) {
    for (int m = 0; m < 4; ++m) {
      for (int half = 0; half < 2; ++half) {
        const int address_lane = 8 * m + lane / 4;
        const int row = Matrix16x16::row(address_lane);
        const int column = 8 * Matrix16x16::half(address_lane) + 2 * (lane % 4) + half;
        CHECK(row == OperandA::row(lane, m) && column == OperandA::column(lane, m, half), "lane %d register %d", lane,
              m);
      }
    }
  }
}

}  // namespace
}  // namespace flashmsa::test

int main() {
  using namespace flashmsa::test;
  for (int columns = 8; columns <= 256; columns += 8) check_accumulator(columns);
  check_operand();
  for (int columns = 16; columns <= 256; columns += 16) check_reuse(columns);
  check_ldmatrix();
  return report("test_fragment");
}
