// The producer: one thread that hands out tiles and keeps TMA ahead of the consumers.
#pragma once

#include "fwd/shared.cuh"
#include "sm90/tma.cuh"

namespace flashmsa::fwd {

// What the 64 rows from first_row on meet of a tile's key blocks.
template <class Mask, class Config>
__device__ __forceinline__ Span span_of(const KernelParams<Mask>& params, const TileWork<Mask, Config>& work,
                                        int32_t first_row) {
  const int32_t count = work.tiles.count();
  if (first_row >= params.len_q) return {count, 0, 0};
  // PERF: looking for each warpgroup's own part of a list costs more than the blocks that it would skip.
  if (Mask::kListed || work.tiles.partial_count() == 0) return {0, count, 0};
  const int32_t last_row = min_of(first_row + sm90::kWarpgroupRows, params.len_q) - 1;
  if constexpr (Mask::kSpansPlanned) {
    // Without a plan there are no documents.
    return sched::span_of(
        work.tiles, Mask::tiles_without_documents(params.mask, work.block, first_row, last_row, Config::kBlockKv));
  } else {
    return sched::span_of(work.tiles, Mask::tiles(params.mask, work.block, first_row, last_row, Config::kBlockKv));
  }
}

// A plan's entry into a work slot. PERF: in pieces, because the producer's few registers do not hold all of it.
template <class Mask>
__device__ __forceinline__ void copy_entry(const sched::PlanEntry<Mask>& from, sched::PlanEntry<Mask>& to) {
  static_assert(sizeof(from) % sizeof(int4) == 0);
  const int4* source = reinterpret_cast<const int4*>(&from);
  int4* target = reinterpret_cast<int4*>(&to);
#pragma unroll 3
  for (size_t i = 0; i < sizeof(from) / sizeof(int4); ++i) target[i] = source[i];
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
  const int32_t sequence = index.slice / params.heads_q;  // over batches and residues
  work.head = index.slice % params.heads_q;
  work.kv_head = work.head / params.q_heads_per_kv_head;
  work.batch = sequence;
  work.residue = 0;
  if constexpr (kMapRank<Mask> == sm90::kStridedRank) {
    if (params.residues > 1) {
      work.batch = sequence / params.residues;
      work.residue = sequence % params.residues;
    }
  }
  if (Mask::kPlanned && params.plan != nullptr) {
    const int64_t at = Mask::kListed ? int64_t{index.slice} * params.order.row_blocks + index.row_rank : index.row_rank;
    copy_entry<Mask>(params.plan[at], work);
    if constexpr (Mask::kPlanned && !Mask::kListed) work.batch += work.block.batch;
    if constexpr (Mask::kSpansPlanned) return;
  } else {
    // Bottom-up: under a causal mask the last rows are the longest.
    work.row_block = params.order.row_blocks - 1 - index.row_rank;
    const int32_t first_row = work.row_block * Config::kBlockQ;
    const int32_t last_row = min_of(first_row + Config::kBlockQ, params.len_q) - 1;
    if constexpr (Mask::kSpansPlanned) {
      work.block = Mask::block_without_documents(params.mask, work.batch, work.head);
      work.tiles = Mask::tiles_without_documents(params.mask, work.block, first_row, last_row, Config::kBlockKv);
    } else if constexpr (!Mask::kPlanned) {
      work.block = Mask::block(params.mask, work.batch, work.head, first_row, last_row);
      work.tiles = Mask::tiles(params.mask, work.block, first_row, last_row, Config::kBlockKv);
    }
  }
#pragma unroll 1
  for (int32_t w = 0; w < Config::kConsumerWarpgroups; ++w) {
    work.spans[w] = span_of<Mask, Config>(params, work, work.row_block * Config::kBlockQ + w * sm90::kWarpgroupRows);
  }
}

// One thread that runs ahead of the consumers. kKeyBlocks: it tells them each key block's place.
template <class Mask, class Config, bool kKeyBlocks>
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
    sm90::load_tile<typename S::QTile, kMapRank<Mask>>(shared.q[stage], params.q, tile.row_block * Config::kBlockQ,
                                                       tile.queries(), shared.full_q[stage]);
  }

  // The key tile of a step, and its detail in a list.
  __device__ __forceinline__ KeyBlock key_block(const TileWork<Mask, Config>& tile, int32_t step) const {
    const int32_t index = tile.tiles.visit(step);
    if constexpr (Mask::kListed) {
      return {Mask::key_tile(params.mask, tile.block, index, Config::kBlockKv),
              params.mask.list.detail[Mask::entry(tile.block, index, Config::kBlockKv)]};
    } else {
      return {index, 0};
    }
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
      // Key block `at` into the ring's n-th use: K and V alike.
      const auto load = [&](int32_t at, uint32_t n, auto& ring, sm90::Barrier* full, const sm90::TensorMap& tensor) {
        const uint32_t stage = S::KvRing::stage(n);
        full[stage].arrive_expect(S::KTile::kBytes);
        sm90::load_tile<typename S::KTile, kMapRank<Mask>>(ring[stage], tensor, at * Config::kBlockKv, tile.keys(),
                                                           full[stage]);
      };
      const auto wait_empty = [&](uint32_t n, sm90::Barrier* empty) {
        empty[S::KvRing::stage(n)].wait(S::KvRing::empty_parity(n));
      };

      const int32_t steps = tile.tiles.count();
      const int32_t publish_step = min_of(steps, 1);
      // Q of the next tile as soon as its buffer is free: early, but where there is one buffer that is read to the end.
      const int32_t q_step = Config::kQInRegisters || Config::kQStages > 1 ? min_of(steps, 2) : steps;
      // PERF: a list is read before the wait for a free buffer, which hides the read.
      int32_t previous = 0;  // V runs one step behind
#pragma unroll 1
      for (int32_t step = 0; step <= steps; ++step) {
        const uint32_t n = key_blocks + step;
        int32_t key_tile = 0;
        if (step < steps) {
          const KeyBlock block = key_block(tile, step);
          key_tile = block.key_tile;
          wait_empty(n, shared.empty_k);
          // SYNC: the consumers read it after full_k, of which this thread's arrival is a part.
          if constexpr (kKeyBlocks) shared.key_block[S::KvRing::stage(n)] = block;
          load(key_tile, n, shared.k, shared.full_k, params.k);
        }
        if (step > 0) {
          wait_empty(n - 1, shared.empty_v);
          load(Mask::kListed ? previous : tile.tiles.visit(step - 1), n - 1, shared.v, shared.full_v, params.v);
        }
        previous = key_tile;
        if (step == publish_step) publish(next_tile(), round + 1);
        if (step == q_step) load_q(round + 1);
      }
      key_blocks += steps;
    }
  }
};

}  // namespace flashmsa::fwd
