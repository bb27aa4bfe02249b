// The producer warpgroup: one thread hands out tiles, another keeps TMA ahead of the consumers.
#pragma once

#include "fwd/shared.cuh"
#include "sm90/tma.cuh"

namespace flashmsa::fwd {

// What the 64 rows from first_row on meet of a tile's key blocks.
template <class Mask, class Config>
__device__ __forceinline__ Span span_of(const KernelParams<Mask>& params, const TileWork<Mask, Config>& work,
                                        int32_t first_row) {
  const int32_t count = work.entry.tiles.count();
  const int32_t end_row = work.end_row(params);
  if (first_row >= end_row) return {count, 0, 0};
  // PERF: looking for each warpgroup's own part of a list costs more than the blocks that it would skip.
  if (Mask::kListed || work.entry.tiles.partial_count() == 0) return {0, count, 0};
  const int32_t last_row = min_of(first_row + sm90::kWarpgroupRows, end_row) - 1;
  if constexpr (Mask::kSpansPlanned) {
    // Without a plan there are no documents.
    return sched::span_of(work.entry.tiles, Mask::tiles_without_documents(params.mask, work.entry.block, first_row,
                                                                          last_row, Config::kBlockKv));
  } else {
    return sched::span_of(work.entry.tiles,
                          Mask::tiles(params.mask, work.entry.block, first_row, last_row, Config::kBlockKv));
  }
}

// A plan's entry into a work slot. PERF: in pieces, because the scheduler's few registers do not hold all of it.
template <class Mask>
__device__ __forceinline__ void copy_entry(const sched::PlanEntry<Mask>& from, sched::PlanEntry<Mask>& to) {
  static_assert(sizeof(from) % sizeof(int4) == 0);
  const int4* source = reinterpret_cast<const int4*>(&from);
  int4* target = reinterpret_cast<int4*>(&to);
#pragma unroll 3
  for (size_t i = 0; i < sizeof(from) / sizeof(int4); ++i) target[i] = source[i];
}

// The rest of a tile of rows by index, whose first row is known.
// PERF: all reads at once, where looking at one row after another waits for memory five times.
template <class Mask, class Config>
__device__ __forceinline__ void decode_indexed(const KernelParams<Mask>& params, int32_t first_row,
                                               TileWork<Mask, Config>& work) {
  constexpr int32_t kParts = Config::kConsumerWarpgroups;
  typename Mask::Block block = Mask::block(params.mask, work.batch, work.head);
  mask::Interval first[kParts], last[kParts];
#pragma unroll
  for (int32_t w = 0; w < kParts; ++w) {
    const int32_t row = first_row + w * sm90::kWarpgroupRows;
    first[w] = Mask::row(params.mask, block, min_of(row, params.len_q - 1));
    last[w] = Mask::row(params.mask, block, min_of(row + sm90::kWarpgroupRows, params.len_q) - 1);
  }
  block.origin = first[0].begin;
  const auto tiles_between = [&](mask::Interval from, mask::Interval to) {
    return mask::key_tiles(mask::from_origin(from, block.origin), mask::from_origin(to, block.origin),
                           Config::kBlockKv);
  };
  const typename Mask::Tiles tiles = tiles_between(first[0], last[kParts - 1]);
  work.entry.block = block;
  work.entry.tiles = tiles;
#pragma unroll
  for (int32_t w = 0; w < kParts; ++w) {
    const bool none = first_row + w * sm90::kWarpgroupRows >= params.len_q;
    work.set_span(w, none ? Span{tiles.count(), 0, 0} : sched::span_of(tiles, tiles_between(first[w], last[w])));
  }
}

// Where tile number `tile` of the grid lies.
struct TilePlace {
  sched::TileIndex index;
  int32_t sequence;  // over batches and residues
  int32_t head, kv_head;
};

template <class Mask, class Config>
__device__ __forceinline__ TilePlace place_of(const KernelParams<Mask>& params, const sched::TileOrder& order,
                                              int32_t tile) {
  TilePlace place;
  if constexpr (kKnowsFirstTile<Mask, Config>) {
    place.index = params.parted_order.decode(tile);
    place.sequence = params.by_heads_q.divide(place.index.slice);
    place.head = place.index.slice - place.sequence * params.heads_q;
    place.kv_head = params.by_q_heads_per_kv_head.divide(place.head);
  } else {
    place.index = order.decode(tile);
    place.sequence = place.index.slice / params.heads_q;
    place.head = place.index.slice % params.heads_q;
    place.kv_head = place.head / params.q_heads_per_kv_head;
  }
  return place;
}

// Which rows, head and keys tile number `tile` of the grid stands for. Past the last: row_block < 0.
template <class Mask, class Config>
__device__ __forceinline__ void decode_tile(const KernelParams<Mask>& params, const sched::TileOrder& order,
                                            int32_t tile, TileWork<Mask, Config>& work) {
  if (tile >= order.count()) {
    work.entry.row_block = -1;
    return;
  }
  const TilePlace place = place_of<Mask, Config>(params, order, tile);
  work.head = place.head;
  work.kv_head = place.kv_head;
  work.batch = place.sequence;
  work.residue = 0;
  if constexpr (kMapRank<Mask> == sm90::kStridedRank) {
    if (params.residues > 1) {
      work.batch = place.sequence / params.residues;
      work.residue = place.sequence % params.residues;
    }
  }
  if (Mask::kPlanned && params.plan != nullptr) {
    const int64_t at =
        Mask::kListed ? int64_t{place.index.slice} * order.row_blocks + place.index.row_rank : place.index.row_rank;
    copy_entry<Mask>(params.plan[at], work.entry);
    if constexpr (Mask::kPlanned && !Mask::kListed) work.batch += work.entry.block.batch;
    if constexpr (Mask::kSpansPlanned) return;
  } else {
    // Bottom-up: under a causal mask the last rows are the longest.
    work.entry.row_block = order.row_blocks - 1 - place.index.row_rank;
    const int32_t first_row = work.entry.row_block * Config::kBlockQ;
    if constexpr (kIndexed<Mask>) return decode_indexed<Mask, Config>(params, first_row, work);
    const int32_t last_row = min_of(first_row + Config::kBlockQ, params.len_q) - 1;
    if constexpr (Mask::kSpansPlanned) {
      work.entry.block = Mask::block_without_documents(params.mask, work.batch, work.head, first_row);
      work.entry.tiles =
          Mask::tiles_without_documents(params.mask, work.entry.block, first_row, last_row, Config::kBlockKv);
    } else if constexpr (!Mask::kPlanned && !kIndexed<Mask>) {
      work.entry.block = Mask::block(params.mask, work.batch, work.head, first_row, last_row);
      work.entry.tiles = Mask::tiles(params.mask, work.entry.block, first_row, last_row, Config::kBlockKv);
    }
  }
  // NOTE: the entry is read again below rather than kept in registers, of which there are too few.
  asm volatile("" ::: "memory");
#pragma unroll 1
  for (int32_t w = 0; w < Config::kConsumerWarpgroups; ++w) {
    work.set_span(w, span_of<Mask, Config>(params, work, work.first_row() + w * sm90::kWarpgroupRows));
  }
}

// What ALiBi's k-step needs of a tile: its slope, where its rows stand, the order of its key blocks. By one thread.
template <class Mask, class Config>
__device__ __forceinline__ void set_places(const KernelParams<Mask>& params, const TileWork<Mask, Config>& work,
                                           uint32_t slot, PlaceOperands<Config>& places) {
  if (work.entry.row_block < 0) return;
  const float slope = alibi_slope(params, work);
  const bool fits = fabsf(slope) <= params.largest_place_slope;
  places.template set_slope<typename Config::Element>(slot, fits ? slope : 0.0f);
  // SYNC: the consumers' wgmma reads it after full_work.
  sm90::fence_async_proxy();
  const auto& block = work.entry.block;
  const int32_t first_row = work.first_row(), rows = min_of(Config::kBlockQ, work.end_row(params) - first_row);
  const bool in_order = fits && Mask::positions_in_order(params.mask, block);
  const bool behind_all =
      in_order && fabsf(slope) <= params.largest_gentle_slope && Mask::sees_none_past(params.mask, block, first_row);
  const int32_t first = in_order ? Mask::position(params.mask, block, first_row) : 0;
  const auto span = [&](int32_t begin, int32_t end) {
    if (!in_order) return mask::kEverywhere;
    return behind_all ? mask::kBehindAll : mask::PositionSpan{first + begin, first + end - 1};
  };
#pragma unroll 1
  for (int32_t w = 0; w < Config::kConsumerWarpgroups; ++w) {
    // NOTE: of a warpgroup past the tensor's end the last row, which it takes for its own.
    const int32_t end = min_of((w + 1) * sm90::kWarpgroupRows, rows);
    places.positions[slot][w] = span(min_of(w * sm90::kWarpgroupRows, end - 1), end);
  }
  places.order[slot] =
      mask::side_order(work.entry.tiles, Mask::origin(params.mask, block), span(0, rows), Config::kBlockKv);
}

// The thread that hands out tiles: takes a number, decodes it, publishes it to the producer and the consumers.
// PERF: a thread of its own. Decoding takes 1500 cycles for a causal mask and several times that for a composite one; done
// between two loads it held up the consumers.
// A tile is taken when the producer has begun the one before, not earlier: the last tiles go to whoever is free.
// SYNC: tile t + 1 needs the slot of tile t + 1 - kWorkSlots alone, so nothing here waits for a tile that is still open.
template <class Mask, class Config>
struct Scheduler {
  using S = Shared<Mask, Config>;

