// The forward kernel's parameters and its plan of shared memory.
#pragma once

#include <type_traits>

#include "attn/dropout.cuh"
#include "attn/places.cuh"
#include "attn/score.cuh"
#include "fwd/config.h"
#include "mask/band.h"
#include "mask/interval.h"
#include "sched/plan.h"
#include "sched/tile_order.h"
#include "sm90/barrier.cuh"
#include "sm90/fragment.h"
#include "sm90/tensor_map.h"
#include "sm90/tma.cuh"

namespace flashmsa::fwd {

// Keys on pages (prefill/paged.h).
template <class Mask>
inline constexpr bool kPaged = requires { requires Mask::kPaged; };
// Tiles have rows of one sequence each, and bring them along.
template <class Mask>
inline constexpr bool kOwnRows = kPaged<Mask> || sched::kOwnRows<Mask>;
// A tile's keys lie in groups of 8 that do not follow each other.
template <class Mask>
inline constexpr bool kScattered = requires { requires Mask::kScattered; };
// Rows and keys lie in memory in another order than they count in (mask/hash.h), and are brought one by one (indexed.cuh).
template <class Mask>
inline constexpr bool kIndexed = requires { requires Mask::kIndexed; };
// Warps that load K and V.
// PERF: a warp issues one box in 60 to 67 cycles, and pages are many boxes.
template <class Mask>
inline constexpr int kLoaders = kPaged<Mask> || kIndexed<Mask> ? 3 : 1;
// Who arrives when a tile is there: the thread that asked TMA for it, or each lane that copied.
template <class Mask>
inline constexpr uint32_t kFullArrivals = kIndexed<Mask> ? kLoaders<Mask> * 32 : 1;

// Whether a CTA's first tile is asked for without a look at what a kernel ahead of this one makes.
// PERF: a causal window of 4096 at 32768, d128, with its first rows at the end 1 %. Bands at other head dims were not measured.
template <class Mask, class Config>
inline constexpr bool kKnowsFirstTile = Mask::kKind == MaskKind::kDense || Mask::kKind == MaskKind::kCausal ||
                                        (std::is_same_v<Mask, mask::Band> && Config::kHeadDim == 128);

// How many entries the plan has, where order.row_blocks is but the most that there may be.
template <bool kOwnRows>
struct RowBlockCount {
  const int32_t* row_blocks;
};
template <>
struct RowBlockCount<false> {};

template <class Mask>
struct KernelParams {
  sm90::TensorMap q, k, v, out;
  TensorRef q_rows, k_rows, v_rows, out_rows;  // the same tensors, for the slow path
  typename Mask::Params mask;
  sched::TileOrder order;
  const sched::PlanEntry<Mask>* plan;  // order.row_blocks entries, for listed masks as many for each slice; or null
  int32_t* tile_counter;               // tiles handed out beyond the grid's first; null: one tile a CTA
  [[no_unique_address]] RowBlockCount<sched::kOwnRows<Mask>> planned;
  float* lse;                          // (batch, heads_q, len_q) by strides; null: not wanted
  int64_t lse_stride_batch, lse_stride_head, lse_stride_seq, lse_stride_residue;
  const float* sinks;                  // (heads_q); null: none
  int32_t heads_q, len_q, residues;
  int32_t q_heads_per_kv_head;
  int32_t head_dim, head_dim_v;
  float scale_log2;                    // scale * log2(e) > 0
  float inverse_scale_log2;            // 1 / scale_log2
  attn::CapParams cap;                 // Score::kSoftcap
  const float* alibi_slopes;           // Score::kAlibi: (heads_q) or (batch, heads_q)
  int64_t alibi_stride_batch;
  float alibi_factor;                  // from a slope to S's unit a key
  attn::DropoutParams dropout;         // Score::kDropout
  float largest_place_slope;           // kPlaceStep: of slopes in units of S that it takes
  float largest_gentle_slope;          // kPlaceStep: see attn::kGentlePenalty
  attn::CapExponents cap_exponents;    // kCapInExponent
  sched::PartedOrder parted_order;     // kKnowsFirstTile: of the tiles that order has
  sched::Divisor by_heads_q, by_q_heads_per_kv_head;
};

using sched::Span;  // of a warpgroup's 64 rows
// Spans that are not part of the plan.
template <bool kPlanned, int32_t kSpans>
struct OwnSpans {
  Span spans[max_of(kSpans, sched::kMaxSpans)];
};
template <int32_t kSpans>
struct OwnSpans<true, kSpans> {};

// Which warpgroup has which 64 rows of a tile: where they are dealt in turn, by who has the first.
template <bool kDealsParts, int32_t kWarpgroups>
struct PartDeal {
  int32_t first_warpgroup;

