#include "sm90/tensor_map.h"

#include <cuda_runtime_api.h>

#include <sstream>
#include <stdexcept>

namespace flashmsa::sm90 {

decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess || entry == nullptr) {
      throw std::runtime_error(
          "flashmsa: the CUDA driver has no cuTensorMapEncodeTiled (it needs version 12.0 or newer): " +
          std::string(cudaGetErrorString(error)));
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  return function;
}

TensorMap make_tensor_map(const TensorRef& tensor, TensorExtent extent, DType dtype, int32_t box_rows, const char* name,
                          int rank) {
  constexpr int64_t kElementBytes = 2;
  TensorMap result;
  result.head_step = tensor.stride_head != 0;
  result.batch_step = tensor.stride_batch != 0;

  // NOTE: an extent of 0 is illegal in a map; such a tensor is never loaded, so 1 does no harm. A dimension of one element
  // has no stride worth the name; any legal one serves.
  cuuint64_t dims[kStridedRank], strides[kStridedRank];
  cuuint32_t box[kStridedRank], element_strides[kStridedRank];
  int count = 0;
  const auto add = [&](int32_t n, int64_t stride, int32_t box_size) {
    dims[count] = static_cast<cuuint64_t>(max_of(n, 1));
    strides[count] = static_cast<cuuint64_t>(dims[count] == 1 ? 16 : stride * kElementBytes);
    box[count] = static_cast<cuuint32_t>(box_size);
    element_strides[count] = 1;
    ++count;
  };
  add(extent.head_dim, 1, kSwizzleColumns);
  add(extent.length, tensor.stride_seq, box_rows);
  if (rank == kStridedRank) add(extent.residues, tensor.stride_residue, 1);
  add(result.head_step ? extent.heads : 1, tensor.stride_head, 1);
  add(result.batch_step ? extent.batch : 1, tensor.stride_batch, 1);
  const CUtensorMapDataType type =
      dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

  const CUresult status = tensor_map_encoder()(&result.map, type, count, tensor.data, dims, strides + 1, box, element_strides,
                                    CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    std::ostringstream text;
    text << "flashmsa: cuTensorMapEncodeTiled refused the map of " << name << " (CUresult " << status << "): address "
         << tensor.data << ", type " << (dtype == DType::kF16 ? "fp16" : "bf16")
         << (rank == kStridedRank ? ", (head_dim, length, residues, heads, batch)"
                                  : ", (head_dim, length, heads, batch)")
         << " dims, byte strides, box:";
    for (int d = 0; d < count; ++d)
      text << ' ' << dims[d] << '/' << (d == 0 ? kElementBytes : strides[d]) << '/' << box[d];
    text << ", swizzle 128 B";
    throw std::runtime_error(text.str());
  }
  return result;
}

}  // namespace flashmsa::sm90