  const KernelParams<Mask>& params;
  S& shared;

  // The number of the CTA's tile `round` > 0. The second round of the grid goes back the way that the first came, so that who
  // begins with the longest tile goes on with the shortest; from then on any CTA that gets there first takes it.
  // PERF: by the counter alone a second tile is taken when the first one begins, by whoever happens to begin first: causal
  // 1x2048, two rounds, took 1.2 times as long.
  __device__ __forceinline__ int32_t next_tile(const sched::TileOrder& order, [[maybe_unused]] uint32_t round) {
    int32_t before = gridDim.x;
    if constexpr (kKnowsFirstTile<Mask, Config>) {
      if (round == 1) return 2 * gridDim.x - 1 - blockIdx.x;
      before *= 2;
    }
    return params.tile_counter != nullptr ? before + atomicAdd(params.tile_counter, 1) : order.count();
  }

  // on_tile(work, slot): what else a tile needs before it is published.
  template <class OnTile>
  __device__ __forceinline__ void run(const OnTile& on_tile) {
    std::conditional_t<sched::kOwnRows<Mask>, sched::TileOrder, const sched::TileOrder&> order = params.order;
    int32_t tile = blockIdx.x;
    uint32_t round = 0;
    [[maybe_unused]] int32_t parts = 0;  // dealt so far
    if constexpr (kKnowsFirstTile<Mask, Config>) {
      on_tile(shared.work[0], 0);
      shared.full_work[0].arrive();
      cudaGridDependencySynchronize();
      shared.begun[0].wait_idly(S::WorkRing::full_parity(0));
      tile = next_tile(order, ++round);
    } else {
      // SYNC: the plan, its number of row blocks and the tile counter are the work of the kernel before, which this one may have
      // overtaken.
      cudaGridDependencySynchronize();
      // NOTE: not more than there is room for, whatever another stream does to the workspace.
      if constexpr (sched::kOwnRows<Mask>) order.row_blocks = min_of(order.row_blocks, *params.planned.row_blocks);
    }
    for (;; ++round) {
      const uint32_t slot = S::WorkRing::stage(round);
      shared.empty_work[slot].wait(S::WorkRing::empty_parity(round));
      TileWork<Mask, Config>& work = shared.work[slot];
      decode_tile<Mask, Config>(params, order, tile, work);
      if constexpr (Config::kDealsParts) {
        work.first_warpgroup = parts % Config::kConsumerWarpgroups;
        if (tile < order.count()) parts += ceil_div(work.end_row(params) - work.first_row(), sm90::kWarpgroupRows);
      }
      on_tile(work, slot);
      shared.full_work[slot].arrive();
      if (tile >= order.count()) break;
      shared.begun[slot].wait_idly(S::WorkRing::full_parity(round));
      tile = next_tile(order, round + 1);
    }
  }
};

// Q and the first keys of the CTA's first tile, asked for by the thread that made the barriers, while others still wait for
// these. Key blocks come in the tile's own order.
template <class Mask, class Config>
__device__ __forceinline__ void load_first(const KernelParams<Mask>& params, Shared<Mask, Config>& shared) {
  using S = Shared<Mask, Config>;
  const TilePlace place = place_of<Mask, Config>(params, params.order, blockIdx.x);
  const int32_t first_row = (params.order.row_blocks - 1 - place.index.row_rank) * Config::kBlockQ;
  shared.full_q[0].arrive_expect(S::QTile::kBytes);
  sm90::load_tile<typename S::QTile>(shared.q[0], params.q, first_row, {place.head, place.sequence}, shared.full_q[0]);
  const int32_t last_row = min_of(first_row + Config::kBlockQ, params.len_q) - 1;
  const typename Mask::Block block = Mask::block(params.mask, place.sequence, place.head, first_row, last_row);
  const auto tiles = Mask::tiles(params.mask, block, first_row, last_row, Config::kBlockKv);
  if (tiles.count() == 0) return;
  const int32_t first_key = Mask::origin(params.mask, block) + tiles.visit(0) * Config::kBlockKv;
  shared.full_k[0].arrive_expect(S::KTile::kBytes);
  sm90::load_tile<typename S::KTile>(shared.k[0], params.k, first_key, {place.kv_head, place.sequence},
                                     shared.full_k[0]);
}

// kDealsParts: the thread that loads Q, each warpgroup's rows as soon as it has room for them.
// PERF: by the thread that loads K and V, which waits for room of theirs, documents of 32 to 256 tokens take 4 % longer.
template <class Mask, class Config>
struct PartLoader {
  using S = Shared<Mask, Config>;

