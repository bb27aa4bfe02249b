// Schemas and dispatch of flashmsa::attention.
//
//   Autograd, FuncTorchBatched   refuse what has no rule yet, so that no gradient is dropped in silence
//   AutocastCPU, AutocastCUDA    cast q, k, v as scaled_dot_product_attention's are
//   CPU, CUDA                    the two native backends
//   Meta                         shapes and strides for tracing
//
// NOTE: attention.out returns lse alone: torch.compile has no operators of which one result aliases an argument and
// another does not.
#include "binding/ops.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <limits>

#include "binding/arguments.h"
#include "binding/backend.h"
#include "binding/build.h"

namespace flashmsa::binding {
namespace {

using at::IntArrayRef;
using at::Tensor;
using at::TensorList;
using Scale = std::optional<double>;
using OptionalTensor = std::optional<Tensor>;

using Functional = Result(const Tensor&, const Tensor&, const Tensor&, int64_t, IntArrayRef, TensorList, Scale, double,
                          const OptionalTensor&, const OptionalTensor&, bool);
using Out = Tensor(const Tensor&, const Tensor&, const Tensor&, int64_t, IntArrayRef, TensorList, Scale, double,
                   const OptionalTensor&, const OptionalTensor&, bool, Tensor&);

const c10::TypedOperatorHandle<Functional>& functional_op() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("flashmsa::attention", "").typed<Functional>();
  return op;
}

const c10::TypedOperatorHandle<Out>& out_op() {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("flashmsa::attention", "out").typed<Out>();
  return op;
}

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
  const OutLayout<int64_t> layout = out_layout<int64_t>(args);
  return Backend::empty(layout.sizes, layout.strides, args.q.scalar_type());
}

template <class Backend>
Result attention_on(const Tensor& q, const Tensor& k, const Tensor& v, int64_t mask, IntArrayRef mask_ints,
                    TensorList mask_tensors, Scale scale, double softcap, const OptionalTensor& sinks,
                    const OptionalTensor& alibi_slopes, bool return_lse) {
  const Arguments args{q, k, v, mask, mask_ints, mask_tensors, scale, softcap, sinks, alibi_slopes};
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
                        const OptionalTensor& alibi_slopes, bool return_lse, Tensor& out) {
  const Arguments args{q, k, v, mask, mask_ints, mask_tensors, scale, softcap, sinks, alibi_slopes};
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

// ---- Meta

Tensor meta_lse(const Arguments& args, bool return_lse) {
  const auto options = args.q.options().dtype(at::kFloat);
  if (!return_lse) return at::empty({0}, options);
  return at::empty_symint({args.q.sym_size(0), args.q.sym_size(1), args.q.sym_size(2)}, options);
}

Result attention_meta(const Tensor& q, const Tensor& k, const Tensor& v, int64_t mask, IntArrayRef mask_ints,
                      TensorList mask_tensors, Scale scale, double softcap, const OptionalTensor& sinks,
                      const OptionalTensor& alibi_slopes, bool return_lse) {
  const Arguments args{q, k, v, mask, mask_ints, mask_tensors, scale, softcap, sinks, alibi_slopes};
  check_arguments<c10::SymInt>(args);
  const OutLayout<c10::SymInt> layout = out_layout<c10::SymInt>(args);
  return {at::empty_strided_symint(layout.sizes, layout.strides, q.options()), meta_lse(args, return_lse)};
}

Tensor attention_out_meta(const Tensor& q, const Tensor& k, const Tensor& v, int64_t mask, IntArrayRef mask_ints,
                          TensorList mask_tensors, Scale scale, double softcap, const OptionalTensor& sinks,
                          const OptionalTensor& alibi_slopes, bool return_lse, Tensor& out) {
  const Arguments args{q, k, v, mask, mask_ints, mask_tensors, scale, softcap, sinks, alibi_slopes};
  check_arguments<c10::SymInt>(args);
  check_out<c10::SymInt>(args, out);
  return meta_lse(args, return_lse);
}

// ---- Autograd, vmap

void refuse_gradient(const char* name, const Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(!tensor.requires_grad() || !at::GradMode::is_enabled(), name,
                              ": requires grad, but the backward pass is not implemented yet; call under "
                              "torch.no_grad(), or use backend=\"torch\"");
  TORCH_CHECK_NOT_IMPLEMENTED(
      !tensor._fw_grad(/*level=*/0).defined(), name,
      ": carries a forward-mode tangent, but forward-mode AD is not supported; detach it, or use reverse mode "
      "with backend=\"torch\"");
}

Result attention_autograd(c10::DispatchKeySet keys, const Tensor& q, const Tensor& k, const Tensor& v, int64_t mask,
                          IntArrayRef mask_ints, TensorList mask_tensors, Scale scale, double softcap,
                          const OptionalTensor& sinks, const OptionalTensor& alibi_slopes, bool return_lse) {
  refuse_gradient("q", q);
  refuse_gradient("k", k);
  refuse_gradient("v", v);
  if (sinks.has_value()) refuse_gradient("sinks", *sinks);
  if (alibi_slopes.has_value()) refuse_gradient("alibi_slopes", *alibi_slopes);
  const at::AutoDispatchBelowADInplaceOrView guard;
  return functional_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, q, k, v, mask, mask_ints, mask_tensors,
                                    scale, softcap, sinks, alibi_slopes, return_lse);
}

