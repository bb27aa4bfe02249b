// A row's numbers, -lse and -Δ, as terms of sums that the tensor cores make: S^T and dP^T begin with them.
// PERF: read from shared memory, two at a time by every thread, they are 6 % of a step at d64.
//
// A number is three terms of 16 bits, each times its weight. What eight rows have of one term is a run of 16 bytes; after it
// comes the next term's, first those of -lse, in units of S, then those of -Δ.
#pragma once

#include <type_traits>

#include "core/types.h"
#include "sm90/matrix.cuh"
#include "sm90/wgmma.cuh"

namespace flashmsa::bwd {

template <class Element>
struct Terms {
  static constexpr int32_t kOfANumber = 3;
  static constexpr int32_t kOfARow = 2 * kOfANumber;
  static constexpr int32_t kRowBytes = kOfARow * sizeof(Element);
  static constexpr int32_t kGroupBytes = 8 * kRowBytes;
  // An operand has 16 terms, of which the weights leave out all but three: those behind a row's own are the next eight rows',
  // or these bytes'.
  static constexpr int32_t kPadBytes = 32;
  static constexpr bool kHalf = std::is_same_v<Element, __half>;
  // The largest number. -lse where a row has no weights: none of its pairs counts, but each is to be finite.
  static constexpr float kMost = kHalf ? 2e8f : 3e38f;

  // NOTE: fp16 ends at 65504.
  static __device__ __forceinline__ constexpr float weight(int term) {
    return !kHalf ? 1.0f : term == 0 ? 32768.0f : term == 1 ? 1.0f : 1.0f / 1024;
  }

  // Number 0 or 1 of a row. One too large becomes NaN: what comes of it is computed once more.
  static __device__ __forceinline__ void store(Element* tile, int32_t row, int which, float x) {
    Element* to = tile + row / 8 * (8 * kOfARow) + which * (8 * kOfANumber) + row % 8;
    if (!(fabsf(x) <= kMost)) x = __builtin_nanf("");
#pragma unroll
    for (int i = 0; i < kOfANumber; ++i) {
      // NOTE: torch's builds leave out the conversions by cast.
      if constexpr (kHalf) {
        to[8 * i] = __float2half_rn(x / weight(i));
        x -= __half2float(to[8 * i]) * weight(i);
      } else {
        to[8 * i] = __float2bfloat16_rn(x / weight(i));
        x -= __bfloat162float(to[8 * i]) * weight(i);
      }
    }
  }

  // The A operand that makes number `which` of them: the same weights in every row.
  struct Weights {
    uint32_t fragment[4];
  };
  static __device__ __forceinline__ Weights weights(uint32_t lane, int which) {
    const auto of = [&](int column) {
      const int term = column - which * kOfANumber;
      return term < 0 || term >= kOfANumber ? 0.0f : weight(term);
    };
    const int column = static_cast<int>(lane % 4) * 2;
    const uint32_t pair = sm90::pack2<Element>(of(column), of(column + 1));
    return {{pair, pair, 0, 0}};
  }

  // The B operand, of the rows from this address on.
  // NOTE: its other eight terms are the first ones again, whose weights are 0.
  static __device__ __forceinline__ uint64_t descriptor(uint32_t shared_address) {
    return sm90::make_descriptor<sm90::Layout::kPlain>(shared_address, 0, kGroupBytes);
  }
};

}  // namespace flashmsa::bwd
