#include "binding/paged_module.h"

#include <torch/csrc/Exceptions.h>

#include <optional>
#include <vector>

#include "binding/build.h"
#include "binding/paged.h"

#ifdef FLASHMSA_WITH_CUDA
#include "decode/decode.h"
#include "prefill/prefill.h"
#endif

namespace flashmsa::binding {
namespace {

namespace py = pybind11;
using OptionalTensor = std::optional<at::Tensor>;

#ifdef FLASHMSA_WITH_CUDA
template <class KernelInfo>
py::dict describe(const KernelInfo& kernel, const char* path) {
  py::dict d;
  d["name"] = kernel.name;
  d["path"] = path;
  d["head_dim_bucket"] = kernel.head_dim_bucket;
  d["block_kv"] = kernel.block_kv;
  d["threads"] = kernel.threads;
  d["shared_memory"] = kernel.shared_memory;
  return d;
}
#endif

py::list paged_kernels() {
  py::list list;
#ifdef FLASHMSA_WITH_CUDA
  for (const decode::KernelInfo& kernel : decode::kernels()) list.append(describe(kernel, "decode"));
  for (const prefill::KernelInfo& kernel : prefill::kernels()) list.append(describe(kernel, "prefill"));
#endif
  return list;
}

py::object paged_path(const at::Tensor& q, const at::Tensor& k_pages, const at::Tensor& v_pages,
                      const OptionalTensor& block_table, const OptionalTensor& kv_lens,
                      const OptionalTensor& cu_seqlens_q, int64_t max_seqlen_q, const OptionalTensor& query_pages,
                      int64_t query_block, int64_t mask, const std::vector<int64_t>& mask_ints,
                      const std::vector<at::Tensor>& mask_tensors, const OptionalTensor& tree_mask,
                      std::optional<double> scale, double softcap, const OptionalTensor& sinks,
                      const OptionalTensor& alibi_slopes, int64_t num_splits, bool batch_invariant, int32_t num_sms) {
  const OptionalTensor no_workspace;
  const PagedCall call = describe_paged_call(
      {q,           k_pages,     v_pages,      block_table, kv_lens,         cu_seqlens_q, max_seqlen_q,
       query_pages, query_block, mask,         mask_ints,   mask_tensors,    tree_mask,    scale,
       softcap,     sinks,       alibi_slopes, num_splits,  batch_invariant, no_workspace});
#ifdef FLASHMSA_WITH_CUDA
  const PagedPath path = CudaPaged::path(call.params, num_sms);
  py::dict d;
  d["path"] = path.path;
  d["kernel"] = path.kernel;
  d["reason"] = path.reason;
  d["workspace_bytes"] = path.workspace_bytes;
  return d;
#else
  return py::none();
#endif
}

}  // namespace

void define_paged(py::module_& module) {
  module.def("paged_kernels", &paged_kernels, "Every compiled kernel over paged caches, as dicts.");
  module.def("paged_path", torch::wrap_pybind_function(&paged_path),
             "Checks the arguments of flashmsa::paged_attention, in its order without the last two, and then the SM "
             "count: which kernels would run it ('path' is empty where none does), why, and the bytes of workspace. "
             "None in a build without kernels.");
}

}  // namespace flashmsa::binding