Tensor attention_out_autograd(c10::DispatchKeySet keys, const Tensor& q, const Tensor& k, const Tensor& v, int64_t mask,
                              IntArrayRef mask_ints, TensorList mask_tensors, Scale scale, double softcap,
                              const OptionalTensor& sinks, const OptionalTensor& alibi_slopes, bool return_lse,
                              Tensor& out) {
  refuse_gradient("q", q);
  refuse_gradient("k", k);
  refuse_gradient("v", v);
  if (sinks.has_value()) refuse_gradient("sinks", *sinks);
  if (alibi_slopes.has_value()) refuse_gradient("alibi_slopes", *alibi_slopes);
  refuse_gradient("out", out);
  Tensor lse = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return out_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, q, k, v, mask, mask_ints, mask_tensors, scale,
                               softcap, sinks, alibi_slopes, return_lse, out);
  }();
  if (!out.is_inference()) out.unsafeGetTensorImpl()->bump_version();
  return lse;
}

[[noreturn]] void refuse_vmap() {
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "flashmsa.attention: vmap is not supported; fold the mapped dimension into the batch");
  throw std::logic_error("unreachable");
}

Result attention_vmap(const Tensor&, const Tensor&, const Tensor&, int64_t, IntArrayRef, TensorList, Scale, double,
                      const OptionalTensor&, const OptionalTensor&, bool) {
  refuse_vmap();
}

Tensor attention_out_vmap(const Tensor&, const Tensor&, const Tensor&, int64_t, IntArrayRef, TensorList, Scale, double,
                          const OptionalTensor&, const OptionalTensor&, bool, Tensor&) {
  refuse_vmap();
}

// ---- Autocast

template <c10::DispatchKey kKey, c10::DeviceType kDevice>
Result attention_autocast(const Tensor& q, const Tensor& k, const Tensor& v, int64_t mask, IntArrayRef mask_ints,
                          TensorList mask_tensors, Scale scale, double softcap, const OptionalTensor& sinks,
                          const OptionalTensor& alibi_slopes, bool return_lse) {
  const c10::impl::ExcludeDispatchKeyGuard guard(kKey);
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(kDevice);
  const auto cast = [&](const Tensor& tensor) { return at::autocast::cached_cast(dtype, tensor, kDevice); };
  return functional_op().call(cast(q), cast(k), cast(v), mask, mask_ints, mask_tensors, scale, softcap, sinks,
                              alibi_slopes, return_lse);
}

#ifndef FLASHMSA_WITH_CUDA
[[noreturn]] void refuse_cuda(const Tensor& q) {
  TORCH_CHECK(false, "q: on ", q.device(), ", but this build of flashmsa has no CUDA kernels: ", kCudaLeftOut,
              "; backend=\"torch\" runs without them");
  throw std::logic_error("unreachable");
}

