#include "sm90/tensor_map.h"

#include <cuda_runtime_api.h>

#include <sstream>
#include <stdexcept>

namespace flashmsa::sm90 {
namespace {

// The driver's encoder, looked up once: the library links against no driver and loads where none is installed.
decltype(&cuTensorMapEncodeTiled) encoder() {
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

}  // namespace

TensorMap make_tensor_map(const TensorRef& tensor, TensorExtent extent, DType dtype, int32_t box_rows,
                          const char* name) {
  constexpr uint32_t kRank = 4;
  constexpr int64_t kElementBytes = 2;
  TensorMap result;
  result.head_step = tensor.stride_head != 0;
  result.batch_step = tensor.stride_batch != 0;

  // NOTE: an extent of 0 is illegal in a map; such a tensor is never loaded, so 1 does no harm. A dimension of one element
  // has no stride worth the name; any legal one serves.
  const auto dim = [](int32_t n) { return static_cast<cuuint64_t>(max_of(n, 1)); };
  const cuuint64_t dims[kRank] = {dim(extent.head_dim), dim(extent.length), result.head_step ? dim(extent.heads) : 1,
                                  result.batch_step ? dim(extent.batch) : 1};
  const auto stride = [&](int64_t elements, cuuint64_t n) {
    return static_cast<cuuint64_t>(n == 1 ? 16 : elements * kElementBytes);
  };
  const cuuint64_t strides[kRank - 1] = {stride(tensor.stride_seq, dims[1]), stride(tensor.stride_head, dims[2]),
                                         stride(tensor.stride_batch, dims[3])};
  const cuuint32_t box[kRank] = {kSwizzleColumns, static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t element_strides[kRank] = {1, 1, 1, 1};
  const CUtensorMapDataType type =
      dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

  const CUresult status = encoder()(&result.map, type, kRank, tensor.data, dims, strides, box, element_strides,
                                    CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    std::ostringstream text;
    text << "flashmsa: cuTensorMapEncodeTiled refused the map of " << name << " (CUresult " << status << "): address "
         << tensor.data << ", type " << (dtype == DType::kF16 ? "fp16" : "bf16")
         << ", dims (head_dim, length, heads, batch) " << dims[0] << " x " << dims[1] << " x " << dims[2] << " x "
         << dims[3] << ", byte strides (length, heads, batch) " << strides[0] << ", " << strides[1] << ", "
         << strides[2] << ", box " << box[0] << " x " << box[1] << ", swizzle 128 B";
    throw std::runtime_error(text.str());
  }
  return result;
}

}  // namespace flashmsa::sm90
