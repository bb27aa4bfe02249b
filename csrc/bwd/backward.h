// The sm_90a backward pass, as the binding sees it. No torch, no CUDA headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/params.h"

namespace flashmsa::bwd {

// Facts about one compiled kernel, for explain() and `python -m flashmsa info`.
struct KernelInfo {
  std::string name;         // e.g. "bwd_d128_bf16"; one kernel serves every mask, another documents alone
  bool packed;              // documents alone, of some length, and not deterministic
  bool band;                // dense, causal and windows alone; at 256 keys a tile long ones, and not deterministic
  bool dropout;             // of weights in the caller's order
  bool general;             // soft cap, ALiBi, dropout in any order
  DType dtype;
  int32_t head_dim_bucket;  // serves head_dim and head_dim_v up to this
  int32_t block_q;          // rows of a tile
  int32_t block_kv;         // keys of a tile
  int32_t stages;
  int32_t threads;
  int32_t shared_memory;    // bytes
};

// Every compiled kernel. Empty when the extension was built without CUDA.
std::vector<KernelInfo> kernels();

// The kernel that would run these params; nullptr where none exists.
const KernelInfo* find_kernel(const BackwardParams& params);

// Bytes of device memory that attention_backward needs beside its results: the fp32 accumulator of dq and O(rows).
// 1024-byte aligned; its content does not matter before or after.
size_t workspace_size(const BackwardParams& params, int32_t num_sms);

// Launches on `stream` (a cudaStream_t) of the current device, whose SM count is num_sms. Does not synchronise. Dilated and
// hash masks come as composite ones, as in fwd/. Requires, and does not check again: scale > 0; strides that are multiples
// of 8 elements and 16-byte aligned data pointers for all tensors; find_kernel(params) != nullptr; batch, heads_q, len_q and
// len_kv > 0. Throws std::runtime_error with the failing call and its arguments.
void attention_backward(const BackwardParams& params, void* workspace, int32_t num_sms, void* stream);

}  // namespace flashmsa::bwd