Result attention_cuda(const Tensor& q, const Tensor&, const Tensor&, int64_t, IntArrayRef, TensorList, Scale, double,
                      const OptionalTensor&, const OptionalTensor&, bool) {
  refuse_cuda(q);
}

Tensor attention_out_cuda(const Tensor& q, const Tensor&, const Tensor&, int64_t, IntArrayRef, TensorList, Scale,
                          double, const OptionalTensor&, const OptionalTensor&, bool, Tensor&) {
  refuse_cuda(q);
}
#endif

}  // namespace

Result attention(const Tensor& q, const Tensor& k, const Tensor& v, int64_t mask, IntArrayRef mask_ints,
                 TensorList mask_tensors, Scale scale, double softcap, const OptionalTensor& sinks,
                 const OptionalTensor& alibi_slopes, bool return_lse) {
  return functional_op().call(q, k, v, mask, mask_ints, mask_tensors, scale, softcap, sinks, alibi_slopes, return_lse);
}

Tensor attention_out(const Tensor& q, const Tensor& k, const Tensor& v, int64_t mask, IntArrayRef mask_ints,
                     TensorList mask_tensors, Scale scale, double softcap, const OptionalTensor& sinks,
                     const OptionalTensor& alibi_slopes, bool return_lse, Tensor& out) {
  // NOTE: the dispatcher's fallback for these takes an operator that returns something else than `out` for a broken one.
  TORCH_CHECK_VALUE(!out.is_neg(),
                    "out: a view that negates what is written to it; must own its values, as "
                    "out.resolve_neg() does");
  return out_op().call(q, k, v, mask, mask_ints, mask_tensors, scale, softcap, sinks, alibi_slopes, return_lse, out);
}

TORCH_LIBRARY(flashmsa, m) {
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, int mask, int[] mask_ints, Tensor[] mask_tensors, float? scale, "
      "float softcap, Tensor? sinks, Tensor? alibi_slopes, bool return_lse) -> (Tensor out, Tensor lse)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "attention.out(Tensor q, Tensor k, Tensor v, int mask, int[] mask_ints, Tensor[] mask_tensors, float? scale, "
      "float softcap, Tensor? sinks, Tensor? alibi_slopes, bool return_lse, *, Tensor(a!) out) -> Tensor lse",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(flashmsa, CPU, m) {
  m.impl("attention", &attention_on<CpuBackend>);
  m.impl("attention.out", &attention_out_on<CpuBackend>);
}

TORCH_LIBRARY_IMPL(flashmsa, CUDA, m) {
#ifdef FLASHMSA_WITH_CUDA
  m.impl("attention", &attention_on<CudaBackend>);
  m.impl("attention.out", &attention_out_on<CudaBackend>);
#else
  m.impl("attention", &attention_cuda);
  m.impl("attention.out", &attention_out_cuda);
#endif
}

TORCH_LIBRARY_IMPL(flashmsa, Meta, m) {
  m.impl("attention", &attention_meta);
  m.impl("attention.out", &attention_out_meta);
}

TORCH_LIBRARY_IMPL(flashmsa, Autograd, m) {
  m.impl("attention", &attention_autograd);
  m.impl("attention.out", &attention_out_autograd);
}

TORCH_LIBRARY_IMPL(flashmsa, FuncTorchBatched, m) {
  m.impl("attention", &attention_vmap);
  m.impl("attention.out", &attention_out_vmap);
}

TORCH_LIBRARY_IMPL(flashmsa, AutocastCPU, m) {
  m.impl("attention", &attention_autocast<c10::DispatchKey::AutocastCPU, at::kCPU>);
}

TORCH_LIBRARY_IMPL(flashmsa, AutocastCUDA, m) {
  m.impl("attention", &attention_autocast<c10::DispatchKey::AutocastCUDA, at::kCUDA>);
}

}  // namespace flashmsa::binding
