// The operator flashmsa::attention, called through torch's dispatcher.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace flashmsa::binding {

// (out, lse); lse has shape (0,) unless asked for.
using Result = std::tuple<at::Tensor, at::Tensor>;

Result attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t mask, at::IntArrayRef mask_ints,
                 at::TensorList mask_tensors, std::optional<double> scale, double softcap,
                 const std::optional<at::Tensor>& sinks, const std::optional<at::Tensor>& alibi_slopes,
                 bool return_lse);

// The same, written to `out`; returns lse.
at::Tensor attention_out(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, int64_t mask,
                         at::IntArrayRef mask_ints, at::TensorList mask_tensors, std::optional<double> scale,
                         double softcap, const std::optional<at::Tensor>& sinks,
                         const std::optional<at::Tensor>& alibi_slopes, bool return_lse, at::Tensor& out);

}  // namespace flashmsa::binding
