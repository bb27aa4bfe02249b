#include "binding/arguments.h"

#include <ATen/ops/zeros.h>
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
  TORCH_CHECK_VALUE(within(length, kMaxLength), name, ": ", what, " ", length, " is above the limit of ", kMaxLength,
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
  TORCH_CHECK_VALUE(within(sizes.back(), kMaxLength), "mask ", name, ": ", sizes.back(),
                    " offsets are above the limit of ", kMaxLength);
  TORCH_CHECK_VALUE(offsets.dim() == 1 || sizes[0] == batch, "mask ", name, ": ", sizes[0],
                    " rows do not match the batch of ", batch,
                    "; one-dimensional offsets are shared by the whole batch");
}

constexpr size_t kBandInts = 9;
constexpr size_t kCompositeInts = 2 * kBandInts + 2;

template <class Int>
struct MaskCheck {
  at::IntArrayRef ints;
  at::TensorList tensors;
  at::Device device;
  const Extent<Int>& extent;

  void expect(const char* name, size_t int_count, size_t tensor_count) const {
    TORCH_CHECK_VALUE(ints.size() == int_count && tensors.size() == tensor_count, "mask: ", name, " takes ", int_count,
                      " ints and ", tensor_count, " tensors, got ", ints.size(), " and ", tensors.size());
  }

  void flag(const char* name, const char* what) const {
    TORCH_CHECK_VALUE(ints[0] == 0 || ints[0] == 1, "mask: ", name, "'s ", what, " flag is ", ints[0],
                      "; must be 0 or 1");
  }

  void range(const char* name, const char* what, size_t at, int64_t low) const {
    TORCH_CHECK_VALUE(ints[at] >= low && ints[at] <= kUnbounded, "mask: ", name, "'s ", what, " is ", ints[at],
                      "; must be from ", low, " to ", kUnbounded, low == 0 ? " (no bound)" : "");
  }

  // An int32 tensor of this mask.
  const at::Tensor& int32(const char* name, size_t at, int64_t dim, const char* shape) const {
    const at::Tensor& tensor = tensors[at];
    TORCH_CHECK_TYPE(tensor.scalar_type() == at::kInt, "mask ", name, ": dtype ", dtype_name(tensor.scalar_type()),
                     " is not supported; must be torch.int32");
    TORCH_CHECK_VALUE(tensor.device() == device, "mask ", name, ": on ", tensor.device(), ", q is on ", device,
                      "; move the mask with mask.to(q.device)");
    TORCH_CHECK_VALUE(tensor.dim() == dim, "mask ", name, ": ", tensor.dim(), " dimensions, shape ", tensor.sym_sizes(),
                      "; must be ", shape);
    return tensor;
  }

  void size(const char* name, size_t at, int64_t dim, const Int& want, const char* whose) const {
    const auto sizes = at::symint::sizes<Int>(tensors[at]);
    TORCH_CHECK_VALUE(sizes[dim] == want, "mask ", name, ": shape ", tensors[at].sym_sizes(), " does not match ", whose,
                      " ", want);
  }

  void size_or_one(const char* name, size_t at, int64_t dim, const Int& want, const char* whose) const {
    const auto sizes = at::symint::sizes<Int>(tensors[at]);
    TORCH_CHECK_VALUE(sizes[dim] == 1 || sizes[dim] == want, "mask ", name, ": shape ", tensors[at].sym_sizes(),
                      " does not match ", whose, " ", want, "; 1 is shared by all");
  }

  void offsets(size_t first) const {
    check_offsets<Int>("offsets", tensors[first], extent.batch, device);
    check_offsets<Int>("kv_offsets", tensors[first + 1], extent.batch, device);
    TORCH_CHECK_VALUE(at::symint::sizes<Int>(tensors[first]) == at::symint::sizes<Int>(tensors[first + 1]),
                      "mask kv_offsets: shape ", tensors[first + 1].sym_sizes(), " does not match offsets' ",
                      tensors[first].sym_sizes());
  }

  // (1 or batch, 1 or heads_q, length); `kv`: or heads_kv
  void plane(const char* name, size_t at, const Int& length, const char* whose, bool kv) const {
    int32(name, at, 3, "(batch or 1, heads or 1, length)");
    size_or_one(name, at, 0, extent.batch, "the batch of");
    if (!kv || at::symint::sizes<Int>(tensors[at])[1] != extent.heads_kv) {
      size_or_one(name, at, 1, extent.heads_q, "the heads of q:");
    }
    const std::string length_of = std::string(whose) + "'s length";
    size(name, at, 2, length, length_of.c_str());
  }

