// One attention call as plain data. The binding checks and fills it once; backends read it and know no torch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/types.h"

namespace flashmsa {

// A (batch, heads, length, head_dim) tensor whose last stride is 1. Strides are in elements; 0 means expanded.
struct TensorRef {
  void* data = nullptr;
  int64_t stride_batch = 0;
  int64_t stride_head = 0;
  int64_t stride_seq = 0;
};

enum class MaskKind : int32_t { kDense = 0, kCausal = 1, kDocument = 2, kBand = 3 };

// What a mask object of the Python side lowers to. Each trait under mask/ reads the fields that concern it.
struct MaskArgs {
  MaskKind kind = MaskKind::kDense;
  bool causal = false;                  // Document: causal inside each document
  bool top_left = false;                // Causal, Band: query i stands at key i, not at i + len_kv - len_q
  const int32_t* q_offsets = nullptr;   // Document: (num_documents + 1), or (batch, num_documents + 1)
  const int32_t* kv_offsets = nullptr;  // Document: the same shape; equal to q_offsets for self-attention
  int32_t num_documents = 0;
  int64_t offsets_stride = 0;           // elements between the offsets of two batches; 0: shared by the batch
  int32_t left = INT32_MAX;  // Band: keys visible before a query's position, after it, and always from the
  int32_t right = INT32_MAX;  // start; see mask/band.h. INT32_MAX: no bound
  int32_t prefix = INT32_MAX;
};

struct AttentionParams {
  int32_t batch = 0, heads_q = 0, heads_kv = 0;
  int32_t len_q = 0, len_kv = 0;
  int32_t head_dim = 0, head_dim_v = 0;
  DType dtype = DType::kBF16;  // of q, k, v and out

  TensorRef q;  // (batch, heads_q,  len_q,  head_dim)
  TensorRef k;  // (batch, heads_kv, len_kv, head_dim)
  TensorRef v;  // (batch, heads_kv, len_kv, head_dim_v)
  TensorRef out;  // (batch, heads_q,  len_q,  head_dim_v)
  float* lse = nullptr;  // (batch, heads_q, len_q), contiguous, natural logarithm

  double scale = 1.0;  // logit = scale * q.k; finite, any sign
  MaskArgs mask;
};

}  // namespace flashmsa
