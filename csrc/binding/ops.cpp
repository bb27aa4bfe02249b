// Schemas and dispatch of flashmsa::attention and its backward pass.
//
//   Autograd                     see autograd.cpp
//   FuncTorchBatched, Batched    refuse
//   AutocastCPU, AutocastCUDA    cast q, k, v as scaled_dot_product_attention's are; the backward pass takes what was saved
//   CPU, CUDA                    the two native backends
//   Meta                         shapes and strides for tracing
//
// NOTE: attention.out returns lse alone: torch.compile has no operators of which one result aliases an argument and
// another does not.
#include "binding/ops.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <limits>

#include "binding/arguments.h"
#include "binding/backend.h"
#include "binding/build.h"

namespace flashmsa::binding {

using at::IntArrayRef;
using at::Tensor;
using at::TensorList;
using Scale = std::optional<double>;

const c10::TypedOperatorHandle<Functional>& functional_op() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("flashmsa::attention", "").typed<Functional>();
  return op;
}

const c10::TypedOperatorHandle<Out>& out_op() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("flashmsa::attention", "out").typed<Out>();
  return op;
}

const c10::TypedOperatorHandle<Backward>& backward_op() {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("flashmsa::attention_backward", "").typed<Backward>();
  return op;
}

namespace {

// ---- CPU and CUDA

template <class Backend>
Tensor empty_lse(const Arguments& args, bool return_lse) {
  if (!return_lse) return Backend::empty({0}, {1}, at::kFloat);
  const int64_t batch = args.q.size(0), heads = args.q.size(1), length = args.q.size(2);
  return Backend::empty({batch, heads, length}, {heads * length, length, 1}, at::kFloat);
}

// Of checked arguments.
template <class Backend>
void run(const Arguments& args, const Tensor& out, const Tensor& lse) {
  if (out.numel() == 0) return;
  if (args.k.size(2) == 0) {
    out.zero_();
    if (lse.numel() == 0) return;
    lse.fill_(-std::numeric_limits<double>::infinity());
    if (args.sinks.has_value()) lse.copy_(args.sinks->unsqueeze(-1));
    return;
  }
  Call call = make_call(args, out, lse, Backend::kRows);
  Backend::run(call);
}

template <class Backend>
Tensor empty_out(const Arguments& args) {
  const Layout<int64_t> layout = out_layout<int64_t>(args);
  return Backend::empty(layout.sizes, layout.strides, args.q.scalar_type());
}

template <class Backend>
Result attention_on(const Tensor& q, const Tensor& k, const Tensor& v, int64_t mask, IntArrayRef mask_ints,
                    TensorList mask_tensors, Scale scale, double softcap, const OptionalTensor& sinks,
                    const OptionalTensor& alibi_slopes, double dropout_p, const OptionalTensor& rng_state,
                    bool /*deterministic*/, bool return_lse) {
  const Arguments args{q,     k,       v,     mask,         mask_ints, mask_tensors,
                       scale, softcap, sinks, alibi_slopes, dropout_p, rng_state};
  check_arguments<int64_t>(args);
  Backend::check_device(q.device());
  const c10::OptionalDeviceGuard guard = Backend::make_current(q.device());
  Tensor out = empty_out<Backend>(args);
  Tensor lse = empty_lse<Backend>(args, return_lse);
  run<Backend>(args, out, lse);
  return {std::move(out), std::move(lse)};
}

template <class Backend>
Tensor attention_out_on(const Tensor& q, const Tensor& k, const Tensor& v, int64_t mask, IntArrayRef mask_ints,
                        TensorList mask_tensors, Scale scale, double softcap, const OptionalTensor& sinks,
                        const OptionalTensor& alibi_slopes, double dropout_p, const OptionalTensor& rng_state,
                        bool /*deterministic*/, bool return_lse, Tensor& out) {
  const Arguments args{q,     k,       v,     mask,         mask_ints, mask_tensors,
                       scale, softcap, sinks, alibi_slopes, dropout_p, rng_state};
  check_arguments<int64_t>(args);
  check_out<int64_t>(args, out);
  Backend::check_device(q.device());
  const c10::OptionalDeviceGuard guard = Backend::make_current(q.device());
  // Gives a lazy clone memory of its own, on the device that is current: from here on addresses are used as they are.
  if (out.numel() > 0) out.mutable_data_ptr();
  Tensor lse = empty_lse<Backend>(args, return_lse);
  if (takes_result_directly(args, out, Backend::kRows)) {
    run<Backend>(args, out, lse);
  } else {
    const Tensor result = empty_out<Backend>(args);
    run<Backend>(args, result, lse);
    out.copy_(result);
  }
  return lse;
}

// ---- Their backward pass

// exp(sink - lse) delta; rows that saw nothing, not even a sink, count for nothing.
Tensor sink_terms(const Tensor& sinks, const DeltaRows& rows) {
  if (rows.sink_terms.defined()) return rows.sink_terms;
  const Tensor sink = rows.lse.dim() == 4 ? sinks.view({1, -1, 1, 1}) : sinks.view({1, -1, 1});
  const Tensor live = rows.lse != -std::numeric_limits<double>::infinity();
  return at::where(live, at::exp(sink - rows.lse).mul_(rows.delta), 0.0);
}

// Minus their sum over everything but heads.
Tensor sinks_gradient(const Tensor& sinks, const std::vector<DeltaRows>& rows) {
  Tensor gradient = at::zeros(sinks.sizes(), sinks.options());
  for (const DeltaRows& part : rows) {
    const Tensor terms = sink_terms(sinks, part);
    gradient -= terms.sum(terms.dim() == 4 ? IntArrayRef{0, 2, 3} : IntArrayRef{0, 2});
  }
  return gradient;
}

// Without queries, or without keys, where delta is -dlse.
std::vector<DeltaRows> zero_gradients(const Gradients& given, const Tensor& dq, const Tensor& dk, const Tensor& dv) {
  dq.zero_();
  dk.zero_();
  dv.zero_();
  if (!given.dlse.has_value()) return {};
  return {{given.lse, given.dlse->neg(), Tensor()}};
}

template <class Backend>
Tensor empty_like_of(const Tensor& tensor) {
  const Layout<int64_t> layout = layout_like<int64_t>(tensor, tensor.size(3));
  return Backend::empty(layout.sizes, layout.strides, tensor.scalar_type());
}

template <class Backend>
BackwardResult attention_backward_on(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q, const Tensor& k,
                                     const Tensor& v, const Tensor& out, const Tensor& lse, int64_t mask,
                                     IntArrayRef mask_ints, TensorList mask_tensors, Scale scale, double softcap,
                                     const OptionalTensor& sinks, const OptionalTensor& alibi_slopes, double dropout_p,
                                     const OptionalTensor& rng_state, bool deterministic) {
  const Arguments args{q,     k,       v,     mask,         mask_ints, mask_tensors,
                       scale, softcap, sinks, alibi_slopes, dropout_p, rng_state};
  const Gradients given{dout, dlse, out, lse};
  check_arguments<int64_t>(args);
  check_gradients<int64_t>(args, given);
  Backend::check_device(q.device());
  const c10::OptionalDeviceGuard guard = Backend::make_current(q.device());
  Tensor dq = empty_like_of<Backend>(q), dk = empty_like_of<Backend>(k), dv = empty_like_of<Backend>(v);
  std::vector<DeltaRows> rows;
  if (out.numel() == 0 || k.size(2) == 0) {
    rows = zero_gradients(given, dq, dk, dv);
  } else {
    const Tensor delta = Backend::empty({lse.numel()}, {1}, at::kFloat);
    BackwardCall call = make_backward_call(args, given, dq, dk, dv, delta, Backend::kRows);
    call.params.deterministic = deterministic || at::globalContext().deterministicAlgorithms();
    rows = Backend::run_backward(call);
  }
  Tensor dsinks = sinks.has_value() ? sinks_gradient(*sinks, rows) : Backend::empty({0}, {1}, at::kFloat);
  return {std::move(dq), std::move(dk), std::move(dv), std::move(dsinks)};
}

// ---- Meta

Tensor meta_lse(const Arguments& args, bool return_lse) {
  const auto options = args.q.options().dtype(at::kFloat);
  if (!return_lse) return at::empty({0}, options);
  return at::empty_symint({args.q.sym_size(0), args.q.sym_size(1), args.q.sym_size(2)}, options);
}

Result attention_meta(const Tensor& q, const Tensor& k, const Tensor& v, int64_t mask, IntArrayRef mask_ints,
                      TensorList mask_tensors, Scale scale, double softcap, const OptionalTensor& sinks,
                      const OptionalTensor& alibi_slopes, double dropout_p, const OptionalTensor& rng_state,
                      bool /*deterministic*/, bool return_lse) {
  const Arguments args{q,     k,       v,     mask,         mask_ints, mask_tensors,
                       scale, softcap, sinks, alibi_slopes, dropout_p, rng_state};
  check_arguments<c10::SymInt>(args);
  const Layout<c10::SymInt> layout = out_layout<c10::SymInt>(args);
  return {at::empty_strided_symint(layout.sizes, layout.strides, q.options()), meta_lse(args, return_lse)};
}

Tensor attention_out_meta(const Tensor& q, const Tensor& k, const Tensor& v, int64_t mask, IntArrayRef mask_ints,
                          TensorList mask_tensors, Scale scale, double softcap, const OptionalTensor& sinks,
                          const OptionalTensor& alibi_slopes, double dropout_p, const OptionalTensor& rng_state,
                          bool /*deterministic*/, bool return_lse, Tensor& out) {
  const Arguments args{q,     k,       v,     mask,         mask_ints, mask_tensors,
                       scale, softcap, sinks, alibi_slopes, dropout_p, rng_state};
  check_arguments<c10::SymInt>(args);
  check_out<c10::SymInt>(args, out);
  return meta_lse(args, return_lse);
}

BackwardResult attention_backward_meta(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q, const Tensor& k,
                                       const Tensor& v, const Tensor& out, const Tensor& lse, int64_t mask,
                                       IntArrayRef mask_ints, TensorList mask_tensors, Scale scale, double softcap,
                                       const OptionalTensor& sinks, const OptionalTensor& alibi_slopes,
                                       double dropout_p, const OptionalTensor& rng_state, bool /*deterministic*/) {
  const Arguments args{q,     k,       v,     mask,         mask_ints, mask_tensors,
                       scale, softcap, sinks, alibi_slopes, dropout_p, rng_state};
  check_arguments<c10::SymInt>(args);
  check_gradients<c10::SymInt>(args, {dout, dlse, out, lse});
  const auto empty_like = [](const Tensor& tensor) {
    const Layout<c10::SymInt> layout = layout_like<c10::SymInt>(tensor, tensor.sym_size(3));
    return at::empty_strided_symint(layout.sizes, layout.strides, tensor.options());
  };
  const auto options = q.options().dtype(at::kFloat);
  Tensor dsinks = sinks.has_value() ? at::empty_symint(sinks->sym_sizes(), options) : at::empty({0}, options);
  return {empty_like(q), empty_like(k), empty_like(v), std::move(dsinks)};
}

// ---- vmap

[[noreturn]] void refuse_vmap() {
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "flashmsa.attention: vmap is not supported; fold the mapped dimension into the batch");
  throw std::logic_error("unreachable");
}