  int64_t flags() const { return ints.size() < kCompositeInts ? 0 : ints[2 * kBandInts]; }

  size_t composite_tensors(const char* name) const {
    TORCH_CHECK_VALUE(flags() >= 0 && flags() < 256, "mask: ", name, "'s flags are ", flags(),
                      "; must be from 0 to 255");
    size_t count = (flags() & kDocuments) != 0 ? 2 : 0;
    for (const int64_t bit : {kKvUsed, kGlobalPrefixEnd, kGlobalPrefixStart, kLocalPrefixEnd, kLocalPrefixStart}) {
      count += (flags() & bit) != 0;
    }
    return count;
  }

  void composite(const char* name) const {
    for (size_t at = 0; at < 2 * kBandInts; ++at) range(name, "bound", at, 0);
    const bool documents = (flags() & kDocuments) != 0;
    TORCH_CHECK_VALUE(documents || (flags() & (kKvUsed | kLocalPrefixEnd | kLocalPrefixStart)) == 0, "mask: ", name,
                      "'s flags ", flags(), " need documents");
    size_t at = 0;
    if (documents) offsets(0), at = 2;
    const auto one_per = [&](int64_t bit, const char* what, bool document) {
      if ((flags() & bit) == 0) return;
      int32(what, at, 1, document ? "(documents,)" : "(batch,)");
      if (document) {
        TORCH_CHECK_VALUE(tensors[0].dim() == 1, "mask ", what, ": one per document, but offsets have shape ",
                          tensors[0].sym_sizes(), "; must be (documents + 1,)");
        size(what, at, 0, at::symint::sizes<Int>(tensors[0])[0] - 1, "the number of documents");
      } else {
        size(what, at, 0, extent.batch, "the batch of");
      }
      ++at;
    };
    one_per(kKvUsed, "seqused_k", true);
    one_per(kGlobalPrefixEnd, "prefix", false);
    one_per(kGlobalPrefixStart, "prefix", false);
    one_per(kLocalPrefixEnd, "prefix", true);
    one_per(kLocalPrefixStart, "prefix", true);
  }

  // A block mask's list; its tensors begin at `first`.
  void list(size_t first) const {
    const int64_t block_q = ints[kCompositeInts], block_kv = ints[kCompositeInts + 1];
    for (const int64_t block : {block_q, block_kv}) {
      TORCH_CHECK_VALUE(block > 0 && block % 64 == 0 && block <= kMaxLength, "mask: BlockSparse's block_size is ",
                        block_q, " x ", block_kv, "; must be multiples of 64");
    }
    const Int rows = (extent.len_q + (block_q - 1)) / block_q, columns = (extent.len_kv + (block_kv - 1)) / block_kv;
    TORCH_CHECK_VALUE(rows == ints[kCompositeInts + 2] && columns == ints[kCompositeInts + 3],
                      "mask: ", ints[kCompositeInts + 2], " x ", ints[kCompositeInts + 3], " blocks of ", block_q,
                      " x ", block_kv, " do not fit ", extent.len_q, " queries and ", extent.len_kv, " keys; must be ",
                      rows, " x ", columns);
    const Int cell_rows = (extent.len_q + 127) / 128;
    int32("row_start", first, 3, "(batch or 1, heads or 1, cell rows + 1)");
    int32("whole_count", first + 1, 3, "(batch or 1, heads or 1, cell rows)");
    for (const size_t at : {first, first + 1}) {
      size_or_one("blocks", at, 0, extent.batch, "the batch of");
      size_or_one("blocks", at, 1, extent.heads_q, "the heads:");
    }
    // A list covers its blocks, which may reach past the last query's cell.
    const Int listed_rows = at::symint::sizes<Int>(tensors[first + 1])[2];
    TORCH_CHECK_VALUE(listed_rows >= cell_rows && within(listed_rows, kUnbounded - 1), "mask whole_count: shape ",
                      tensors[first + 1].sym_sizes(), " has fewer than ", cell_rows, " cell rows");
    size("row_start", first, 2, listed_rows + 1, "whole_count's cell rows + 1:");
    TORCH_CHECK_VALUE(at::symint::sizes<Int>(tensors[first])[0] == at::symint::sizes<Int>(tensors[first + 1])[0] &&
                          at::symint::sizes<Int>(tensors[first])[1] == at::symint::sizes<Int>(tensors[first + 1])[1],
                      "mask whole_count: shape ", tensors[first + 1].sym_sizes(), " does not match row_start's ",
                      tensors[first].sym_sizes());
    int32("cells", first + 2, 1, "(capacity,)");
    int32("detail", first + 3, 1, "(capacity,)");
    size("detail", first + 3, 0, at::symint::sizes<Int>(tensors[first + 2])[0], "cells'");
    int32("bits", first + 4, 3, "(tiles, 128, 4)");
    size("bits", first + 4, 1, Int(128), "the rows of a cell:");
    size("bits", first + 4, 2, Int(4), "the words of a row:");
    for (size_t at = first; at < first + 5; ++at) {
      TORCH_CHECK_VALUE(within(at::symint::sizes<Int>(tensors[at])[0], kUnbounded),
                        "mask: BlockSparse's list is above the limit of ", kUnbounded, " entries");
      TORCH_CHECK_VALUE(tensors[at].is_contiguous(), "mask: BlockSparse's list must be contiguous, as it is made");
    }
  }
};

