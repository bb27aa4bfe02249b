// The operators flashmsa::attention, attention.out and attention_backward, called through torch's dispatcher.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <tuple>

namespace flashmsa::binding {

// (out, lse); lse has shape (0,) unless asked for.
using Result = std::tuple<at::Tensor, at::Tensor>;
// (dq, dk, dv, dsinks); dsinks has shape (0,) without sinks.
using BackwardResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

using OptionalTensor = std::optional<at::Tensor>;

// q, k, v, mask, mask_ints, mask_tensors, scale, softcap, sinks, alibi_slopes, dropout_p, rng_state, deterministic,
// return_lse
using Functional = Result(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, at::IntArrayRef,
                          at::TensorList, std::optional<double>, double, const OptionalTensor&, const OptionalTensor&,
                          double, const OptionalTensor&, bool, bool);
// and out
using Out = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, at::IntArrayRef,
                       at::TensorList, std::optional<double>, double, const OptionalTensor&, const OptionalTensor&,
                       double, const OptionalTensor&, bool, bool, at::Tensor&);
// dout, dlse, q, k, v, out, lse, mask, mask_ints, mask_tensors, scale, softcap, sinks, alibi_slopes, dropout_p, rng_state,
// deterministic
using Backward = BackwardResult(const at::Tensor&, const OptionalTensor&, const at::Tensor&, const at::Tensor&,
                                const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, at::IntArrayRef,
                                at::TensorList, std::optional<double>, double, const OptionalTensor&,
                                const OptionalTensor&, double, const OptionalTensor&, bool);

const c10::TypedOperatorHandle<Functional>& functional_op();
const c10::TypedOperatorHandle<Out>& out_op();
const c10::TypedOperatorHandle<Backward>& backward_op();

Result attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t mask, at::IntArrayRef mask_ints,
                 at::TensorList mask_tensors, std::optional<double> scale, double softcap, const OptionalTensor& sinks,
                 const OptionalTensor& alibi_slopes, double dropout_p, const OptionalTensor& rng_state,
                 bool deterministic, bool return_lse);

// The same, written to `out`; returns lse.
at::Tensor attention_out(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t mask,
                         at::IntArrayRef mask_ints, at::TensorList mask_tensors, std::optional<double> scale,
                         double softcap, const OptionalTensor& sinks, const OptionalTensor& alibi_slopes,
                         double dropout_p, const OptionalTensor& rng_state, bool deterministic, bool return_lse,
                         at::Tensor& out);

}  // namespace flashmsa::binding