// A kernel of the operator's own signature that refuses.
template <class Signature>
struct RefuseVmap;
template <class R, class... Args>
struct RefuseVmap<R(Args...)> {
  static R call(Args...) { refuse_vmap(); }
};

void refuse_vmap_of_all(torch::Library& m) {
  m.impl("attention", &RefuseVmap<Functional>::call);
  m.impl("attention.out", &RefuseVmap<Out>::call);
  m.impl("attention_backward", &RefuseVmap<Backward>::call);
}

// ---- Autocast

template <c10::DispatchKey kKey, c10::DeviceType kDevice>
Result attention_autocast(const Tensor& q, const Tensor& k, const Tensor& v, int64_t mask, IntArrayRef mask_ints,
                          TensorList mask_tensors, Scale scale, double softcap, const OptionalTensor& sinks,
                          const OptionalTensor& alibi_slopes, double dropout_p, const OptionalTensor& rng_state,
                          bool deterministic, bool return_lse) {
  const c10::impl::ExcludeDispatchKeyGuard guard(kKey);
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(kDevice);
  const auto cast = [&](const Tensor& tensor) { return at::autocast::cached_cast(dtype, tensor, kDevice); };
  return functional_op().call(cast(q), cast(k), cast(v), mask, mask_ints, mask_tensors, scale, softcap, sinks,
                              alibi_slopes, dropout_p, rng_state, deterministic, return_lse);
}

