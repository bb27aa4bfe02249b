// The Autograd key: what attention saves for its backward pass, flashmsa::attention_backward, and what has no rule.
//
// NOTE: a graph node of our own and not a torch::autograd::Function, whose apply() costs a call with gradients about as
// much again as the rest of the binding.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "binding/ops.h"

namespace flashmsa::binding {
namespace {

using at::IntArrayRef;
using at::Tensor;
using at::TensorList;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using Scale = std::optional<double>;

// NOTE: torch counts the references of a node outside of it before, and inside from a version after 2.9 on. What the two
// call for is in templates, of which only the fitting branch is compiled.
using torch::autograd::Node;
using NodePtr = decltype(torch::autograd::Edge::function);
constexpr bool kCountedOutside = std::is_same_v<NodePtr, std::shared_ptr<Node>>;

template <class Pointer>
Pointer owner(Node* node) {
  if constexpr (kCountedOutside) {
    return Pointer(node, [](auto* x) { deleteNode(x); });
  } else {
    return Pointer::unsafe_steal_from_new(node);
  }
}

template <class Pointer, class N>
Pointer self(N* node) {
  if constexpr (kCountedOutside) {
    return node->shared_from_this();
  } else {
    return Pointer::unsafe_reclaim_from_nonowning(node);
  }
}

const Tensor& value_or_undefined(const OptionalTensor& tensor) {
  static const Tensor undefined;
  return tensor.has_value() ? *tensor : undefined;
}

OptionalTensor optional_of(Tensor tensor) {
  return tensor.defined() ? OptionalTensor(std::move(tensor)) : std::nullopt;
}

bool wants_gradient(const Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }

void refuse_tangent(const char* name, const Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(!tensor.defined() || !tensor._fw_grad(/*level=*/0).defined(), name,
                              ": carries a forward-mode tangent, but forward-mode AD is not supported; detach it, or "
                              "use reverse mode");
}

void refuse_gradient(const char* name, const Tensor& tensor, const char* why) {
  TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled() || !wants_gradient(tensor), name, ": requires grad, but ",
                              why);
}

constexpr const char* kSlopesWhy =
    "the native backends have no gradient of slopes; call under torch.no_grad(), pass alibi_slopes.detach(), or use "
    "backend=\"torch\"";
constexpr const char* kOutWhy =
    "a result written to out= is not differentiable; call under torch.no_grad(), or without out";

// One call's part of the graph: gradients of q, k, v and sinks from those of out and, where it was returned, lse.
struct AttentionBackward : Node {
  SavedVariable q, k, v, out, lse, sinks, alibi_slopes, rng_state;
  std::vector<SavedVariable> mask_tensors;
  std::vector<int64_t> mask_ints;
  int64_t mask = 0;
  Scale scale;
  double softcap = 0.0, dropout_p = 0.0;
  bool deterministic = false;

  std::string name() const override { return "FlashmsaAttentionBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* saved : {&q, &k, &v, &out, &lse, &sinks, &alibi_slopes, &rng_state}) saved->reset_data();
    for (SavedVariable& saved : mask_tensors) saved.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Tensor dlse = grads.size() > 1 ? grads[1] : Tensor();
    if (!grads[0].defined() && !dlse.defined()) return variable_list(4);
    const Tensor out_ = out.unpack(self<NodePtr>(this));
    std::vector<Tensor> tensors;
    tensors.reserve(mask_tensors.size());
    for (const SavedVariable& saved : mask_tensors) tensors.push_back(saved.unpack());
    auto [dq, dk, dv, dsinks] = backward_op().call(
        grads[0].defined() ? grads[0] : at::zeros_like(out_), optional_of(dlse), q.unpack(), k.unpack(), v.unpack(),
        out_, lse.unpack(self<NodePtr>(this)), mask, mask_ints, tensors, scale, softcap, optional_of(sinks.unpack()),
        optional_of(alibi_slopes.unpack()), dropout_p, optional_of(rng_state.unpack()), deterministic);
    const auto wanted = [&](size_t input, Tensor& gradient) {
      return task_should_compute_output(input) ? std::move(gradient) : Tensor();
    };
    return {wanted(0, dq), wanted(1, dk), wanted(2, dv), wanted(3, dsinks)};
  }
};

Result attention_autograd(c10::DispatchKeySet keys, const Tensor& q, const Tensor& k, const Tensor& v, int64_t mask,
                          IntArrayRef mask_ints, TensorList mask_tensors, Scale scale, double softcap,
                          const OptionalTensor& sinks, const OptionalTensor& alibi_slopes, double dropout_p,
                          const OptionalTensor& rng_state, bool deterministic, bool return_lse) {
  const Tensor& sink = value_or_undefined(sinks);
  const Tensor& slopes = value_or_undefined(alibi_slopes);
  refuse_tangent("q", q);
  refuse_tangent("k", k);
  refuse_tangent("v", v);
  refuse_tangent("sinks", sink);
  refuse_tangent("alibi_slopes", slopes);
  refuse_gradient("alibi_slopes", slopes, kSlopesWhy);
  const bool recorded = at::GradMode::is_enabled() &&
                        (wants_gradient(q) || wants_gradient(k) || wants_gradient(v) || wants_gradient(sink));
  Result result = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return functional_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, q, k, v, mask, mask_ints, mask_tensors,
                                      scale, softcap, sinks, alibi_slopes, dropout_p, rng_state, deterministic,
                                      return_lse || recorded);
  }();
  if (!recorded) return result;

  auto* const node = new AttentionBackward();
  const NodePtr owned = owner<NodePtr>(node);
  node->set_next_edges(torch::autograd::collect_next_edges(q, k, v, sink));
  auto& [out, lse] = result;
  torch::autograd::set_history(out, owned);
  if (return_lse) torch::autograd::set_history(lse, owned);
  node->q = SavedVariable(q, false);
  node->k = SavedVariable(k, false);
  node->v = SavedVariable(v, false);
  node->out = SavedVariable(out, true);
  node->lse = SavedVariable(lse, return_lse);
  node->sinks = SavedVariable(sink, false);
  node->alibi_slopes = SavedVariable(slopes, false);
  node->rng_state = SavedVariable(value_or_undefined(rng_state), false);
  node->mask_tensors.reserve(mask_tensors.size());
  for (const Tensor& tensor : mask_tensors) node->mask_tensors.emplace_back(tensor, false);
  node->mask_ints = mask_ints.vec();
  node->mask = mask;
  node->scale = scale;
  node->softcap = softcap;
  node->dropout_p = dropout_p;
  node->deterministic = deterministic;
  if (return_lse) return result;
  const at::AutoDispatchBelowADInplaceOrView guard;
  return {out, at::empty({0}, lse.options())};
}

