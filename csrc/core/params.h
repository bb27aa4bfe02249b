// One attention call as plain data. The binding checks and fills it once; backends read it and know no torch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/philox.h"
#include "core/types.h"

namespace flashmsa {

// A (batch, heads, length, head_dim) tensor whose last stride is 1. Strides are in elements; 0 means expanded.
struct TensorRef {
  void* data = nullptr;
  int64_t stride_batch = 0;
  int64_t stride_head = 0;
  int64_t stride_seq = 0;
  int64_t stride_residue = 0;  // see AttentionParams::residues
};

// Dilated masks are lowered to composite ones over strided tensors before a kernel sees them. So are hash masks, over sorted
// tensors, but for those that the forward kernels serve as they are.
enum class MaskKind : int32_t {
  kDense = 0,
  kCausal = 1,
  kDocument = 2,
  kComposite = 3,
  kDilated = 4,
  kHash = 5,
  kBlockSparse = 6
};

// The kind as which a mask's kernels are looked for.
constexpr MaskKind kernel_kind(MaskKind kind) { return kind == MaskKind::kDilated ? MaskKind::kComposite : kind; }

inline constexpr int32_t kUnbounded = INT32_MAX;

// Query i of len_q stands among len_kv keys at p_0 = i + len_kv - len_q (aligned at the end) and at p_1 = i (at the
// start). For both alignments a it sees key j only where
//   j <= p_a + right[a]   and   (j < prefix[a] or j <= p_a)   and
//   (j >= p_a - left[a], or j < keep_first and j >= p_a - outer[a])
// where the two lower bounds count together: either all of the first kind hold, or all of the second.
struct BandArgs {
  int32_t left[2] = {kUnbounded, kUnbounded};
  int32_t right[2] = {kUnbounded, kUnbounded};
  int32_t prefix[2] = {kUnbounded, kUnbounded};
  const int32_t* prefixes[2] = {nullptr, nullptr};  // instead of prefix: one per batch, or per document
  int32_t keep_first = 0;
  int32_t outer[2] = {kUnbounded, kUnbounded};
};

// The set cells of a block mask, 128 x 128 pairs each. Row r of slice (batch, head) is number
// (batch * stride_batch + head * stride_head) * rows + r; its entries are [row_start[r], row_start[r + 1]) counting the
// rows of all slices with one more row_start each; of them whole_count are whole cells, the others mixed ones, both
// ascending.
struct CellListArgs {
  const int32_t* row_start = nullptr;    // (slices, rows + 1)
  const int32_t* whole_count = nullptr;  // (slices, rows)
  const int32_t* cells = nullptr;        // (capacity): column of the cell
  const int32_t* detail =
      nullptr;  // (capacity): -1 whole; else its bit tile, or without bits 4 bits, 2 * row half + column half
  const int32_t* bits = nullptr;    // (tiles, 128, 4): bit k of word w of row r is key 32 w + k; null: none
  int32_t rows = 0;
  int32_t capacity = 0, tiles = 0;
  int32_t stride_batch = 0, stride_head = 0;  // in slices; 0: shared
};

// What a mask object of the Python side lowers to. Each trait under mask/ reads the fields that concern it.
struct MaskArgs {
  MaskKind kind = MaskKind::kDense;
  bool causal = false;    // Document, Hash: causal inside each document or bucket
  bool top_left = false;  // Causal, Dilated: query i stands at key i, not at i + len_kv - len_q
  // Document, Composite with documents
  const int32_t* q_offsets = nullptr;   // (num_documents + 1), or (batch, num_documents + 1)
  const int32_t* kv_offsets = nullptr;  // the same shape; equal to q_offsets for self-attention
  const int32_t* kv_used = nullptr;     // Composite: (num_documents), the keys of each document in use; null: all
  int32_t num_documents = 0;
  int64_t offsets_stride = 0;  // elements between the offsets of two batches; 0: shared by the batch
  // Composite, BlockSparse
  BandArgs global;
  BandArgs local;  // inside each document
  bool positions_local = false;     // ALiBi counts from a query's place in its document
  bool positions_top_left = false;  // ... aligned at the start
  int32_t position_offset = 0;      // ... and added to it
  // Composite: the rows' keys as they are, instead of all other rules; (batch, heads_q, len_q) by strides
  const int32_t* row_begin = nullptr;
  const int32_t* row_end = nullptr;
  int64_t row_stride_batch = 0, row_stride_head = 0;
  // Dilated
  int32_t left = kUnbounded, right = kUnbounded, dilation = 1;  // bounds in steps of `dilation`
  // Hash
  const int32_t* q_order = nullptr;   // (batch or 1, heads_q or 1, len_q): the stable order by bucket
  const int32_t* kv_order = nullptr;  // (batch or 1, heads_kv or 1 or heads_q, len_kv)
  int32_t kv_order_heads = 1;
  int64_t q_order_stride_batch = 0, q_order_stride_head = 0;
  int64_t kv_order_stride_batch = 0, kv_order_stride_head = 0;
  // BlockSparse
  CellListArgs list;
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
  float* lse = nullptr;  // (batch, heads_q, len_q) by the strides below, natural logarithm
  int64_t lse_stride_batch = 0, lse_stride_head = 0, lse_stride_seq = 1, lse_stride_residue = 0;
  // More than 1: each batch is this many sequences of len_q queries and len_kv keys, interleaved by stride_residue.
  int32_t residues = 1;

