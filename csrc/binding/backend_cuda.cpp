// Part of builds with kernels only.
#include <ATen/EmptyTensor.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <limits>

#include "binding/backend.h"
#include "binding/prepare.h"
#include "binding/sorted_call.h"
#include "fwd/forward.h"
#include "mask/dilated.h"

namespace flashmsa::binding {

namespace {

struct DeviceFacts {
  int num_sms = 0;
  int major = 0;
  int minor = 0;
};

// Of every visible device, read once. Attributes need neither a context nor a synchronisation.
const std::vector<DeviceFacts>& all_device_facts() {
  static const std::vector<DeviceFacts> facts = [] {
    const auto require = [](cudaError_t error, const char* what) {
      TORCH_CHECK(error == cudaSuccess, what, " failed: ", cudaGetErrorString(error));
    };
    int count = 0;
    require(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    std::vector<DeviceFacts> result(count);
    for (int device = 0; device < count; ++device) {
      const auto read = [&](cudaDeviceAttr attribute, int& value) {
        require(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
      };
      read(cudaDevAttrMultiProcessorCount, result[device].num_sms);
      read(cudaDevAttrComputeCapabilityMajor, result[device].major);
      read(cudaDevAttrComputeCapabilityMinor, result[device].minor);
    }
    return result;
  }();
  return facts;
}

const DeviceFacts& device_facts(at::Device device) { return all_device_facts().at(device.index()); }

// Tiles are numbered by int32, and handed out beyond the last one once for each SM.
void check_tile_count(const AttentionParams& p, const fwd::KernelInfo& kernel) {
  constexpr int64_t kMaxTiles = std::numeric_limits<int32_t>::max() - 65536;
  const int64_t row_blocks = ceil_div(p.len_q, kernel.block_q);
  const int64_t slices = int64_t{p.batch} * p.residues * p.heads_q;
  TORCH_CHECK_VALUE(slices <= kMaxTiles / row_blocks, "q: batch ", p.batch, " x ", p.heads_q, " heads x ", row_blocks,
                    " blocks of ", kernel.block_q, " rows are above the limit of ", kMaxTiles, "; split the batch");
}

// The kernels take a positive scale. A negative one moves into q, and zero makes q zero: NaN and inf in it stay NaN.
void make_scale_positive(Call& call) {
  AttentionParams& p = call.params;
  const float scale = static_cast<float>(p.scale);
  if (scale > 0) return;
  call.q = readable(scale < 0 ? call.q.neg() : call.q.mul(0), CudaBackend::kRows);
  p.scale = scale < 0 ? -p.scale : 1.0;
  p.q = tensor_ref(call.q);
}

}  // namespace

void CudaBackend::check_device(at::Device device) {
  const DeviceFacts& facts = device_facts(device);
  TORCH_CHECK(facts.major == 9 && facts.minor == 0, "q: on ", device, " of compute capability ", facts.major, ".",
              facts.minor, "; the sm90 backend needs 9.0 (H100, H200), backend=\"torch\" runs on any device");
}

at::Tensor CudaBackend::empty(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  // PERF: what at::empty_strided ends in, without a second trip through the dispatcher.
  return at::Tensor(at::detail::empty_strided_generic(sizes, strides, c10::cuda::CUDACachingAllocator::get(),
                                                      c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype));
}

namespace {

// A call with a kind that has kernels.
void launch(const AttentionParams& params, at::Device device) {
  if (params.len_q == 0) return;
  const fwd::KernelInfo* kernel = fwd::find_kernel(params);
  TORCH_CHECK_NOT_IMPLEMENTED(kernel != nullptr, "q: this dtype with head_dim ", params.head_dim, " and ",
                              params.head_dim_v,
                              " has no sm90 kernel; torch.float16 and torch.bfloat16 have, and backend=\"torch\" runs "
                              "any dtype");
  check_tile_count(params, *kernel);
  const int num_sms = device_facts(device).num_sms;
  const size_t bytes = fwd::workspace_size(params, num_sms);
  // Freed on return, reused in stream order.
  const c10::DataPtr workspace = bytes > 0 ? c10::cuda::CUDACachingAllocator::get()->allocate(bytes) : c10::DataPtr();
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device.index());
  fwd::attention_forward(params, workspace.get(), num_sms, stream.stream());
}

}  // namespace

void CudaBackend::run(Call& call) {
  make_scale_positive(call);
  const at::Device device = call.q.device();
  switch (call.params.mask.kind) {
    case MaskKind::kDilated:
      for (const AttentionParams& part : mask::split_by_residue(call.params)) launch(part, device);
      return;
    case MaskKind::kHash: {
      SortedCall<CudaBackend, CudaPrepare> sorted(call);
      launch(sorted.params(), device);
      return sorted.finish();
    }
    default:
      return launch(call.params, device);
  }
}

}  // namespace flashmsa::binding
