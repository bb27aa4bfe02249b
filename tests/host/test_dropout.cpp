// Dropout's draws: the published answers of Philox4x32-7, the threshold, and the CPU backend's bits of a tile against the
// draws one by one.
#include <cstdint>

#include "check.h"
#include "core/philox.h"
#include "cpu/block.h"
#include "mask_cases.h"

namespace flashmsa::test {
namespace {

// Salmon et al.'s Random123, its known-answer file.
void check_known_answers() {
  const struct {
    PhiloxBlock counter;
    uint32_t key[2];
    PhiloxBlock result;
  } known[] = {
      {{{0, 0, 0, 0}}, {0, 0}, {{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}}},
      {{{~0u, ~0u, ~0u, ~0u}}, {~0u, ~0u}, {{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}}},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       {0xa4093822, 0x299f31d0},
       {{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}}},
  };
  for (const auto& [counter, key, result] : known) {
    const PhiloxBlock got = philox(counter, key[0], key[1]);
    for (int32_t w = 0; w < 4; ++w) CHECK(got.word[w] == result.word[w], "word %d: %08x", w, got.word[w]);
  }
}

void check_thresholds() {
  CHECK(dropout_threshold(0.0) == 0, "p 0");
  CHECK(dropout_threshold(0.25) == 16384, "p 1/4");
  CHECK(dropout_threshold(0.1) == 6554, "p 0.1: %u", dropout_threshold(0.1));
  CHECK(dropout_threshold(0.9999999) == 65535, "p near 1 keeps a draw: %u", dropout_threshold(0.9999999));
  Dropout dropout;
  dropout.threshold = 49152;
  CHECK(dropout.keep_scale() == 4.f, "%g", dropout.keep_scale());
}

// Each of the eight pairs that share a call has draws of its own.
void check_draws_differ() {
  Dropout dropout;
  dropout.key0 = 7;
  const PhiloxBlock block = dropout.draws(3, 4);
  uint64_t seen = 0;
  for (uint32_t i : {3u, 11u}) {
    for (uint32_t j : {4u, 5u, 12u, 13u}) {
      const PhiloxBlock other = dropout.draws(i, j);
      for (int32_t w = 0; w < 4; ++w) CHECK(other.word[w] == block.word[w], "query %u key %u: another call", i, j);
      const int32_t half = static_cast<int32_t>((i / 8 * 2 + j % 16 / 8) * 2 + j % 2);
      CHECK((seen >> half & 1) == 0, "query %u key %u shares a draw", i, j);
      seen |= uint64_t{1} << half;
      CHECK(Dropout::draw(block, i, j) == (block.word[half / 2] >> half % 2 * 16 & 0xFFFF), "query %u key %u", i, j);
    }
  }
}

// Tiles that begin anywhere, tokens in order, strided, and in an order of their own.
void check_tiles(Random& random) {
  std::vector<int32_t> q_order(64), kv_order(200);
  for (int32_t& x : q_order) x = random.between(0, 100000);
  for (int32_t& x : kv_order) x = random.between(0, 100000);
  for (int32_t trial = 0; trial < 200; ++trial) {
    cpu::BlockDropout dropout;
    dropout.head.key0 = static_cast<uint32_t>(trial);
    dropout.head.slice = 3;
    dropout.head.offset = 9;
    dropout.head.threshold = dropout_threshold(0.3);
    dropout.first_query = random.between(0, 1000);
    dropout.first_key = random.between(0, 1000);
    const int32_t way = random.between(0, 2);
    if (way == 1) dropout.step = random.between(2, 9);
    if (way == 2) {
      dropout.q_order = q_order.data();
      dropout.kv_order = kv_order.data();
    }
    const int32_t rows = random.between(1, 64), count = random.between(1, 64), first = random.between(0, 130);
    uint64_t kept[cpu::kBlockQ];
    cpu::find_kept(dropout, rows, first, count, kept);
    for (int32_t row = 0; row < cpu::kBlockQ; ++row) {
      for (int32_t k = 0; k < count; ++k) {
        const bool want = row < rows && dropout.head.keeps(dropout.query(row), dropout.key(first + k));
        CHECK((kept[row] >> k & 1) == want, "way %d row %d of %d key %d", way, row, rows, k);
      }
    }
  }
}

}  // namespace
}  // namespace flashmsa::test

int main() {
  using namespace flashmsa;
  test::Random random(1);
  test::check_known_answers();
  test::check_thresholds();
  test::check_draws_differ();
  test::check_tiles(random);
  return test::report("test_dropout");
}
