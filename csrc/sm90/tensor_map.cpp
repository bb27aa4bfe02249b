#include "sm90/tensor_map.h"

#include <cuda_runtime_api.h>

#include <sstream>
#include <stdexcept>
#include <string>

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

std::string name_of(CUtensorMapDataType type) {
  if (type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16) return "fp16";
  if (type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16) return "bf16";
  if (type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32) return "fp32";
  return std::to_string(static_cast<int>(type));
}

}  // namespace

CUtensorMap encode_map(void* data, const MapFormat& format, const MapDimension* dimensions, int rank,
                       const char* name) {
  cuuint64_t dims[kMaxRank], strides[kMaxRank];
  cuuint32_t box[kMaxRank], element_strides[kMaxRank];
  for (int d = 0; d < rank; ++d) {
    // NOTE: an extent of 0 is illegal in a map; such a tensor is never loaded, so 1 does no harm. A dimension of one element
    // has no stride worth the name; any legal one serves.
    dims[d] = static_cast<cuuint64_t>(max_of<int64_t>(dimensions[d].extent, 1));
    strides[d] = static_cast<cuuint64_t>(dims[d] == 1 ? 16 : dimensions[d].stride_bytes);
    box[d] = static_cast<cuuint32_t>(dimensions[d].box);
    element_strides[d] = 1;
  }
  CUtensorMap map;
  const auto encode = [&] {
    return encoder()(&map, format.type, rank, data, dims, strides + 1, box, element_strides,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, format.swizzle, format.promotion,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult status = encode();
  // NOTE: a thread that has made no call of the runtime yet, such as one of autograd's, has no context; any call gives it
  // the current device's.
  if (status == CUDA_ERROR_INVALID_CONTEXT && cudaFree(nullptr) == cudaSuccess) status = encode();
  if (status == CUDA_SUCCESS) return map;
  std::ostringstream text;
  text << "flashmsa: cuTensorMapEncodeTiled refused the map of " << name << " (CUresult " << status << "): address "
       << data << ", type " << name_of(format.type) << ", swizzle " << format.swizzle << ", dims, byte strides, box:";
  for (int d = 0; d < rank; ++d) {
    text << ' ' << dims[d] << '/' << (d == 0 ? dimensions[0].stride_bytes : static_cast<int64_t>(strides[d])) << '/'
         << box[d];
  }
  throw std::runtime_error(text.str());
}

TensorMap make_tensor_map(const TensorRef& tensor, TensorExtent extent, DType dtype, int32_t box_rows, const char* name,
                          int rank) {
  constexpr int64_t kElementBytes = 2;
  TensorMap result;
  result.head_step = tensor.stride_head != 0;
  result.batch_step = tensor.stride_batch != 0;

  MapDimension dimensions[kMaxRank];
  int count = 0;
  const auto add = [&](int32_t n, int64_t stride, int32_t box) {
    dimensions[count++] = {n, stride * kElementBytes, box};
  };
  add(extent.head_dim, 1, kSwizzleColumns);
  add(extent.length, tensor.stride_seq, box_rows);
  if (rank == kStridedRank) add(extent.residues, tensor.stride_residue, 1);
  add(result.head_step ? extent.heads : 1, tensor.stride_head, 1);
  add(result.batch_step ? extent.batch : 1, tensor.stride_batch, 1);
  result.map = encode_map(tensor.data, {element_type(dtype)}, dimensions, count, name);
  return result;
}

}  // namespace flashmsa::sm90
