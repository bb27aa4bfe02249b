// The arguments of one call: their checks, and their translation to AttentionParams.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "core/params.h"

namespace flashmsa::binding {

// NOTE: rows and keys are int32 in the kernels; the margin lets them round up to whole tiles.
inline constexpr int64_t kMaxLength = INT32_MAX - 65536;

// Whether a size is within a limit. A tracer's symbol is: the call that has a number for it asks again, and the question
// would bound what torch.export lets vary.
inline bool within(int64_t size, int64_t most) { return size <= most; }
inline bool within(const c10::SymInt& size, int64_t most) {
  const std::optional<int64_t> number = size.maybe_as_int();
  return !number.has_value() || *number <= most;
}

// What the op's schema hands over. Refers to the caller's tensors and lists.
struct Arguments {
  const at::Tensor& q;         // (batch, heads_q,  len_q,  head_dim)
  const at::Tensor& k;         // (batch, heads_kv, len_kv, head_dim)
  const at::Tensor& v;         // (batch, heads_kv, len_kv, head_dim_v)
  int64_t mask;                // a MaskKind
  at::IntArrayRef mask_ints;    // by kind, see make_mask
  at::TensorList mask_tensors;  // the same
  std::optional<double> scale;  // nullopt: 1 / sqrt(head_dim)
  double softcap;               // 0: none
  const std::optional<at::Tensor>& sinks;         // (heads_q,) fp32
  const std::optional<at::Tensor>& alibi_slopes;  // (heads_q,) or (batch, heads_q) fp32
  double dropout_p;                               // in [0, 1)
  const std::optional<at::Tensor>& rng_state;     // (2,) int64: seed and offset; needed with dropout
};

// What the backward pass is handed beside them.
struct Gradients {
  const at::Tensor& dout;                 // like out
  const std::optional<at::Tensor>& dlse;  // like lse; nullopt: zero
  const at::Tensor& out;                  // (batch, heads_q, len_q, head_dim_v) of q's dtype
  const at::Tensor& lse;                  // (batch, heads_q, len_q) fp32
};

// What a mask is applied to.
template <class Int>
struct Extent {
  Int batch, heads_q, heads_kv, len_q, len_kv;
};

// Raises on whatever does not look at values in device memory. Int is int64_t, or c10::SymInt under a tracer.
template <class Int>
void check_arguments(const Arguments& args);

// The mask's part of it; its tensors live on `device`.
template <class Int>
void check_mask(int64_t mask, at::IntArrayRef mask_ints, at::TensorList mask_tensors, at::Device device,
                const Extent<Int>& extent);

template <class Int>
void check_gradients(const Arguments& args, const Gradients& gradients);

// `out` must be able to take the result: shape, dtype, device, each element a place of its own.
template <class Int>
void check_out(const Arguments& args, const at::Tensor& out);

template <class Int>
struct Layout {
  std::array<Int, 4> sizes;
  std::array<Int, 4> strides;
};

// `tensor`'s shape with another last size, contiguous in its memory order: (B, H, S, D), or (B, S, H, D) where its head
// stride is the smaller one.
template <class Int>
Layout<Int> layout_like(const at::Tensor& tensor, const Int& head_dim);

// Of the result.
template <class Int>
Layout<Int> out_layout(const Arguments& args);

// What a backend can read where it lies.
enum class Rows {
  kUnitStride,  // the last stride is 1
  kTma,  // and: strides and base aligned to 16 bytes, rows of the sequence neither expanded nor overlapping
};

// A call ready to run, and the tensors that keep its pointers alive: the inputs, or copies of those that `rows` excludes.
struct Call {
  AttentionParams params;
  at::Tensor q, k, v;
  std::vector<at::Tensor> held;
};

// Of checked arguments. lse may be undefined.
Call make_call(const Arguments& args, const at::Tensor& out, const at::Tensor& lse, Rows rows);

// A backward pass ready to run.
struct BackwardCall {
  Call call;  // its params are those of the forward pass, with out and lse
  BackwardParams params;  // `forward` is unset: call.params, which a backend may still change
  at::Tensor out, lse, dout, dlse;  // dlse may be undefined
  at::Tensor dq, dk, dv;
  at::Tensor delta;       // (batch * heads_q * len_q,) fp32, see BackwardParams
  at::Tensor sink_terms;  // the same in fp64, where wanted
};
BackwardCall make_backward_call(const Arguments& args, const Gradients& gradients, const at::Tensor& dq,
                                const at::Tensor& dk, const at::Tensor& dv, const at::Tensor& delta, Rows rows);

// MaskArgs of checked arguments; `held` keeps their pointers alive. By kind, ints and tensors:
//   Dense        [] []
//   Causal       [top_left] []
//   Document     [causal] [q_offsets, kv_offsets]
//   Composite    [two bands of left, right, prefix (two alignments each), keep_first, outer (two): the global one, the local
//                one; flags; 0] [by flags: q_offsets, kv_offsets; kv_used; prefixes], see CompositeFlag
//   Dilated      [top_left, left, right, dilation] []
//   Hash         [causal] [q_order, kv_order, row_begin, row_end]
//   BlockSparse  [Composite's; block_q, block_kv, blocks of queries, blocks of keys]
//                [Composite's; row_start, whole_count, cells, detail, bits]
MaskArgs make_mask(int64_t mask, at::IntArrayRef mask_ints, at::TensorList mask_tensors, int64_t heads_q,
                   std::vector<at::Tensor>& held);

enum CompositeFlag : int64_t {
  kDocuments = 1,  // q_offsets, kv_offsets
  kKvUsed = 2,     // of each document
  kGlobalPrefixEnd = 4,  // one per batch, in place of the int; aligned at the end, at the start
  kGlobalPrefixStart = 8,
  kLocalPrefixEnd = 16,  // one per document
  kLocalPrefixStart = 32,
  kLocalPositions = 64,  // ALiBi counts inside documents
  kStartPositions = 128  // and from the start
};

// Whether `tensor` can be used where it lies, and `tensor` or a copy of which that is true.
bool fits(const at::Tensor& tensor, Rows rows);
at::Tensor readable(const at::Tensor& tensor, Rows rows);

// Whether two elements of a tensor of four dimensions may share memory. Conservative: true also for interleavings that do not
// collide.
bool may_overlap_itself(const at::Tensor& tensor);

// Whether the byte ranges of two tensors meet.
bool ranges_meet(const at::Tensor& a, const at::Tensor& b);

// Whether a backend may write to `out` while it reads: it fits, and its memory is clear of every input's. Elsewhere the
// result is made beside it and copied.
bool takes_result_directly(const Arguments& args, const at::Tensor& out, Rows rows);

// Pointer and strides as a backend sees them.
TensorRef tensor_ref(const at::Tensor& tensor);

std::string dtype_name(at::ScalarType dtype);
DType core_dtype(at::ScalarType dtype);

}  // namespace flashmsa::binding
