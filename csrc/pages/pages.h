// Moving keys and values between pages and dense tensors on sm_90a. No torch, no CUDA headers.
#pragma once

#include <cstdint>

#include "core/paged.h"

namespace flashmsa::pages {

struct GatherParams {
  PoolRef k_pages, v_pages;
  int32_t num_pages = 0, page_size = 0, heads_kv = 0, head_dim = 0, head_dim_v = 0;
  const int32_t* block_table = nullptr;
  int64_t block_table_stride = 0;
  int32_t batch = 0, max_pages = 0;
  const int32_t* kv_lens = nullptr;
  // The dense view, (batch, heads_kv, max_pages * page_size, head_dim) by strides; rows past a length are written as 0.
  TensorRef k, v;
  int32_t element_bytes = 2;
};

struct AppendParams {
  PoolRef k_pages, v_pages;
  int32_t num_pages = 0, page_size = 0, heads_kv = 0, head_dim = 0, head_dim_v = 0;
  const int32_t* block_table = nullptr;
  int64_t block_table_stride = 0;
  int32_t batch = 0, max_pages = 0;
  const int32_t* kv_lens =
      nullptr;  // before; tokens that would lie beyond the table, or on a page out of range, are dropped
  // (batch, heads_kv, len_new, head_dim), or packed by cu_seqlens (batch + 1).
  TensorRef k_new, v_new;
  const int32_t* cu_seqlens = nullptr;
  int32_t len_new = 0, total_new = 0;
  // Rotary embedding of k on its way, at each token's position in its sequence; null: none.
  const void* rope_cos = nullptr;  // (positions, rotary_dim / 2), fp32 or the dtype of k
  const void* rope_sin = nullptr;
  bool rope_fp32 = true;
  int32_t rope_positions = 0, rotary_dim = 0;
  bool rope_interleaved = false;  // pairs (2i, 2i + 1); else (i, i + rotary_dim / 2)
  DType dtype = DType::kBF16;
};

// Launch on `stream` (a cudaStream_t) of the current device. Whatever the tables hold, nothing outside is touched.
void gather_pages(const GatherParams& params, int32_t num_sms, void* stream);
void append_kv(const AppendParams& params, void* stream);

}  // namespace flashmsa::pages
