// What hash buckets need around the attention kernel: the sort of rows by bucket, each sorted row's interval of sorted
// keys, and moving rows to sorted order and back. Host interface of kernels and CPU code. No torch, no CUDA headers.
//
// Functions with a `stream` (a cudaStream_t) launch on it, on the current device, do not synchronise and can be
// captured; they throw std::runtime_error where a CUDA call fails. Those that end in _cpu take host memory and run at
// once. Arguments are not checked again here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/params.h"
#include "cpu/forward.h"

namespace flashmsa::hash {

// An int32 (batch, heads, length) tensor whose last stride is 1. Strides are in elements; 0 means shared.
template <class T>
struct Plane {
  T* data = nullptr;
  int64_t stride_batch = 0;
  int64_t stride_head = 0;

  FLASHMSA_HD T* row(int64_t batch, int64_t head) const { return data + batch * stride_batch + head * stride_head; }
};

// ---- Sort

// order[b, h] = the stable permutation that sorts bucket[b, h] ascending: bucket[order[r]] never decreases with r.
struct SortParams {
  Plane<const int32_t> bucket;  // any int32 values
  int32_t* order = nullptr;     // (batch, heads, length), contiguous
  int32_t batch = 0, heads = 0, length = 0;
};

// Bytes of device memory that sort_buckets needs beside its output, from the shapes alone; 16-byte aligned, its content
// does not matter. 0 up to a length of 65536.
size_t sort_workspace_size(const SortParams& params);
void sort_buckets(const SortParams& params, void* workspace, void* stream);
void sort_buckets_cpu(const SortParams& params, const cpu::ParallelFor& parallel_for);

// ---- Intervals

// For the sorted query row r of head h (original row i = q_order[r], bucket c): the sorted keys of bucket c, for causal
// those with an original position <= i + len_kv - len_q. begin and end never decrease with r; a row without keys
// has begin = end. Head h of the result uses head h / (heads / heads_q) of q, and the same of kv.
struct IntervalParams {
  Plane<const int32_t> q_bucket, q_order;    // (batch, heads_q,  len_q)
  Plane<const int32_t> kv_bucket, kv_order;  // (batch, heads_kv, len_kv)
  int32_t* begin = nullptr;                  // (batch, heads, len_q), contiguous
  int32_t* end = nullptr;                    // the same
  int32_t batch = 0, heads = 0, heads_q = 0, heads_kv = 0;  // heads is a multiple of the other two
  int32_t len_q = 0, len_kv = 0;
  bool causal = false;
};

void bucket_rows(const IntervalParams& params, void* stream);
void bucket_rows_cpu(const IntervalParams& params, const cpu::ParallelFor& parallel_for);

// ---- Rows

// Rows of a (batch, heads, length, row_bytes) tensor. Strides are in BYTES; 0 means shared.
struct RowsRef {
  void* data = nullptr;
  int64_t stride_batch = 0;
  int64_t stride_head = 0;
  int64_t stride_row = 0;
};

inline RowsRef rows_of(const TensorRef& tensor, int64_t element_bytes) {
  return {tensor.data, tensor.stride_batch * element_bytes, tensor.stride_head * element_bytes,
          tensor.stride_seq * element_bytes};
}

// gather: to[b, h, r] = from[b, h / from_group, order[b, h / order_group, r]]
// scatter: to[b, h, order[b, h / order_group, r]] = from[b, h / from_group, r]
// order is a permutation of the rows; what lies outside is clamped to the last row. `to` and `from` do not overlap.
struct RowsJob {
  RowsRef from, to;
  Plane<const int32_t> order;
  int32_t batch = 0, heads = 0, length = 0;  // of `to`
  int32_t from_group = 1, order_group = 1;   // heads of `to` that share one of `from`, one of `order`
  int32_t row_bytes = 0;  // a multiple of 16 up to 512, or 4. Rows are aligned to 16 bytes, or to 4
  bool scatter = false;
};

// All jobs in one launch. Jobs without rows are legal.
inline constexpr int32_t kMaxRowsJobs = 4;
void move_rows(const RowsJob* jobs, int32_t count, void* stream);
void move_rows_cpu(const RowsJob* jobs, int32_t count, const cpu::ParallelFor& parallel_for);

}  // namespace flashmsa::hash