  __device__ __forceinline__ int32_t part_of(int32_t warpgroup) const {
    const int32_t part = warpgroup - first_warpgroup;
    return part < 0 ? part + kWarpgroups : part;
  }
  __device__ __forceinline__ int32_t warpgroup_of(int32_t part) const {
    const int32_t warpgroup = first_warpgroup + part;
    return warpgroup < kWarpgroups ? warpgroup : warpgroup - kWarpgroups;
  }
};
template <int32_t kWarpgroups>
struct PartDeal<false, kWarpgroups> {
  __device__ __forceinline__ int32_t part_of(int32_t warpgroup) const { return warpgroup; }
};

// What the producer tells the consumers about their next tile: its entry of the plan, planned or not (row_block negative:
// no more tiles), and whose rows they are.
template <class Mask, class Config>
struct alignas(16) TileWork : PartDeal<Config::kDealsParts, Config::kConsumerWarpgroups> {
  sched::PlanEntry<Mask> entry;
  OwnSpans<Mask::kSpansPlanned, Config::kConsumerWarpgroups> own;
  static_assert(!Mask::kSpansPlanned || Config::kConsumerWarpgroups <= sched::kMaxSpans);
  int32_t head;
  int32_t kv_head;
  int32_t batch;
  int32_t residue;

  __device__ Span span(int32_t warpgroup) const {
    if constexpr (Mask::kSpansPlanned) {
      return entry.spans[warpgroup];
    } else {
      return own.spans[warpgroup];
    }
  }
  __device__ void set_span(int32_t warpgroup, Span span) {
    if constexpr (Mask::kSpansPlanned) {
      entry.spans[warpgroup] = span;
    } else {
      own.spans[warpgroup] = span;
    }
  }

  // Rows count in their sequence: the first, one past the last, and the row of Q that is the sequence's first.
  __device__ int32_t first_row() const {
    if constexpr (kOwnRows<Mask>) {
      return entry.block.first_row;
    } else {
      return entry.row_block * Config::kBlockQ;
    }
  }
  __device__ int32_t end_row(const KernelParams<Mask>& params) const {
    if constexpr (kOwnRows<Mask>) {
      return entry.block.end_row;
    } else {
      return params.len_q;
    }
  }
  __device__ int32_t sequence_row() const {
    if constexpr (kPaged<Mask>) {
      return entry.block.sequence_row;
    } else {
      return 0;
    }
  }

  __device__ sm90::Sequence queries() const { return {head, batch, residue}; }
  __device__ sm90::Sequence keys() const { return {kv_head, batch, residue}; }
};

// ALiBi's slope of a tile in units of S.
template <class Mask, class Config>
__device__ __forceinline__ float alibi_slope(const KernelParams<Mask>& params, const TileWork<Mask, Config>& tile) {
  int32_t batch = tile.batch;
  if constexpr (kPaged<Mask>) batch = tile.entry.block.sequence;  // packed ones are one batch
  return params.alibi_slopes[batch * params.alibi_stride_batch + tile.head] * params.alibi_factor;
}

// Where a key block's keys begin, and what of a listed cell may be seen; of scattered keys, the block's number in the ring.
struct KeyBlock {
  int32_t first_key;
  int32_t detail;
};

// The first keys of the groups of 8 that make a tile of scattered keys. The consumers read them after they have given K back.
// SYNC: so there is room for twice the stages: a block's place is written again when all have given back the K that came
// kStages later, hence are done with the block.
template <bool kScattered, class Config>
struct KeyGroups {
  static constexpr int kSlots = 2 * Config::kStages;
  static constexpr int kGroups = Config::kBlockKv / 8;
  int32_t first_key[kSlots][kGroups];

