// The forward kernel's parameters and its plan of shared memory.
#pragma once

#include <type_traits>

#include "fwd/config.h"
#include "mask/interval.h"
#include "sched/plan.h"
#include "sched/tile_order.h"
#include "sm90/barrier.cuh"
#include "sm90/fragment.h"
#include "sm90/tensor_map.h"

namespace flashmsa::fwd {

template <class Mask>
struct KernelParams {
  sm90::TensorMap q, k, v, out;
  TensorRef q_rows, k_rows, v_rows, out_rows;  // the same tensors, for the slow path
  typename Mask::Params mask;
  sched::TileOrder order;
  const sched::PlanEntry<Mask>* plan;  // order.row_blocks entries; null unless Mask::kPlanned
  int32_t* tile_counter;               // tiles handed out beyond the grid's first; null: one tile a CTA
  float* lse;                          // (batch, heads_q, len_q); null: not wanted
  int32_t heads_q, len_q;
  int32_t q_heads_per_kv_head;
  int32_t head_dim, head_dim_v;
  float scale_log2;                    // scale * log2(e) > 0
  float inverse_scale_log2;            // 1 / scale_log2
};

// Which key blocks of a tile one warpgroup's 64 rows meet, in visit order: `front` blocks that lie right of all of them,
// `steps` to attend to, `back` blocks left of all of them.
struct Span {
  int32_t front, steps, back;
};

// What the producer tells the consumers about their next tile.
template <class Mask, class Config>
struct alignas(16) TileWork {
  int32_t row_block;  // negative: no more tiles
  int32_t head;
  int32_t kv_head;
  int32_t batch;
  mask::KeyTiles tiles;
  typename Mask::Block block;
  Span spans[Config::kConsumerWarpgroups];
};

// SYNC: with four the producer never waits for a slot. It publishes tile t + 1 when block 0 of tile t has been issued, so
// when K of two blocks before has been read; that is of tile t - 2 or later, hence tile t - 3 is done.
inline constexpr int kWorkSlots = 4;

template <class Mask, class Config>
struct Shared {
  using QTile = sm90::SwizzledTile<Config::kBlockQ, Config::kHeadDim>;
  using KTile = sm90::SwizzledTile<Config::kBlockKv, Config::kHeadDim>;
  using VTile = KTile;
  using OTile = sm90::SwizzledTile<Config::kBlockQ, Config::kOColumns>;  // a warp stages its own 16 rows

  using KvRing = sm90::Ring<Config::kStages>;
  using WorkRing = sm90::Ring<kWorkSlots>;
  using QRing = sm90::Ring<Config::kQStages>;

  alignas(1024) char q[Config::kQStages][QTile::kBytes];
  alignas(1024) char k[Config::kStages][KTile::kBytes];
  alignas(1024) char v[Config::kStages][VTile::kBytes];
  alignas(1024) char o[OTile::kBytes];

  //                                       arrives (count)                     waits
  sm90::Barrier full_q[Config::kQStages];         // producer + TMA bytes (1)            consumers
  sm90::Barrier empty_q[Config::kQStages];        // consumer warps                      producer
  sm90::Barrier full_k[Config::kStages];   // producer + TMA bytes (1)          consumers
  sm90::Barrier empty_k[Config::kStages];  // consumer warps                    producer
  sm90::Barrier full_v[Config::kStages];   // producer + TMA bytes (1)          consumers
  sm90::Barrier empty_v[Config::kStages];  // consumer warps                    producer
  sm90::Barrier full_work[kWorkSlots];    // producer (1)                      consumers
  sm90::Barrier empty_work[kWorkSlots];   // consumer threads                  producer

  TileWork<Mask, Config> work[kWorkSlots];

  __device__ void init_barriers() {
    constexpr uint32_t kConsumerWarps = Config::kConsumerWarpgroups * 4;
    for (int s = 0; s < Config::kQStages; ++s) {
      full_q[s].init(1);
      empty_q[s].init(kConsumerWarps);
    }
    for (int s = 0; s < Config::kStages; ++s) {
      full_k[s].init(1);
      empty_k[s].init(kConsumerWarps);
      full_v[s].init(1);
      empty_v[s].init(kConsumerWarps);
    }
    for (int s = 0; s < kWorkSlots; ++s) {
      full_work[s].init(1);
      empty_work[s].init(kConsumerWarps * 32);
    }
    sm90::fence_barrier_init();
  }
};

}  // namespace flashmsa::fwd
