// Dropout's draws: the published answers of Philox4x32-7, calls whose first rounds are shared, the order of draws, the
// threshold, and the CPU backend's bits of a tile against the draws one by one.
#include <cstdint>
#include <cstring>
#include <vector>

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
  CHECK(dropout_threshold(32641 / 65536.0) == 32642, "the zeros are dropped together");
  CHECK(dropout_threshold(0.9999999) == 65535, "p near 1 keeps a draw: %u", dropout_threshold(0.9999999));
  Dropout dropout;
  dropout.threshold = 49152;
  CHECK(dropout.keep_scale() == 4.f, "%g", dropout.keep_scale());
}

// A call by what its query or its key alone makes of it is that call.
void check_shared_rounds(Random& random) {
  const auto word = [&] { return static_cast<uint32_t>(random.bits()) >> random.between(0, 31); };
  for (int32_t trial = 0; trial < 1000; ++trial) {
    const Dropout dropout = {word(), word(), word(), word(), 1};
    const uint32_t i = word(), j = word(), keys = Dropout::key_count(j), queries = Dropout::query_count(i);
    const PhiloxBlock want = philox({{dropout.offset, keys, dropout.slice, queries}}, dropout.key0, dropout.key1);
    const PhiloxBlock by_query = dropout.calls_of_query(i).at(keys), by_key = dropout.calls_of_key(j).at(queries);
    for (int32_t w = 0; w < 4; ++w) {
      CHECK(by_query.word[w] == want.word[w], "query %u key %u word %d", i, j, w);
      CHECK(by_key.word[w] == want.word[w], "key %u query %u word %d", j, i, w);
    }
  }
}

// Ranks are places: each is taken once, and numbers that are smaller come first.
void check_ranks() {
  const auto value = [](uint32_t bits) {
    const uint32_t wide = bits << 16;
    float x;
    std::memcpy(&x, &wide, sizeof(x));
    return x;
  };
  std::vector<uint32_t> bits_at(65536, 65536);
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const uint32_t rank = bf16_rank(bits);
    CHECK(rank < 65536 && bits_at[rank] == 65536, "rank %u of %04x", rank, bits);
    if (rank < 65536) bits_at[rank] = bits;
    if (rank <= kLastBf16Rank) CHECK(bf16_of_rank(rank) == bits, "%04x", bits);
  }
  for (uint32_t rank = 0; rank < kLastBf16Rank; ++rank) {
    CHECK(value(bits_at[rank]) < value(bits_at[rank + 1]) || rank == kBf16Infinity, "rank %u", rank);
  }
  CHECK(bits_at[kLastBf16Rank] == kBf16Infinity, "%04x", bits_at[kLastBf16Rank]);
}

// The pairs that share a call: a word for each query and two keys, half a word for each pair.
void check_shared_calls() {
  Dropout dropout;
  dropout.key0 = 7;
  const PhiloxBlock block = dropout.call(3, 68);
  const uint32_t multipliers[4] = {0x9E37F2D1u, 0x7F4A805Bu, 0xC2B2A6DDu, 0x85EB8C27u};
  for (uint32_t q = 0; q < 4; ++q) {
    for (uint32_t n = 0; n < 8; ++n) {
      const uint32_t* w = block.word;
      const uint32_t sum = n < 4 ? w[(n + 1) % 4] : w[(n + 1) % 4] + w[(n + 2) % 4];
      const uint32_t word = w[n % 4] * multipliers[q] + sum;
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t i = 3 + 8 * q, j = 68 + 8 * n + half;
        const PhiloxBlock other = dropout.call(i, j);
        for (int32_t x = 0; x < 4; ++x) CHECK(other.word[x] == block.word[x], "query %u key %u: another call", i, j);
        CHECK(Dropout::draw(block, i, j) == (word >> 16 * half & 0xFFFF), "query %u key %u", i, j);
      }
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
  test::check_ranks();
  test::check_shared_rounds(random);
  test::check_shared_calls();
  test::check_tiles(random);
  return test::report("test_dropout");
}