  __device__ int32_t* of(uint32_t block) { return first_key[block % kSlots]; }
};
template <class Config>
struct KeyGroups<false, Config> {};

// Whether the consumers have to know a full block's place, or cannot tell a block's place from its step.
template <class Mask, class Score>
inline constexpr bool kNeedsKeyBlocks = Mask::kListed || ((Score::kAlibi || Score::kDropout) && !kScattered<Mask>);

// Whether the first keys of a block's groups are wanted of full blocks too.
template <class Mask, class Score>
inline constexpr bool kNeedsAllGroups = kScattered<Mask> && Score::kAlibi;

// Whether ALiBi's penalties come by one more k-step of Q K^T: attn/places.cuh.
// PERF: at head dim 256 penalties one by one cost 1 … 3 %, and the step would be 1/32 of the products.
template <class Mask, class Config, class Score>
inline constexpr bool kPlaceStep =
    Score::kAlibi && !Score::kSoftcap && !Mask::kListed && !kScattered<Mask> && Config::kHeadDim <= 128;

// Whether a soft cap becomes a part of the softmax's exponents: attn/cap.h. With ALiBi it has to come before the penalties.
template <class Score>
inline constexpr bool kCapInExponent = Score::kSoftcap && !Score::kAlibi;

// Whether no row sees a key past its own position, whatever the call: none then stands before a block of keys.
template <class Mask>
inline constexpr bool kSeesNonePast = requires { requires Mask::kSeesNonePast; };

// How a partial block is masked, see attn/masking.cuh: of masks without options, where cut blocks are many.
// NOTE: not at head dim 96, where the kernel of documents would spill.
template <class Mask, class Config>
inline constexpr bool kMasksByBits =
    Config::kHeadDim != 96 &&
    (Mask::kKind == MaskKind::kCausal || Mask::kKind == MaskKind::kDocument || Mask::kKind == mask::kBandKind);

// Composite masks run over strided tensors too.
template <class Mask>
inline constexpr int kMapRank = Mask::kKind == MaskKind::kComposite ? sm90::kStridedRank : sm90::kPlainRank;

// SYNC: with four the scheduler never waits for a slot. Tile t + 1 is decoded when the producer has begun tile t, which is
// after the consumers opened tile t - 1, hence tile t - 3 is done.
inline constexpr int kWorkSlots = 4;

template <class Mask, class Config>
struct Shared {
  // Columns in whole groups of 64. Past the tensor's columns TMA brings zeros; past the config's width nothing reads them.
  static constexpr int32_t kColumns = ceil_div(Config::kHeadDim, sm90::kSwizzleColumns) * sm90::kSwizzleColumns;
  static constexpr int32_t kColumnsV = ceil_div(Config::kHeadDimV, sm90::kSwizzleColumns) * sm90::kSwizzleColumns;

  template <int32_t kTileColumns>
  using KvTile = std::conditional_t<kPaged<Mask>, sm90::RowMajorTile<Config::kBlockKv, kTileColumns>,
                                    sm90::SwizzledTile<Config::kBlockKv, kTileColumns>>;
  using QTile = sm90::SwizzledTile<Config::kBlockQ, kColumns>;
  using KTile = KvTile<kColumns>;
  using VTile = KvTile<kColumnsV>;
  using OTile = sm90::SwizzledTile<Config::kBlockQ, Config::kOColumns>;  // a warp stages its own 16 rows

