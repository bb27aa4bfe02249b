// The operators over paged caches, and what each device does for them.
//
//   flashmsa::paged_attention, gather_pages, append_kv
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <optional>
#include <string>
#include <vector>

#include "core/paged.h"
#include "pages/pages.h"

namespace flashmsa::binding {

// What paged_attention's schema hands over. Refers to the caller's tensors and lists.
struct PagedArguments {
  const at::Tensor& q;        // (batch, heads_q, len_q, head_dim); packed: (total_q, heads_q, head_dim)
  const at::Tensor& k_pages;  // (pages, page_size, heads_kv, head_dim); dense: (batch, heads_kv, length, head_dim)
  const at::Tensor& v_pages;
  const std::optional<at::Tensor>& block_table;   // (batch, max_pages); none: the caches are dense
  const std::optional<at::Tensor>& kv_lens;       // (batch)
  const std::optional<at::Tensor>& cu_seqlens_q;  // (batch + 1): q is packed
  int64_t max_seqlen_q;                           // packed: the longest sequence; -1: not known
  const std::optional<at::Tensor>& query_pages;   // (batch, query blocks, pages)
  int64_t query_block;
  int64_t mask;                 // Dense, Causal or Composite, see binding/arguments.h
  at::IntArrayRef mask_ints;
  at::TensorList mask_tensors;
  const std::optional<at::Tensor>& tree_mask;  // (batch, len_q) words
  std::optional<double> scale;
  double softcap;
  const std::optional<at::Tensor>& sinks;
  const std::optional<at::Tensor>& alibi_slopes;
  int64_t num_splits;
  bool batch_invariant;
  const std::optional<at::Tensor>& workspace;
};

// A call ready to run, and the tensors that keep its pointers alive.
struct PagedCall {
  PagedParams params;
  at::Tensor q;
  std::vector<at::Tensor> held;
};

// What would run a call on a device.
struct PagedPath {
  std::string path;         // "decode", "prefill", "two-stage"
  std::string kernel;
  std::string reason;
  int64_t workspace_bytes = 0;
};

// Ordinary threads; at::parallel_for.
struct CpuPaged {
  static constexpr int64_t kAlignment = 1;  // bytes, of rows of q, k and v
  static void check_device(const char*, at::Device) {}
  static void attend(PagedCall& call, const at::Tensor& out, const at::Tensor& lse,
                     const std::optional<at::Tensor>& workspace);
  static void gather(const pages::GatherParams& params, at::Device);
  static void append(const pages::AppendParams& params, at::Device);
};

// The kernels, on the current stream of the device, which must be current. Only in builds with kernels.
struct CudaPaged {
  static constexpr int64_t kAlignment = 16;
  // Raises, with the argument's name, where the device has no kernels.
  static void check_device(const char* name, at::Device device);
  static void attend(PagedCall& call, const at::Tensor& out, const at::Tensor& lse,
                     const std::optional<at::Tensor>& workspace);
  static void gather(const pages::GatherParams& params, at::Device device);
  static void append(const pages::AppendParams& params, at::Device device);
  // Of params that need not point anywhere.
  static PagedPath path(const PagedParams& params, int32_t num_sms);
};

// Checks the arguments; the params are those of a call on CUDA, without an out.
PagedCall describe_paged_call(const PagedArguments& args);

}  // namespace flashmsa::binding
