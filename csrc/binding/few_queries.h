// Few queries against many dense keys: an attention call as one over a cache, for the split kernels of decode/. No torch.
#pragma once

#include "core/paged.h"
#include "decode/config.h"

namespace flashmsa::binding {

// Keys from which on it is worth cutting a sequence into parts.
inline constexpr int32_t kManyKeys = 1024;
// Query rows of a kv head, at most.
inline constexpr int64_t kFewRows = 256;

// Nanoseconds that the two ways take by a model of an H200; `rows` of a kv head.
// PERF: fitted to 144 calls of 16 to 256 rows, 1024 to 32768 keys, head dims 64, 128 and 256. Where the model chose wrong,
// the other way was at most a fifth faster.
struct FewQueriesModel {
  int64_t rows, heads, heads_kv, keys, head_dim;  // heads, heads_kv: of all batches
  static constexpr double kSms = 132;

  // Every key once from memory, if all SMs read.
  constexpr double read() const { return static_cast<double>(heads_kv * keys * head_dim) / (kSms * 8.2); }

  // A tile of 128 rows holds the queries of one head, however few, and its SM passes all its keys.
  constexpr double forward() const {
    const int64_t rounds = ceil_div(heads, static_cast<int64_t>(kSms));
    const double compute = static_cast<double>(rounds * keys) * (4 + static_cast<double>(head_dim) / 28);
    return max_of(compute, 1.06 * read());
  }

  // A group of rows reads the keys, the next group reads them again; parts are begun and merged. Clusters merge fastest.
  constexpr double decode() const {
    const bool clusters = heads_kv <= 16 && keys <= 8192 && rows <= 32;
    const int64_t groups = ceil_div(rows, int64_t{head_dim <= 128 ? 64 : 32});
    const double merge = rows <= 16 ? 0 : rows <= 32 ? 2000 : 10000;
    return static_cast<double>(groups) * read() + (clusters ? 3000 : 14000) + merge;
  }
};

// Whether the decode kernels are the better choice for this call, and know all that it asks for.
// NOTE: the forward kernels give a tile of 128 rows of one query head to one SM. With so few rows nearly all of a tile is
// empty, a kv head's keys are read once for each of its query heads, and a small batch leaves most SMs idle; decode reads
// each key once, by all SMs.
constexpr bool has_few_queries(const AttentionParams& p) {
  const MaskArgs& m = p.mask;
  const bool bands = (m.kind == MaskKind::kDense || m.kind == MaskKind::kCausal || m.kind == MaskKind::kComposite) &&
                     m.q_offsets == nullptr && m.row_begin == nullptr;
  const bool from_end = !m.positions_top_left && !(m.kind == MaskKind::kCausal && m.top_left) &&
                        m.position_offset == 0 && p.alibi_step == 1.0;
  if (!bands || (p.alibi_slopes != nullptr && !from_end) || p.residues != 1 || p.dropout_p > 0) return false;
  if (p.heads_kv <= 0 || p.len_kv < kManyKeys) return false;
  const int64_t rows = int64_t{p.heads_q} / p.heads_kv * p.len_q;
  // NOTE: decode counts all sequences' keys in 32 bits.
  if (rows > kFewRows || int64_t{p.batch} * p.len_kv >= kUnbounded) return false;
  const FewQueriesModel model = {rows, int64_t{p.batch} * p.heads_q, int64_t{p.batch} * p.heads_kv, p.len_kv,
                                 decode::bucket_of(max_of(p.head_dim, p.head_dim_v))};
  return model.decode() < model.forward();
}

// Such a call over a cache whose sequences are a page each.
inline PagedParams as_cache(const AttentionParams& p) {
  PagedParams c;
  c.batch = p.batch;
  c.heads_q = p.heads_q;
  c.heads_kv = p.heads_kv;
  c.head_dim = p.head_dim;
  c.head_dim_v = p.head_dim_v;
  c.dtype = p.dtype;
  c.q = p.q;
  c.out = p.out;
  c.lse = p.lse;
  c.lse_stride_batch = p.lse_stride_batch;
  c.lse_stride_head = p.lse_stride_head;
  c.lse_stride_seq = p.lse_stride_seq;
  c.len_q = p.len_q;
  c.total_q = p.batch * p.len_q;
  c.k_pages = {p.k.data, p.k.stride_batch, p.k.stride_seq, p.k.stride_head};
  c.v_pages = {p.v.data, p.v.stride_batch, p.v.stride_seq, p.v.stride_head};
  c.num_pages = p.batch;
  c.page_size = p.len_kv;
  c.max_pages = 1;
  c.band = p.mask.global;
  if (p.mask.kind == MaskKind::kCausal) c.band.right[p.mask.top_left] = 0;
  c.scale = p.scale;
  c.softcap = p.softcap;
  c.sinks = p.sinks;
  c.alibi_slopes = p.alibi_slopes;
  c.alibi_stride_batch = p.alibi_stride_batch;
  return c;
}

}  // namespace flashmsa::binding
