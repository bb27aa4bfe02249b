// Paged caches on sm_90a: which kernels run a call, and the way through a dense copy where no fused one does. No device
// value is read on the host. Part of builds with kernels only.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <limits>

#include "binding/arguments.h"
#include "binding/paged.h"
#include "decode/decode.h"
#include "fwd/forward.h"
#include "prefill/prefill.h"

namespace flashmsa::binding {
namespace {

using at::Tensor;

int attribute(cudaDeviceAttr which, at::Device device) {
  int value = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&value, which, device.index());
  TORCH_CHECK(error == cudaSuccess, "cudaDeviceGetAttribute failed: ", cudaGetErrorString(error));
  return value;
}

int32_t num_sms_of(at::Device device) { return attribute(cudaDevAttrMultiProcessorCount, device); }

void* stream_of(at::Device device) { return c10::cuda::getCurrentCUDAStream(device.index()).stream(); }

// Device memory for one launch: the caller's, or the allocator's, freed on return and reused in stream order.
class Workspace {
 public:
  Workspace(size_t bytes, const std::optional<Tensor>& given) {
    if (bytes == 0) return;
    if (!given.has_value()) {
      own_ = c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
      data_ = own_.get();
      return;
    }
    TORCH_CHECK_VALUE(given->nbytes() >= bytes, "workspace: ", given->nbytes(), " bytes; this call needs ", bytes,
                      ", see flashmsa.paged_workspace");
    data_ = given->mutable_data_ptr();
    TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(data_) % 16 == 0,
                      "workspace: its memory does not begin at a multiple of 16 bytes; it must");
  }
  void* get() const { return data_; }

 private:
  c10::DataPtr own_;
  void* data_ = nullptr;
};

// For kernels that take a positive scale; decode takes any. A negative one moves into q, and zero makes q zero: NaN and inf in it stay NaN.
void make_scale_positive(PagedCall& call) {
  PagedParams& p = call.params;
  const float scale = static_cast<float>(p.scale);
  if (scale > 0) return;
  call.q = readable(scale < 0 ? call.q.neg() : call.q.mul(0), Rows::kTma);
  p.scale = scale < 0 ? -p.scale : 1.0;
  p.q = tensor_ref(call.q);
}

// Device memory that the caller holds, as a tensor.
template <class T>
Tensor view_of(const T* data, at::IntArrayRef sizes, const at::TensorOptions& options) {
  // NOTE: with its device: torch would ask the driver whose memory it is.
  return at::for_blob(const_cast<T*>(data), sizes).options(options).target_device(options.device()).make_tensor();
}

// ---- Decode, head by head of a group

// Of a group of query heads that make too many rows for a decode kernel together, number `head` alone. `held` keeps copies
// of what has no stride.
PagedParams one_of_group(const PagedParams& p, int32_t head, const at::TensorOptions& options,
                         std::vector<Tensor>& held) {
  const int64_t group = p.heads_q / p.heads_kv;
  const auto every = [&](TensorRef& rows) {
    constexpr int64_t kBytes = 2;  // only half types have kernels
    rows.data = static_cast<char*>(rows.data) + head * rows.stride_head * kBytes;
    rows.stride_head *= group;
  };
  const auto copy = [&](const float* values, int64_t batch) {
    return held.emplace_back(view_of(values, {batch, p.heads_kv, group}, options).select(2, head).contiguous())
        .const_data_ptr<float>();
  };
  PagedParams one = p;
  one.heads_q = p.heads_kv;
  every(one.q);
  every(one.out);
  if (p.lse != nullptr) one.lse += head * p.lse_stride_head;
  one.lse_stride_head *= group;
  if (p.sinks != nullptr) one.sinks = copy(p.sinks, 1);
  if (p.alibi_slopes != nullptr) {
    one.alibi_slopes = copy(p.alibi_slopes, p.alibi_stride_batch != 0 ? p.batch : 1);
    one.alibi_stride_batch = p.alibi_stride_batch != 0 ? p.heads_kv : 0;
  }
  return one;
}

// What kernel and workspace depend on is the same for every head.
PagedParams sized_as_one(const PagedParams& p) {
  PagedParams one = p;
  one.heads_q = p.heads_kv;
  return one;
}

// Whether that is the way: trees have no other kernels.
bool goes_head_by_head(const PagedParams& p) {
  return p.tree_bits != nullptr && decode::find_kernel(sized_as_one(p)) != nullptr;
}

// ---- Two stages: the pages copied to dense keys and values, then the forward kernel over documents, one a sequence

// Whether sequences are laid one after another: as they come so, or since prefixes by tensor are one per document, and
// documents by batch have no number of their own.
bool runs_packed(const PagedParams& p) {
  return p.cu_seqlens_q != nullptr || p.band.prefixes[0] != nullptr || p.band.prefixes[1] != nullptr;
}

