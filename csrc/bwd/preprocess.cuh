// Ahead of the main kernel: Δ = rowsum(dO ∘ O) - dlse and lse for every row, zeros for dQ, and which keys each row and each
// tile of rows sees.
#pragma once

#include "attn/slow_rows.cuh"
#include "bwd/shared.cuh"
#include "bwd/visible.cuh"
#include "mask/composite.h"

namespace flashmsa::bwd {

inline constexpr int kPreprocessThreads = 256;

struct PreprocessParams {
  TensorRef out, dout;
  const float* lse;
  int64_t lse_stride_batch, lse_stride_head, lse_stride_seq, lse_stride_residue;
  const float* dlse;  // null: zero
  int64_t dlse_stride_batch, dlse_stride_head, dlse_stride_seq, dlse_stride_residue;
  const float* sinks;  // (heads_q); null: none
  float* delta;  // (batch, heads_q, residues, len_q); null: not wanted
  mask::Composite::Params mask;
  Prepared prepared;
  int32_t heads_q, residues, len_q, q_tiles, head_dim_v;
  int32_t block_kv;  // keys of the main kernel's tiles
  CellListArgs list;  // rows 0: none
  int32_t heads_kv, key_tiles, orders;
};

// A row's own keys, whatever block it is in.
__device__ inline mask::TwoRuns keys_of(const PreprocessParams& params, int32_t batch, int32_t head, int32_t row,
                                        int32_t* position) {
  using mask::Composite;
  const Composite::Block block = Composite::block(params.mask, batch, head, row, row);
  if (position != nullptr) *position = Composite::position(params.mask, block, row);
  return Composite::row(params.mask, block, row);
}

// The tiles' share of a plan: rows, by one thread each, then the tile by the first. SYNC: all threads of the CTA call it.
template <class Tiles>
__device__ void plan_tile(const PreprocessParams& params, int32_t batch, int32_t head, int32_t tile) {
  __shared__ mask::TwoRuns ends[2];
  const Prepared& to = params.prepared;
  const int64_t plan = int64_t{batch} * to.plan_stride_batch + int64_t{head} * to.plan_stride_head;
  const int32_t first_row = tile * Tiles::kBlockQ;
  const int32_t last_row = min_of(first_row + Tiles::kBlockQ, params.len_q) - 1;
  for (int32_t i = threadIdx.x; i < Tiles::kBlockQ; i += blockDim.x) {
    const int64_t at = (plan * params.q_tiles + tile) * Tiles::kBlockQ + i;
    const int32_t row = first_row + i;
    mask::TwoRuns keys = {{0, 0}, {0, 0}};
    int32_t position = 0;
    if (row <= last_row) {
      keys = keys_of(params, batch, head, row, to.positions != nullptr ? &position : nullptr);
      if (row == first_row) ends[0] = keys;
      if (row == last_row) ends[1] = keys;
    }
    to.mains[at] = keys.main;
    if (to.firsts != nullptr) to.firsts[at] = keys.first;
    if (to.positions != nullptr) to.positions[at] = position;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const mask::TwoRunTiles tiles = mask::key_tiles(ends[0], ends[1], params.block_kv);
    to.tiles[plan * params.q_tiles + tile] = {tiles.main, tiles.first_begin, tiles.first_end, {0, 0}};
  }
}

// Key tiles by how many query tiles they meet, most first: a call ends when its last long one does.
// PERF: without, 16 documents and lists of blocks left multiprocessors idle for 5 % of the time.
inline constexpr int32_t kMostOrdered = 1024;

template <class Tiles>
__device__ void order_key_tiles(const PreprocessParams& params, int32_t order) {
  __shared__ int32_t begins[kMostOrdered + 1];  // query tiles whose run of key tiles begins here, less those that ended
  __shared__ int32_t meets[kMostOrdered];
  const Prepared& to = params.prepared;
  const int32_t n = params.key_tiles;
  const bool by_head = to.order_stride_head != 0;
  const int32_t batch = by_head ? order / params.heads_kv : order;
  const int32_t ratio = params.heads_q / params.heads_kv;
  const int32_t first_head = by_head ? order % params.heads_kv * ratio : 0;
  for (int32_t i = threadIdx.x; i <= n; i += blockDim.x) begins[i] = 0;
  __syncthreads();
  const auto add_run = [&](int32_t begin, int32_t end) {
    if (begin >= end) return;
    atomicAdd(&begins[begin], 1);
    atomicAdd(&begins[end], -1);
  };
  const int32_t all = params.q_tiles * (by_head ? ratio : 1);
  for (int32_t i = threadIdx.x; i < all; i += blockDim.x) {
    const int32_t head = first_head + i / params.q_tiles;
    const int32_t first_row = i % params.q_tiles * Tiles::kBlockQ;
    const int32_t last_row = min_of(first_row + Tiles::kBlockQ, params.len_q) - 1;
    const mask::TwoRunTiles met = mask::key_tiles(keys_of(params, batch, head, first_row, nullptr),
                                                  keys_of(params, batch, head, last_row, nullptr), params.block_kv);
    const auto add = [&](int32_t begin, int32_t end) {
      add_run(max_of(begin, met.main.begin), min_of(end, met.main.end));
      add_run(max_of(begin, met.first_begin), min_of(end, met.first_end));
    };
    const CellListArgs& list = params.list;
    if (list.rows == 0) {
      add(0, n);
      continue;
    }
    const int32_t row = first_row / mask::kCell, parts = mask::kCell / params.block_kv;
    if (row >= list.rows) continue;
    const int32_t* start = list.row_start + list_slice(list, batch, head) * (list.rows + 1) + row;
    const int32_t begin = clamp(start[0], 0, list.capacity), end = clamp(start[1], begin, list.capacity);
    for (int32_t entry = begin; entry < end; ++entry) {
      const int32_t tile = list.cells[entry] * parts;
      add(clamp(tile, 0, n), clamp(tile + parts, 0, n));
    }
  }
  __syncthreads();
  for (int32_t i = threadIdx.x; i < n; i += blockDim.x) {
    int32_t sum = 0;
    for (int32_t j = 0; j <= i; ++j) sum += begins[j];
    meets[i] = sum;
  }
  __syncthreads();
  for (int32_t i = threadIdx.x; i < n; i += blockDim.x) {
    const int32_t mine = meets[i];
    int32_t rank = 0;
    for (int32_t j = 0; j < n; ++j) rank += meets[j] > mine || (meets[j] == mine && j < i);
    to.longest[int64_t{order} * n + rank] = i;
  }
}

// Whether lse is a sink alone: as given, or as the forward kernels round it on its way.
__device__ __forceinline__ bool is_sink(float lse, float sink) {
  constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;
  return lse == sink || lse == __fmul_rn(__fmul_rn(sink, kLog2E), kLn2);
}

// One CTA an order of key tiles, then one a tile of rows of a sequence.
template <class Tiles>
__global__ void __launch_bounds__(kPreprocessThreads)
    preprocess_kernel(const __grid_constant__ PreprocessParams params) {
  using Element = typename Tiles::Element;
  constexpr float kLog2E = 1.44269504088896341f;
  constexpr float kInfinity = __builtin_huge_valf();
  constexpr int32_t kLanes = Tiles::kHeadDim / 8;  // of a row
  constexpr int32_t kRowsAtOnce = kPreprocessThreads / kLanes;
  // The main kernel may start to set itself up.
  cudaTriggerProgrammaticLaunchCompletion();

  if (static_cast<int32_t>(blockIdx.x) < params.orders) return order_key_tiles<Tiles>(params, blockIdx.x);
  const int32_t block = static_cast<int32_t>(blockIdx.x) - params.orders;
  const int32_t tile = block % params.q_tiles;
  const int32_t sequence = block / params.q_tiles;
  const int32_t residue = sequence % params.residues;
  const int32_t head = sequence / params.residues % params.heads_q;
  const int32_t batch = sequence / params.residues / params.heads_q;
  const sm90::Sequence from = {head, batch, residue};
  float* stats = params.prepared.stats + int64_t{block} * (2 * Tiles::kBlockQ);

  const int32_t lane = threadIdx.x % kLanes;
#pragma unroll
  for (int32_t i = threadIdx.x / kLanes; i < Tiles::kBlockQ; i += kRowsAtOnce) {
    const int32_t row = tile * Tiles::kBlockQ + i;
    float delta = 0.0f;
    int32_t zero = 1;  // the row of O is
    if (row < params.len_q && lane * 8 < params.head_dim_v) {
      float o[8], d[8];
      attn::load8(attn::row_of<Element>(params.out, from, row) + lane * 8, o);
      attn::load8(attn::row_of<Element>(params.dout, from, row) + lane * 8, d);
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        delta = fmaf(o[c], d[c], delta);
        zero &= o[c] == 0.0f;
      }
    }
#pragma unroll
    for (int32_t step = kLanes / 2; step > 0; step /= 2) {
      delta += __shfl_xor_sync(~0u, delta, step);
      zero &= __shfl_xor_sync(~0u, zero, step);
    }
    if (lane == 0) {
      // Rows that see nothing, or only logits of -inf, and rows past the end: every weight is 2^-inf = 0, whatever dO holds.
      float lse = kInfinity;
      bool empty = true;
      if (row < params.len_q) {
        const float given = params.lse[batch * params.lse_stride_batch + head * params.lse_stride_head +
                                       residue * params.lse_stride_residue + row * params.lse_stride_seq];
        empty = given == -kInfinity || (params.sinks != nullptr && zero != 0 && is_sink(given, params.sinks[head]));
        if (empty) {
          delta = 0.0f;
        } else {
          // NOTE: a row that sees a logit of +inf is NaN throughout.
          lse = given == kInfinity ? given - given : given * kLog2E;
        }
        if (params.dlse != nullptr) {
          delta -= params.dlse[batch * params.dlse_stride_batch + head * params.dlse_stride_head +
                               residue * params.dlse_stride_residue + row * params.dlse_stride_seq];
        }
        if (params.delta != nullptr) params.delta[int64_t{sequence} * params.len_q + row] = delta;
      }
      stats[i] = lse;
      stats[Tiles::kBlockQ + i] = empty ? 0.0f : -delta;
    }
  }

  constexpr int32_t kQuads = Tiles::kPieces * DqPiece::kFloats / 4;
  float4* dq = reinterpret_cast<float4*>(params.prepared.dq) + int64_t{block} * kQuads;
  for (int32_t i = threadIdx.x; i < kQuads; i += kPreprocessThreads) dq[i] = {0.0f, 0.0f, 0.0f, 0.0f};
  if (params.prepared.turns != nullptr && threadIdx.x < 4) {
    params.prepared.turns[int64_t{block} * 4 + threadIdx.x] = 0;
  }

  // The first sequence that a plan serves makes it.
  const bool first = residue == 0 && (batch == 0 || params.prepared.plan_stride_batch != 0) &&
                     (head == 0 || params.prepared.plan_stride_head != 0);
  if (first) plan_tile<Tiles>(params, batch, head, tile);
}

}  // namespace flashmsa::bwd
