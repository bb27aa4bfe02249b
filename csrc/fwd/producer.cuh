// The producer: one thread that hands out tiles and keeps TMA ahead of the consumers.
#pragma once

#include "fwd/shared.cuh"
#include "sm90/tma.cuh"

namespace flashmsa::fwd {

// What the 64 rows from first_row on meet of a tile's key blocks.
template <class Mask, class Config>
__device__ __forceinline__ Span span_of(const KernelParams<Mask>& params, const TileWork<Mask, Config>& work,
                                        int32_t first_row) {
  const mask::KeyTiles& tiles = work.tiles;
  const int32_t count = tiles.count();
  if (first_row >= params.len_q) return {count, 0, 0};
  if (tiles.partial_count() == 0) return {0, count, 0};
  const int32_t last_row = min_of(first_row + sm90::kWarpgroupRows, params.len_q) - 1;
  const mask::KeyTiles mine = mask::block_tiles<Mask>(params.mask, work.block, first_row, last_row, Config::kBlockKv);
  const int32_t front = mine.count() == 0 ? count : clamp(tiles.end - mine.end, 0, count);
  // Full blocks come last in visit order: with them there is nothing to skip at the end.
  const bool any_full = tiles.full_begin < tiles.full_end;
  const int32_t back = any_full ? 0 : clamp(mine.begin - tiles.begin, 0, count - front);
  return {front, count - front - back, back};
}

// Which rows, head and keys tile number `tile` of the grid stands for. Past the last: row_block < 0.
template <class Mask, class Config>
__device__ __forceinline__ void decode_tile(const KernelParams<Mask>& params, int32_t tile,
                                            TileWork<Mask, Config>& work) {
  if (tile >= params.order.count()) {
    work.row_block = -1;
    return;
  }
  const sched::TileIndex index = params.order.decode(tile);
  const int32_t batch = index.slice / params.heads_q;
  sched::PlanEntry<Mask> entry;
  if constexpr (Mask::kPlanned) {
    entry = params.plan[index.row_rank];
  } else {
    // Bottom-up: under a causal mask the last rows are the longest.
    entry = sched::plan_row_block<Mask>(params.mask, batch, params.order.row_blocks - 1 - index.row_rank,
                                        Config::kBlockQ, Config::kBlockKv, params.len_q);
  }
  work.row_block = entry.row_block;
  work.head = index.slice % params.heads_q;
  work.kv_head = work.head / params.q_heads_per_kv_head;
  work.batch = batch;
  if constexpr (Mask::kPlanned) work.batch += entry.block.batch;
  work.tiles = entry.tiles;
  work.block = entry.block;
#pragma unroll 1
  for (int32_t w = 0; w < Config::kConsumerWarpgroups; ++w) {
    work.spans[w] = span_of<Mask, Config>(params, work, work.row_block * Config::kBlockQ + w * sm90::kWarpgroupRows);
  }
}

// One thread that runs ahead of the consumers.
template <class Mask, class Config>
struct Producer {
  using S = Shared<Mask, Config>;
  static_assert(std::is_same_v<typename S::KTile, typename S::VTile>);

  const KernelParams<Mask>& params;
  S& shared;

  // NOTE: in shared memory, for the producer too: its few registers do not hold two of them.
  __device__ __forceinline__ TileWork<Mask, Config>& work(uint32_t round) {
    return shared.work[S::WorkRing::stage(round)];
  }

  // The number of the next tile: any CTA that gets there first takes it.
  __device__ __forceinline__ int32_t next_tile() {
    return params.tile_counter != nullptr ? gridDim.x + atomicAdd(params.tile_counter, 1) : params.order.count();
  }

  // Tells the consumers about tile `round`, the end included.
  __device__ __forceinline__ void publish(int32_t tile, uint32_t round) {
    const uint32_t slot = S::WorkRing::stage(round);
    shared.empty_work[slot].wait(S::WorkRing::empty_parity(round));
    decode_tile<Mask, Config>(params, tile, work(round));
    shared.full_work[slot].arrive();
  }

  __device__ __forceinline__ void load_q(uint32_t round) {
    const TileWork<Mask, Config>& tile = work(round);
    if (tile.row_block < 0) return;
    const uint32_t stage = S::QRing::stage(round);
    shared.empty_q[stage].wait(S::QRing::empty_parity(round));
    shared.full_q[stage].arrive_expect(S::QTile::kBytes);
    sm90::load_tile<typename S::QTile>(shared.q[stage], params.q, tile.row_block * Config::kBlockQ, tile.head,
                                       tile.batch, shared.full_q[stage]);
  }

  // Tile after tile: K(0), K(1), V(0), K(2), V(1), …, the order in which the consumers free the buffers. On the way the
  // next tile is decoded and published, and its Q fetched.
  // PERF: decoding takes 1500 cycles; done behind the last load it held up the consumers.
  // SYNC: a warpgroup opens tile t + 1 before it has let all blocks of tile t pass. So nothing on the way there waits for
  // more than K(0) of tile t: K(1) and V(0) have the stages of the tile before, K(2) follows K(0), V(1) is free.
  __device__ __forceinline__ void run() {
    uint32_t key_blocks = 0;  // of K handed to TMA so far; V runs one behind within a tile
    publish(blockIdx.x, 0);
    load_q(0);

    for (uint32_t round = 0;; ++round) {
      const TileWork<Mask, Config>& tile = work(round);
      if (tile.row_block < 0) break;
      // Key block `step` into the ring's n-th use: K and V alike.
      const auto load = [&](int32_t step, uint32_t n, auto& ring, sm90::Barrier* full, sm90::Barrier* empty,
                            const sm90::TensorMap& tensor) {
        const uint32_t stage = S::KvRing::stage(n);
        empty[stage].wait(S::KvRing::empty_parity(n));
        full[stage].arrive_expect(S::KTile::kBytes);
        sm90::load_tile<typename S::KTile>(ring[stage], tensor, tile.tiles.visit(step) * Config::kBlockKv, tile.kv_head,
                                           tile.batch, full[stage]);
      };

      const int32_t steps = tile.tiles.count();
      const int32_t publish_step = min_of(steps, 1);
      // Q of the next tile as soon as its buffer is free: early, but where there is one buffer that is read to the end.
      const int32_t q_step = Config::kQInRegisters || Config::kQStages > 1 ? min_of(steps, 2) : steps;
#pragma unroll 1
      for (int32_t step = 0; step <= steps; ++step) {
        if (step < steps) load(step, key_blocks + step, shared.k, shared.full_k, shared.empty_k, params.k);
        if (step > 0) load(step - 1, key_blocks + step - 1, shared.v, shared.full_v, shared.empty_v, params.v);
        if (step == publish_step) publish(next_tile(), round + 1);
        if (step == q_step) load_q(round + 1);
      }
      key_blocks += steps;
    }
  }
};

}  // namespace flashmsa::fwd