  const KernelParams<Mask>& params;
  S& shared;

  __device__ __forceinline__ void run() {
    static_assert(256 % (2 * Config::kQStages) == 0);
    uint32_t uses = 0;  // of each warpgroup's ring so far, 8 bits each
    for (uint32_t round = 0;; ++round) {
      const uint32_t slot = S::WorkRing::stage(round);
      shared.full_work[slot].wait(S::WorkRing::full_parity(round));
      const TileWork<Mask, Config>& tile = shared.work[slot];
      if (tile.entry.row_block < 0) return;
      // SYNC: no slot is written again before this thread is done with it.
      shared.begun[slot].arrive();
#pragma unroll 1
      for (int32_t part = 0; part < Config::kConsumerWarpgroups; ++part) {
        if (tile.span(part).steps == 0) continue;
        const int32_t warpgroup = tile.warpgroup_of(part);
        const uint32_t field = 8 * warpgroup, use = uses >> field & 0xff;
        uses = (uses & ~(0xffu << field)) | (use + 1 & 0xff) << field;
        const uint32_t stage = S::QRing::stage(use), barrier = S::part_barrier(stage, warpgroup);
        shared.empty_q[barrier].wait(S::QRing::empty_parity(use));
        shared.full_q[barrier].arrive_expect(S::QTile::kBytes / S::kQParts);
        sm90::load_tile<typename S::QTile>(shared.q[stage] + warpgroup * sm90::kWarpgroupRows * sm90::kSwizzleRowBytes,
                                           params.q, tile.first_row() + part * sm90::kWarpgroupRows, tile.queries(),
                                           shared.full_q[barrier]);
      }
    }
  }
};

// The thread that loads. kKeyBlocks: it tells the consumers each key block's place. kPlaces: key blocks come in an order of
// their own. kLoadsFirst: load_first() has been called.
template <class Mask, class Config, bool kKeyBlocks, bool kPlaces, bool kLoadsFirst>
struct Producer {
  using S = Shared<Mask, Config>;

