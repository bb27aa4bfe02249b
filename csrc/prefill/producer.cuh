// The producer warpgroup over pages: one thread hands out tiles, three warps load.
#pragma once

#include "fwd/producer.cuh"
#include "fwd/shared.cuh"
#include "prefill/paged.h"
#include "prefill/plan.h"
#include "sm90/tma.cuh"

namespace flashmsa::prefill {

// As fwd::Scheduler, over a plan whose length lies on the device.
template <class Mask, class Config>
struct PageScheduler {
  using S = fwd::Shared<Mask, Config>;

  const fwd::KernelParams<Mask>& params;
  S& shared;

  __device__ __forceinline__ void decode(const sched::TileOrder& order, int32_t tile,
                                         fwd::TileWork<Mask, Config>& work) const {
    if (tile >= order.count()) {
      work.entry.row_block = -1;
      return;
    }
    const sched::TileIndex index = order.decode(tile);
    work.head = index.slice;
    work.kv_head = index.slice / params.q_heads_per_kv_head;
    work.residue = 0;
    const Ranked* ranked = reinterpret_cast<const Ranked*>(params.plan + params.order.row_blocks);
    fwd::copy_entry<Mask>(params.plan[ranked[index.row_rank].entry], work.entry);
    // Packed rows are found by sequence_row, in one long sequence.
    work.batch = params.mask.cu_seqlens_q == nullptr ? work.entry.block.sequence : 0;
  }

  __device__ __forceinline__ void run() {
    Counters* counters = reinterpret_cast<Counters*>(params.tile_counter);
    sched::TileOrder order = params.order;
    order.row_blocks = counters->row_blocks;
    int32_t tile = blockIdx.x;
    for (uint32_t round = 0;; ++round) {
      const uint32_t slot = S::WorkRing::stage(round);
      shared.empty_work[slot].wait(S::WorkRing::empty_parity(round));
      decode(order, tile, shared.work[slot]);
      shared.full_work[slot].arrive();
      if (tile >= order.count()) break;
      shared.begun[slot].wait_idly(S::WorkRing::full_parity(round));
      tile = gridDim.x + atomicAdd(&counters->next_tile, 1);
    }
  }
};

// One of the warps that load K and V; the first also loads Q and announces what all of them bring. Piece p of a key block is
// loader p % kLoaders's. Eight lanes have the pieces of a block, the four eights those of four blocks in a row.
// PERF: how long a warp takes from a free buffer to its boxes shows. With a table looked up there, for one block at a time, page
// 64 was at .92 of a dense call and page 8 at .84; looked up four blocks at a time .96 and .95; with the coordinates of the
// boxes ready by then .985 and .98.
// SYNC: bytes may be complete before the first warp announces them: its pending arrival holds the phase. And no warp is
// more than a tile behind another, because the scheduler waits until all have begun a tile.
template <class Mask, class Config, class Score>
struct PageLoader {
  using S = fwd::Shared<Mask, Config>;
  using Work = fwd::TileWork<Mask, Config>;
  static constexpr int32_t kLoaders = fwd::kLoaders<Mask>;
  static constexpr int32_t kGroups = Config::kBlockKv / 8;
  static constexpr int32_t kLanes = 8;           // for a block
  static constexpr int32_t kBatch = 32 / kLanes;  // blocks looked up at a time
  static_assert(kGroups <= 32 && kGroups <= kLanes * kLoaders);
  static constexpr int32_t kNoKey = INT32_MAX - Config::kBlockKv;  // behind every length
  // PERF: ahead of a box, in ns. At d256 boxes that are asked for at once cost 2 to 6 %, why is not known; at d128 a
  // delay costs 1 %.
  static constexpr uint32_t kPause = Config::kHeadDim > 128 ? 100 : 0;

  const fwd::KernelParams<Mask>& params;
  S& shared;
  const int32_t loader;

  // Where a piece lies. NOTE: the page as the table has it, which is not looked at while it is being loaded.
  struct Place {
    int32_t page;
    int32_t slot;  // of the page; negative: nowhere, and read as zeros
  };

  __device__ __forceinline__ int32_t lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ int32_t piece() const { return loader + lane() % kLanes * kLoaders; }
  __device__ __forceinline__ int32_t pieces() const { return Config::kBlockKv >> params.mask.piece_log2; }

