// Shared-memory tiles against the definition of the 128-byte swizzle: inside 1024 aligned bytes, address bits 4-6 are
// exclusive-or'ed with bits 7-9. TMA and wgmma both apply it, so any other layout reads other elements.
#include "sm90/swizzle.h"

#include <set>
#include <vector>

#include "check.h"

namespace flashmsa::test {
namespace {

uint32_t hardware_swizzle(uint32_t address) { return address ^ (address >> 7 & 7u) << 4; }

// Every element lies where TMA puts it, and no two share a place.
template <class Tile>
void check_tile() {
  static_assert(Tile::kBytes == Tile::kRows * Tile::kColumns * 2);
  static_assert(Tile::kGroupBytes % sm90::kSwizzleAtomBytes == 0, "each column group starts a period of the pattern");
  std::vector<bool> taken(Tile::kBytes / 2, false);
  for (uint32_t row = 0; row < Tile::kRows; ++row) {
    for (uint32_t column = 0; column < Tile::kColumns; ++column) {
      const uint32_t box = column / 64 * Tile::kRows * 128;  // one TMA box per 64 columns, rows one after another
      const uint32_t want = hardware_swizzle(box + row * 128 + column % 64 * 2);
      const uint32_t got = Tile::offset(row, column);
      CHECK(got == want, "(%u, %u) at %u, not %u", row, column, got, want);
      if (!CHECK(got % 2 == 0 && got < Tile::kBytes, "(%u, %u) at %u", row, column, got)) return;
      CHECK(!taken[got / 2], "(%u, %u) shares %u", row, column, got);
      taken[got / 2] = true;
    }
  }
}

// A 16-byte chunk holds 8 columns in order.
template <class Tile>
void check_chunks() {
  for (uint32_t row = 0; row < Tile::kRows; ++row) {
    for (uint32_t chunk = 0; chunk < Tile::kColumns / 8; ++chunk) {
      const uint32_t start = Tile::chunk_offset(row, chunk);
      CHECK(start % 16 == 0, "row %u chunk %u at %u", row, chunk, start);
      for (uint32_t c = 0; c < 8; ++c) {
        CHECK(Tile::offset(row, 8 * chunk + c) == start + 2 * c, "row %u chunk %u column %u", row, chunk, c);
      }
    }
  }
}

// Eight rows of one chunk, as ldmatrix reads them, cover all 32 banks: no conflict.
template <class Tile>
void check_banks() {
  for (uint32_t first = 0; first < Tile::kRows; first += 8) {
    for (uint32_t chunk = 0; chunk < Tile::kColumns / 8; ++chunk) {
      std::set<uint32_t> banks;
      for (uint32_t row = first; row < first + 8; ++row) banks.insert(Tile::chunk_offset(row, chunk) / 16 % 8);
      CHECK(banks.size() == 8, "rows %u-%u chunk %u use %zu bank groups", first, first + 7, chunk, banks.size());
    }
  }
}

template <int... kRows>
void check_shapes() {
  const auto check = []<class Tile>(Tile) {
    check_tile<Tile>();
    check_chunks<Tile>();
    check_banks<Tile>();
  };
  (check(sm90::SwizzledTile<kRows, 64>{}), ...);
  (check(sm90::SwizzledTile<kRows, 128>{}), ...);
  (check(sm90::SwizzledTile<kRows, 256>{}), ...);
}

}  // namespace
}  // namespace flashmsa::test

int main() {
  flashmsa::test::check_shapes<8, 16, 64, 80, 112, 128, 160, 176, 192>();
  return flashmsa::test::report("test_swizzle");
}
