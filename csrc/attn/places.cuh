// ALiBi by the tensor core: one more k-step of S = Q K^T, whose keys' operand holds the keys' places in their block.
//
// Where a row stands at or behind a block's last key, its distance from key j is (row - last) + (last - j), where it stands
// at or before the first, (first - row) + (j - first). The second part is what the k-step adds to S, times the slope: a
// small integer, exact in either element type, times the slope in three pieces. The first part is the same for all keys of
// the block, and moves the softmax's reference instead: BlockShift.
//
// NOTE: both parts have one sign, so neither is larger than the whole, and S keeps the digits that a multiply-add would
// leave it. A row amid a block's keys has no such end to count from: its penalties are added one by one, unless the slope is
// gentle and the row sees nothing past its own key.
#pragma once

#include <cstdint>

#include "attn/slow_rows.cuh"
#include "attn/softmax.cuh"
#include "mask/sides.h"
#include "sm90/matrix.cuh"
#include "sm90/wgmma.cuh"

namespace flashmsa::attn {

// A gentle slope takes no more than this from a logit over a block. Counted from an end that lies past a row's own key the two
// parts cancel, and the logit is wrong by a few 2^-24 of it: 1e-6, as by Q K^T itself.
inline constexpr float kGentlePenalty = 8.0f;

// 8 rows of 8 columns, 16 bytes a row: what operands without swizzle are made of.
inline constexpr uint32_t kMatrixBytes = 128;

// The slope's second and third piece are given in this unit. NOTE: fp16's smallest numbers are coarse: 2^-24.
inline constexpr float kPieceStep = 0x1p-12f;
// The largest slope, in units of S, whose pieces are in fp16's range.
inline constexpr float kLargestPlaceSlope = 0x1p15f;

// The step's operands, K-major without swizzle: for kSlots tiles of queries and for all blocks of kKeys keys. One row's 16
// columns are the slope in three pieces, in 0, 1, 2 for a row behind the keys, in 8, 9, 10 for one before them; one key's
// are by what the pieces are multiplied, j - last in the former and first - j in the latter.
template <int kKeys, int kSlots, int kWarpgroups>
struct PlaceOperands {
  static constexpr uint32_t kKeyHalfBytes = kKeys / 8 * kMatrixBytes;  // from columns 0 … 7 to 8 … 15

  alignas(kMatrixBytes) char keys[2 * kKeyHalfBytes];
  // Nothing, nothing, 8 times the pieces, nothing: two of them in turn are the operand of a side. All rows are the same,
  // so 8 serve for any number, at a stride of 0.
  alignas(kMatrixBytes) char slopes[kSlots][4 * kMatrixBytes];

  // Of a tile: its rows' positions, 64 each, and the order of its full key tiles.
  mask::PositionSpan positions[kSlots][kWarpgroups];
  mask::SideOrder order[kSlots];

  // The operand of slot 0 for rows amid the keys, which is all zeros; from there to other slots and sides.
  __device__ __forceinline__ uint64_t slope_descriptor() const {
    return sm90::make_descriptor<sm90::Layout::kPlain>(address_of(slopes), kMatrixBytes, 0);
  }
  static __device__ __forceinline__ uint64_t slot_step(uint32_t slot) {
    return sm90::descriptor_step(slot * sizeof(slopes[0]));
  }
  static __device__ __forceinline__ uint64_t side_step(mask::Side side) {
    return sm90::descriptor_step(static_cast<uint32_t>(side) * kMatrixBytes);
  }
  __device__ __forceinline__ uint64_t key_descriptor() const {
    return sm90::make_descriptor<sm90::Layout::kPlain>(address_of(keys), kKeyHalfBytes, kMatrixBytes);
  }

  // What stays, by all threads of a block. SYNC: for the async proxy, so a fence and a barrier follow.
  template <class Element>
  __device__ __forceinline__ void fill() {
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * kKeys; i += blockDim.x) {
      const int key = i % kKeys;
      const float place = static_cast<float>(i < kKeys ? key - (kKeys - 1) : -key);
      reinterpret_cast<uint4*>(keys)[i] =
          uint4{sm90::pack2<Element>(place, place * kPieceStep), sm90::pack2<Element>(place * kPieceStep, 0.0f), 0, 0};
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < int(sizeof(slopes) / sizeof(uint4)); i += blockDim.x) {
      reinterpret_cast<uint4*>(slopes)[i] = uint4{0, 0, 0, 0};
    }
  }

  // A tile's slope, in units of S, by one thread. SYNC: as above.
  template <class Element>
  __device__ __forceinline__ void set_slope(uint32_t slot, float slope) {
    const auto rounded = [](float x) { return unpack2(sm90::pack2<Element>(x, 0.0f), Element{}).x; };
    const float first = rounded(slope);
    const float rest = (slope - first) * (1.0f / kPieceStep);
    const float second = rounded(rest);
    const uint4 row = {sm90::pack2<Element>(first, second), sm90::pack2<Element>(rest - second, 0.0f), 0, 0};
    uint4* rows = reinterpret_cast<uint4*>(slopes[slot] + 2 * kMatrixBytes);
#pragma unroll 1
    for (int i = 0; i < 8; ++i) rows[i] = row;
  }

 private:
  static __device__ __forceinline__ uint32_t address_of(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
  }
};

}  // namespace flashmsa::attn
