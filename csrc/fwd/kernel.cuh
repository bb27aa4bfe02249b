// The forward pass on sm_90a: O = softmax(scale * Q K^T over the allowed keys) V; persistent CTAs, one an SM, or several
// small ones.
//
// Roles       warpgroup 0, few registers: a producer thread (TMA; for rows by index three warps, indexed.cuh) and a
//             scheduler thread in a warp of its own; warpgroups 1 …: consumers, 64 rows of the tile each. Where parts are
//             dealt (config.h) a third thread loads Q.
// Shared      Q, a ring of K and a ring of V tiles, a staging buffer for O, barriers, work slots: shared.cuh. With ALiBi up to
//             head dim 128 the operands of one more k-step of S: attn/places.cuh.
// Barriers    full_* (TMA bytes) and empty_* (one arrival a consumer warp) for Q, K, V; full_work / empty_work for tiles.
// Schedule    0. scheduler: take a tile number, decode it, publish it; where no plan is needed the first one beside the making
//                of barriers, while the producer already asks for its Q and K(0)
//             1. producer: load Q, K(0), K(1), V(0), K(2), V(1), …
//             2. consumers: S(0), P(0); then per key block S(i) and O += P(i-1) V(i-1) overlapped; the last P V
//             3. consumers: O / l to shared memory, TMA store; lse
#pragma once

#include "fwd/consumer.cuh"
#include "fwd/indexed.cuh"
#include "fwd/producer.cuh"
#include "fwd/shared.cuh"

namespace flashmsa::fwd {

inline constexpr uint32_t kSchedulerThread = 32;
inline constexpr uint32_t kPartLoaderThread = 64;

template <class Mask, class Config, class Score>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    attention_forward_kernel(const __grid_constant__ KernelParams<Mask> params) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<Shared<Mask, Config>*>(shared_memory + kPlaceBytes<Mask, Config, Score>);
  auto& places = *reinterpret_cast<PlaceOperands<Config>*>(shared_memory);

  // Warp-uniform, and known as such to the compiler: descriptors that depend on it stay in uniform registers.
  const int32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int32_t warpgroup = warp / 4;
  constexpr bool kPlaces = kPlaceStep<Mask, Config, Score>;
  constexpr bool kKeyBlocks = kNeedsKeyBlocks<Mask, Score>;
  constexpr bool kLoadsFirst = kKnowsFirstTile<Mask, Config> && !kPlaces && !kKeyBlocks;
  // PERF: known as one thread to the compiler, or each of its copies becomes a loop over lanes.
  const bool first = kKnowsFirstTile<Mask, Config> ? warp == 0 && sm90::elect() : threadIdx.x == 0;
  if (first) {
    if constexpr (!kIndexed<Mask>) {
      sm90::prefetch_map(params.q);
      sm90::prefetch_map(params.k);
      sm90::prefetch_map(params.v);
      sm90::prefetch_map(params.out);
    }
    shared.init_barriers();
    // PERF: ahead of the block's barrier: the first S of a CTA comes 1300 cycles sooner.
    // SYNC: no kernel that this one may have overtaken writes q or k: the one that does is sched::reset_counter_kernel.
    if constexpr (kLoadsFirst) load_first(params, shared);
  }
  if constexpr (kPlaces) {
    places.template fill<typename Config::Element>();
    sm90::fence_async_proxy();
  }
  // PERF: the first tile's number is known, so it is decoded beside the barriers' making.
  if (kKnowsFirstTile<Mask, Config> && threadIdx.x == kSchedulerThread) {
    decode_tile<Mask, Config>(params, params.order, blockIdx.x, shared.work[0]);
  }
  __syncthreads();

  if (warpgroup == 0) {
    sm90::setmaxnreg_dec<Config::kRegistersProducer>();
    if constexpr (kIndexed<Mask>) {
      constexpr int32_t kSchedulerWarp = kSchedulerThread / 32;
      if (warp != kSchedulerWarp) {
        return IndexedLoader<Mask, Config>{params, shared, warp < kSchedulerWarp ? warp : warp - 1}.run();
      }
    } else if (first) {
      return Producer<Mask, Config, kKeyBlocks, kPlaces, kLoadsFirst>{params, shared, places}.run();
    }
    if constexpr (Config::kDealsParts) {
      if (threadIdx.x == kPartLoaderThread) return PartLoader<Mask, Config>{params, shared}.run();
    }
    if (threadIdx.x == kSchedulerThread) {
      Scheduler<Mask, Config>{params, shared}.run([&](const TileWork<Mask, Config>& work, uint32_t slot) {
        if constexpr (kPlaces) set_places(params, work, slot, places);
      });
    }
  } else {
    sm90::setmaxnreg_inc<Config::kRegistersConsumer>();
    Consumer<Mask, Config, Score>(params, shared, warpgroup - 1, kPlaces ? &places : nullptr).run();
  }
}

}  // namespace flashmsa::fwd