Tensor attention_out_autograd(c10::DispatchKeySet keys, const Tensor& q, const Tensor& k, const Tensor& v, int64_t mask,
                              IntArrayRef mask_ints, TensorList mask_tensors, Scale scale, double softcap,
                              const OptionalTensor& sinks, const OptionalTensor& alibi_slopes, double dropout_p,
                              const OptionalTensor& rng_state, bool deterministic, bool return_lse, Tensor& out) {
  const std::pair<const char*, const Tensor&> inputs[] = {
      {"q", q},     {"k", k},
      {"v", v},     {"sinks", value_or_undefined(sinks)},
      {"out", out}, {"alibi_slopes", value_or_undefined(alibi_slopes)}};
  for (const auto& [name, tensor] : inputs) {
    refuse_tangent(name, tensor);
    refuse_gradient(name, tensor, kOutWhy);
  }
  Tensor lse = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return out_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, q, k, v, mask, mask_ints, mask_tensors, scale,
                               softcap, sinks, alibi_slopes, dropout_p, rng_state, deterministic, return_lse, out);
  }();
  if (!out.is_inference()) out.unsafeGetTensorImpl()->bump_version();
  return lse;
}

// What a gradient that is differentiated again meets.
struct NoSecondDerivative : Node {
  std::string name() const override { return "FlashmsaNoSecondDerivative"; }
  variable_list apply(variable_list&&) override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "flashmsa.attention: second derivatives are not supported");
    return {};
  }
};

BackwardResult attention_backward_autograd(c10::DispatchKeySet keys, const Tensor& dout, const OptionalTensor& dlse,
                                           const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                                           const Tensor& lse, int64_t mask, IntArrayRef mask_ints,
                                           TensorList mask_tensors, Scale scale, double softcap,
                                           const OptionalTensor& sinks, const OptionalTensor& alibi_slopes,
                                           double dropout_p, const OptionalTensor& rng_state, bool deterministic) {
  BackwardResult result = [&] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return backward_op().redispatch(keys & c10::after_ADInplaceOrView_keyset, dout, dlse, q, k, v, out, lse, mask,
                                    mask_ints, mask_tensors, scale, softcap, sinks, alibi_slopes, dropout_p, rng_state,
                                    deterministic);
  }();
  if (!at::GradMode::is_enabled()) return result;
  const Tensor &dlse_ = value_or_undefined(dlse), &sink = value_or_undefined(sinks);
  const std::initializer_list<const Tensor*> sources = {&dout, &dlse_, &q, &k, &v, &out, &lse, &sink};
  if (std::none_of(sources.begin(), sources.end(), [](const Tensor* x) { return wants_gradient(*x); })) return result;
  const NodePtr node = owner<NodePtr>(new NoSecondDerivative());
  node->set_next_edges(torch::autograd::collect_next_edges(dout, dlse_, q, k, v, out, lse, sink));
  auto& [dq, dk, dv, dsinks] = result;
  for (Tensor* gradient : {&dq, &dk, &dv}) torch::autograd::set_history(*gradient, node);
  if (sinks.has_value()) torch::autograd::set_history(dsinks, node);
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(flashmsa, Autograd, m) {
  m.impl("attention", &attention_autograd);
  m.impl("attention.out", &attention_out_autograd);
  m.impl("attention_backward", &attention_backward_autograd);
}

}  // namespace flashmsa::binding
