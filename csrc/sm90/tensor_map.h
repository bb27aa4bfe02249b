// Tensor maps made from the shared tile that they fill, so that the two cannot disagree.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/params.h"
#include "sm90/swizzle.h"

namespace flashmsa::sm90 {

inline constexpr int kMaxRank = 5;

// One dimension of a map, the innermost first; its stride is that of the elements.
struct MapDimension {
  int64_t extent;
  int64_t stride_bytes;
  int32_t box;
};

struct MapFormat {
  CUtensorMapDataType type;
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  // PERF: what computes much wants whole 256-byte lines; what only streams loses 6 to 8 % by them.
  CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
};

constexpr CUtensorMapDataType element_type(DType dtype) {
  return dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

// A map of any kind; what lies outside reads as zero and is not written. Throws std::runtime_error that prints every field
// when the driver refuses.
CUtensorMap encode_map(void* data, const MapFormat& format, const MapDimension* dimensions, int rank, const char* name);

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
// read as zero and are not written. `rank` is one of the two above. Throws as encode_map does.
TensorMap make_tensor_map(const TensorRef& tensor, TensorExtent extent, DType dtype, int32_t box_rows, const char* name,
                          int rank = kPlainRank);

template <class Tile>
TensorMap make_tile_map(const TensorRef& tensor, TensorExtent extent, DType dtype, const char* name,
                        int rank = kPlainRank) {
  static_assert(Tile::kRows <= 256, "a TMA box has at most 256 rows");
  return make_tensor_map(tensor, extent, dtype, Tile::kRows, name, rank);
}

}  // namespace flashmsa::sm90
