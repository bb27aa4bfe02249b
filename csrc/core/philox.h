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

FLASHMSA_HD constexpr PhiloxBlock philox(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
  FLASHMSA_UNROLL
  for (int32_t round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t a = uint64_t{kPhiloxMultiplier0} * counter.word[0];
    const uint64_t b = uint64_t{kPhiloxMultiplier1} * counter.word[2];
    counter = {{static_cast<uint32_t>(b >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(b),
                static_cast<uint32_t>(a >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(a)}};
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  return counter;
}

// The draws of one head. A 16-bit draw below `threshold` drops its weight; the others are multiplied by keep_scale().
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

  // Eight draws with one call: queries {i, i + 8} x keys {j, j + 1, j + 8, j + 9} for the i with i % 16 < 8 and the
  // even j with j % 16 < 8 of their group, which is what one thread holds of a 16 x 16 part of a wgmma's result. Query i
  // and key j may be any of the eight.
  FLASHMSA_HD constexpr PhiloxBlock draws(uint32_t i, uint32_t j) const {
    return philox({{i / 16 * 8 + i % 8, j / 16 * 4 + j % 8 / 2, slice, offset}}, key0, key1);
  }

  // The draw of (i, j) among draws(i, j).
  FLASHMSA_HD static constexpr uint32_t draw(const PhiloxBlock& block, uint32_t i, uint32_t j) {
    // NOTE: selected, because an index would put the words into local memory.
    const bool further = j % 16 >= 8;
    const uint32_t word = i % 16 < 8 ? (further ? block.word[1] : block.word[0])
                                     : (further ? block.word[3] : block.word[2]);
    return word >> (j % 2 * 16) & 0xFFFFu;
  }

  FLASHMSA_HD constexpr bool keeps(uint32_t i, uint32_t j) const { return draw(draws(i, j), i, j) >= threshold; }
};

// Probability p in [0, 1) as a threshold of 16-bit draws.
FLASHMSA_HD constexpr uint32_t dropout_threshold(double p) {
  return min_of(static_cast<uint32_t>(p * 65536.0 + 0.5), 65535u);
}

// rng_state holds seed and offset.
FLASHMSA_HD constexpr Dropout make_dropout(const int64_t* rng_state, double p, int32_t batch, int32_t head,
                                           int32_t heads_q) {
  const uint64_t seed = static_cast<uint64_t>(rng_state[0]), offset = static_cast<uint64_t>(rng_state[1]);
  Dropout result;
  result.key0 = static_cast<uint32_t>(seed);
  result.key1 = static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(offset >> 32);
  result.slice = static_cast<uint32_t>(batch) * static_cast<uint32_t>(heads_q) + static_cast<uint32_t>(head);
  result.offset = static_cast<uint32_t>(offset);
  result.threshold = dropout_threshold(p);
  return result;
}

}  // namespace flashmsa