  __device__ __forceinline__ const Work& work(uint32_t round) const { return shared.work[S::WorkRing::stage(round)]; }
  __device__ __forceinline__ void wait_work(uint32_t round) {
    shared.full_work[S::WorkRing::stage(round)].wait(S::WorkRing::full_parity(round));
  }

  // Where a piece, by its number in the block's order, lies on the listed pages.
  struct Listed {
    int32_t entry, slot;
  };
  __device__ __forceinline__ Listed listed(const Work& tile, int32_t piece) const {
    const int32_t row = tile.entry.block.pieces.visit(piece) << params.mask.piece_log2;
    const int32_t entry = params.mask.by_page_size.divide(row);
    return {entry, row - entry * params.mask.page_size};
  }

  // Piece `piece` of block `step`.
  __device__ __forceinline__ Place find(const Work& tile, int32_t step, int32_t piece) const {
    const PagedMaskParams& mask = params.mask;
    const auto& block = tile.entry.block;
    Place place = {0, -1};
    if (step >= tile.entry.tiles.count() || piece >= pieces()) return place;
    if constexpr (Mask::kScattered) {
      const int32_t number = step * pieces() + piece - block.pad;
      if (number < 0) return place;
      const Listed at = listed(tile, number);
      place.page = Mask::list(mask, block)[at.entry].page;
      place.slot = at.slot;
    } else {
      const int32_t key = tile.entry.tiles.visit(step) * Config::kBlockKv + (piece << mask.piece_log2);
      if (key >= block.len_kv) return place;
      const int32_t logical = mask.by_page_size.divide(key);
      place.page = mask.table_entry(block.sequence, logical);
      place.slot = key - logical * mask.page_size;
    }
    return place;
  }

  // The lane's place among the kBatch blocks from `step` on.
  __device__ __forceinline__ Place find_batch(const Work& tile, int32_t step) const {
    return find(tile, step + lane() / kLanes, piece());
  }

  // The coordinates of a piece's box that depend on its page.
  struct BoxPlace {
    int32_t eight, head;
  };
  __device__ __forceinline__ BoxPlace box_place(const Work& tile, Place place, const PoolSteps& steps) const {
    const int32_t page = params.mask.clamp_page(place.page);
    // Eights before the first read as zeros.
    const int32_t eight = place.slot < 0 ? -(params.mask.piece() >> 3) : page * steps.eights + (place.slot >> 3);
    return {eight, page * steps.heads + tile.kv_head * steps.head};
  }

  // A lane's piece, if it has one of the block, into a buffer that is free.
  __device__ __forceinline__ void load(bool mine, BoxPlace place, char* target, sm90::Barrier& full,
                                       const sm90::TensorMap& tensor) {
    if (loader == 0 && lane() == 0) full.arrive_expect(S::KTile::kBytes);
    if constexpr (kPause > 0) __nanosleep(kPause);
    if (mine) {
      const int32_t coordinates[5] = {0, 0, 0, place.eight, place.head};
      sm90::load_box(target, tensor.map, coordinates, full);
    }
  }

  __device__ __forceinline__ bool asks_for_all_groups() const {
    return fwd::kNeedsAllGroups<Mask, Score> && params.alibi_slopes != nullptr;
  }

