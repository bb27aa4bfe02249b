// Ahead of the main kernel: Δ = rowsum(dO ∘ O) - dlse and lse for every row, zeros for dQ or its turns, and which keys each
// row and each tile of rows sees.
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
  float scale_log2;  // KernelParams'
  int32_t heads_q, residues, len_q, q_tiles, head_dim_v;
  int32_t block_kv;  // keys of the main kernel's tiles
  CellListArgs list;  // rows 0: none
  int32_t heads_kv, key_tiles, orders;
  PackedKeys* packed;  // KernelParams::packed
};

// A row's own keys, whatever block it is in.
__device__ inline mask::TwoRuns keys_of(const PreprocessParams& params, int32_t batch, int32_t head, int32_t row,
                                        int32_t* position) {
  using mask::Composite;
  const Composite::Block block = Composite::block(params.mask, batch, head, row, row);
  if (position != nullptr) *position = Composite::position(params.mask, block, row);
  return Composite::row(params.mask, block, row);
}

// Packed: the tiles of a batch's queries and keys.
template <class Tiles>
__device__ __forceinline__ PackedTiles packed_queries(const PreprocessParams& params, int32_t batch) {
  const mask::Document::Params& documents = params.mask.documents;
  return {documents.q_offsets + batch * documents.offsets_stride, documents.num_documents, params.len_q,
          Tiles::kBlockQ};
}
__device__ __forceinline__ PackedTiles packed_keys(const PreprocessParams& params, int32_t batch) {
  const mask::Document::Params& documents = params.mask.documents;
  return {documents.kv_offsets + batch * documents.offsets_stride, documents.num_documents, params.mask.len_kv,
          params.block_kv};
}

// The rows of a tile. SYNC: all threads of the CTA call it.
struct TileRows {
  int32_t begin, end;
  int32_t origin;  // packed: where their document's keys begin, from which keys are counted
};
template <class Tiles>
__device__ __forceinline__ TileRows rows_of(const PreprocessParams& params, int32_t batch, int32_t tile) {
  if constexpr (Tiles::kPacked) {
    // PERF: the documents that begin at or before this tile are counted, all at once; halving is a chain of loads.
    const PackedTiles queries = packed_queries<Tiles>(params, batch);
    int32_t begun = 0;
    for (int32_t base = 0; base <= queries.documents; base += kPreprocessThreads) {
      const int32_t d = base + static_cast<int32_t>(threadIdx.x);
      begun += __syncthreads_count(d <= queries.documents && queries.first_tile(d) <= tile);
    }
    const int32_t document = max_of(begun, 1) - 1;
    const PackedTiles::Range range = queries.range(tile, document);
    return {range.begin, range.end, packed_keys(params, batch).begin(document)};
  } else {
    const int32_t first_row = tile * Tiles::kBlockQ;
    return {first_row, min_of(first_row + Tiles::kBlockQ, params.len_q), 0};
  }
}

