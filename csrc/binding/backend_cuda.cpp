// Part of builds with kernels only.
#include <ATen/EmptyTensor.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <limits>

#include "binding/backend.h"
#include "binding/backward_call.h"
#include "binding/few_queries.h"
#include "binding/prepare.h"
#include "binding/sorted_call.h"
#include "bwd/backward.h"
#include "decode/decode.h"
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

// Tiles are numbered by int32, and handed out beyond the last one once for each SM. `block` rows make one.
void check_tile_count(const AttentionParams& p, int32_t length, int32_t block) {
  constexpr int64_t kMaxTiles = std::numeric_limits<int32_t>::max() - 65536;
  const int64_t row_blocks = ceil_div(length, block);
  const int64_t slices = int64_t{p.batch} * p.residues * p.heads_q;
  TORCH_CHECK_VALUE(slices <= kMaxTiles / row_blocks, "q: batch ", p.batch, " x ", p.heads_q, " heads x ", row_blocks,
                    " blocks of ", block, " rows are above the limit of ", kMaxTiles, "; split the batch");
}

// Of a call for which no kernel was found.
[[noreturn]] void refuse(const AttentionParams& p, const char* pass) {
  const bool half = p.dtype == DType::kF16 || p.dtype == DType::kBF16;
  TORCH_CHECK_NOT_IMPLEMENTED(half, "q: this dtype with head_dim ", p.head_dim, " and ", p.head_dim_v,
                              " has no sm90 kernel; torch.float16 and torch.bfloat16 have, and backend=\"torch\" runs "
                              "any dtype");
  TORCH_CHECK_NOT_IMPLEMENTED(p.dropout_p <= 0.0, "dropout_p: ", p.dropout_p, " has no sm90 ", pass,
                              " kernel for this mask with head_dim ", p.head_dim, " and ", p.head_dim_v,
                              "; use 0.0, or backend=\"torch\"");
  TORCH_CHECK_NOT_IMPLEMENTED(false, "q: head_dim ", p.head_dim, " and ", p.head_dim_v, " has no sm90 ", pass,
                              " kernel for this mask; backend=\"torch\" runs any");
  throw std::logic_error("unreachable");
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

// Runs a call of few queries by the decode kernels; false: it is none, or they do not serve it.
bool launch_decode(const AttentionParams& params, at::Device device) {
  if (!has_few_queries(params)) return false;
  const PagedParams cache = as_cache(params);
  if (decode::find_kernel(cache) == nullptr) return false;
  const int num_sms = device_facts(device).num_sms;
  const size_t bytes = decode::workspace_size(cache, num_sms);
  const c10::DataPtr workspace = bytes > 0 ? c10::cuda::CUDACachingAllocator::get()->allocate(bytes) : c10::DataPtr();
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device.index());
  decode::paged_decode(cache, workspace.get(), num_sms, stream.stream());
  return true;
}

// Whether a call of hash buckets has a kernel that finds rows by their order, and needs no sorted copies.
bool runs_unsorted(const AttentionParams& params) {
  const fwd::KernelInfo* kernel = fwd::find_kernel(params);
  return kernel != nullptr && kernel->mask == MaskKind::kHash;
}

// A call with a kind that has kernels.
void launch(const AttentionParams& params, at::Device device) {
  if (params.len_q == 0) return;
  const fwd::KernelInfo* kernel = fwd::find_kernel(params);
  if (kernel == nullptr) refuse(params, "forward");
  check_tile_count(params, params.len_q, kernel->block_q);
  const int num_sms = device_facts(device).num_sms;
  const size_t bytes = fwd::workspace_size(params, num_sms);
  // Freed on return, reused in stream order.
  const c10::DataPtr workspace = bytes > 0 ? c10::cuda::CUDACachingAllocator::get()->allocate(bytes) : c10::DataPtr();
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device.index());
  fwd::attention_forward(params, workspace.get(), num_sms, stream.stream());
}

void launch(const BackwardParams& params, at::Device device) {
  const AttentionParams& forward = params.forward;
  const bwd::KernelInfo* kernel = bwd::find_kernel(params);
  if (kernel == nullptr) refuse(forward, "backward");
  // Packed: a tile more of each document, at the most, and one behind.
  const auto check = [&](int32_t length, int32_t block) {
    const int32_t more = kernel->packed ? (forward.mask.num_documents + 1) * block : 0;
    check_tile_count(forward, length + min_of(more, std::numeric_limits<int32_t>::max() - length), block);
  };
  check(forward.len_q, kernel->block_q);
  check(forward.len_kv, kernel->block_kv);
  const int num_sms = device_facts(device).num_sms;
  const size_t bytes = bwd::workspace_size(params, num_sms);
  const c10::DataPtr workspace = bytes > 0 ? c10::cuda::CUDACachingAllocator::get()->allocate(bytes) : c10::DataPtr();
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device.index());
  bwd::attention_backward(params, workspace.get(), num_sms, stream.stream());
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
      if (runs_unsorted(call.params)) return launch(call.params, device);
      SortedCall<CudaBackend, CudaPrepare> sorted(call);
      launch(sorted.params(), device);
      return sorted.finish();
    }
    default:
      if (!launch_decode(call.params, device)) launch(call.params, device);
  }
}

std::vector<DeltaRows> CudaBackend::run_backward(BackwardCall& call) {
  const float scale = static_cast<float>(call.call.params.scale);
  make_scale_positive(call.call);
  const at::Device device = call.call.q.device();
  std::vector<DeltaRows> rows = run_backward_by_kind<CudaBackend, CudaPrepare>(
      call, [&](const BackwardParams& params) { launch(params, device); });
  // The gradient of -q where the kernels saw that; of a scale of 0 nothing comes back.
  if (scale < 0) call.dq.neg_();
  if (scale == 0) {
    call.dq.zero_();
    call.dk.zero_();
  }
  return rows;
}

}  // namespace flashmsa::binding
