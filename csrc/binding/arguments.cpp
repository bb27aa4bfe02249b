#include "binding/arguments.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace flashmsa::binding {
namespace {

constexpr int64_t kMinHeadDim = 8;
constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kHeadDimStep = 8;
constexpr int64_t kRowAlignment = 16;  // bytes; what a tensor map asks of strides and base

// NOTE: rows and keys are int32 in the kernels; the margin lets them round up to whole tiles.
constexpr int64_t kMaxLength = std::numeric_limits<int32_t>::max() - 65536;

void check_kind(const char* name, const at::Tensor& tensor, const at::Tensor& q) {
  TORCH_CHECK_VALUE(tensor.dim() == 4, name, ": ", tensor.dim(), " dimensions, shape ", tensor.sym_sizes(),
                    "; must have 4, (batch, heads, length, head_dim)",
                    tensor.dim() == 3 ? "; unsqueeze(0) adds the batch" : "");
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, name, ": layout ", tensor.layout(),
                   " is not supported; must be torch.strided, as ", name, ".to_dense() gives");
  TORCH_CHECK_TYPE(tensor.scalar_type() == q.scalar_type(), name, ": dtype ", dtype_name(tensor.scalar_type()),
                   " does not match q's ", dtype_name(q.scalar_type()), "; cast with ", name, ".to(q.dtype)");
  TORCH_CHECK_VALUE(tensor.device() == q.device(), name, ": on ", tensor.device(), ", q is on ", q.device(),
                    "; move it with ", name, ".to(q.device)");
}

void check_dtype(const at::Tensor& q) {
  switch (q.scalar_type()) {
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
      return;
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e5m2:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "q: dtype ", dtype_name(q.scalar_type()),
                                  " is not implemented yet; cast q, k and v to torch.bfloat16");
    default:
      TORCH_CHECK_TYPE(false, "q: dtype ", dtype_name(q.scalar_type()),
                       " is not supported; must be torch.float16, torch.bfloat16, torch.float32 or torch.float64");
  }
}

template <class Int>
void check_head_dim(const char* name, const Int& head_dim) {
  const bool good = head_dim >= kMinHeadDim && head_dim <= kMaxHeadDim && head_dim % kHeadDimStep == 0;
  const auto nearest = [&] {
    const Int rounded = (head_dim + (kHeadDimStep - 1)) / kHeadDimStep * kHeadDimStep;
    return rounded < kMinHeadDim ? Int(kMinHeadDim) : rounded > kMaxHeadDim ? Int(kMaxHeadDim) : rounded;
  };
  TORCH_CHECK_VALUE(good, name, ": head_dim ", head_dim, " is not supported; must be a multiple of ", kHeadDimStep,
                    " from ", kMinHeadDim, " to ", kMaxHeadDim, ", the nearest is ", nearest(),
                    head_dim < kMaxHeadDim ? " (pad with zeros, and keep scale at 1/sqrt of the unpadded q's)" : "");
}

template <class Int>
void check_length(const char* name, const char* what, const Int& length) {
  TORCH_CHECK_VALUE(length <= kMaxLength, name, ": ", what, " ", length, " is above the limit of ", kMaxLength,
                    "; split the call");
}

template <class Int>
void check_shapes(const Arguments& args) {
  const auto q = at::symint::sizes<Int>(args.q);
  const auto k = at::symint::sizes<Int>(args.k);
  const auto v = at::symint::sizes<Int>(args.v);

  check_head_dim<Int>("q", q[3]);
  TORCH_CHECK_VALUE(k[3] == q[3], "k: head_dim ", k[3], " does not match q's ", q[3]);
  check_head_dim<Int>("v", v[3]);
  TORCH_CHECK_VALUE(k[0] == q[0], "k: batch ", k[0], " does not match q's ", q[0],
                    "; k.expand(q.size(0), -1, -1, -1) shares one batch without a copy");
  TORCH_CHECK_VALUE(v[0] == q[0], "v: batch ", v[0], " does not match q's ", q[0],
                    "; v.expand(q.size(0), -1, -1, -1) shares one batch without a copy");
  TORCH_CHECK_VALUE(v[1] == k[1], "v: ", v[1], " heads do not match k's ", k[1]);
  TORCH_CHECK_VALUE(v[2] == k[2], "v: length ", v[2], " does not match k's ", k[2]);
  TORCH_CHECK_VALUE(k[1] > 0 ? q[1] % k[1] == 0 : q[1] == 0, "k: ", k[1], " heads do not divide q's ", q[1],
                    "; query head h uses kv head h // (heads_q / heads_kv)");

  check_length<Int>("q", "batch", q[0]);
  check_length<Int>("q", "heads", q[1]);
  check_length<Int>("q", "length", q[2]);
  check_length<Int>("k", "length", k[2]);
}