// softcap, sinks and alibi_slopes.
template <class Int>
void check_options(const Arguments& args, const Int& batch, const Int& heads) {
  const bool finite = args.q.scalar_type() == at::kDouble ? std::isfinite(args.softcap)
                                                          : std::isfinite(static_cast<float>(args.softcap));
  TORCH_CHECK_VALUE(finite && args.softcap >= 0.0, "softcap: ", args.softcap,
                    " is not supported; must be positive and finite in fp32, or 0 for none");
  const auto check = [&](const char* name, const std::optional<at::Tensor>& tensor) {
    TORCH_CHECK_TYPE(tensor->scalar_type() == at::kFloat, name, ": dtype ", dtype_name(tensor->scalar_type()),
                     " is not supported; must be torch.float32");
    TORCH_CHECK_VALUE(tensor->device() == args.q.device(), name, ": on ", tensor->device(), ", q is on ",
                      args.q.device(), "; all on one device");
  };
  if (args.sinks.has_value()) {
    check("sinks", args.sinks);
    TORCH_CHECK_VALUE(args.sinks->dim() == 1 && at::symint::sizes<Int>(*args.sinks)[0] == heads, "sinks: shape ",
                      args.sinks->sym_sizes(), "; must be (", heads, ",), one per head of q");
  }
  if (args.alibi_slopes.has_value()) {
    check("alibi_slopes", args.alibi_slopes);
    const auto sizes = at::symint::sizes<Int>(*args.alibi_slopes);
    const bool good =
        (sizes.size() == 1 && sizes[0] == heads) || (sizes.size() == 2 && sizes[0] == batch && sizes[1] == heads);
    TORCH_CHECK_VALUE(good, "alibi_slopes: shape ", args.alibi_slopes->sym_sizes(), "; must be (", heads, ",) or (",
                      batch, ", ", heads, ")");
    TORCH_CHECK_NOT_IMPLEMENTED(args.mask != static_cast<int64_t>(MaskKind::kHash),
                                "alibi_slopes: not implemented with HashBucket, whose rows are sorted; "
                                "backend=\"torch\" has them");
  }
}