#ifndef FLASHMSA_WITH_CUDA
[[noreturn]] void refuse_cuda(const Tensor& q) {
  TORCH_CHECK(false, "q: on ", q.device(), ", but this build of flashmsa has no CUDA kernels: ", kCudaLeftOut,
              "; backend=\"torch\" runs without them");
  throw std::logic_error("unreachable");
}

// Likewise; the first tensor tells the device.
template <class Signature>
struct RefuseCuda;
template <class R, class... Args>
struct RefuseCuda<R(const Tensor&, Args...)> {
  static R call(const Tensor& first, Args...) { refuse_cuda(first); }
};
#endif

}  // namespace

Result attention(const Tensor& q, const Tensor& k, const Tensor& v, int64_t mask, IntArrayRef mask_ints,
                 TensorList mask_tensors, Scale scale, double softcap, const OptionalTensor& sinks,
                 const OptionalTensor& alibi_slopes, double dropout_p, const OptionalTensor& rng_state,
                 bool deterministic, bool return_lse) {
  return functional_op().call(q, k, v, mask, mask_ints, mask_tensors, scale, softcap, sinks, alibi_slopes, dropout_p,
                              rng_state, deterministic, return_lse);
}

Tensor attention_out(const Tensor& q, const Tensor& k, const Tensor& v, int64_t mask, IntArrayRef mask_ints,
                     TensorList mask_tensors, Scale scale, double softcap, const OptionalTensor& sinks,
                     const OptionalTensor& alibi_slopes, double dropout_p, const OptionalTensor& rng_state,
                     bool deterministic, bool return_lse, Tensor& out) {
  // NOTE: the dispatcher's fallback for these takes an operator that returns something else than `out` for a broken one.
  TORCH_CHECK_VALUE(!out.is_neg(),
                    "out: a view that negates what is written to it; must own its values, as "
                    "out.resolve_neg() does");
  return out_op().call(q, k, v, mask, mask_ints, mask_tensors, scale, softcap, sinks, alibi_slopes, dropout_p,
                       rng_state, deterministic, return_lse, out);
}