template <class Int>
void check_offsets(const char* name, const at::Tensor& offsets, const Int& batch, at::Device device) {
  TORCH_CHECK_TYPE(offsets.scalar_type() == at::kInt, "mask ", name, ": dtype ", dtype_name(offsets.scalar_type()),
                   " is not supported; must be torch.int32, cast with ", name, ".to(torch.int32)");
  TORCH_CHECK_VALUE(offsets.device() == device, "mask ", name, ": on ", offsets.device(), ", q is on ", device,
                    "; move the mask with mask.to(q.device)");
  TORCH_CHECK_VALUE(offsets.dim() == 1 || offsets.dim() == 2, "mask ", name, ": ", offsets.dim(), " dimensions, shape ",
                    offsets.sym_sizes(), "; must be (documents + 1,), or (batch, documents + 1)");
  const auto sizes = at::symint::sizes<Int>(offsets);
  TORCH_CHECK_VALUE(sizes.back() >= 1, "mask ", name, ": is empty; must hold documents + 1 offsets, the first 0");
  TORCH_CHECK_VALUE(sizes.back() <= kMaxLength, "mask ", name, ": ", sizes.back(), " offsets are above the limit of ",
                    kMaxLength);
  TORCH_CHECK_VALUE(offsets.dim() == 1 || sizes[0] == batch, "mask ", name, ": ", sizes[0],
                    " rows do not match the batch of ", batch,
                    "; one-dimensional offsets are shared by the whole batch");
}

// Whether two elements of `tensor` may share memory. Conservative: true also for interleavings that do not collide.
bool may_overlap_itself(const at::Tensor& tensor) {
  if (tensor.numel() < 2) return false;
  std::array<int, 4> order = {0, 1, 2, 3};
  std::sort(order.begin(), order.end(), [&](int a, int b) { return tensor.stride(a) < tensor.stride(b); });
  int64_t extent = 1;  // elements spanned by the dimensions with smaller strides
  for (const int d : order) {
    if (tensor.size(d) == 1) continue;
    if (tensor.stride(d) < extent) return true;
    extent += tensor.stride(d) * (tensor.size(d) - 1);
  }
  return false;
}

// Whether the byte ranges of two tensors meet.
bool ranges_meet(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  const auto range = [](const at::Tensor& t) {
    int64_t last = 0;
    for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
    const auto* begin = static_cast<const char*>(t.const_data_ptr());
    return std::pair(begin, begin + (last + 1) * t.itemsize());
  };
  const auto [a_begin, a_end] = range(a);
  const auto [b_begin, b_end] = range(b);
  return a_begin < b_end && b_begin < a_end;
}

}  // namespace

std::string dtype_name(at::ScalarType dtype) { return "torch." + std::string(c10::getDtypeNames(dtype).first); }

DType core_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return DType::kF16;
    case at::kBFloat16:
      return DType::kBF16;
    case at::kFloat:
      return DType::kF32;
    case at::kDouble:
      return DType::kF64;
    default:
      TORCH_CHECK_TYPE(false, "dtype ", dtype_name(dtype),
                       " is not supported; must be torch.float16, torch.bfloat16, torch.float32 or torch.float64");
  }
}

template <class Int>
void check_mask(int64_t mask, at::IntArrayRef mask_ints, at::TensorList mask_tensors, const Int& batch,
                at::Device device) {
  const auto expect = [&](const char* name, size_t ints, size_t tensors) {
    TORCH_CHECK_VALUE(mask_ints.size() == ints && mask_tensors.size() == tensors, "mask: ", name, " takes ", ints,
                      " ints and ", tensors, " tensors, got ", mask_ints.size(), " and ", mask_tensors.size());
    TORCH_CHECK_VALUE(ints == 0 || mask_ints[0] == 0 || mask_ints[0] == 1, "mask: ", name, "'s flag is ", mask_ints[0],
                      "; must be 0 or 1");
  };
  switch (mask) {
    case static_cast<int64_t>(MaskKind::kDense):
      return expect("Dense", 0, 0);
    case static_cast<int64_t>(MaskKind::kCausal):
      return expect("Causal", 1, 0);
    case static_cast<int64_t>(MaskKind::kBand):
      expect("Band", 4, 0);
      for (size_t bound = 1; bound < 4; ++bound) {
        TORCH_CHECK_VALUE(mask_ints[bound] >= 0 && mask_ints[bound] <= INT32_MAX, "mask: Band's bound ", bound, " is ",
                          mask_ints[bound], "; must be from 0 to 2147483647 (no bound)");
      }
      return;
    case static_cast<int64_t>(MaskKind::kDocument):
      expect("Document", 1, 2);
      check_offsets<Int>("offsets", mask_tensors[0], batch, device);
      check_offsets<Int>("kv_offsets", mask_tensors[1], batch, device);
      TORCH_CHECK_VALUE(at::symint::sizes<Int>(mask_tensors[0]) == at::symint::sizes<Int>(mask_tensors[1]),
                        "mask kv_offsets: shape ", mask_tensors[1].sym_sizes(), " does not match offsets' ",
                        mask_tensors[0].sym_sizes());
      return;
  }
  TORCH_CHECK_VALUE(false, "mask: kind ", mask, " is unknown; must be 0 (Dense), 1 (Causal), 2 (Document) or 3 (Band)");
}

