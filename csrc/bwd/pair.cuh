// One pair of a query and a key by one warp, each lane eight columns: what the slow paths are made of.
#pragma once

#include "attn/slow_rows.cuh"
#include "bwd/dropout.cuh"
#include "bwd/shared.cuh"

namespace flashmsa::bwd {

template <class Element>
struct PairGradient {
  const KernelParams& params;
  const int32_t batch, residue;
  float q[8] = {}, dout[8] = {}, k[8] = {}, v[8] = {};
  float lse = 0.0f, minus_delta = 0.0f;  // the query's, as preprocessing left them
  mask::TwoRuns keys = {};
  int32_t head = 0, query = 0, key = 0;
  int32_t position = 0;
  float dropped = 0.0f;  // the weight after ds(), with dropout

  __device__ __forceinline__ PairGradient(const KernelParams& params, int32_t batch, int32_t residue)
      : params(params), batch(batch), residue(residue) {}

  __device__ __forceinline__ int32_t column() const { return threadIdx.x % 32 * 8; }

  __device__ __forceinline__ void load(const TensorRef& tensor, int32_t of_head, int32_t row, int32_t columns,
                                       float (&values)[8]) const {
    if (column() >= columns) return;
    attn::load8(attn::row_of<Element>(tensor, {of_head, batch, residue}, row) + column(), values);
  }

  // `place`: of the row among those of its sequence as they come in tiles.
  __device__ __forceinline__ void load_query(int32_t of_head, int32_t row, int32_t place, int32_t block_q) {
    head = of_head;
    query = row;
    load(params.q_rows, head, row, params.head_dim, q);
    load(params.dout_rows, head, row, params.head_dim_v, dout);
    const int64_t tile = params.sequence(batch, head, residue) * params.q_tiles + place / block_q;
    const float* stats = params.prepared.stats + tile * 2 * block_q + place % block_q;
    lse = stats[0];
    minus_delta = stats[block_q];
    const int64_t planned = params.plan(batch, head) * params.q_tiles * block_q + place;
    keys = params.prepared.keys_of(planned);
    if (params.prepared.positions != nullptr) position = params.prepared.positions[planned];
  }

  __device__ __forceinline__ void load_key(int32_t kv_head, int32_t row) {
    key = row;
    load(params.k_rows, kv_head, row, params.head_dim, k);
    load(params.v_rows, kv_head, row, params.head_dim_v, v);
  }

  // Whether a sum is NaN in every column: it stays so, and what is left need not be computed.
  __device__ __forceinline__ bool settled(const float (&values)[8], int32_t columns) const {
    bool all = true;
#pragma unroll
    for (int c = 0; c < 8; ++c) all = all && values[c] != values[c];
    return __all_sync(~0u, all || column() >= columns);
  }

  // Of a query that sees nothing, or only logits of -inf.
  __device__ __forceinline__ bool without_weights() const { return lse == __builtin_huge_valf(); }

  static __device__ __forceinline__ float sum(float x) {
#pragma unroll
    for (int32_t step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
  }

  // dS without its scale; sets `dropped`.
  __device__ __forceinline__ float ds() {
    float s = 0.0f, dp = 0.0f;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      s = fmaf(q[c], k[c], s);
      dp = fmaf(dout[c], v[c], dp);
    }
    s = sum(s);
    dp = sum(dp);
    float slope = 1.0f;
    if (params.softcap) {
      const float t = attn::tanh_exact(s * params.cap.factor);
      slope = 1.0f - t * t;
      s = t * params.cap.inverse;
    }
    if (params.alibi_slopes != nullptr) {
      const float alibi = params.alibi_slopes[batch * params.alibi_stride_batch + head] * params.alibi_factor;
      s -= alibi * fabsf(static_cast<float>(position - key));
    }
    const float p = sm90::exp2_approx(fmaf(s, params.scale_log2, -lse));
    dropped = p;
    if (params.dropout.rng_state != nullptr) {
      const attn::SequenceDraws<true> draws = draws_of(params, batch, head, residue);
      const bool keep = draws.dropout.keeps(draws.query(query), draws.key(key));
      // NOTE: a dropped weight counts as 0 and is not hidden: what is NaN stays so.
      const float factor = keep ? params.dropout.keep_scale : 0.0f;
      dropped *= factor;
      dp *= factor;
    }
    return p * (dp + minus_delta) * slope;
  }

  __device__ __forceinline__ void store(const TensorRef& tensor, sm90::Sequence at, int32_t row, int32_t columns,
                                        const float (&values)[8], float factor) const {
    if (column() >= columns) return;
    uint4 packed;
    packed.x = sm90::pack2<Element>(values[0] * factor, values[1] * factor);
    packed.y = sm90::pack2<Element>(values[2] * factor, values[3] * factor);
    packed.z = sm90::pack2<Element>(values[4] * factor, values[5] * factor);
    packed.w = sm90::pack2<Element>(values[6] * factor, values[7] * factor);
    *reinterpret_cast<uint4*>(attn::row_of<Element>(tensor, at, row) + column()) = packed;
  }
};

}  // namespace flashmsa::bwd
