// The backward kernels' parameters and the plan of shared memory.
#pragma once

#include "attn/dropout.cuh"
#include "attn/score.cuh"
#include "bwd/band.h"
#include "bwd/config.h"
#include "bwd/key_order.h"
#include "bwd/packed.h"
#include "bwd/terms.cuh"
#include "core/params.h"
#include "mask/interval.h"
#include "sched/tile_order.h"
#include "sm90/barrier.cuh"
#include "sm90/cluster.cuh"
#include "sm90/fragment.h"
#include "sm90/tensor_map.h"
#include "sm90/tma.cuh"

namespace flashmsa::bwd {

// Which key tiles some rows of queries meet, for the kernel that walks the other way.
struct alignas(32) QueryTile {
  mask::KeyTiles main;
  int32_t first_begin, first_end;
  int32_t first_row, end_row;  // packed: its own rows, and in first_begin what their keys are counted from
};

// What preprocessing leaves for the main kernel, all in the workspace. Rows come in tiles of Config::kBlockQ, the last one
// filled up; a sequence is a (batch, head, residue).
struct Prepared {
  float* stats;        // (sequences, q_tiles, 2, block_q): lse in the exponent's units, then -Δ
  void* terms;         // the same by terms of 16 bits (terms.cuh), as far as the main kernel takes these
  float* dq;           // (sequences, 64-row blocks, head_dim / 64, 4096): fragment order, see DqPiece
  QueryTile* tiles;    // (plans, q_tiles)
  mask::Interval* mains;   // (plans, padded len_q): keys of each row, the main run; packed: see PackedKeys::origin
  mask::Interval* firsts;  // the first run; null: no row has one
  int32_t* positions;  // (plans, padded len_q): ALiBi's; null: none
  int32_t* suspects;   // (CTAs of the main kernel, 8 warps): a gradient of theirs is not finite
  int32_t* turns;      // (sequences, q_tiles, 4 warps): deterministic mode, how many key tiles have added
  int32_t* longest;    // (orders, key_tiles): key tiles, those that meet most queries first; null: as they come
  int32_t plan_stride_batch, plan_stride_head;  // 0: the same plan
  int32_t order_stride_batch, order_stride_head;  // of kv heads; 0: the same order

  FLASHMSA_HD mask::TwoRuns keys_of(int64_t row) const {
    mask::TwoRuns keys = {{0, 0}, mains[row]};
    if (firsts != nullptr) keys.first = firsts[row];
    return keys;
  }
  // PERF: all of it at once. Field by field, as they are needed, is a chain of loads.
  __device__ __forceinline__ QueryTile load_tile(int64_t index) const {
    const int4* from = reinterpret_cast<const int4*>(tiles + index);
    const int4 a = from[0], b = from[1];
    return {{a.x, a.y, a.z, a.w}, b.x, b.y, b.z, b.w};
  }
};

// A number on its way to dq: 64 x 64 of fp32, as the warps' accumulators hold it, four elements of each lane in a row.
struct DqPiece {
  static constexpr int32_t kFloats = 64 * 64;
  static constexpr int32_t kWarpFloats = kFloats / 4;
  // Of element e of a lane, within the warp's part.
  static FLASHMSA_HD constexpr uint32_t offset(uint32_t lane, uint32_t e) { return (e / 4 * 32 + lane) * 4 + e % 4; }
};

struct KernelParams {
  sm90::TensorMap q, dout, k, v, dk, dv;
  TensorRef q_rows, dout_rows, k_rows, v_rows, dq_rows, dk_rows, dv_rows;  // the same tensors, for the slow path
  Prepared prepared;
  CellListArgs list;  // rows 0: none
  sched::TileOrder order;
  KeyOrder key_order;
  int32_t batch, heads_q, heads_kv, residues;
  int32_t len_q, len_kv, q_tiles, head_dim, head_dim_v;
  float scale, scale_log2;  // scale_log2 = scale * log2(e) > 0
  attn::CapParams cap;      // softcap
  bool softcap;
  const float* alibi_slopes;  // null: none; (heads_q) or (batch, heads_q)
  int64_t alibi_stride_batch;
  float alibi_factor;  // from a slope to S's unit a key
  attn::DropoutParams dropout;  // rng_state null: none
  KeyBand band;  // band kernels
  const PackedKeys* packed;  // (orders, key_tiles): packed kernels' key tiles, in the order of Prepared::longest