  const KernelParams<Mask>& params;
  S& shared;
  const PlaceOperands<Config>& places;

  // Where Q has one buffer that is read to a tile's end, the next tile's K(0) has one sooner, and goes ahead of its Q.
  // PERF: dense d64 and d256 1.002 ... 1.016, d192 1.01 ... 1.02, d96 .96 ... .98; causal d256 .986 ... .998.
  static constexpr bool kKeysFirst = Mask::kKind == MaskKind::kDense && kLoadsFirst && !Config::kQInRegisters &&
                                     Config::kQStages == 1 && Config::kHeadDim != 96;

  // NOTE: read in shared memory where needed: this thread's few registers do not hold it.
  __device__ __forceinline__ const TileWork<Mask, Config>& work(uint32_t round) const {
    return shared.work[S::WorkRing::stage(round)];
  }

  // SYNC: tile `round` has been published.
  __device__ __forceinline__ void wait_work(uint32_t round) {
    shared.full_work[S::WorkRing::stage(round)].wait(S::WorkRing::full_parity(round));
  }

  __device__ __forceinline__ void load_q(uint32_t round) {
    wait_work(round);
    const TileWork<Mask, Config>& tile = work(round);
    if (tile.entry.row_block < 0) return;
    const uint32_t stage = S::QRing::stage(round);
    shared.empty_q[stage].wait(S::QRing::empty_parity(round));
    shared.full_q[stage].arrive_expect(S::QTile::kBytes);
    sm90::load_tile<typename S::QTile, kMapRank<Mask>>(shared.q[stage], params.q, tile.first_row(), tile.queries(),
                                                       shared.full_q[stage]);
  }