// Why the forward kernel cannot follow a gather; null where it can.
const char* two_stage_gap(const PagedParams& p) {
  if (p.tree_bits != nullptr) return "tree_mask: no fused kernel serves so many query rows of a kv head";
  if (p.query_pages != nullptr) {
    return "query_pages: no fused kernel serves this page_size, head_dim or query_block (a multiple of 64 is served)";
  }
  if (p.alibi_slopes != nullptr && p.alibi_stride_batch != 0 && runs_packed(p)) {
    return "alibi_slopes: no kernel has slopes by sequence with packed queries, or prefixes by tensor";
  }
  if (p.batch_invariant && runs_packed(p)) {
    return "batch_invariant: no fused kernel serves this call, and gathered packed sequences share tiles";
  }
  if (p.dtype != DType::kF16 && p.dtype != DType::kBF16) return "q: only torch.float16 and torch.bfloat16 have kernels";
  return nullptr;
}

// The dense keys and values, and what says which of them belong to whom.
struct Gathered {
  Tensor k, v;  // (batch, length, heads_kv, head_dim)
  Tensor q_offsets, kv_offsets;
  AttentionParams params;
};

pages::GatherParams gather_params(const PagedParams& p, const Tensor& k, const Tensor& v) {
  pages::GatherParams g;
  g.k_pages = p.k_pages;
  g.v_pages = p.v_pages;
  g.num_pages = p.num_pages;
  g.page_size = p.page_size;
  g.heads_kv = p.heads_kv;
  g.head_dim = p.head_dim;
  g.head_dim_v = p.head_dim_v;
  g.block_table = p.block_table;
  g.block_table_stride = p.block_table_stride;
  g.batch = p.batch;
  g.max_pages = p.max_pages;
  g.kv_lens = p.kv_lens;
  g.k = tensor_ref(k.transpose(1, 2));
  g.v = tensor_ref(v.transpose(1, 2));
  g.element_bytes = static_cast<int32_t>(k.itemsize());
  return g;
}

// kv_lens as a tensor, or the whole length of each sequence.
Tensor lengths(const PagedParams& p, int64_t length, const at::TensorOptions& options) {
  if (p.kv_lens == nullptr) return at::empty({p.batch}, options).fill_(length);
  return view_of(p.kv_lens, {p.batch}, options).clamp(0, length);
}

// Padded: each batch is one document of len_q queries and as many keys as its length says.
void set_padded(Gathered& g, const PagedParams& p, int64_t length, const at::TensorOptions& options) {
  g.q_offsets = at::zeros({p.batch, 2}, options);
  g.q_offsets.select(1, 1).fill_(p.len_q);
  g.kv_offsets = at::zeros({p.batch, 2}, options);
  g.kv_offsets.select(1, 1).copy_(lengths(p, length, options));
  AttentionParams& a = g.params;
  a.batch = p.batch;
  a.len_q = p.len_q;
  a.len_kv = static_cast<int32_t>(length);
  a.mask.q_offsets = g.q_offsets.const_data_ptr<int32_t>();
  a.mask.num_documents = 1;
  a.mask.offsets_stride = p.batch > 1 ? 2 : 0;
}

// Packed: one batch, a document for each sequence, of whose keys only some are in use.
void set_packed(Gathered& g, const PagedParams& p, int64_t length, const at::TensorOptions& options) {
  const int64_t keys = length * p.batch;
  TORCH_CHECK_VALUE(keys <= kMaxLength, "block_table: ", p.batch, " sequences of up to ", length,
                    " tokens make more than ", kMaxLength,
                    " keys, the limit of a call without a fused kernel; split "
                    "the batch");
  g.kv_offsets = at::arange(p.batch + 1, options).mul_(length);
  AttentionParams& a = g.params;
  a.batch = 1;
  a.len_q = p.total_q;
  a.len_kv = static_cast<int32_t>(keys);
  a.k.stride_batch = a.v.stride_batch = 0;
  a.mask.q_offsets = p.cu_seqlens_q;
  a.mask.num_documents = p.batch;
  a.mask.kv_used = p.kv_lens;
}