  using KvRing = sm90::Ring<Config::kStages>;
  using WorkRing = sm90::Ring<kWorkSlots>;
  using QRing = sm90::Ring<Config::kQStages>;

  // Parts of Q with barriers of their own: a warpgroup's 64 rows, where these come and go with its tiles alone.
  static constexpr int32_t kQParts = Config::kDealsParts ? Config::kConsumerWarpgroups : 1;

  alignas(1024) char q[Config::kQStages][QTile::kBytes];
  alignas(1024) char k[Config::kStages][KTile::kBytes];
  alignas(1024) char v[Config::kStages][VTile::kBytes];
  alignas(Config::kDealsParts ? 8 : 1024) char o[Config::kDealsParts ? 8 : OTile::kBytes];

  //                                       arrives (count)                     waits
  sm90::Barrier full_q[Config::kQStages * kQParts];   // producer + TMA bytes (1), or        consumers
                                                  // loading lanes behind their copies
  sm90::Barrier empty_q[Config::kQStages * kQParts];  // consumer warps                      producer
  sm90::Barrier full_k[Config::kStages];   // as full_q                         consumers
  sm90::Barrier empty_k[Config::kStages];  // consumer warps                    producer
  sm90::Barrier full_v[Config::kStages];   // as full_q                         consumers
  sm90::Barrier empty_v[Config::kStages];  // consumer warps                    producer
  sm90::Barrier full_work[kWorkSlots];    // scheduler (1)                     producer, consumers
  sm90::Barrier empty_work[kWorkSlots];   // consumer threads                  scheduler
  sm90::Barrier begun[kWorkSlots];        // who loads                         scheduler

  TileWork<Mask, Config> work[kWorkSlots];
  KeyBlock key_block[Config::kStages];  // of the K stages; where the consumers need it
  [[no_unique_address]] KeyGroups<kScattered<Mask>, Config> key_groups;

  // The place of a warpgroup's barrier among those of Q.
  static __device__ __forceinline__ uint32_t part_barrier(uint32_t stage, int32_t warpgroup) {
    return kQParts == 1 ? stage : stage * kQParts + warpgroup;
  }

  __device__ void init_barriers() {
    constexpr uint32_t kConsumerWarps = Config::kConsumerWarpgroups * 4;
    for (int s = 0; s < Config::kQStages * kQParts; ++s) {
      full_q[s].init(kFullArrivals<Mask>);
      empty_q[s].init(kConsumerWarps / kQParts);
    }
    for (int s = 0; s < Config::kStages; ++s) {
      full_k[s].init(kFullArrivals<Mask>);
      empty_k[s].init(kConsumerWarps);
      full_v[s].init(kFullArrivals<Mask>);
      empty_v[s].init(kConsumerWarps);
    }
    for (int s = 0; s < kWorkSlots; ++s) {
      full_work[s].init(1);
      empty_work[s].init(kConsumerWarps * 32);
      begun[s].init(kLoaders<Mask> + Config::kDealsParts);
    }
    sm90::fence_barrier_init();
  }
};

// A tile's slopes lie beside its work slot.
template <class Config>
using PlaceOperands = attn::PlaceOperands<Config::kBlockKv, kWorkSlots, Config::kConsumerWarpgroups>;

// They lie before the rest of a kernel's shared memory. NOTE: not in one struct with it, of which nvcc 13.0 gets the offsets
// wrong (an empty member without an address of its own).
template <class Mask, class Config, class Score>
inline constexpr uint32_t kPlaceBytes =
    kPlaceStep<Mask, Config, Score> ? ceil_div<uint32_t>(sizeof(PlaceOperands<Config>), 1024u) * 1024u : 0;
template <class Mask, class Config, class Score>
inline constexpr size_t kSharedBytes = kPlaceBytes<Mask, Config, Score> + sizeof(Shared<Mask, Config>);

}  // namespace flashmsa::fwd