template <class Int>
void check_arguments(const Arguments& args) {
  check_kind("q", args.q, args.q);
  check_dtype(args.q);
  check_kind("k", args.k, args.q);
  check_kind("v", args.v, args.q);
  check_shapes<Int>(args);
  if (args.scale.has_value()) {
    // The kernels compute in fp32; only fp64 keeps a scale beyond it.
    const bool finite = args.q.scalar_type() == at::kDouble ? std::isfinite(*args.scale)
                                                            : std::isfinite(static_cast<float>(*args.scale));
    TORCH_CHECK_VALUE(finite, "scale: ", *args.scale, " is not finite in fp32; must be finite, the default is 1/sqrt(",
                      at::symint::sizes<Int>(args.q)[3], ")");
  }
  check_mask<Int>(args.mask, args.mask_ints, args.mask_tensors, at::symint::sizes<Int>(args.q)[0], args.q.device());
}

template <class Int>
OutLayout<Int> out_layout(const Arguments& args) {
  const auto sizes = at::symint::sizes<Int>(args.q);
  const Int batch = sizes[0], heads = sizes[1], length = sizes[2], head_dim_v = at::symint::sizes<Int>(args.v)[3];
  const auto strides = at::symint::strides<Int>(args.q);
  bool heads_inside;
  if constexpr (std::is_same_v<Int, c10::SymInt>) {
    heads_inside = TORCH_GUARD_OR_FALSE(strides[1].sym_lt(strides[2]));
  } else {
    heads_inside = strides[1] < strides[2];
  }
  const std::array<Int, 4> result = {batch, heads, length, head_dim_v};
  const Int plane = heads_inside ? heads * head_dim_v : length * head_dim_v;  // elements of all heads of a row, or rows
  if (heads_inside) return {result, {length * plane, head_dim_v, plane, Int(1)}};
  return {result, {heads * plane, plane, head_dim_v, Int(1)}};
}

template <class Int>
void check_out(const Arguments& args, const at::Tensor& out) {
  check_kind("out", out, args.q);
  const auto want = out_layout<Int>(args).sizes;
  TORCH_CHECK_VALUE(at::symint::sizes<Int>(out) == at::ArrayRef<Int>(want), "out: shape ", out.sym_sizes(),
                    " does not match the result's ", at::ArrayRef<Int>(want));
  if constexpr (std::is_same_v<Int, int64_t>) {
    TORCH_CHECK_VALUE(!may_overlap_itself(out), "out: strides ", out.strides(), " let elements of shape ", out.sizes(),
                      " overlap; pass a tensor that owns each of its elements");
  }
}

bool takes_result_directly(const Arguments& args, const at::Tensor& out, Rows rows) {
  if (!fits(out, rows)) return false;
  if (ranges_meet(out, args.q) || ranges_meet(out, args.k) || ranges_meet(out, args.v)) return false;
  return std::none_of(args.mask_tensors.begin(), args.mask_tensors.end(),
                      [&](const at::Tensor& offsets) { return ranges_meet(out, offsets); });
}

bool fits(const at::Tensor& tensor, Rows rows) {
  const at::IntArrayRef sizes = tensor.sizes();
  const at::IntArrayRef strides = tensor.strides();
  if (strides[3] != 1) return false;
  if (rows == Rows::kUnitStride || tensor.numel() == 0) return true;
  const int64_t step = kRowAlignment / static_cast<int64_t>(tensor.itemsize());
  for (int d = 0; d < 3; ++d) {
    if (sizes[d] > 1 && strides[d] % step != 0) return false;
  }
  if (sizes[2] > 1 && strides[2] < sizes[3]) return false;
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kRowAlignment == 0;
}