  double scale = 1.0;  // logit = scale * q.k; finite, any sign
  double softcap = 0.0;  // > 0: logit = softcap * tanh(logit / softcap)
  const float* sinks = nullptr;  // (heads_q): one more term e^sink in the denominator
  const float* alibi_slopes = nullptr;  // (heads_q) or (batch, heads_q): logit -= slope * |p - j|
  int64_t alibi_stride_batch = 0;
  double alibi_step = 1.0;  // distance of neighbouring keys
  // > 0: weights are dropped as core/philox.h says, keyed by rng_state = (seed, offset), which lies where q does.
  double dropout_p = 0.0;
  const int64_t* rng_state = nullptr;
  // Which of the caller's tokens the draws are keyed by: row i of residue r is its query first_query + r + i * token_step,
  // keys alike; where mask.q_order is set, entry i of q_order, and of kv_order (by batch and kv head) for keys.
  int32_t first_query = 0, first_key = 0, token_step = 1;
  MaskArgs mask;
};

// Whether rows and keys are the caller's queries and keys, by which draws are keyed, and draws can be compared as numbers:
// what the kernels draw quickly.
constexpr bool draws_in_order(const AttentionParams& p) {
  return p.mask.q_order == nullptr && p.mask.kv_order == nullptr && p.residues == 1 && p.token_step == 1 &&
         p.first_query == 0 && p.first_key == 0 && dropout_threshold(p.dropout_p) <= kLastBf16Rank;
}

// The gradients of one call. `forward` holds what went in, and `out` and `lse` as they came out (both are read; lse is
// never null).
struct BackwardParams {
  AttentionParams forward;
  TensorRef dout;               // (batch, heads_q,  len_q,  head_dim_v)
  const float* dlse = nullptr;  // like lse, by the strides below; null: zero
  int64_t dlse_stride_batch = 0, dlse_stride_head = 0, dlse_stride_seq = 1, dlse_stride_residue = 0;
  TensorRef dq;                 // (batch, heads_q,  len_q,  head_dim)
  TensorRef dk;                 // (batch, heads_kv, len_kv, head_dim)
  TensorRef dv;                 // (batch, heads_kv, len_kv, head_dim_v)
  // (batch, heads_q, residues, len_q), contiguous, written: rowsum(dout * out) - dlse, what dS subtracts from dP.
  float* delta = nullptr;
  // Of f64 with sinks, on the CPU: likewise exp(sink - lse) * delta, of which delta and lse in fp32 keep too few digits.
  double* sink_terms = nullptr;
  bool deterministic = false;
};

}  // namespace flashmsa
