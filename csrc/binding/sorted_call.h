// A hash-bucket call in sorted order, where no kernel takes it as it is: rows of q, k and v gathered by bucket, attention over
// each row's interval, the results scattered back; and its backward pass.
#pragma once

#include <ATen/ops/empty_like.h>
#include <ATen/ops/sum.h>

#include "binding/backend.h"
#include "hash/rows.h"

namespace flashmsa::binding {

// What moves between a call's own order and the sorted one. Backend allocates, Prepare moves rows.
template <class Backend, class Prepare>
class SortedRows {
 protected:
  // Gathers q, k and v.
  explicit SortedRows(Call& call) : call_(call), params_(call.params) {
    const AttentionParams& p = call.params;
    // Keys sorted differently for the query heads that share them become one head each.
    if (p.mask.kv_order_heads == p.heads_q) params_.heads_kv = p.heads_q;
    q_ = rows(p.heads_q, p.len_q, p.head_dim);
    k_ = rows(params_.heads_kv, p.len_kv, p.head_dim);
    v_ = rows(params_.heads_kv, p.len_kv, p.head_dim_v);
    out_ = rows(p.heads_q, p.len_q, p.head_dim_v);
    const hash::RowsJob jobs[] = {gather(p.q, p.heads_q, q_, q_order()), gather(p.k, p.heads_kv, k_, kv_order()),
                                  gather(p.v, p.heads_kv, v_, kv_order())};
    Prepare::move(jobs, 3, device());
    params_.q = tensor_ref(q_);
    params_.k = tensor_ref(k_);
    params_.v = tensor_ref(v_);
    params_.out = tensor_ref(out_);
    params_.lse_stride_seq = 1;
    params_.lse_stride_head = p.len_q;
    params_.lse_stride_batch = int64_t{p.heads_q} * p.len_q;
    params_.mask.kind = MaskKind::kComposite;
  }

  at::Device device() const { return call_.q.device(); }

  hash::Plane<const int32_t> q_order() const {
    const MaskArgs& m = call_.params.mask;
    return {m.q_order, m.q_order_stride_batch, m.q_order_stride_head};
  }
  hash::Plane<const int32_t> kv_order() const {
    const MaskArgs& m = call_.params.mask;
    return {m.kv_order, m.kv_order_stride_batch, m.kv_order_stride_head};
  }

  at::Tensor rows(int64_t heads, int64_t length, int64_t columns) const {
    return Backend::empty({call_.params.batch, heads, length, columns},
                          {heads * length * columns, length * columns, columns, 1}, call_.q.scalar_type());
  }

  // A number for each query.
  at::Tensor row_values() const {
    const int64_t heads = call_.params.heads_q, length = call_.params.len_q;
    return Backend::empty({call_.params.batch, heads, length}, {heads * length, length, 1}, at::kFloat);
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

  // `from` and `to` of the same heads.
  hash::RowsJob scatter(const at::Tensor& from, const TensorRef& to, hash::Plane<const int32_t> order) const {
    hash::RowsJob job = this->job(from.itemsize() * from.size(3), static_cast<int32_t>(from.size(1)),
                                  static_cast<int32_t>(from.size(2)));
    job.from = hash::rows_of(tensor_ref(from), from.itemsize());
    job.to = hash::rows_of(to, from.itemsize());
    job.order = order;
    job.scatter = true;
    return job;
  }

  hash::RowsJob value_job(const float* from, int64_t stride_batch, int64_t stride_head, int64_t stride_seq) const {
    constexpr int64_t kBytes = sizeof(float);
    hash::RowsJob job = this->job(kBytes, call_.params.heads_q, call_.params.len_q);
    job.from = {const_cast<float*>(from), stride_batch * kBytes, stride_head * kBytes, stride_seq * kBytes};
    job.order = q_order();
    return job;
  }

  static hash::RowsRef lse_rows(const AttentionParams& p) {
    constexpr int64_t kBytes = sizeof(float);
    return {p.lse, p.lse_stride_batch * kBytes, p.lse_stride_head * kBytes, p.lse_stride_seq * kBytes};
  }

  Call& call_;
  AttentionParams params_;  // of the sorted rows; lse is left to whoever derives
  at::Tensor q_, k_, v_, out_;
};

template <class Backend, class Prepare>
class SortedCall : SortedRows<Backend, Prepare> {
 public:
  // Gathers.
  explicit SortedCall(Call& call) : SortedRows<Backend, Prepare>(call) {
    if (call.params.lse == nullptr) return;
    lse_ = this->row_values();
    this->params_.lse = lse_.template mutable_data_ptr<float>();
  }

