// A hash-bucket call in sorted order: rows of q, k and v gathered by bucket, attention over each row's interval, the results
// scattered back.
#pragma once

#include "binding/backend.h"
#include "hash/rows.h"

namespace flashmsa::binding {

// Backend allocates, Prepare moves rows.
template <class Backend, class Prepare>
class SortedCall {
 public:
  // Gathers.
  explicit SortedCall(Call& call) : call_(call), params_(call.params) {
    const AttentionParams& p = call.params;
    const MaskArgs& m = p.mask;
    // Keys sorted differently for the query heads that share them become one head each.
    if (m.kv_order_heads == p.heads_q) params_.heads_kv = p.heads_q;
    q_ = rows(p.heads_q, p.len_q, p.head_dim);
    k_ = rows(params_.heads_kv, p.len_kv, p.head_dim);
    v_ = rows(params_.heads_kv, p.len_kv, p.head_dim_v);
    out_ = rows(p.heads_q, p.len_q, p.head_dim_v);
    if (p.lse != nullptr) {
      const int64_t heads = p.heads_q, length = p.len_q;
      lse_ = Backend::empty({p.batch, heads, length}, {heads * length, length, 1}, at::kFloat);
    }
    const hash::Plane<const int32_t> q_order = {m.q_order, m.q_order_stride_batch, m.q_order_stride_head};
    const hash::Plane<const int32_t> kv_order = {m.kv_order, m.kv_order_stride_batch, m.kv_order_stride_head};
    const hash::RowsJob jobs[] = {gather(p.q, p.heads_q, q_, q_order), gather(p.k, p.heads_kv, k_, kv_order),
                                  gather(p.v, p.heads_kv, v_, kv_order)};
    Prepare::move(jobs, 3, call.q.device());

    params_.q = tensor_ref(q_);
    params_.k = tensor_ref(k_);
    params_.v = tensor_ref(v_);
    params_.out = tensor_ref(out_);
    params_.lse = p.lse == nullptr ? nullptr : lse_.template mutable_data_ptr<float>();
    params_.lse_stride_seq = 1;
    params_.lse_stride_head = p.len_q;
    params_.lse_stride_batch = int64_t{p.heads_q} * p.len_q;
    params_.mask.kind = MaskKind::kComposite;
  }

  const AttentionParams& params() const { return params_; }

  // Scatters, once the attention over params() has been run.
  void finish() {
    const AttentionParams& p = call_.params;
    const MaskArgs& m = p.mask;
    hash::RowsJob out = job(out_.itemsize() * p.head_dim_v, p.heads_q, p.len_q);
    out.from = hash::rows_of(params_.out, out_.itemsize());
    out.to = hash::rows_of(p.out, out_.itemsize());
    hash::RowsJob lse = job(sizeof(float), p.heads_q, p.lse == nullptr ? 0 : p.len_q);
    lse.from = lse_rows(params_);
    lse.to = lse_rows(p);
    for (hash::RowsJob* each : {&out, &lse}) {
      each->order = {m.q_order, m.q_order_stride_batch, m.q_order_stride_head};
      each->scatter = true;
    }
    const hash::RowsJob jobs[] = {out, lse};
    Prepare::move(jobs, 2, call_.q.device());
  }

 private:
  at::Tensor rows(int64_t heads, int64_t length, int64_t columns) const {
    return Backend::empty({call_.params.batch, heads, length, columns},
                          {heads * length * columns, length * columns, columns, 1}, call_.q.scalar_type());
  }

  hash::RowsJob job(int64_t row_bytes, int32_t heads, int32_t length) const {
    hash::RowsJob job;
    job.batch = call_.params.batch;
    job.heads = heads;
    job.length = length;
    job.row_bytes = static_cast<int32_t>(row_bytes);
    return job;
  }

  hash::RowsJob gather(const TensorRef& from, int32_t from_heads, const at::Tensor& to,
                       hash::Plane<const int32_t> order) const {
    hash::RowsJob job =
        this->job(to.itemsize() * to.size(3), static_cast<int32_t>(to.size(1)), static_cast<int32_t>(to.size(2)));
    job.from = hash::rows_of(from, to.itemsize());
    job.to = hash::rows_of(tensor_ref(to), to.itemsize());
    job.order = order;
    job.from_group = static_cast<int32_t>(to.size(1)) / max_of(from_heads, 1);
    return job;
  }

  static hash::RowsRef lse_rows(const AttentionParams& p) {
    constexpr int64_t kBytes = sizeof(float);
    return {p.lse, p.lse_stride_batch * kBytes, p.lse_stride_head * kBytes, p.lse_stride_seq * kBytes};
  }

  Call& call_;
  AttentionParams params_;
  at::Tensor q_, k_, v_, out_, lse_;
};

}  // namespace flashmsa::binding
