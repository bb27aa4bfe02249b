// The producer: one thread that hands out tiles and keeps TMA ahead of the consumers.
#pragma once

#include "fwd/shared.cuh"
#include "sm90/tma.cuh"

namespace flashmsa::fwd {

// Which rows, head and keys tile number `tile` of the grid stands for.
template <class Mask, class Config>
__device__ __forceinline__ TileWork<Mask> decode_tile(const KernelParams<Mask>& params, int32_t tile) {
  const sched::TileIndex index = params.order.decode(tile);
  TileWork<Mask> work;
  work.head = index.slice % params.heads_q;
  work.batch = index.slice / params.heads_q;
  sched::PlanEntry<Mask> entry;
  if constexpr (Mask::kPlanned) {
    entry = params.plan[index.row_rank];
    work.batch += entry.block.batch;
  } else {
    // Bottom-up: under a causal mask the last rows are the longest.
    entry = sched::plan_row_block<Mask>(params.mask, work.batch, params.order.row_blocks - 1 - index.row_rank,
                                        Config::kBlockQ, Config::kBlockKv, params.len_q);
  }
  work.row_block = entry.row_block;
  work.tiles = entry.tiles;
  work.block = entry.block;
  return work;
}

template <class Mask, class Config>
__device__ __forceinline__ void producer(const KernelParams<Mask>& params, Shared<Mask, Config>& shared) {
  using S = Shared<Mask, Config>;
  const int32_t tile_count = params.order.count();
  int32_t tile = blockIdx.x;
  uint32_t key_blocks = 0;  // of K handed to TMA so far; V runs one behind within a tile

  // Key block `step` of a tile into the ring's n-th use: K and V alike.
  const auto load = [&](const TileWork<Mask>& work, int32_t step, uint32_t n, auto& ring, sm90::Barrier* full,
                        sm90::Barrier* empty, const sm90::TensorMap& tensor) {
    const uint32_t stage = S::KvRing::stage(n);
    empty[stage].wait(S::KvRing::empty_parity(n));
    full[stage].arrive_expect(S::KTile::kBytes);
    sm90::load_tile<typename S::KTile>(ring[stage], tensor, work.tiles.visit(step) * Config::kBlockKv,
                                       work.head / params.q_heads_per_kv_head, work.batch, full[stage]);
  };
  static_assert(std::is_same_v<typename S::KTile, typename S::VTile>);

  // SYNC: the plan and the tile counter are the work of the kernel before, which this one may have overtaken.
  if constexpr (Mask::kPlanned) cudaGridDependencySynchronize();

  for (uint32_t round = 0;; ++round) {
    // 1. The next tile, told to the consumers before its loads are issued.
    const bool more = tile < tile_count;
    TileWork<Mask> work = {};
    work.row_block = -1;
    if (more) work = decode_tile<Mask, Config>(params, tile);
    const uint32_t slot = S::WorkRing::stage(round);
    shared.empty_work[slot].wait(S::WorkRing::empty_parity(round));
    shared.work[slot] = work;
    shared.full_work[slot].arrive();
    if (!more) break;

    // 2. The ticket of the tile after it: its latency hides behind the loads.
    const int32_t next = params.tile_counter != nullptr ? gridDim.x + atomicAdd(params.tile_counter, 1) : tile_count;

    // 3. Q once, then K(0), K(1), V(0), K(2), V(1), …: the order in which the consumers free the buffers.
    const uint32_t q_stage = S::QRing::stage(round);
    shared.empty_q[q_stage].wait(S::QRing::empty_parity(round));
    shared.full_q[q_stage].arrive_expect(S::QTile::kBytes);
    sm90::load_tile<typename S::QTile>(shared.q[q_stage], params.q, work.row_block * Config::kBlockQ, work.head,
                                       work.batch, shared.full_q[q_stage]);
    const int32_t steps = work.tiles.count();
    for (int32_t step = 0; step <= steps; ++step) {
      if (step < steps) load(work, step, key_blocks + step, shared.k, shared.full_k, shared.empty_k, params.k);
      if (step > 0) {
        load(work, step - 1, key_blocks + step - 1, shared.v, shared.full_v, shared.empty_v, params.v);
      }
    }
    key_blocks += steps;
    tile = next;
  }
}

}  // namespace flashmsa::fwd
