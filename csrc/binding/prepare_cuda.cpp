// Part of builds with kernels only.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "binding/prepare.h"

namespace flashmsa::binding {
namespace {

void* stream_of(at::Device device) { return c10::cuda::getCurrentCUDAStream(device.index()).stream(); }

int attribute(cudaDeviceAttr which, at::Device device) {
  int value = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&value, which, device.index());
  TORCH_CHECK(error == cudaSuccess, "cudaDeviceGetAttribute failed: ", cudaGetErrorString(error));
  return value;
}

}  // namespace

void CudaPrepare::check_device(const char* name, at::Device device) {
  const int major = attribute(cudaDevAttrComputeCapabilityMajor, device);
  const int minor = attribute(cudaDevAttrComputeCapabilityMinor, device);
  TORCH_CHECK(major == 9 && minor == 0, name, ": on ", device, " of compute capability ", major, ".", minor,
              "; the kernels need 9.0 (H100, H200)");
}

void CudaPrepare::sort(const hash::SortParams& params, at::Device device) {
  const size_t bytes = hash::sort_workspace_size(params);
  // Freed on return, reused in stream order.
  const c10::DataPtr workspace = bytes > 0 ? c10::cuda::CUDACachingAllocator::get()->allocate(bytes) : c10::DataPtr();
  hash::sort_buckets(params, workspace.get(), stream_of(device));
}

void CudaPrepare::intervals(const hash::IntervalParams& params, at::Device device) {
  hash::bucket_rows(params, stream_of(device));
}

void CudaPrepare::move(const hash::RowsJob* jobs, int32_t count, at::Device device) {
  hash::move_rows(jobs, count, stream_of(device));
}

void CudaPrepare::count_list(const blocks::ListParams& params, void* workspace, at::Device device) {
  blocks::count_list(params, workspace, stream_of(device));
}

void CudaPrepare::fill_list(const blocks::ListParams& params, void* workspace, at::Device device) {
  blocks::fill_list(params, workspace, stream_of(device));
}

}  // namespace flashmsa::binding