  // What kept weights, and with them dV, are multiplied by.
  FLASHMSA_HD float value_scale() const { return dropout.rng_state != nullptr ? dropout.keep_scale : 1.0f; }
  FLASHMSA_HD int32_t heads_per_kv_head() const { return heads_q / heads_kv; }
  FLASHMSA_HD int64_t sequence(int32_t batch_index, int32_t head, int32_t residue) const {
    return (int64_t{batch_index} * heads_q + head) * residues + residue;
  }
  FLASHMSA_HD int64_t plan(int32_t batch_index, int32_t head) const {
    return int64_t{batch_index} * prepared.plan_stride_batch + int64_t{head} * prepared.plan_stride_head;
  }
};

// One step: a tile of queries of one head.
struct alignas(16) Step {
  int32_t tile;     // of queries; negative: no more
  int32_t head;
  int32_t partial;  // some pair may be hidden
  int32_t detail;   // of the listed cell
  int32_t turn;     // deterministic mode: how many key tiles add to these queries before this one
};

// Whose keys and values a CTA's tile is.
struct KeyTile {
  int32_t tile, batch, residue, kv_head;
};

// What packed and band kernels know beside it.
template <bool kPacked, bool kBand>
struct OwnKeys {};
template <>
struct OwnKeys<true, false> : PackedKeys {};
template <>
struct OwnKeys<false, true> : BandKeys {};

template <class Config>
struct Shared {
  using QTile = sm90::SwizzledTile<Config::kBlockQ, Config::kHeadDim>;
  using KTile = sm90::SwizzledTile<Config::kCtaKeys, Config::kHeadDim>;
  using OtherTile = sm90::SwizzledTile<Config::kCtaKeys, Config::kHeadDim / Config::kCluster>;
  using DsTile = sm90::SwizzledTile<Config::kBlockKv, Config::kBlockQ>;  // dS^T, the CTA's own keys first

  static constexpr bool kClustered = Config::kCluster > 1;
  static constexpr bool kStaged = Config::kStagings > 0;
  using RowTerms = Terms<typename Config::Element>;
  static constexpr uint32_t kStatBytes =
      Config::kBlockQ * (Config::kTerms ? RowTerms::kRowBytes : 2 * static_cast<uint32_t>(sizeof(float)));
  static constexpr uint32_t kStatPad = Config::kTerms ? RowTerms::kPadBytes : 0;
  static constexpr uint32_t kRunBytes = Config::kBlockQ * sizeof(mask::Interval);

  // Clusters: behind its own the other CTA's keys, those columns of which this one computes dQ.
  alignas(1024) char k[KTile::kBytes + (kClustered ? OtherTile::kBytes : 0)];
  alignas(1024) char v[KTile::kBytes];
  alignas(1024) char q[Config::kStages][QTile::kBytes];
  alignas(1024) char dout[Config::kStages][QTile::kBytes];
  alignas(1024) char ds[Config::kDsBuffers][DsTile::kBytes];
  // NOTE: ahead of what is longer: memcheck takes the terms' operand, whose groups of rows overlap, for one of 4 KB.
  alignas(128) char stats[Config::kStages][kStatBytes + kStatPad];
  alignas(kStaged ? 1024 : 16) float staging[kStaged ? Config::kStagings : 1][kStaged ? DqPiece::kFloats : 1];
  // Where the step is partial: the rows' main runs, and their first ones.
  alignas(128) mask::Interval rows[Config::kStages][2][Config::kRowsShared ? Config::kBlockQ : 1];
  // Query tiles that the keys meet, a bit each, 32 in a word; the words of one head after those of another.
  static constexpr int32_t kFoundWords = Config::kLooks ? 64 : 1;
  uint32_t found[kFoundWords];
  uint32_t partial[kFoundWords];  // those that are not whole
  Step step[Config::kStages];
  KeyTile key_tile;

  //                                      arrives (count)             waits
  sm90::Barrier full_kv;                  // dQ's thread 0 + TMA bytes (1)    consumers, dQ
  sm90::Barrier full[Config::kStages];    // producer + TMA bytes (1)    consumers, dQ
  sm90::Barrier empty[Config::kStages];       // consumer warps, dQ's warps     the loading warp
  sm90::Barrier full_p[Config::kDsBuffers];   // P's warps (split)         the other consumers
  sm90::Barrier full_ds[Config::kDsBuffers][Config::kDsParts];   // the part's warps    dQ
  sm90::Barrier empty_ds[Config::kDsBuffers][Config::kDsParts];  // dQ's warps          who writes it first