TORCH_LIBRARY(flashmsa, m) {
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, int mask, int[] mask_ints, Tensor[] mask_tensors, float? scale, "
      "float softcap, Tensor? sinks, Tensor? alibi_slopes, float dropout_p, Tensor? rng_state, bool deterministic, "
      "bool return_lse) -> (Tensor out, Tensor lse)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "attention.out(Tensor q, Tensor k, Tensor v, int mask, int[] mask_ints, Tensor[] mask_tensors, float? scale, "
      "float softcap, Tensor? sinks, Tensor? alibi_slopes, float dropout_p, Tensor? rng_state, bool deterministic, "
      "bool return_lse, *, Tensor(a!) out) -> Tensor lse",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, int mask, "
      "int[] mask_ints, Tensor[] mask_tensors, float? scale, float softcap, Tensor? sinks, Tensor? alibi_slopes, "
      "float dropout_p, Tensor? rng_state, bool deterministic) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(flashmsa, CPU, m) {
  m.impl("attention", &attention_on<CpuBackend>);
  m.impl("attention.out", &attention_out_on<CpuBackend>);
  m.impl("attention_backward", &attention_backward_on<CpuBackend>);
}

TORCH_LIBRARY_IMPL(flashmsa, CUDA, m) {
#ifdef FLASHMSA_WITH_CUDA
  m.impl("attention", &attention_on<CudaBackend>);
  m.impl("attention.out", &attention_out_on<CudaBackend>);
  m.impl("attention_backward", &attention_backward_on<CudaBackend>);
#else
  m.impl("attention", &RefuseCuda<Functional>::call);
  m.impl("attention.out", &RefuseCuda<Out>::call);
  m.impl("attention_backward", &RefuseCuda<Backward>::call);
#endif
}

TORCH_LIBRARY_IMPL(flashmsa, Meta, m) {
  m.impl("attention", &attention_meta);
  m.impl("attention.out", &attention_out_meta);
  m.impl("attention_backward", &attention_backward_meta);
}

TORCH_LIBRARY_IMPL(flashmsa, FuncTorchBatched, m) { refuse_vmap_of_all(m); }

// torch.autograd.grad(is_grads_batched=True) has a vmap of its own.
TORCH_LIBRARY_IMPL(flashmsa, Batched, m) { refuse_vmap_of_all(m); }

TORCH_LIBRARY_IMPL(flashmsa, AutocastCPU, m) {
  m.impl("attention", &attention_autocast<c10::DispatchKey::AutocastCPU, at::kCPU>);
}

TORCH_LIBRARY_IMPL(flashmsa, AutocastCUDA, m) {
  m.impl("attention", &attention_autocast<c10::DispatchKey::AutocastCUDA, at::kCUDA>);
}

}  // namespace flashmsa::binding