  // The key block of a step.
  __device__ __forceinline__ KeyBlock key_block(const TileWork<Mask, Config>& tile, uint32_t round,
                                                int32_t step) const {
    if constexpr (kPlaces) {
      return {mask::first_key(tile.entry.tiles, Mask::origin(params.mask, tile.entry.block),
                              places.order[S::WorkRing::stage(round)], step, Config::kBlockKv),
              0};
    }
    const int32_t index = tile.entry.tiles.visit(step);
    if constexpr (Mask::kListed) {
      return {Mask::key_tile(params.mask, tile.entry.block, index, Config::kBlockKv) * Config::kBlockKv,
              params.mask.list.detail[Mask::entry(tile.entry.block, index, Config::kBlockKv)]};
    } else {
      return {Mask::origin(params.mask, tile.entry.block) + index * Config::kBlockKv, 0};
    }
  }

  // The keys from first_key on into a buffer: K or V.
  template <class Tile>
  __device__ __forceinline__ void load(const TileWork<Mask, Config>& tile, int32_t first_key, void* buffer,
                                       sm90::Barrier& full, const sm90::TensorMap& tensor) {
    full.arrive_expect(Tile::kBytes);
    sm90::load_tile<Tile, kMapRank<Mask>>(buffer, tensor, first_key, tile.keys(), full);
  }

  // Tile after tile: K(0), K(1), V(0), K(2), V(1), …, the order in which the consumers free the buffers. On the way Q of the
  // next tile is fetched, or behind K(0) its own.
  // SYNC: a warpgroup opens tile t + 1 before it has let all blocks of tile t pass. So nothing on the way to its Q waits for
  // more than K(0) of tile t: K(1) and V(0) have the stages of the tile before, K(2) follows K(0), V(1) is free.
  __device__ __forceinline__ void run() {
    uint32_t key_blocks = 0;  // of K handed to TMA so far; V runs one behind within a tile
    if constexpr (kLoadsFirst) {
      wait_work(0);
    } else if constexpr (!Config::kDealsParts) {
      load_q(0);
    }

    for (uint32_t round = 0;; ++round) {
      if constexpr (Config::kDealsParts) wait_work(round);
      const TileWork<Mask, Config>& tile = work(round);
      if (tile.entry.row_block < 0) break;
      shared.begun[S::WorkRing::stage(round)].arrive();
      const int32_t steps = tile.entry.tiles.count();
      // Q of the next tile as soon as its buffer is free: early, but where there is one buffer that is read to the end.
      const int32_t q_step = Config::kQInRegisters || Config::kQStages > 1 ? min_of(steps, 2) : steps;
      int32_t previous = 0;  // V runs one step behind
      [[maybe_unused]] KeyBlock ahead = {};
      if constexpr (Mask::kListed) {
        if (steps > 0) ahead = key_block(tile, round, 0);
      }
#pragma unroll 1
      for (int32_t step = 0; step <= steps; ++step) {
        const uint32_t n = key_blocks + step;
        const uint32_t stage = S::KvRing::stage(n), before = S::KvRing::stage(n - 1);
        int32_t first_key = 0;
        if (step < steps) {
          KeyBlock block;
          if constexpr (Mask::kListed) {
            // PERF: a list is read a step ahead: the wait for a free buffer alone does not hide the read.
            block = ahead;
            if (step + 1 < steps) ahead = key_block(tile, round, step + 1);
          } else {
            block = key_block(tile, round, step);
          }
          first_key = block.first_key;
          if (!kLoadsFirst || round > 0 || step > 0) {
            shared.empty_k[stage].wait(S::KvRing::empty_parity(n));
            // SYNC: the consumers read it after full_k, of which this thread's arrival is a part.
            if constexpr (kKeyBlocks) shared.key_block[stage] = block;
            load<typename S::KTile>(tile, first_key, shared.k[stage], shared.full_k[stage], params.k);
          }
        }
        if (step > 0) {
          shared.empty_v[before].wait(S::KvRing::empty_parity(n - 1));
          load<typename S::VTile>(tile, previous, shared.v[before], shared.full_v[before], params.v);
        }
        previous = first_key;
        if constexpr (kKeysFirst) {
          if (step == 0 && round > 0) load_q(round);
        } else if constexpr (!Config::kDealsParts) {
          if (step == q_step) load_q(round + 1);
        }
      }
      key_blocks += steps;
      if constexpr (kKeysFirst) wait_work(round + 1);
    }
  }
};

}  // namespace flashmsa::fwd
