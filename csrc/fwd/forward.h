// The sm_90a forward pass, as the binding sees it. No torch, no CUDA headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/params.h"

namespace flashmsa::fwd {

// Facts about one compiled kernel, for explain() and `python -m flashmsa info`.
struct KernelInfo {
  std::string name;         // e.g. "fwd_causal_d128_bf16"
  MaskKind mask;
  bool softcap, alibi;      // what it does to logits
  bool dropout;             // of weights
  bool short_documents = false;  // serves documents of a mean length up to mask::ShortPacked::kMostLength alone
  int32_t least_packed = 0;  // document masks: mean length from which on blocks of rows begin where documents do
  bool general;             // softcap, alibi and dropout in any order, as the call wants them
  DType dtype;
  int32_t head_dim_bucket;    // serves head_dim up to this
  int32_t head_dim_v_bucket;  // serves head_dim_v up to this
  int32_t block_q;          // rows of a tile
  int32_t block_kv;         // keys of a tile
  int32_t stages;           // of K and of V each
  int32_t consumer_warpgroups;
  int32_t threads;
  int32_t registers_producer, registers_consumer;
  int32_t ctas_per_sm;      // more than 1: small tiles, for few rows
  int32_t shared_memory;    // bytes of a CTA
};

// Every compiled kernel. Empty when the extension was built without CUDA.
std::vector<KernelInfo> kernels();

// The kernel that would run these params (mask kind, softcap, ALiBi, dropout, dtype, head dims): of those that can, the
// narrowest; with small tiles where there are few rows (few_rows.h). nullptr where none exists. Softcap, ALiBi and dropout
// turn dense, causal and document masks into composite ones. A hash mask has kernels of its own, which take rows and keys as
// they are; where the kernel found is another's, it runs them in sorted order.
const KernelInfo* find_kernel(const AttentionParams& params);

// From now on the kernel `by` runs the calls that find_kernel would have given to the kernel `name`, those of them that it
// serves; its own name: as compiled. For every thread; not while one is launching. Throws std::invalid_argument for a name that no kernel has.
void replace_kernel(const std::string& name, const std::string& by);

// Bytes of device memory that attention_forward needs beside its outputs: O(tiles + documents). 16-byte aligned; its
// content does not matter before or after. 0 for small grids without a plan.
size_t workspace_size(const AttentionParams& params, int32_t num_sms);

// Launches on `stream` (a cudaStream_t) of the current device, whose SM count is num_sms. Does not synchronise.
// Requires, and does not check again: a kind that has kernels, see MaskKind; scale > 0; strides that are multiples of 8 elements and 16-byte aligned data
// pointers for q, k, v, out; find_kernel(params) != nullptr; batch, heads_q and len_q > 0. len_kv may be 0.
// Throws std::runtime_error with the failing call and its arguments.
void attention_forward(const AttentionParams& params, void* workspace, int32_t num_sms, void* stream);

}  // namespace flashmsa::fwd
