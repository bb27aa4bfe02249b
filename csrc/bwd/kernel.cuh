// The main kernel of the backward pass on sm_90a: a CTA owns 128 keys of one kv head and walks over the queries that see them.
// Or a cluster of two does, at d256 with 64 keys each, for bands of d128 (band.h) with 128 each.
//
//   P = 2^(S scale - lse)   dV = P^T dO   dP = dO V^T   dS = P ∘ (dP - Δ)   dQ = scale dS K   dK = scale dS^T Q
//
// Everything is computed transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T stay in registers on their way to
// dV and dK; dS^T alone goes through shared memory, for dQ.
//
// Roles       warpgroup 0: loads query tiles, dQ and its sum in memory (dq.cuh); warpgroups 1, 2: 64 keys each
//             (consumer.cuh), or dV and dK of the same 64 (split_consumer.cuh), and before that which query tiles there are.
// Shared      K, V; a ring of Q, dO with their rows' lse and Δ, in some kernels as operands (terms.cuh); dS; pieces of dQ:
//             shared.cuh.
// Barriers    full / empty for the ring, full_ds / empty_ds for dS, full_p for P on its way to it, finished.
// Schedule    the numbered steps of the consumers.
// Clusters    each CTA loads half of Q's and dO's columns, to both. dS^T goes to the other CTA as it goes to this one's dQ, and
//             each has half of dQ's columns, of both CTAs' keys: half the bytes that the L2 gives and half of those that it adds.
//             At d128 dQ's product is made in two parts, each when the dS^T of one warpgroup of either CTA has come.
// Order       deterministic mode: CTAs add to the same rows of dQ in the order in which they start, see key_order.h;
//             the first of them stores.
#pragma once

#include "bwd/consumer.cuh"
#include "bwd/dq.cuh"
#include "bwd/split_consumer.cuh"
#include "sm90/cluster.cuh"
#include "sm90/registers.cuh"

namespace flashmsa::bwd {

// kOrdered: deterministic mode.
template <class Config, bool kOrdered>
__global__ void __launch_bounds__(Config::kThreads, 1)
    attention_backward_kernel(const __grid_constant__ KernelParams params) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<Shared<Config>*>(shared_memory);
  const int32_t warpgroup = __shfl_sync(~0u, threadIdx.x / sm90::kWarpgroupThreads, 0);
  const int32_t tile_index = blockIdx.x / Config::kCluster;
  [[maybe_unused]] KeyTile key_tile;
  [[maybe_unused]] OwnKeys<Config::kPacked, Config::Extra::kBand> own;
  if constexpr (Config::kPacked) {
    key_tile = key_tile_of<kOrdered>(params, tile_index);
    own = own_keys_of(params, key_tile);
    key_tile.tile = own.place;
    // A number of no tile has no results.
    if (own.empty()) {
      if (threadIdx.x < 8) params.prepared.suspects[blockIdx.x * 8 + threadIdx.x] = 0;
      return;
    }
  }
  if (threadIdx.x == 0) {
    sm90::prefetch_map(params.q);
    sm90::prefetch_map(params.dout);
    sm90::prefetch_map(params.dv);
    sm90::prefetch_map(params.dk);
    shared.clear_pads();
    shared.init_barriers();
    if constexpr (Config::kPacked) {
      shared.key_tile = key_tile;
      shared.own = own;
    } else {
      shared.key_tile = key_tile_of<kOrdered>(params, tile_index);
    }
    if constexpr (Config::Extra::kBand) {
      const int32_t first = shared.key_tile.tile * Config::kBlockKv;
      static_cast<BandKeys&>(shared.own) =
          make_band_keys<Config>(params.band, params.len_q, params.len_kv, first,
                                 first + static_cast<int32_t>(rank_of_cta<Config>()) * Config::kCtaKeys);
    }
    DqWarpgroup<Config, kOrdered>{params, shared, shared.key_tile}.load_keys();
  }
  // SYNC: the barriers are there, in the other CTA too.
  if constexpr (Config::kDsParts > 1) {
    // PERF: cluster_sync's release is a fence of the whole GPU. fence_barrier_init is all that the other CTA needs.
    __syncthreads();
    sm90::cluster_arrive_relaxed();
    sm90::cluster_wait();
  } else if constexpr (Config::kCluster > 1) {
    __syncwarp();
    sm90::cluster_sync();
  } else {
    __syncthreads();
  }
  // SYNC: the numbers of the rows are the work of the kernel before, which this one may have overtaken.
  cudaGridDependencySynchronize();
  if constexpr (Config::kLooks) {
    if (warpgroup != 0) Walk<Config, kOrdered>::find_all(params, shared);
    __syncthreads();
  }

  if (warpgroup == 0) {
    sm90::setmaxnreg_dec<Config::kRegistersProducer>();
    DqWarpgroup<Config, kOrdered>{params, shared, shared.key_tile}.run();
  } else {
    sm90::setmaxnreg_inc<Config::kRegistersConsumer>();
    if constexpr (Config::kSplit == Split::kByKeys) {
      KeyConsumer<Config>(params, shared, warpgroup - 1).run();
    } else if (warpgroup == 1) {
      SplitConsumer<Config, Gradient::kValues>(params, shared).run();
    } else {
      SplitConsumer<Config, Gradient::kKeys>(params, shared).run();
    }
  }
  // SYNC: shared memory and barriers outlive what the other CTA sends.
  if constexpr (Config::kCluster > 1) {
    __syncwarp();
    sm90::cluster_arrive_relaxed();
    sm90::cluster_wait();
  }
}

}  // namespace flashmsa::bwd
