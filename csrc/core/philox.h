// Which attention weights dropout keeps: a pure function of seed, offset, batch, head, query and key, so that forward,
// backward, every backend and every tile shape draw the same mask and none has to be stored.
//
// Philox4x32 of 7 rounds: Salmon, Moraes, Dror and Shaw, Parallel random numbers: as easy as 1, 2, 3 (2011).
#pragma once

#include <cstdint>

#include "core/types.h"

namespace flashmsa {

inline constexpr int32_t kPhiloxRounds = 7;
inline constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier1 = 0xCD9E8D57u;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u, kPhiloxWeyl1 = 0xBB67AE85u;

struct PhiloxBlock {
  uint32_t word[4];
};

struct Product {
  uint32_t high, low;
};
FLASHMSA_HD constexpr Product product(uint32_t a, uint32_t b) {
  const uint64_t both = uint64_t{a} * b;
  return {static_cast<uint32_t>(both >> 32), static_cast<uint32_t>(both)};
}

// The rounds from number `round` on. The keys are those of round 0.
FLASHMSA_HD constexpr PhiloxBlock philox(PhiloxBlock counter, uint32_t key0, uint32_t key1, int32_t round = 0) {
  FLASHMSA_UNROLL
  for (; round < kPhiloxRounds; ++round) {
    const Product a = product(kPhiloxMultiplier0, counter.word[0]), b = product(kPhiloxMultiplier1, counter.word[2]);
    const uint32_t step = static_cast<uint32_t>(round);
    counter = {{b.high ^ counter.word[1] ^ (key0 + step * kPhiloxWeyl0), b.low,
                a.high ^ counter.word[3] ^ (key1 + step * kPhiloxWeyl1), a.low}};
  }
  return counter;
}

// How draws are compared: 16 bits by their place in the order of the bfloat16 numbers that they are, which a GPU compares
// two at a time. Negative ones come first, then zero and the positive ones, at last what is no number. One to one.
inline constexpr uint32_t kBf16Infinity = 0x7F80;
FLASHMSA_HD constexpr uint32_t bf16_rank(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7FFFu, sign = bits >> 15;
  if (magnitude > kBf16Infinity) return 2 * magnitude + sign;
  return sign != 0 ? kBf16Infinity - magnitude : kBf16Infinity + 1 + magnitude;
}
// The inverse, up to the last number.
inline constexpr uint32_t kLastBf16Rank = 2 * kBf16Infinity + 1;
FLASHMSA_HD constexpr uint32_t bf16_of_rank(uint32_t rank) {
  return rank <= kBf16Infinity ? 0x8000u | (kBf16Infinity - rank) : rank - kBf16Infinity - 1;
}

// 64 draws of 16 bits, two in a word, of each of four queries and eight pairs of keys: of the call's words w, pair n and query
// q have w[n] M[q] + w[n + 1], where n < 4, and w[n] M[q] + w[n + 1] + w[n + 2] from there on; numbers of words modulo 4.
//
// If the call's words are uniform and independent, so is a draw, and so are any two: those of different pairs, or of one word,
// exactly, because the sums of different pairs have no common multiple modulo 2; those of one pair and two queries but for
// their lowest bits, as the words' difference is a multiple of 2 or 4. Of three draws the third may be given by two; the
// multipliers are chosen so that three queries' draws fall below a threshold together as often as independent ones would,
// to 0.02 % at thresholds of a twentieth and above.
FLASHMSA_HD constexpr uint32_t draw_multiplier(uint32_t query) {
  // NOTE: selected, here and below, because an index would put the numbers into local memory.
  const uint32_t even = (query & 2u) == 0 ? 0x9E37F2D1u : 0xC2B2A6DDu;
  const uint32_t odd = (query & 2u) == 0 ? 0x7F4A805Bu : 0x85EB8C27u;
  return (query & 1u) == 0 ? even : odd;
}
// n known when compiled.
FLASHMSA_HD constexpr uint32_t draw_word(const PhiloxBlock& block, uint32_t multiplier, uint32_t n) {
  const uint32_t sum = block.word[(n + 1) % 4] + (n < 4 ? 0 : block.word[(n + 2) % 4]);
  return block.word[n % 4] * multiplier + sum;
}

// The draws of one head. A weight whose draw's rank is below `threshold` is dropped; the others are multiplied by
// keep_scale().
struct Dropout {
  uint32_t key0 = 0, key1 = 0;
  uint32_t slice = 0;      // batch * heads_q + head
  uint32_t offset = 0;     // its low half
  uint32_t threshold = 0;  // 0: nothing is dropped

  // What kept weights are multiplied by, so that their expectation stays: one over the realised rate of kept draws.
  template <class T = float>
  FLASHMSA_HD constexpr T keep_scale() const {
    return T(65536) / static_cast<T>(65536u - threshold);
  }

  // One call serves queries i, i + 8, … i + 24 and keys j, j + 1, j + 8, j + 9, … j + 57, for the i with i % 32 < 8 and the even
  // j with j % 64 < 8 of their group: of a 32 x 64 part of a wgmma's result, or of its transpose, what one thread holds and its
  // neighbours that hold the rest of these rows and columns. Query i and key j may be any of these. A call's counter is
  // {offset, key_count(j), slice, query_count(i)}.
  static FLASHMSA_HD constexpr uint32_t query_count(uint32_t i) { return i / 32 * 8 + i % 8; }
  static FLASHMSA_HD constexpr uint32_t key_count(uint32_t j) { return j / 64 * 4 + j % 8 / 2; }

