// One call over a paged, or a dense, cache of keys and values as plain data: decode, chunked prefill, mixed batches.
#pragma once

#include <cstdint>

#include "core/params.h"

namespace flashmsa {

// K or V of a cache, (pages, page_size, heads_kv, head_dim) in any order of the first three; strides in elements. A dense
// cache (batch, heads_kv, length, head_dim) is one whose sequences are a page each: page_size = length, no block table.
struct PoolRef {
  void* data = nullptr;
  int64_t stride_page = 0;
  int64_t stride_slot = 0;
  int64_t stride_head = 0;
};

// Query i of sequence b's len_q stands at p = i + kv_len - len_q (aligned at the end) or p = i (at the start).
struct PagedParams {
  int32_t batch = 0, heads_q = 0, heads_kv = 0;
  int32_t head_dim = 0, head_dim_v = 0;
  DType dtype = DType::kBF16;

  // Queries and result. Padded: (batch, heads_q, len_q, head_dim) with len_q each. Packed: stride_batch 0 and cu_seqlens_q
  // (batch + 1), clamped to [0, total_q] and rising; rows past the last are 0, their lse -inf.
  TensorRef q, out;
  float* lse = nullptr;  // natural logarithm, by strides; null: not wanted
  int64_t lse_stride_batch = 0, lse_stride_head = 0, lse_stride_seq = 1;
  const int32_t* cu_seqlens_q = nullptr;
  int32_t len_q = 0;    // padded: of each sequence; packed: the largest that the caller promises, or total_q
  int32_t total_q = 0;  // rows of q in all

  PoolRef k_pages, v_pages;
  int32_t num_pages = 0, page_size = 0;
  const int32_t* block_table = nullptr;  // (batch, max_pages): pages of each sequence; null: page b is sequence b
  int64_t block_table_stride = 0;
  int32_t max_pages = 0;                 // 1 without a table
  const int32_t* kv_lens = nullptr;  // (batch), clamped to [0, max_pages * page_size]; null: the whole page (dense)

  // Each block of query_block queries sees only the logical pages listed for it; null: all. Entries outside
  // [0, pages in use) are skipped; a page listed twice counts once.
  const int32_t* query_pages = nullptr;  // (batch, query_blocks, pages_per_block)
  int32_t query_block = 128, query_blocks = 0, pages_per_block = 0;

  BandArgs band;  // prefixes, where given by tensor: one per sequence
  // Speculative decoding: of the last len_q keys of a sequence query i sees those whose bit is set; null: by the band.
  const int32_t* tree_bits = nullptr;  // (batch, len_q), bit t is key kv_len - len_q + t; len_q <= 32

  double scale = 1.0;
  double softcap = 0.0;
  const float* sinks = nullptr;  // (heads_q)
  const float* alibi_slopes = nullptr;  // (heads_q) or (batch, heads_q)
  int64_t alibi_stride_batch = 0;

  int32_t num_splits = 0;  // parts of a sequence; 0: chosen
  bool batch_invariant = false;  // parts of a fixed size, whatever else is in the batch
};

}  // namespace flashmsa
