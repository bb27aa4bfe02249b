// Behind the main kernel: dQ from its fp32 sum, and gradients that did not come out finite once more, pair by pair.
//
// Where a tile holds pairs that may not be seen, their weight is 0, but 0 times a NaN or an infinity is NaN. What may not be
// seen must not be touched; so such rows are computed again from what they see alone. Slow, and right: ordinary data never
// come here.
#pragma once

#include "attn/epilogue.cuh"
#include "attn/slow_rows.cuh"
#include "bwd/pair.cuh"
#include "bwd/shared.cuh"
#include "bwd/visible.cuh"

namespace flashmsa::bwd {

inline constexpr int kPostprocessThreads = 128;

template <class Tiles>
struct Postprocess {
  using Element = typename Tiles::Element;
  using RowTile = sm90::SwizzledTile<64, 64>;

  const KernelParams& params;

  __device__ __forceinline__ int32_t lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ int32_t warp() const { return threadIdx.x / 32; }

  // 64 rows of dQ.
  __device__ void convert(int32_t block, char* staging) {
    constexpr int32_t kBlocks = Tiles::kBlockQ / 64, kColumns = Tiles::kHeadDim / 64;
    const int32_t blocks = params.q_tiles * kBlocks;
    const int32_t sequence = block / blocks;
    const sm90::Sequence at = {sequence / params.residues % params.heads_q, sequence / params.residues / params.heads_q,
                               sequence % params.residues};
    const uint32_t tile = static_cast<uint32_t>(__cvta_generic_to_shared(staging));
    const float* from =
        params.prepared.dq + int64_t{block} * kColumns * DqPiece::kFloats + warp() * DqPiece::kWarpFloats;
    constexpr int32_t kAtOnce = kColumns > 1 ? 2 : 1;  // groups of 64 columns on their way at a time
    float dq[kAtOnce][32];
    const auto load = [&](int32_t first) {
#pragma unroll
      for (int32_t n = 0; n < kAtOnce; ++n) load_group(from + (first + n) * DqPiece::kFloats, dq[n]);
    };
    // PERF: before it is known which rows these are: else one load waits for the other.
    load(0);
    const int32_t place = block % blocks * 64 + warp() * sm90::kWarpRows;
    int32_t first_row = place, end_row = params.len_q, origin = 0;
    if constexpr (Tiles::kPacked) {
      const QueryTile own =
          params.prepared.load_tile(params.plan(at.batch, at.head) * params.q_tiles + place / Tiles::kBlockQ);
      first_row = own.first_row + place % Tiles::kBlockQ;
      end_row = own.end_row;
      origin = own.first_begin;
    }
    if (first_row >= end_row) return;
    bool suspect = false;
    // Deterministic mode: rows to which no key tile came hold whatever was there.
    const int32_t* turns = params.prepared.turns;
    const bool none = !Tiles::kPacked && turns != nullptr && turns[int64_t{block} / kBlocks * 4 * Tiles::kCluster] == 0;
#pragma unroll 1
    for (int32_t first = 0;;) {
      if (none) clear(dq);
#pragma unroll
      for (int32_t n = 0; n < kAtOnce; ++n) {
        suspect |= attn::any_nonfinite(dq[n]);
        attn::stage_rows<Element, RowTile, 32>(dq[n], 0, tile, warp() * sm90::kWarpRows);
        __syncwarp();
        write_rows(at, first_row, end_row, (first + n) * 64, staging);
        __syncwarp();
      }
      first += kAtOnce;
      if (first * 64 >= params.head_dim) break;
      load(first);
    }
    if (!suspect) return;
    for (int32_t i = 0; i < sm90::kWarpRows && first_row + i < end_row; ++i) {
      redo_query(at, first_row + i, place + i, origin);
    }
  }

  __device__ __forceinline__ void load_group(const float* from, float (&dq)[32]) const {
#pragma unroll
    for (int e = 0; e < 32; e += 4) {
      const float4 quad = __ldcs(reinterpret_cast<const float4*>(from + DqPiece::offset(lane(), e)));
      dq[e] = quad.x * params.scale;
      dq[e + 1] = quad.y * params.scale;
      dq[e + 2] = quad.z * params.scale;
      dq[e + 3] = quad.w * params.scale;
    }
  }