  const AttentionParams& params() const { return this->params_; }

  // Scatters, once the attention over params() has been run.
  void finish() {
    const AttentionParams& p = this->call_.params;
    hash::RowsJob lse = this->job(sizeof(float), p.heads_q, p.lse == nullptr ? 0 : p.len_q);
    lse.from = this->lse_rows(this->params_);
    lse.to = this->lse_rows(p);
    lse.order = this->q_order();
    lse.scatter = true;
    const hash::RowsJob jobs[] = {this->scatter(this->out_, p.out, this->q_order()), lse};
    Prepare::move(jobs, 2, this->device());
  }

 private:
  at::Tensor lse_;
};

template <class Backend, class Prepare>
class SortedBackward : SortedRows<Backend, Prepare> {
 public:
  // Gathers.
  explicit SortedBackward(BackwardCall& call)
      : SortedRows<Backend, Prepare>(call.call), backward_(call), gradients_(call.params) {
    const AttentionParams& p = call.call.params;
    dout_ = this->rows(p.heads_q, p.len_q, p.head_dim_v);
    dq_ = this->rows(p.heads_q, p.len_q, p.head_dim);
    dk_ = this->rows(this->params_.heads_kv, p.len_kv, p.head_dim);
    dv_ = this->rows(this->params_.heads_kv, p.len_kv, p.head_dim_v);
    lse_ = this->row_values();
    hash::RowsJob jobs[4] = {this->gather(p.out, p.heads_q, this->out_, this->q_order()),
                             this->gather(call.params.dout, p.heads_q, dout_, this->q_order()),
                             this->value_job(p.lse, p.lse_stride_batch, p.lse_stride_head, p.lse_stride_seq)};
    this->params_.lse = lse_.template mutable_data_ptr<float>();
    jobs[2].to = this->lse_rows(this->params_);
    const bool has_dlse = call.params.dlse != nullptr;
    if (has_dlse) {
      dlse_ = this->row_values();
      jobs[3] = this->value_job(call.params.dlse, call.params.dlse_stride_batch, call.params.dlse_stride_head,
                                call.params.dlse_stride_seq);
      jobs[3].to = jobs[2].to;
      jobs[3].to.data = dlse_.template mutable_data_ptr<float>();
    }
    Prepare::move(jobs, has_dlse ? 4 : 3, this->device());

    gradients_.forward = this->params_;
    gradients_.dout = tensor_ref(dout_);
    gradients_.dlse = has_dlse ? dlse_.template const_data_ptr<float>() : nullptr;
    gradients_.dlse_stride_batch = this->params_.lse_stride_batch;
    gradients_.dlse_stride_head = this->params_.lse_stride_head;
    gradients_.dlse_stride_seq = 1;
    gradients_.dq = tensor_ref(dq_);
    gradients_.dk = tensor_ref(dk_);
    gradients_.dv = tensor_ref(dv_);
  }

  const BackwardParams& params() const { return gradients_; }
  const at::Tensor& lse() const { return lse_; }

  // Scatters, once the backward pass over params() has been run.
  void finish() {
    const bool shared = dk_.size(1) != backward_.dk.size(1);
    at::Tensor dk = shared ? at::empty_like(dk_) : backward_.dk, dv = shared ? at::empty_like(dv_) : backward_.dv;
    const hash::RowsJob jobs[] = {this->scatter(dq_, tensor_ref(backward_.dq), this->q_order()),
                                  this->scatter(dk_, tensor_ref(dk), this->kv_order()),
                                  this->scatter(dv_, tensor_ref(dv), this->kv_order())};
    Prepare::move(jobs, 3, this->device());
    if (!shared) return;
    // A kv head's gradient is the sum over the query heads that each had it in an order of their own.
    const auto sum = [&](const at::Tensor& of_query_heads, at::Tensor& to) {
      const int64_t heads = to.size(1);
      at::sum_out(to, of_query_heads.unflatten(1, {heads, of_query_heads.size(1) / heads}), 2);
    };
    sum(dk, backward_.dk);
    sum(dv, backward_.dv);
  }

 private:
  BackwardCall& backward_;
  BackwardParams gradients_;
  at::Tensor dout_, dq_, dk_, dv_, lse_, dlse_;
};

}  // namespace flashmsa::binding