  FLASHMSA_HD constexpr PhiloxBlock call(uint32_t i, uint32_t j) const {
    return philox({{offset, key_count(j), slice, query_count(i)}}, key0, key1);
  }

  // The draw of (i, j) among those of call(i, j).
  FLASHMSA_HD static constexpr uint32_t draw(const PhiloxBlock& block, uint32_t i, uint32_t j) {
    const uint32_t n = j % 64 / 8;
    const auto word_at = [&](uint32_t at) {
      const uint32_t even = (at & 2u) == 0 ? block.word[0] : block.word[2];
      const uint32_t odd = (at & 2u) == 0 ? block.word[1] : block.word[3];
      return (at & 1u) == 0 ? even : odd;
    };
    const uint32_t word = word_at(n) * draw_multiplier(i % 32 / 8) + word_at(n + 1) + (n < 4 ? 0 : word_at(n + 2));
    return word >> (j % 2 * 16) & 0xFFFFu;
  }

  FLASHMSA_HD constexpr bool keeps(uint32_t i, uint32_t j) const {
    return bf16_rank(draw(call(i, j), i, j)) >= threshold;
  }

  // Calls for one query and many keys, or one key and many queries: the counter's words reach the product a round apart, so
  // that of the first three rounds' six products four do not depend on the one that varies.
  struct Calls {
    uint32_t key0, key1;
    uint32_t first, second;                // of the head alone
    uint32_t third0, third1, fourth;
  };
  struct QueryCalls : Calls {
    FLASHMSA_HD constexpr PhiloxBlock at(uint32_t key_count) const {
      const Product a = product(kPhiloxMultiplier0, first ^ key_count);
      const Product b = product(kPhiloxMultiplier1, a.high ^ second);
      return philox({{b.high ^ third0, b.low, a.low ^ third1, fourth}}, key0, key1, 3);
    }
  };
  struct KeyCalls : Calls {
    FLASHMSA_HD constexpr PhiloxBlock at(uint32_t query_count) const {
      const Product a = product(kPhiloxMultiplier1, first ^ query_count);
      const Product b = product(kPhiloxMultiplier0, a.high ^ second);
      return philox({{a.low ^ third0, fourth, b.high ^ third1, b.low}}, key0, key1, 3);
    }
  };
  FLASHMSA_HD constexpr QueryCalls calls_of_query(uint32_t i) const {
    const Product a = product(kPhiloxMultiplier0, offset), b = product(kPhiloxMultiplier1, slice);
    const Product c = product(kPhiloxMultiplier1, a.high ^ query_count(i) ^ key1);
    const Product d = product(kPhiloxMultiplier0, c.high ^ b.low ^ (key0 + kPhiloxWeyl0));
    return {{key0, key1, b.high ^ key0, a.low ^ (key1 + kPhiloxWeyl1), c.low ^ (key0 + 2 * kPhiloxWeyl0),
             d.high ^ (key1 + 2 * kPhiloxWeyl1), d.low}};
  }
  FLASHMSA_HD constexpr KeyCalls calls_of_key(uint32_t j) const {
    const Product a = product(kPhiloxMultiplier0, offset), b = product(kPhiloxMultiplier1, slice);
    const Product c = product(kPhiloxMultiplier0, b.high ^ key_count(j) ^ key0);
    const Product d = product(kPhiloxMultiplier1, c.high ^ a.low ^ (key1 + kPhiloxWeyl1));
    return {{key0, key1, a.high ^ key1, b.low ^ (key0 + kPhiloxWeyl0), d.high ^ (key0 + 2 * kPhiloxWeyl0),
             c.low ^ (key1 + 2 * kPhiloxWeyl1), d.low}};
  }
};

// Probability p in [0, 1) as a threshold of 16-bit draws.
// NOTE: where a draw is zero of either sign, which compare equal, both have to be dropped or none.
FLASHMSA_HD constexpr uint32_t dropout_threshold(double p) {
  const uint32_t nearest = min_of(static_cast<uint32_t>(p * 65536.0 + 0.5), 65535u);
  return nearest == kBf16Infinity + 1 ? nearest + 1 : nearest;
}

// rng_state holds seed and offset.
FLASHMSA_HD constexpr Dropout make_dropout(const int64_t* rng_state, uint32_t threshold, int32_t batch, int32_t head,
                                           int32_t heads_q) {
  const uint64_t seed = static_cast<uint64_t>(rng_state[0]), offset = static_cast<uint64_t>(rng_state[1]);
  Dropout result;
  result.key0 = static_cast<uint32_t>(seed);
  result.key1 = static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(offset >> 32);
  result.slice = static_cast<uint32_t>(batch) * static_cast<uint32_t>(heads_q) + static_cast<uint32_t>(head);
  result.offset = static_cast<uint32_t>(offset);
  result.threshold = threshold;
  return result;
}

}  // namespace flashmsa