// The tiles' share of a plan: rows, by one thread each, then the tile by the first. SYNC: all threads of the CTA call it.
template <class Tiles>
__device__ void plan_tile(const PreprocessParams& params, int32_t batch, int32_t head, int32_t tile,
                          const TileRows& own) {
  __shared__ mask::TwoRuns ends[2];
  const Prepared& to = params.prepared;
  const int64_t plan = int64_t{batch} * to.plan_stride_batch + int64_t{head} * to.plan_stride_head;
  const int32_t first_row = own.begin, last_row = own.end - 1;
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
    to.mains[at] =
        Tiles::kPacked ? mask::Interval{keys.main.begin - own.origin, keys.main.end - own.origin} : keys.main;
    if (to.firsts != nullptr) to.firsts[at] = keys.first;
    if (to.positions != nullptr) to.positions[at] = position;
  }
  if constexpr (Tiles::kPacked) {
    if (threadIdx.x == 0) to.tiles[plan * params.q_tiles + tile] = {{0, 0, 0, 0}, own.origin, 0, own.begin, own.end};
    return;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const mask::TwoRunTiles tiles = mask::key_tiles(ends[0], ends[1], params.block_kv);
    to.tiles[plan * params.q_tiles + tile] = {tiles.main, tiles.first_begin, tiles.first_end, 0, 0};
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

// Packed: the key tiles of an order, likewise; numbers that are none come last.
template <class Tiles>
__device__ void order_packed(const PreprocessParams& params, int32_t order) {
  __shared__ int32_t steps[kMostPacked];
  const Prepared& to = params.prepared;
  const int32_t batch = to.order_stride_batch != 0 ? order : 0, n = params.key_tiles;
  const PackedTiles keys = packed_keys(params, batch), queries = packed_queries<Tiles>(params, batch);
  const bool causal = params.mask.documents.causal;
  for (int32_t i = threadIdx.x; i < n; i += blockDim.x) {
    const PackedKeys made = make_packed_keys(keys, queries, causal, i);
    steps[i] = made.empty() ? -1 : made.steps();
  }
  __syncthreads();
  for (int32_t i = threadIdx.x; i < n; i += blockDim.x) {
    const int32_t mine = steps[i];
    int32_t rank = 0;
    for (int32_t j = 0; j < n; ++j) rank += steps[j] > mine || (steps[j] == mine && j < i);
    params.packed[int64_t{order} * n + rank] = make_packed_keys(keys, queries, causal, i);
  }
}

// Whether lse is a sink alone: as given, or as the forward kernels round it on its way.
__device__ __forceinline__ bool is_sink(float lse, float sink) {
  constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;
  return lse == sink || lse == __fmul_rn(__fmul_rn(sink, kLog2E), kLn2);
}

// Δ of a tile's rows, and whether a row of O is zero.
template <class Tiles>
struct RowSums {
  using Element = typename Tiles::Element;
  static constexpr int32_t kLanes = Tiles::kHeadDim / 8;  // of a row
  static constexpr int32_t kRowsAtOnce = kPreprocessThreads / kLanes;
  static constexpr int32_t kLoads = 4;  // rows that a lane has on their way at a time
  static_assert(Tiles::kBlockQ % (kRowsAtOnce * kLoads) == 0);

  float delta[Tiles::kBlockQ];
  bool zero[Tiles::kBlockQ];

  // Of these rows, and zeros past them. SYNC: a block barrier before anything is read.
  __device__ __forceinline__ void gather(const PreprocessParams& params, sm90::Sequence from, const TileRows& rows) {
    const int32_t lane = threadIdx.x % kLanes;
#pragma unroll 1
    for (int32_t base = threadIdx.x / kLanes; base < Tiles::kBlockQ; base += kRowsAtOnce * kLoads) {
      // PERF: all loads, then the sums: each row by itself waits for the memory each time.
      uint4 o[kLoads], d[kLoads];
#pragma unroll
      for (int n = 0; n < kLoads; ++n) {
        const int32_t row = rows.begin + base + n * kRowsAtOnce;
        const bool is = row < rows.end && lane * 8 < params.head_dim_v;
        o[n] = load(params.out, from, row, lane, is);
        d[n] = load(params.dout, from, row, lane, is);
      }
#pragma unroll
      for (int n = 0; n < kLoads; ++n) sum(o[n], d[n], lane, base + n * kRowsAtOnce);
    }
  }

 private:
  static __device__ __forceinline__ uint4 load(const TensorRef& tensor, sm90::Sequence from, int32_t row, int32_t lane,
                                               bool is) {
    if (!is) return {0, 0, 0, 0};
    return *reinterpret_cast<const uint4*>(attn::row_of<Element>(tensor, from, row) + lane * 8);
  }

  __device__ __forceinline__ void sum(const uint4& packed_o, const uint4& packed_d, int32_t lane, int32_t place) {
    const uint32_t o[4] = {packed_o.x, packed_o.y, packed_o.z, packed_o.w};
    const uint32_t d[4] = {packed_d.x, packed_d.y, packed_d.z, packed_d.w};
    float sum = 0.0f;
    int32_t none = 1;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float2 out = attn::unpack2(o[c], Element{}), dout = attn::unpack2(d[c], Element{});
      sum = fmaf(out.y, dout.y, fmaf(out.x, dout.x, sum));
      none &= out.x == 0.0f && out.y == 0.0f;
    }
#pragma unroll
    for (int32_t step = kLanes / 2; step > 0; step /= 2) {
      sum += __shfl_xor_sync(~0u, sum, step);
      none &= __shfl_xor_sync(~0u, none, step);
    }
    if (lane == 0) {
      delta[place] = sum;
      zero[place] = none != 0;
    }
  }
};

// What the main kernel wants to know of a row: lse in the exponent's units, and -Δ.
__device__ __forceinline__ float2 row_statistics(const PreprocessParams& params, sm90::Sequence at, int32_t row,
                                                 float given, float delta, bool zero) {
  constexpr float kLog2E = 1.44269504088896341f;
  constexpr float kInfinity = __builtin_huge_valf();
  // Rows that see nothing, or only logits of -inf: every weight is 2^-inf = 0, whatever dO holds.
  const bool empty = given == -kInfinity || (params.sinks != nullptr && zero && is_sink(given, params.sinks[at.head]));
  if (empty) delta = 0.0f;
  if (params.dlse != nullptr) {
    delta -= params.dlse[at.batch * params.dlse_stride_batch + at.head * params.dlse_stride_head +
                         at.residue * params.dlse_stride_residue + row * params.dlse_stride_seq];
  }
  if (params.delta != nullptr) {
    const int64_t sequence = (int64_t{at.batch} * params.heads_q + at.head) * params.residues + at.residue;
    params.delta[sequence * params.len_q + row] = delta;
  }
  if (empty) return {kInfinity, 0.0f};
  // NOTE: a row that sees a logit of +inf is NaN throughout.
  return {given == kInfinity ? given - given : given * kLog2E, -delta};
}