at::Tensor readable(const at::Tensor& tensor, Rows rows) {
  // NOTE: contiguous() would return a tensor whose only fault is its base pointer as it is.
  return fits(tensor, rows) ? tensor : tensor.clone(at::MemoryFormat::Contiguous);
}

TensorRef tensor_ref(const at::Tensor& tensor) {
  // NOTE: strides of dimensions of size 1 are arbitrary in torch and never followed; a tensor map still wants legal ones.
  const auto stride = [&](int d, int64_t of_one) { return tensor.size(d) > 1 ? tensor.stride(d) : of_one; };
  return {const_cast<void*>(tensor.const_data_ptr()), stride(0, 0), stride(1, 0), stride(2, tensor.size(3))};
}

MaskArgs make_mask(int64_t mask, at::IntArrayRef mask_ints, at::TensorList mask_tensors,
                   std::array<at::Tensor, 2>& offsets) {
  MaskArgs result;
  result.kind = static_cast<MaskKind>(mask);
  if (result.kind == MaskKind::kCausal || result.kind == MaskKind::kBand) result.top_left = mask_ints[0] != 0;
  if (result.kind == MaskKind::kBand) {
    result.left = static_cast<int32_t>(mask_ints[1]);
    result.right = static_cast<int32_t>(mask_ints[2]);
    result.prefix = static_cast<int32_t>(mask_ints[3]);
  }
  if (result.kind != MaskKind::kDocument) return result;

  result.causal = mask_ints[0] != 0;
  const at::Tensor& q = mask_tensors[0];
  const at::Tensor& kv = mask_tensors[1];
  result.num_documents = static_cast<int32_t>(q.size(-1) - 1);
  // One stride serves both, so tensors that differ in theirs are copied.
  const auto unit = [](const at::Tensor& t) { return t.size(-1) == 1 || t.stride(-1) == 1; };
  const bool as_they_are = unit(q) && unit(kv) && (q.dim() == 1 || q.stride(0) == kv.stride(0));
  offsets[0] = as_they_are ? q : q.contiguous();
  offsets[1] = as_they_are ? kv : kv.contiguous();
  result.q_offsets = offsets[0].const_data_ptr<int32_t>();
  result.kv_offsets = offsets[1].const_data_ptr<int32_t>();
  result.offsets_stride = q.dim() == 2 && q.size(0) > 1 ? offsets[0].stride(0) : 0;
  return result;
}

Call make_call(const Arguments& args, const at::Tensor& out, const at::Tensor& lse, Rows rows) {
  Call call;
  call.q = readable(args.q, rows);
  call.k = readable(args.k, rows);
  call.v = readable(args.v, rows);

  AttentionParams& p = call.params;
  p.batch = static_cast<int32_t>(args.q.size(0));
  p.heads_q = static_cast<int32_t>(args.q.size(1));
  p.heads_kv = static_cast<int32_t>(args.k.size(1));
  p.len_q = static_cast<int32_t>(args.q.size(2));
  p.len_kv = static_cast<int32_t>(args.k.size(2));
  p.head_dim = static_cast<int32_t>(args.q.size(3));
  p.head_dim_v = static_cast<int32_t>(args.v.size(3));
  p.dtype = core_dtype(args.q.scalar_type());
  p.q = tensor_ref(call.q);
  p.k = tensor_ref(call.k);
  p.v = tensor_ref(call.v);
  p.out = tensor_ref(out);
  p.lse = lse.defined() && lse.numel() > 0 ? lse.mutable_data_ptr<float>() : nullptr;
  p.scale = args.scale.value_or(1.0 / std::sqrt(static_cast<double>(p.head_dim)));
  p.mask = make_mask(args.mask, args.mask_ints, args.mask_tensors, call.offsets);
  return call;
}

template void check_arguments<int64_t>(const Arguments&);
template void check_arguments<c10::SymInt>(const Arguments&);
template void check_mask<int64_t>(int64_t, at::IntArrayRef, at::TensorList, const int64_t&, at::Device);
template void check_mask<c10::SymInt>(int64_t, at::IntArrayRef, at::TensorList, const c10::SymInt&, at::Device);
template void check_out<int64_t>(const Arguments&, const at::Tensor&);
template void check_out<c10::SymInt>(const Arguments&, const at::Tensor&);
template OutLayout<int64_t> out_layout<int64_t>(const Arguments&);
template OutLayout<c10::SymInt> out_layout<c10::SymInt>(const Arguments&);

}  // namespace flashmsa::binding