  // Scattered blocks that need a test, or ALiBi: the first keys of their groups, a lane each.
  // SYNC: the consumers read them after full_k, of which lane 0's arrival is a part.
  __device__ __forceinline__ void write_keys(const Work& tile, int32_t step, int32_t* keys) const {
    const PagedMaskParams& mask = params.mask;
    if (lane() < kGroups) {
      const int32_t row = lane() * 8;
      const int32_t number = step * pieces() + (row >> mask.piece_log2) - tile.entry.block.pad;
      int32_t key = kNoKey;
      if (number >= 0) {
        const Listed at = listed(tile, number);
        const int32_t logical = Mask::list(mask, tile.entry.block)[at.entry].logical;
        key = logical * mask.page_size + at.slot + (row & (mask.piece() - 1));
      }
      keys[lane()] = key;
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load_q(uint32_t round) {
    wait_work(round);
    const Work& tile = work(round);
    if (tile.entry.row_block >= 0 && lane() == 0) {
      const uint32_t stage = S::QRing::stage(round);
      shared.empty_q[stage].wait(S::QRing::empty_parity(round));
      shared.full_q[stage].arrive_expect(S::QTile::kBytes);
      sm90::load_tile<typename S::QTile, fwd::kMapRank<Mask>>(
          shared.q[stage], params.q, tile.sequence_row() + tile.first_row(), tile.queries(), shared.full_q[stage]);
    }
    __syncwarp();
  }

  // The lane's place among the kBatch blocks of tile `round` from `step` on, if there is such a tile.
  __device__ __forceinline__ Place look_up(uint32_t round, int32_t step) const {
    const Work& tile = work(round);
    return tile.entry.row_block < 0 ? Place{} : find_batch(tile, step);
  }

  // What step `step` of tile `round` looks up: the next batch of blocks, or behind the last block the next tile's
  // first; `round` is then that tile.
  // PERF: one copy of the look-up, at d128 without lists two. The compiler then leaves the softmax registers with its
  // two references in different banks: in the loop 122 (lists) and 124 operands are reused, the other way round 107 and
  // 98, which costs 2 %.
  __device__ __forceinline__ void look_ahead(uint32_t& round, int32_t step, int32_t steps, Place& ahead) {
    constexpr bool kOneCopy = Mask::kScattered || Config::kHeadDim != 128;
    if constexpr (kOneCopy) {
      if (step == steps || step % kBatch == 1) {
        int32_t first = step - 1 + kBatch;
        if (step == steps) {
          first = 0;
          wait_work(++round);
        }
        ahead = look_up(round, first);
      }
    } else if (step == steps) {
      wait_work(++round);
      ahead = look_up(round, 0);
    } else if (step % kBatch == 1) {
      ahead = find_batch(work(round), step - 1 + kBatch);
    }
  }

  // K and V of one tile, the first block being number key_blocks of the rings: as fwd::Producer::run, whose order keeps it
  // from waiting for itself. `ahead`: the pages of the tile's first blocks, then those of the next tile's.
  __device__ __forceinline__ void load_tile(const Work& tile, uint32_t round, uint32_t key_blocks, int32_t steps,
                                            Place& ahead) {
    const int32_t q_step = Config::kQInRegisters || Config::kQStages > 1 ? min_of(steps, 2) : steps;
    const int32_t offset = (piece() << params.mask.piece_log2 >> 3) * static_cast<int32_t>(S::KTile::kAtomBytes);
    const int32_t turn = piece() < pieces() ? lane() / kLanes : kBatch;
    BoxPlace k_place = {}, v_place = {};
#pragma unroll 1
    for (int32_t step = 0; step <= steps; ++step) {
      const uint32_t n = key_blocks + step;
      const uint32_t stage = S::KvRing::stage(n), before = S::KvRing::stage(n - 1);
      if (step % kBatch == 0) k_place = box_place(tile, ahead, params.mask.k_steps);
      if (step % kBatch == 1) v_place = box_place(tile, ahead, params.mask.v_steps);
      look_ahead(round, step, steps, ahead);
      if (step < steps) {
        const bool mine = turn == step % kBatch;
        shared.empty_k[stage].wait(S::KvRing::empty_parity(n));
        if constexpr (Mask::kScattered) {
          const bool wanted = step < tile.entry.tiles.partial_count() || asks_for_all_groups();
          if (loader == 0 && wanted) write_keys(tile, step, shared.key_groups.of(n));
        }
        load(mine, k_place, shared.k[stage] + offset, shared.full_k[stage], params.k);
      }
      if (step > 0) {
        const bool mine = turn == (step - 1) % kBatch;
        shared.empty_v[before].wait(S::KvRing::empty_parity(n - 1));
        load(mine, v_place, shared.v[before] + offset, shared.full_v[before], params.v);
      }
      if (loader == 0 && step == q_step) load_q(step == steps ? round : round + 1);
    }
  }

  __device__ __forceinline__ void run() {
    uint32_t key_blocks = 0;
    if (loader == 0) load_q(0);
    wait_work(0);
    Place ahead = look_up(0, 0);
    for (uint32_t round = 0;; ++round) {
      wait_work(round);
      const Work& tile = work(round);
      if (tile.entry.row_block < 0) break;
      const int32_t steps = tile.entry.tiles.count();
      __syncwarp();
      if (lane() == 0) shared.begun[S::WorkRing::stage(round)].arrive();
      // Where pages are large, some warps have nothing to load.
      if (loader < pieces()) load_tile(tile, round, key_blocks, steps, ahead);
      key_blocks += steps;
    }
  }
};

}  // namespace flashmsa::prefill