  template <int kGroups>
  static __device__ __forceinline__ void clear(float (&dq)[kGroups][32]) {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 32; ++e) dq[n][e] = 0.0f;
    }
  }

  // A warp's 16 rows of 64 columns, eight lanes a row.
  __device__ __forceinline__ void write_rows(sm90::Sequence at, int32_t first_row, int32_t end_row,
                                             int32_t first_column, const char* staging) {
    const int32_t chunk = lane() % 8;
#pragma unroll
    for (int32_t i = lane() / 8; i < sm90::kWarpRows; i += 4) {
      const int32_t row = first_row + i, column = first_column + chunk * 8;
      if (row >= end_row || column >= params.head_dim) continue;
      const uint4 value =
          *reinterpret_cast<const uint4*>(staging + RowTile::chunk_offset(warp() * sm90::kWarpRows + i, chunk));
      *reinterpret_cast<uint4*>(attn::row_of<Element>(params.dq_rows, at, row) + column) = value;
    }
  }

  __device__ __forceinline__ void redo_query(sm90::Sequence at, int32_t row, int32_t place, int32_t origin) {
    PairGradient<Element> pair(params, at.batch, at.residue);
    pair.load_query(at.head, row, place, Tiles::kBlockQ);
    const int32_t kv_head = at.head / params.heads_per_kv_head();
    float dq[8] = {};
    const mask::TwoRuns keys = pair.keys;
    const mask::Interval first = mask::first_run(keys);
    for (int run = 0; run < 2; ++run) {
      // A row without weights has no gradient: its zeros times an infinite key are none.
      if (pair.without_weights()) break;
      const int32_t begin = run == 0 ? first.begin : keys.main.begin, end = run == 0 ? first.end : keys.main.end;
      for (int32_t key = begin; key < end; ++key) {
        if (!visible(params, keys, at.batch, at.head, row, key)) continue;
        pair.load_key(kv_head, key + origin);
        const float ds = pair.ds();
#pragma unroll
        for (int c = 0; c < 8; ++c) dq[c] = fmaf(ds, pair.k[c], dq[c]);
        if (pair.settled(dq, params.head_dim)) break;
      }
    }
    pair.store(params.dq_rows, at, row, params.head_dim, dq, params.scale);
  }

  // Whether a warp of the main kernel has noted these 16 keys: one for both gradients, or one for each.
  __device__ __forceinline__ bool noted(int32_t index, int32_t keys) const {
    if constexpr (Tiles::kSplit == Split::kByKeys) {
      return params.prepared.suspects[index * (8 * Tiles::kCluster) + keys] != 0;
    } else {
      const int32_t* suspects = params.prepared.suspects + (index * Tiles::kCluster + keys / 4) * 8 + keys % 4;
      return (suspects[0] | suspects[4]) != 0;
    }
  }

  // 16 of a key tile's keys.
  __device__ void redo_keys(int32_t index, int32_t keys) {
    if (!noted(index, keys)) return;
    const KeyTile tile = key_tile_of<true>(params, index);
    OwnKeys<Tiles::kPacked, false> own;
    int32_t end = params.len_kv;
    if constexpr (Tiles::kPacked) {
      own = own_keys_of(params, tile);
      end = own.end_key;
    }
    const int32_t first = first_key_of<Tiles>(tile, own) + keys % (Tiles::kBlockKv / sm90::kWarpRows) * sm90::kWarpRows;
    for (int32_t i = 0; i < sm90::kWarpRows && first + i < end; ++i) redo_key(tile, own, first + i);
  }

  __device__ __forceinline__ void redo_key(const KeyTile& tile, const OwnKeys<Tiles::kPacked, false>& own,
                                           int32_t key) {
    // The rows' places, what makes a row of one, and what keys are counted from.
    int32_t begin = 0, end = params.len_q, shift = 0, origin = 0;
    if constexpr (Tiles::kPacked) {
      begin = own.begin * Tiles::kBlockQ;
      end = own.end * Tiles::kBlockQ;
      shift = own.first_row - begin;
      origin = own.origin(Tiles::kBlockKv);
    }
    PairGradient<Element> pair(params, tile.batch, tile.residue);
    pair.load_key(tile.kv_head, key);
    float dk[8] = {}, dv[8] = {};
    bool settled = false;
    for (int32_t g = 0; !settled && g < params.heads_per_kv_head(); ++g) {
      const int32_t head = tile.kv_head * params.heads_per_kv_head() + g;
      const int64_t rows = params.plan(tile.batch, head) * params.q_tiles * Tiles::kBlockQ;
      for (int32_t place = begin; place < end; ++place) {
        const int32_t row = place + shift;
        if (!visible(params, params.prepared.keys_of(rows + place), tile.batch, head, row, key - origin)) continue;
        pair.load_query(head, row, place, Tiles::kBlockQ);
        if (pair.without_weights()) continue;
        const float ds = pair.ds();
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          dk[c] = fmaf(ds, pair.q[c], dk[c]);
          dv[c] = fmaf(pair.dropped, pair.dout[c], dv[c]);
        }
        settled = pair.settled(dk, params.head_dim) && pair.settled(dv, params.head_dim_v);
        if (settled) break;
      }
    }
    const sm90::Sequence at = {tile.kv_head, tile.batch, tile.residue};
    pair.store(params.dk_rows, at, key, params.head_dim, dk, params.scale);
    pair.store(params.dv_rows, at, key, params.head_dim_v, dv, 1.0f);
  }
};

// A CTA has 64 rows of dQ, or 64 keys, or both.
template <class Tiles>
inline constexpr int32_t kKeyParts = Tiles::kBlockKv / 64;
template <class Tiles>
__global__ void __launch_bounds__(kPostprocessThreads, 3)
    postprocess_kernel(const __grid_constant__ KernelParams params, int32_t blocks) {
  __shared__ __align__(1024) char staging[Postprocess<Tiles>::RowTile::kBytes];
  Postprocess<Tiles> post{params};
  const int32_t index = blockIdx.x;
  // PERF: the last first: what the main kernel added to last is still in the L2.
  if (index < blocks) post.convert(blocks - 1 - index, staging);
  if (index < kKeyParts<Tiles> * params.order.count()) {
    post.redo_keys(index / kKeyParts<Tiles>, index % kKeyParts<Tiles> * 4 + post.warp());
  }
}

}  // namespace flashmsa::bwd