Gathered gather(const PagedCall& call) {
  const PagedParams& p = call.params;
  const at::Device device = call.q.device();
  const at::TensorOptions ints = at::TensorOptions().device(device).dtype(at::kInt);
  Gathered g;
  const int64_t length = int64_t{p.max_pages} * p.page_size;
  g.k = at::empty({p.batch, length, p.heads_kv, p.head_dim}, call.q.options());
  g.v = at::empty({p.batch, length, p.heads_kv, p.head_dim_v}, call.q.options());
  AttentionParams& a = g.params;
  const pages::GatherParams params = gather_params(p, g.k, g.v);
  a.k = params.k;
  a.v = params.v;
  if (p.cu_seqlens_q == nullptr) {
    set_padded(g, p, length, ints);
  } else {
    set_packed(g, p, length, ints);
  }
  a.heads_q = p.heads_q;
  a.heads_kv = p.heads_kv;
  a.head_dim = p.head_dim;
  a.head_dim_v = p.head_dim_v;
  a.dtype = p.dtype;
  a.q = p.q;
  a.out = p.out;
  a.lse = p.lse;
  a.lse_stride_batch = p.lse_stride_batch;
  a.lse_stride_head = p.lse_stride_head;
  a.lse_stride_seq = p.lse_stride_seq;
  a.scale = p.scale;
  a.softcap = p.softcap;
  a.sinks = p.sinks;
  a.alibi_slopes = p.alibi_slopes;
  a.alibi_stride_batch = p.alibi_stride_batch;
  a.mask.kind = MaskKind::kComposite;
  a.mask.kv_offsets = g.kv_offsets.const_data_ptr<int32_t>();
  a.mask.local = p.band;
  a.mask.positions_local = true;
  pages::gather_pages(params, num_sms_of(device), stream_of(device));
  return g;
}

// Of padded queries as packed ones: sequences one after another, all of one length.
PagedCall pack(const PagedCall& call, Tensor& out, Tensor& lse) {
  PagedCall packed = call;
  PagedParams& p = packed.params;
  const int64_t batch = p.batch, length = p.len_q;
  const auto flat = [](const Tensor& x) { return x.transpose(1, 2).flatten(0, 1).unsqueeze(0).transpose(1, 2); };
  packed.q = readable(flat(call.q), Rows::kTma);
  p.q = tensor_ref(packed.q);
  out = at::empty({1, batch * length, p.heads_q, p.head_dim_v}, call.q.options()).transpose(1, 2);
  p.out = tensor_ref(out);
  if (p.lse != nullptr) {
    lse = at::empty({p.heads_q, batch * length}, call.q.options().dtype(at::kFloat));
    p.lse = lse.mutable_data_ptr<float>();
    p.lse_stride_batch = 0;
    p.lse_stride_head = batch * length;
  }
  const at::TensorOptions ints = at::TensorOptions().device(call.q.device()).dtype(at::kInt);
  p.cu_seqlens_q = packed.held.emplace_back(at::arange(batch + 1, ints).mul_(length)).const_data_ptr<int32_t>();
  p.total_q = static_cast<int32_t>(batch * length);
  return packed;
}

void attend_gathered(const PagedCall& call) {
  const at::Device device = call.q.device();
  const int32_t num_sms = num_sms_of(device);
  const Gathered g = gather(call);
  const fwd::KernelInfo* kernel = fwd::find_kernel(g.params);
  TORCH_CHECK_NOT_IMPLEMENTED(kernel != nullptr, "q: head_dim ", g.params.head_dim, " and ", g.params.head_dim_v,
                              " have no sm90 kernel; backend=\"torch\" runs them");
  constexpr int64_t kMaxTiles = std::numeric_limits<int32_t>::max() - 65536;
  const int64_t row_blocks = ceil_div(g.params.len_q, kernel->block_q);
  TORCH_CHECK_VALUE(int64_t{g.params.batch} * g.params.heads_q <= kMaxTiles / row_blocks, "q: ", g.params.batch, " x ",
                    g.params.heads_q, " heads x ", row_blocks, " blocks of rows are above the limit of ", kMaxTiles,
                    "; split the batch");
  const Workspace workspace(fwd::workspace_size(g.params, num_sms), std::nullopt);
  fwd::attention_forward(g.params, workspace.get(), num_sms, stream_of(device));
}

// The lse of packed rows that lie in no sequence: the forward kernel gives them their sink.
void clear_outside(const PagedCall& call) {
  const PagedParams& p = call.params;
  if (p.lse == nullptr || p.sinks == nullptr) return;
  const at::TensorOptions options = call.q.options().dtype(at::kInt);
  const Tensor offsets = view_of(p.cu_seqlens_q, {p.batch + 1}, options);
  const Tensor row = at::arange(p.total_q, options);
  const Tensor outside = row.lt(offsets.select(0, 0)).logical_or_(row.ge(offsets.select(0, p.batch)));
  view_of(p.lse, {p.heads_q, p.total_q}, options.dtype(at::kFloat))
      .masked_fill_(outside, -std::numeric_limits<double>::infinity());
}

void attend_two_stage(const PagedCall& call, const Tensor& out, const Tensor& lse) {
  const PagedParams& p = call.params;
  if (p.cu_seqlens_q != nullptr) {
    attend_gathered(call);
    return clear_outside(call);
  }
  if (!runs_packed(p)) return attend_gathered(call);
  Tensor packed_out, packed_lse;
  attend_gathered(pack(call, packed_out, packed_lse));
  const int64_t batch = p.batch, length = p.len_q;
  out.copy_(packed_out.squeeze(0).unflatten(1, {batch, length}).transpose(0, 1));
  if (p.lse != nullptr) lse.copy_(packed_lse.unflatten(1, {batch, length}).transpose(0, 1));
}

