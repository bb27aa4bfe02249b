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
    fwd::copy_entry<Mask>(params.plan[index.row_rank], work.entry);
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

// One of the warps that load K and V; the first also loads Q and announces what all of them bring. Lane g knows where rows
// [8 g, 8 g + 8) of a tile lie, and issues the box of a piece that begins there if the piece is the warp's.
// SYNC: a helper may complete bytes before the first warp announces them: its pending arrival holds the phase. And no warp is
// more than a tile behind another, because the scheduler waits until all have begun a tile.
template <class Mask, class Config>
struct PageLoader {
  using S = fwd::Shared<Mask, Config>;
  using Work = fwd::TileWork<Mask, Config>;
  static constexpr int32_t kGroups = Config::kBlockKv / 8;
  static_assert(kGroups <= 32);
  static constexpr int32_t kNoKey = INT32_MAX - Config::kBlockKv;  // behind every length

  const fwd::KernelParams<Mask>& params;
  S& shared;
  const int32_t loader;

  // Where a lane's 8 rows lie.
  struct Place {
    int32_t key;   // the first
    int32_t page;  // in the pool
    int32_t slot;  // of the page; negative: nowhere, and read as zeros
  };

  __device__ __forceinline__ int32_t lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ const Work& work(uint32_t round) const {
    return shared.work[S::WorkRing::stage(round)];
  }
  __device__ __forceinline__ void wait_work(uint32_t round) {
    shared.full_work[S::WorkRing::stage(round)].wait(S::WorkRing::full_parity(round));
  }

  __device__ __forceinline__ bool issues() const {
    const int32_t row = lane() * 8;
    const int32_t piece = row >> params.mask.piece_log2;
    return row < Config::kBlockKv && row == piece << params.mask.piece_log2 && piece % fwd::kLoaders<Mask> == loader;
  }

  __device__ __forceinline__ Place find(const Work& tile, int32_t step) const {
    const PagedMaskParams& mask = params.mask;
    const auto& block = tile.entry.block;
    Place place = {kNoKey, 0, -mask.piece()};
    if (lane() >= kGroups) return place;
    if constexpr (Mask::kScattered) {
      const int32_t row = lane() * 8, within = row & (mask.piece() - 1);
      const int32_t piece =
          step * (Config::kBlockKv >> mask.piece_log2) + (row >> mask.piece_log2) - block.pad;
      if (piece < 0) return place;
      const uint32_t index = block.pieces.visit(piece);
      const uint32_t per_page = static_cast<uint32_t>(mask.page_size) >> mask.piece_log2;
      const ListedPage listed = Mask::list(mask, block)[index / per_page];
      place.page = listed.page;
      place.slot = static_cast<int32_t>(index % per_page) << mask.piece_log2;
      place.key = listed.logical * mask.page_size + place.slot + within;
    } else {
      place.key = tile.entry.tiles.visit(step) * Config::kBlockKv + lane() * 8;
      if (place.key >= block.len_kv) return place;
      const uint32_t logical = static_cast<uint32_t>(place.key) / static_cast<uint32_t>(mask.page_size);
      place.page = mask.page(block.sequence, static_cast<int32_t>(logical));
      place.slot = place.key - static_cast<int32_t>(logical) * mask.page_size;
    }
    return place;
  }

  // This warp's pieces of a tile.
  __device__ __forceinline__ void load(const Work& tile, const Place& place, char* buffer, sm90::Barrier& full,
                                       const sm90::TensorMap& tensor, const PoolSteps& steps) {
    if (loader == 0 && lane() == 0) full.arrive_expect(S::KTile::kBytes);
    if (!issues()) return;
    const int32_t eight = place.slot < 0 ? -(params.mask.piece() / 8) : place.page * steps.eights + place.slot / 8;
    const int32_t coordinates[5] = {0, 0, 0, eight, place.page * steps.heads + tile.kv_head * steps.head};
    sm90::load_box(buffer + lane() * S::KTile::kAtomBytes, tensor.map, coordinates, full);
  }

  __device__ __forceinline__ void load_q(uint32_t round) {
    wait_work(round);
    const Work& tile = work(round);
    if (tile.entry.row_block < 0 || lane() != 0) return;
    const uint32_t stage = S::QRing::stage(round);
    shared.empty_q[stage].wait(S::QRing::empty_parity(round));
    shared.full_q[stage].arrive_expect(S::QTile::kBytes);
    sm90::load_tile<typename S::QTile, fwd::kMapRank<Mask>>(
        shared.q[stage], params.q, tile.sequence_row() + tile.first_row(), tile.queries(), shared.full_q[stage]);
  }

  // As fwd::Producer::run, whose order keeps it from waiting for itself. The pages of a key block are looked up one block
  // ahead, while it waits for a free buffer.
  __device__ __forceinline__ void run() {
    uint32_t key_blocks = 0;
    if (loader == 0) load_q(0);
    for (uint32_t round = 0;; ++round) {
      wait_work(round);
      const Work& tile = work(round);
      if (tile.entry.row_block < 0) break;
      const int32_t steps = tile.entry.tiles.count();
      __syncwarp();
      if (lane() == 0) shared.begun[S::WorkRing::stage(round)].arrive();
      const int32_t q_step = Config::kQInRegisters || Config::kQStages > 1 ? min_of(steps, 2) : steps;
      Place previous = {}, place = {}, next = {};
      if (steps > 0) place = find(tile, 0);
#pragma unroll 1
      for (int32_t step = 0; step <= steps; ++step) {
        const uint32_t n = key_blocks + step;
        const uint32_t stage = S::KvRing::stage(n), before = S::KvRing::stage(n - 1);
        if (step + 1 < steps) next = find(tile, step + 1);
        if (step < steps) {
          shared.empty_k[stage].wait(S::KvRing::empty_parity(n));
          if constexpr (Mask::kScattered) {
            // SYNC: the consumers read it after full_k, of which lane 0's arrival is a part.
            if (loader == 0 && lane() < kGroups) shared.key_groups.of(n)[lane()] = place.key;
            __syncwarp();
          }
          load(tile, place, shared.k[stage], shared.full_k[stage], params.k, params.mask.k_steps);
        }
        if (step > 0) {
          shared.empty_v[before].wait(S::KvRing::empty_parity(n - 1));
          load(tile, previous, shared.v[before], shared.full_v[before], params.v, params.mask.v_steps);
        }
        previous = place;
        place = next;
        if (loader == 0 && step == q_step) load_q(round + 1);
        __syncwarp();
      }
      key_blocks += steps;
    }
  }
};

}  // namespace flashmsa::prefill