  OwnKeys<Config::kPacked, Config::Extra::kBand> own;
  sm90::Barrier finished;  // by gradient: consumer warps             they themselves

  __device__ void init_barriers() {
    constexpr uint32_t kConsumerWarps = Config::kConsumerWarpgroups * 4;
    full_kv.init(1);
    for (int s = 0; s < Config::kStages; ++s) {
      full[s].init(1);
      empty[s].init(kConsumerWarps * Config::kCluster + 4);
    }
    for (int s = 0; s < Config::kDsBuffers; ++s) {
      full_p[s].init(4);
      for (int part = 0; part < Config::kDsParts; ++part) {
        full_ds[s][part].init(Config::kSplit == Split::kByKeys ? kConsumerWarps / Config::kDsParts : 4);
        empty_ds[s][part].init(4 * Config::kCluster);
      }
    }
    if constexpr (Config::kSplit == Split::kByGradient) finished.init(kConsumerWarps);
    sm90::fence_barrier_init();
  }

  // One thread.
  __device__ void clear_pads() {
    if constexpr (kStatPad > 0) {
      for (int s = 0; s < Config::kStages; ++s) memset(stats[s] + kStatBytes, 0, kStatPad);
      // SYNC: wgmma reads them.
      sm90::fence_async_proxy();
    }
  }
};

// A place in a ring of any number of stages, and the parity of its round.
template <int32_t kStages>
struct Place {
  uint32_t stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1u;
    }
  }
};

// Of a CTA in its cluster.
template <class Config>
__device__ __forceinline__ uint32_t rank_of_cta() {
  return Config::kCluster > 1 ? blockIdx.x % Config::kCluster : 0;
}

// One arrival of a warp, in each CTA of the cluster.
template <class Config>
__device__ __forceinline__ void release_in_cluster(sm90::Barrier& barrier, uint32_t lane) {
  if constexpr (Config::kCluster > 1) {
    if (lane < Config::kCluster) sm90::arrive_at(sm90::map_shared(&barrier.word, lane));
  } else {
    if (lane == 0) barrier.arrive();
  }
}

template <bool kOrdered>
__device__ __forceinline__ KeyTile key_tile_of(const KernelParams& params, int32_t index) {
  const sched::TileIndex at = params.order.decode(index);
  KeyTile key_tile;
  key_tile.kv_head = at.slice % params.heads_kv;
  const int32_t sequence = at.slice / params.heads_kv;
  key_tile.batch = sequence / params.residues;
  key_tile.residue = sequence % params.residues;
  const Prepared& prepared = params.prepared;
  if (prepared.longest == nullptr) {
    // The first key tiles first: under a causal mask most queries see them.
    key_tile.tile = kOrdered ? params.key_order.nth(at.row_rank) : at.row_rank;
  } else {
    // SYNC: the work of the kernel before.
    cudaGridDependencySynchronize();
    const int64_t order =
        int64_t{key_tile.batch} * prepared.order_stride_batch + int64_t{key_tile.kv_head} * prepared.order_stride_head;
    key_tile.tile = prepared.longest[order * params.order.row_blocks + at.row_rank];
  }
  return key_tile;
}

// Packed kernels: of the key tile that key_tile_of gave.
__device__ __forceinline__ OwnKeys<true, false> own_keys_of(const KernelParams& params, const KeyTile& key_tile) {
  // SYNC: the work of the kernel before.
  cudaGridDependencySynchronize();
  const int64_t order = int64_t{key_tile.batch} * params.prepared.order_stride_batch;
  const int4* from = reinterpret_cast<const int4*>(params.packed + order * params.order.row_blocks + key_tile.tile);
  const int4 a = from[0], b = from[1];
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

template <class Config, class Own>
__device__ __forceinline__ int32_t first_key_of(const KeyTile& key_tile, [[maybe_unused]] const Own& own) {
  if constexpr (Config::kPacked) {
    return own.first_key;
  } else {
    return key_tile.tile * Config::kBlockKv;
  }
}

}  // namespace flashmsa::bwd