const char* why_not_fused(const PagedParams& p) {
  if (p.softcap > 0 || p.alibi_slopes != nullptr) return "the fused prefill kernel has no softcap and no alibi_slopes";
  if (p.page_size % 8 != 0) return "the fused prefill kernel has page sizes that are multiples of 8";
  return "the fused prefill kernel serves head dims up to 64, or multiples of 64, and pools that make a tensor map";
}

}  // namespace

void CudaPaged::check_device(const char* name, at::Device device) {
  const int major = attribute(cudaDevAttrComputeCapabilityMajor, device);
  const int minor = attribute(cudaDevAttrComputeCapabilityMinor, device);
  TORCH_CHECK(major == 9 && minor == 0, name, ": on ", device, " of compute capability ", major, ".", minor,
              "; the kernels need 9.0 (H100, H200), backend=\"torch\" runs on any device");
}

PagedPath CudaPaged::path(const PagedParams& p, int32_t num_sms) {
  PagedPath path;
  if (const decode::KernelInfo* kernel = decode::find_kernel(p)) {
    path.path = "decode";
    path.kernel = kernel->name;
    path.reason = "few query rows for a kv head: keys are split over the SMs";
    path.workspace_bytes = static_cast<int64_t>(decode::workspace_size(p, num_sms));
  } else if (const prefill::KernelInfo* kernel = prefill::find_kernel(p)) {
    path.path = "prefill";
    path.kernel = kernel->name;
    path.reason = "many query rows for a kv head: tiles of rows, keys read from their pages";
    path.workspace_bytes = static_cast<int64_t>(prefill::workspace_size(p, num_sms));
  } else if (goes_head_by_head(p)) {
    path.path = "decode";
    path.kernel = decode::find_kernel(sized_as_one(p))->name;
    path.reason = "a tree over many query rows of a kv head: the query heads of a group one after another";
    path.workspace_bytes = static_cast<int64_t>(decode::workspace_size(sized_as_one(p), num_sms));
  } else if (const char* gap = two_stage_gap(p)) {
    path.reason = gap;
  } else {
    path.path = "two-stage";
    path.reason = why_not_fused(p);
  }
  return path;
}

void CudaPaged::attend(PagedCall& call, const Tensor& out, const Tensor& lse, const std::optional<Tensor>& given) {
  const PagedParams& p = call.params;
  const at::Device device = call.q.device();
  const int32_t num_sms = num_sms_of(device);
  if (decode::find_kernel(p) != nullptr) {
    const Workspace workspace(decode::workspace_size(p, num_sms), given);
    decode::paged_decode(p, workspace.get(), num_sms, stream_of(device));
  } else if (prefill::find_kernel(p) != nullptr) {
    make_scale_positive(call);
    const Workspace workspace(prefill::workspace_size(p, num_sms), given);
    prefill::paged_prefill(p, workspace.get(), num_sms, stream_of(device));
  } else if (goes_head_by_head(p)) {
    const Workspace workspace(decode::workspace_size(sized_as_one(p), num_sms), given);
    const at::TensorOptions floats = call.q.options().dtype(at::kFloat);
    for (int32_t head = 0; head < p.heads_q / p.heads_kv; ++head) {
      const PagedParams one = one_of_group(p, head, floats, call.held);
      decode::paged_decode(one, workspace.get(), num_sms, stream_of(device));
    }
  } else {
    const char* gap = two_stage_gap(p);
    TORCH_CHECK_NOT_IMPLEMENTED(gap == nullptr, gap, "; backend=\"torch\" runs it");
    make_scale_positive(call);
    attend_two_stage(call, out, lse);
  }
}

void CudaPaged::gather(const pages::GatherParams& params, at::Device device) {
  TORCH_CHECK_NOT_IMPLEMENTED(params.element_bytes == 2,
                              "k_pages: gathered on a GPU in torch.float16 and torch.bfloat16 alone; "
                              "flashmsa.gather_pages(..., backend=\"torch\") takes any dtype");
  pages::gather_pages(params, num_sms_of(device), stream_of(device));
}

void CudaPaged::append(const pages::AppendParams& params, at::Device device) {
  TORCH_CHECK_NOT_IMPLEMENTED(params.dtype == DType::kF16 || params.dtype == DType::kBF16,
                              "k_pages: appended to on a GPU in torch.float16 and torch.bfloat16 alone; "
                              "flashmsa.append_kv(..., backend=\"torch\") takes any dtype");
  pages::append_kv(params, stream_of(device));
}

}  // namespace flashmsa::binding