// Zeros for what is added to a tile's dQ. PERF: without a test of each store's place.
template <class Tiles>
__device__ __forceinline__ void clear_dq(const PreprocessParams& params, int64_t tile) {
  constexpr int32_t kQuads = Tiles::kPieces * DqPiece::kFloats / 4;
  static_assert(kQuads % kPreprocessThreads == 0);
  float4* dq = reinterpret_cast<float4*>(params.prepared.dq) + tile * kQuads + threadIdx.x;
#pragma unroll
  for (int32_t i = 0; i < kQuads; i += kPreprocessThreads) dq[i] = {0.0f, 0.0f, 0.0f, 0.0f};
}

// One CTA an order of key tiles, then one a tile of rows of a sequence.
template <class Tiles>
__global__ void __launch_bounds__(kPreprocessThreads)
    preprocess_kernel(const __grid_constant__ PreprocessParams params) {
  static_assert(Tiles::kBlockQ <= kPreprocessThreads, "a thread has a row at the end");
  __shared__ RowSums<Tiles> sums;
  // The main kernel may start to set itself up.
  cudaTriggerProgrammaticLaunchCompletion();

  if (static_cast<int32_t>(blockIdx.x) < params.orders) {
    if constexpr (Tiles::kPacked) {
      return order_packed<Tiles>(params, blockIdx.x);
    } else {
      return order_key_tiles<Tiles>(params, blockIdx.x);
    }
  }
  const int32_t block = static_cast<int32_t>(blockIdx.x) - params.orders;
  const int32_t tile = block % params.q_tiles;
  const int32_t sequence = block / params.q_tiles;
  const sm90::Sequence from = {sequence / params.residues % params.heads_q, sequence / params.residues / params.heads_q,
                               sequence % params.residues};
  const TileRows rows = rows_of<Tiles>(params, from.batch, tile);
  const int32_t row = rows.begin + static_cast<int32_t>(threadIdx.x);
  const bool has_row = threadIdx.x < Tiles::kBlockQ && row < rows.end;
  float lse = 0.0f;
  if (has_row) {
    lse = params.lse[from.batch * params.lse_stride_batch + from.head * params.lse_stride_head +
                     from.residue * params.lse_stride_residue + row * params.lse_stride_seq];
  }
  sums.gather(params, from, rows);
  if (params.prepared.turns == nullptr) {
    if (!Tiles::kPacked || rows.begin < rows.end) clear_dq<Tiles>(params, block);
  } else if (threadIdx.x < 4 * Tiles::kCluster) {
    params.prepared.turns[int64_t{block} * (4 * Tiles::kCluster) + threadIdx.x] = 0;
  }
  __syncthreads();
  if (threadIdx.x < Tiles::kBlockQ) {
    // Past the rows: as rows that see nothing.
    float2 of_row = {__builtin_huge_valf(), 0.0f};
    if (has_row) of_row = row_statistics(params, from, row, lse, sums.delta[threadIdx.x], sums.zero[threadIdx.x]);
    float* stats = params.prepared.stats + int64_t{block} * (2 * Tiles::kBlockQ) + threadIdx.x;
    stats[0] = of_row.x;
    stats[Tiles::kBlockQ] = of_row.y;
    if constexpr (Tiles::kTerms) {
      using Element = typename Tiles::Element;
      using RowTerms = Terms<Element>;
      Element* terms =
          static_cast<Element*>(params.prepared.terms) + int64_t{block} * (Tiles::kBlockQ * RowTerms::kOfARow);
      const bool empty = of_row.x == __builtin_huge_valf();
      RowTerms::store(terms, threadIdx.x, 0, empty ? -RowTerms::kMost : -of_row.x / params.scale_log2);
      RowTerms::store(terms, threadIdx.x, 1, of_row.y);
    }
  }

  // The first sequence that a plan serves makes it.
  const bool first = from.residue == 0 && (from.batch == 0 || params.prepared.plan_stride_batch != 0) &&
                     (from.head == 0 || params.prepared.plan_stride_head != 0);
  if (first) plan_tile<Tiles>(params, from.batch, from.head, tile, rows);
}

}  // namespace flashmsa::bwd
