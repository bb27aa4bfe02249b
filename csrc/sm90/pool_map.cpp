#include "sm90/pool_map.h"

#include <sstream>
#include <stdexcept>
#include <string>

#include "sm90/swizzle.h"
#include "sm90/tensor_map.h"

namespace flashmsa::sm90 {
namespace {

constexpr int64_t kElementBytes = 2;
constexpr int kPoolRank = 5;

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
  PoolMap result;
  result.boxes = whole ? 1 : columns / kSwizzleColumns;

  // (columns of a group, slots, groups of 64 columns, heads, pages); where 64 does not divide head_dim one group holds all.
  cuuint64_t dims[kPoolRank], strides[kPoolRank];
  cuuint32_t box[kPoolRank], element_strides[kPoolRank];
  int count = 0;
  const auto add = [&](int64_t extent, int64_t stride, int32_t box_size) {
    dims[count] = static_cast<cuuint64_t>(max_of<int64_t>(extent, 1));
    strides[count] = static_cast<cuuint64_t>(dims[count] == 1 ? 16 : stride * kElementBytes);
    box[count] = static_cast<cuuint32_t>(box_size);
    element_strides[count] = 1;
    ++count;
  };
  add(whole ? kSwizzleColumns : head_dim, 1, kSwizzleColumns);
  add(page_size, pool.stride_slot, piece);
  add(whole ? head_dim / kSwizzleColumns : 1, kSwizzleColumns, whole ? columns / kSwizzleColumns : 1);
  add(heads, pool.stride_head, 1);
  add(pages, pool.stride_page, 1);
  const CUtensorMapDataType type =
      dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

  const CUresult status = tensor_map_encoder()(
      &result.map, type, count, pool.data, dims, strides + 1, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    std::ostringstream text;
    text << "flashmsa: cuTensorMapEncodeTiled refused the map of " << name << " (CUresult " << status << "): address "
         << pool.data << ", type " << (dtype == DType::kF16 ? "fp16" : "bf16")
         << ", (columns, slots, column groups, heads, pages) dims, byte strides, box:";
    for (int d = 0; d < count; ++d) {
      text << ' ' << dims[d] << '/' << (d == 0 ? kElementBytes : strides[d]) << '/' << box[d];
    }
    text << ", swizzle 128 B";
    throw std::runtime_error(text.str());
  }
  return result;
}

}  // namespace flashmsa::sm90