void check_dropout(const Arguments& args) {
  // NOTE: so that NaN fails too.
  TORCH_CHECK_VALUE(args.dropout_p >= 0.0 && args.dropout_p < 1.0, "dropout_p: ", args.dropout_p,
                    "; must lie in [0, 1)");
  if (!args.rng_state.has_value()) {
    TORCH_CHECK_VALUE(args.dropout_p == 0.0, "rng_state: None with dropout_p ", args.dropout_p,
                      "; must be int64 (2,), seed and offset");
    return;
  }
  const at::Tensor& state = *args.rng_state;
  TORCH_CHECK_TYPE(state.scalar_type() == at::kLong, "seed: dtype ", dtype_name(state.scalar_type()),
                   " is not supported; must be an int, or torch.int64 (seed, offset)");
  TORCH_CHECK_VALUE(state.dim() == 1 && state.sym_size(0) == 2, "seed: shape ", state.sym_sizes(),
                    "; must be (2,), seed and offset");
  TORCH_CHECK_VALUE(state.device() == args.q.device(), "seed: on ", state.device(), ", q is on ", args.q.device(),
                    "; all on one device");
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
void check_mask(int64_t mask, at::IntArrayRef mask_ints, at::TensorList mask_tensors, at::Device device,
                const Extent<Int>& extent) {
  // NOTE: before the cast, which would take a kind modulo 2^32.
  TORCH_CHECK_VALUE(mask >= 0 && mask <= static_cast<int64_t>(MaskKind::kBlockSparse), "mask: kind ", mask,
                    " is unknown; must be 0 (Dense), 1 (Causal), 2 (Document), 3 (Composite), 4 (DilatedWindow), 5 "
                    "(HashBucket) or 6 (BlockSparse)");
  const MaskCheck<Int> check{mask_ints, mask_tensors, device, extent};
  switch (static_cast<MaskKind>(mask)) {
    case MaskKind::kDense:
      return check.expect("Dense", 0, 0);
    case MaskKind::kCausal:
      check.expect("Causal", 1, 0);
      return check.flag("Causal", "top_left");
    case MaskKind::kDocument:
      check.expect("Document", 1, 2);
      check.flag("Document", "causal");
      return check.offsets(0);
    case MaskKind::kComposite:
      check.expect("Composite", kCompositeInts, check.composite_tensors("Composite"));
      return check.composite("Composite");
    case MaskKind::kDilated:
      check.expect("DilatedWindow", 4, 0);
      check.flag("DilatedWindow", "top_left");
      check.range("DilatedWindow", "left", 1, 0);
      check.range("DilatedWindow", "right", 2, 0);
      return check.range("DilatedWindow", "dilation", 3, 1);
    case MaskKind::kHash:
      check.expect("HashBucket", 1, 4);
      check.flag("HashBucket", "causal");
      check.plane("q_bucket", 0, extent.len_q, "q", false);
      check.plane("kv_bucket", 1, extent.len_kv, "k", true);
      check.plane("row_begin", 2, extent.len_q, "q", true);
      return check.plane("row_end", 3, extent.len_q, "q", true);
    case MaskKind::kBlockSparse: {
      const size_t tensors = check.composite_tensors("BlockSparse");
      check.expect("BlockSparse", kCompositeInts + 4, tensors + 5);
      check.composite("BlockSparse");
      return check.list(tensors);
    }
  }
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
  const auto q = at::symint::sizes<Int>(args.q);
  const auto k = at::symint::sizes<Int>(args.k);
  check_options<Int>(args, q[0], q[1]);
  check_dropout(args);
  check_mask<Int>(args.mask, args.mask_ints, args.mask_tensors, args.q.device(), {q[0], q[1], k[1], q[2], k[2]});
}

template <class Int>
Layout<Int> layout_like(const at::Tensor& tensor, const Int& head_dim) {
  const auto sizes = at::symint::sizes<Int>(tensor);
  const Int batch = sizes[0], heads = sizes[1], length = sizes[2];
  const auto strides = at::symint::strides<Int>(tensor);
  bool heads_inside;
  if constexpr (std::is_same_v<Int, c10::SymInt>) {
    heads_inside = TORCH_GUARD_OR_FALSE(strides[1].sym_lt(strides[2]));
  } else {
    heads_inside = strides[1] < strides[2];
  }
  const std::array<Int, 4> result = {batch, heads, length, head_dim};
  const Int plane = heads_inside ? heads * head_dim : length * head_dim;  // elements of all heads of a row, or rows
  if (heads_inside) return {result, {length * plane, head_dim, plane, Int(1)}};
  return {result, {heads * plane, plane, head_dim, Int(1)}};
}

template <class Int>
Layout<Int> out_layout(const Arguments& args) {
  return layout_like<Int>(args.q, at::symint::sizes<Int>(args.v)[3]);
}

template <class Int>
void check_gradients(const Arguments& args, const Gradients& gradients) {
  const auto want = out_layout<Int>(args).sizes;
  const auto check = [&](const char* name, const at::Tensor& tensor) {
    check_kind(name, tensor, args.q);
    TORCH_CHECK_VALUE(at::symint::sizes<Int>(tensor) == at::ArrayRef<Int>(want), name, ": shape ", tensor.sym_sizes(),
                      " does not match the result's ", at::ArrayRef<Int>(want));
  };
  check("out", gradients.out);
  check("dout", gradients.dout);
  const at::ArrayRef<Int> rows = at::ArrayRef<Int>(want).slice(0, 3);
  const auto check_rows = [&](const char* name, const at::Tensor& tensor) {
    TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat, name, ": dtype ", dtype_name(tensor.scalar_type()),
                     " is not supported; must be torch.float32");
    TORCH_CHECK_VALUE(tensor.device() == args.q.device(), name, ": on ", tensor.device(), ", q is on ", args.q.device(),
                      "; all on one device");
    TORCH_CHECK_VALUE(at::symint::sizes<Int>(tensor) == rows, name, ": shape ", tensor.sym_sizes(), "; must be ", rows,
                      ", (batch, heads, length) of q");
  };
  check_rows("lse", gradients.lse);
  if (gradients.dlse.has_value()) check_rows("dlse", *gradients.dlse);
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

bool may_overlap_itself(const at::Tensor& tensor) {
  if (tensor.numel() < 2) return false;
  TORCH_INTERNAL_ASSERT(tensor.dim() == 4);
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

bool takes_result_directly(const Arguments& args, const at::Tensor& out, Rows rows) {
  if (!fits(out, rows)) return false;
  if (ranges_meet(out, args.q) || ranges_meet(out, args.k) || ranges_meet(out, args.v)) return false;
  if (args.sinks.has_value() && ranges_meet(out, *args.sinks)) return false;
  if (args.alibi_slopes.has_value() && ranges_meet(out, *args.alibi_slopes)) return false;
  if (args.rng_state.has_value() && ranges_meet(out, *args.rng_state)) return false;
  return std::none_of(args.mask_tensors.begin(), args.mask_tensors.end(),
                      [&](const at::Tensor& tensor) { return ranges_meet(out, tensor); });
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

namespace {

// q_offsets and kv_offsets into the mask. One stride serves both, so tensors that differ in theirs are copied.
void set_documents(MaskArgs& result, const at::Tensor& q, const at::Tensor& kv, std::vector<at::Tensor>& held) {
  result.num_documents = static_cast<int32_t>(q.size(-1) - 1);
  const auto unit = [](const at::Tensor& t) { return t.size(-1) == 1 || t.stride(-1) == 1; };
  const bool as_they_are = unit(q) && unit(kv) && (q.dim() == 1 || q.stride(0) == kv.stride(0));
  const at::Tensor& q_offsets = held.emplace_back(as_they_are ? q : q.contiguous());
  result.q_offsets = q_offsets.const_data_ptr<int32_t>();
  result.offsets_stride = q.dim() == 2 && q.size(0) > 1 ? q_offsets.stride(0) : 0;
  result.kv_offsets = held.emplace_back(as_they_are ? kv : kv.contiguous()).const_data_ptr<int32_t>();
}

const int32_t* dense_ints(const at::Tensor& tensor, std::vector<at::Tensor>& held) {
  return held.emplace_back(tensor.contiguous()).const_data_ptr<int32_t>();
}

BandArgs make_band(at::IntArrayRef ints) {
  BandArgs band;
  const auto pair = [&](size_t at, int32_t (&to)[2]) {
    to[0] = static_cast<int32_t>(ints[at]);
    to[1] = static_cast<int32_t>(ints[at + 1]);
  };
  pair(0, band.left);
  pair(2, band.right);
  pair(4, band.prefix);
  band.keep_first = static_cast<int32_t>(ints[6]);
  pair(7, band.outer);
  return band;
}

// Returns how many tensors it took.
size_t set_composite(MaskArgs& result, at::IntArrayRef ints, at::TensorList tensors, std::vector<at::Tensor>& held) {
  result.global = make_band(ints.slice(0, kBandInts));
  result.local = make_band(ints.slice(kBandInts, kBandInts));
  const int64_t flags = ints[2 * kBandInts];
  size_t at = 0;
  if ((flags & kDocuments) != 0) set_documents(result, tensors[0], tensors[1], held), at = 2;
  const auto take = [&](int64_t bit, const int32_t*& to) {
    if ((flags & bit) != 0) to = dense_ints(tensors[at++], held);
  };
  take(kKvUsed, result.kv_used);
  take(kGlobalPrefixEnd, result.global.prefixes[0]);
  take(kGlobalPrefixStart, result.global.prefixes[1]);
  take(kLocalPrefixEnd, result.local.prefixes[0]);
  take(kLocalPrefixStart, result.local.prefixes[1]);
  result.positions_local = (flags & kLocalPositions) != 0;
  result.positions_top_left = (flags & kStartPositions) != 0;
  return at;
}

// (batch or 1, heads or 1, length) with a unit last stride.
const int32_t* set_plane(const at::Tensor& tensor, int64_t& stride_batch, int64_t& stride_head,
                         std::vector<at::Tensor>& held) {
  const bool unit = tensor.size(2) <= 1 || tensor.stride(2) == 1;
  const at::Tensor& plane = held.emplace_back(unit ? tensor : tensor.contiguous());
  stride_batch = plane.size(0) > 1 ? plane.stride(0) : 0;
  stride_head = plane.size(1) > 1 ? plane.stride(1) : 0;
  return plane.const_data_ptr<int32_t>();
}

void set_list(MaskArgs& result, at::TensorList tensors, std::vector<at::Tensor>& held) {
  for (const at::Tensor& tensor : tensors) held.push_back(tensor);
  const at::Tensor& whole = tensors[1];
  CellListArgs& list = result.list;
  list.row_start = tensors[0].const_data_ptr<int32_t>();
  list.whole_count = whole.const_data_ptr<int32_t>();
  list.cells = tensors[2].const_data_ptr<int32_t>();
  list.detail = tensors[3].const_data_ptr<int32_t>();
  list.tiles = static_cast<int32_t>(tensors[4].size(0));
  list.bits = list.tiles > 0 ? tensors[4].const_data_ptr<int32_t>() : nullptr;
  list.rows = static_cast<int32_t>(whole.size(2));
  list.capacity = static_cast<int32_t>(tensors[2].size(0));
  list.stride_batch = whole.size(0) > 1 ? static_cast<int32_t>(whole.size(1)) : 0;
  list.stride_head = whole.size(1) > 1 ? 1 : 0;
}

}  // namespace

MaskArgs make_mask(int64_t mask, at::IntArrayRef mask_ints, at::TensorList mask_tensors, int64_t heads_q,
                   std::vector<at::Tensor>& held) {
  MaskArgs result;
  result.kind = static_cast<MaskKind>(mask);
  switch (result.kind) {
    case MaskKind::kDense:
      break;
    case MaskKind::kCausal:
      result.top_left = mask_ints[0] != 0;
      break;
    case MaskKind::kDocument:
      result.causal = mask_ints[0] != 0;
      set_documents(result, mask_tensors[0], mask_tensors[1], held);
      break;
    case MaskKind::kComposite:
      set_composite(result, mask_ints, mask_tensors, held);
      break;
    case MaskKind::kDilated:
      result.top_left = mask_ints[0] != 0;
      result.left = static_cast<int32_t>(mask_ints[1]);
      result.right = static_cast<int32_t>(mask_ints[2]);
      result.dilation = static_cast<int32_t>(mask_ints[3]);
      break;
    case MaskKind::kHash: {
      result.causal = mask_ints[0] != 0;
      result.q_order = set_plane(mask_tensors[0], result.q_order_stride_batch, result.q_order_stride_head, held);
      result.kv_order = set_plane(mask_tensors[1], result.kv_order_stride_batch, result.kv_order_stride_head, held);
      result.kv_order_heads = static_cast<int32_t>(mask_tensors[1].size(1));
      // One pair of strides serves both ends; rows per kv head are repeated for its query heads.
      const auto per_query_head = [&](const at::Tensor& rows) {
        const int64_t heads = rows.size(1);
        return heads > 1 && heads != heads_q ? rows.repeat_interleave(heads_q / heads, 1) : rows.contiguous();
      };
      const at::Tensor begin = per_query_head(mask_tensors[2]), end = per_query_head(mask_tensors[3]);
      TORCH_CHECK_VALUE(begin.sizes() == end.sizes(), "mask row_end: shape ", end.sizes(),
                        " does not match row_begin's ", begin.sizes());
      result.row_begin = set_plane(begin, result.row_stride_batch, result.row_stride_head, held);
      result.row_end = set_plane(end, result.row_stride_batch, result.row_stride_head, held);
      break;
    }
    case MaskKind::kBlockSparse: {
      const size_t taken = set_composite(result, mask_ints, mask_tensors, held);
      set_list(result, mask_tensors.slice(taken), held);
      break;
    }
  }
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
  p.lse = lse.defined() && lse.numel() > 0 ? static_cast<float*>(const_cast<void*>(lse.const_data_ptr())) : nullptr;
  p.scale = args.scale.value_or(1.0 / std::sqrt(static_cast<double>(p.head_dim)));
  p.lse_stride_seq = 1;
  p.lse_stride_head = p.len_q;
  p.lse_stride_batch = int64_t{p.heads_q} * p.len_q;
  p.softcap = args.softcap;
  if (args.sinks.has_value()) p.sinks = call.held.emplace_back(args.sinks->contiguous()).const_data_ptr<float>();
  if (args.alibi_slopes.has_value()) {
    const at::Tensor& slopes = call.held.emplace_back(args.alibi_slopes->contiguous());
    p.alibi_slopes = slopes.const_data_ptr<float>();
    p.alibi_stride_batch = slopes.dim() == 2 ? p.heads_q : 0;
  }
  p.dropout_p = args.dropout_p;
  if (args.dropout_p > 0.0) {
    p.rng_state = call.held.emplace_back(args.rng_state->contiguous()).const_data_ptr<int64_t>();
  }
  p.mask = make_mask(args.mask, args.mask_ints, args.mask_tensors, p.heads_q, call.held);
  return call;
}

BackwardCall make_backward_call(const Arguments& args, const Gradients& gradients, const at::Tensor& dq,
                                const at::Tensor& dk, const at::Tensor& dv, const at::Tensor& delta, Rows rows) {
  BackwardCall result;
  result.out = readable(gradients.out, rows);
  result.lse = gradients.lse.contiguous();
  result.dout = readable(gradients.dout, rows);
  if (gradients.dlse.has_value()) result.dlse = gradients.dlse->contiguous();
  result.dq = dq;
  result.dk = dk;
  result.dv = dv;
  result.delta = delta;
  result.call = make_call(args, result.out, result.lse, rows);

  BackwardParams& p = result.params;
  const AttentionParams& forward = result.call.params;
  p.dout = tensor_ref(result.dout);
  if (result.dlse.defined()) p.dlse = result.dlse.const_data_ptr<float>();
  p.dlse_stride_batch = forward.lse_stride_batch;
  p.dlse_stride_head = forward.lse_stride_head;
  p.dlse_stride_seq = forward.lse_stride_seq;
  p.dq = tensor_ref(dq);
  p.dk = tensor_ref(dk);
  p.dv = tensor_ref(dv);
  p.delta = delta.mutable_data_ptr<float>();
  if (args.sinks.has_value() && forward.dtype == DType::kF64) {
    result.sink_terms = at::zeros(delta.sizes(), delta.options().dtype(at::kDouble));
    p.sink_terms = result.sink_terms.mutable_data_ptr<double>();
  }
  return result;
}

template void check_arguments<int64_t>(const Arguments&);
template void check_arguments<c10::SymInt>(const Arguments&);
template void check_mask<int64_t>(int64_t, at::IntArrayRef, at::TensorList, at::Device, const Extent<int64_t>&);
template void check_mask<c10::SymInt>(int64_t, at::IntArrayRef, at::TensorList, at::Device, const Extent<c10::SymInt>&);
template void check_out<int64_t>(const Arguments&, const at::Tensor&);
template void check_out<c10::SymInt>(const Arguments&, const at::Tensor&);
template void check_gradients<int64_t>(const Arguments&, const Gradients&);
template void check_gradients<c10::SymInt>(const Arguments&, const Gradients&);
template Layout<int64_t> layout_like<int64_t>(const at::Tensor&, const int64_t&);
template Layout<c10::SymInt> layout_like<c10::SymInt>(const at::Tensor&, const c10::SymInt&);
template Layout<int64_t> out_layout<int64_t>(const Arguments&);
template Layout<c10::SymInt> out_layout<c10::SymInt>(const Arguments&);

}  // namespace flashmsa::binding
