#include "sm90/pool_map.h"

#include "sm90/swizzle.h"
#include "sm90/tensor_map.h"

namespace flashmsa::sm90 {
namespace {

constexpr int64_t kElementBytes = 2;

}  // namespace

bool fits_tensor_map(const PoolRef& pool, int32_t pages, int32_t page_size, int32_t heads) {
  const auto legal = [](int32_t extent, int64_t stride) {
    return extent <= 1 || (stride > 0 && stride % 8 == 0 && stride * kElementBytes < int64_t{1} << 40);
  };
  return reinterpret_cast<uintptr_t>(pool.data) % 16 == 0 && legal(page_size, pool.stride_slot) &&
         legal(heads, pool.stride_head) && legal(pages, pool.stride_page);
}

PoolMap make_pool_map(const PoolRef& pool, int32_t pages, int32_t page_size, int32_t heads, int32_t head_dim,
                      DType dtype, int32_t piece, int32_t columns, const char* name) {
  const bool whole = head_dim % kSwizzleColumns == 0;
  // (columns of a group, slots, groups of 64 columns, heads, pages); where 64 does not divide head_dim one group holds all.
  const MapDimension dimensions[] = {
      {whole ? kSwizzleColumns : head_dim, kElementBytes, kSwizzleColumns},
      {page_size, pool.stride_slot * kElementBytes, piece},
      {whole ? head_dim / kSwizzleColumns : 1, kSwizzleColumns * kElementBytes, whole ? columns / kSwizzleColumns : 1},
      {heads, pool.stride_head * kElementBytes, 1},
      {pages, pool.stride_page * kElementBytes, 1}};
  const MapFormat format = {element_type(dtype), CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE};
  return {encode_map(pool.data, format, dimensions, 5, name), whole ? 1 : columns / kSwizzleColumns};
}

}  // namespace flashmsa::sm90
