// Tensor maps of pools of pages: a box is some slots of one page and head by all columns.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/paged.h"

namespace flashmsa::sm90 {

struct PoolMap {
  CUtensorMap map;
  int32_t boxes;  // that make a piece: 1, or where 64 does not divide head_dim one for every 64 columns
};

// Whether TMA can read the pool: strides that are multiples of 16 bytes, none of them 0.
bool fits_tensor_map(const PoolRef& pool, int32_t pages, int32_t page_size, int32_t heads);

// `piece` slots x `columns` (a multiple of 64) come as [columns / 64][piece][64] elements, swizzled by 128 bytes. Slots past
// page_size and columns past head_dim read as zero. Throws std::runtime_error that prints every field when the driver
// refuses.
// PERF: no L2 promotion: streams of caches that are read once are 6 to 8 % faster than with 256 bytes.
PoolMap make_pool_map(const PoolRef& pool, int32_t pages, int32_t page_size, int32_t heads, int32_t head_dim,
                      DType dtype, int32_t piece, int32_t columns, const char* name);

}  // namespace flashmsa::sm90
