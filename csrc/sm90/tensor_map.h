// Tensor maps made from the shared tile that they fill, so that the two cannot disagree.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/params.h"
#include "sm90/swizzle.h"

namespace flashmsa::sm90 {

// The driver's encoder, looked up once: the library links against no driver and loads where none is installed.
decltype(&cuTensorMapEncodeTiled) tensor_map_encoder();

// A (batch, heads, length, head_dim) tensor of 2-byte elements seen by TMA: the map and what turns a head or batch index
// into a coordinate (0 where the tensor is expanded, because a map's stride may not be 0).
struct TensorMap {
  CUtensorMap map;
  int32_t head_step;   // 1, or 0: every head is the same data
  int32_t batch_step;
};

// Dimensions of a map: (head_dim, length, heads, batch); strided ones have the residue after the length.
inline constexpr int kPlainRank = 4;
inline constexpr int kStridedRank = 5;

struct TensorExtent {
  int32_t batch, heads, length, head_dim;
  int32_t residues = 1;  // interleaved sequences, see AttentionParams
};

// A box is kBoxRows rows of one head by 64 columns, swizzled by 128 bytes. Rows past the length and columns past head_dim
// read as zero and are not written. `rank` is one of the two above. Throws std::runtime_error that prints every field when the driver refuses.
TensorMap make_tensor_map(const TensorRef& tensor, TensorExtent extent, DType dtype, int32_t box_rows, const char* name,
                          int rank = kPlainRank);

template <class Tile>
TensorMap make_tile_map(const TensorRef& tensor, TensorExtent extent, DType dtype, const char* name,
                        int rank = kPlainRank) {
  static_assert(Tile::kRows <= 256, "a TMA box has at most 256 rows");
  return make_tensor_map(tensor, extent, dtype, Tile::kRows, name, rank);
}

}  // namespace flashmsa::sm90
