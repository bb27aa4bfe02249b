// Which query tiles the CTA's keys meet; and warpgroup 0, which loads them and computes dQ = dS K, to be added to memory.
#pragma once

#include <type_traits>

#include "bwd/shared.cuh"
#include "bwd/visible.cuh"
#include "sm90/atomic.cuh"
#include "sm90/cluster.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

namespace flashmsa::bwd {

// Walks over the query tiles of a key tile, head by head. A warp's work: each lane looks at a tile of its own.
template <class Config, bool kOrdered>
struct Walk {
  using S = Shared<Config>;

  const KernelParams& params;
  S& shared;
  const KeyTile& key_tile;  // in shared memory
  int32_t head, last_head;
  int32_t word = -1;  // of shared.found
  int32_t base = -32;  // of the 32 tiles at hand
  uint32_t found = 0, partial = 0;  // of these: to come, and not whole
  int32_t detail = mask::kWholeCell, turn = 0;  // of this lane's tile

  __device__ __forceinline__ Walk(const KernelParams& params, S& shared)
      : params(params), shared(shared), key_tile(shared.key_tile) {
    head = key_tile.kv_head * params.heads_per_kv_head();
    last_head = head + params.heads_per_kv_head() - 1;
  }

  // Fills shared.found and shared.partial, as far as they reach. The consumers' warps, before they have that work.
  __device__ __forceinline__ static void find_all(const KernelParams& params, S& shared) {
    Walk walk(params, shared);
    constexpr int32_t kWarps = Config::kConsumerWarpgroups * 4;
    const int32_t words = ceil_div(params.q_tiles, 32);
    const int32_t all = min_of(words * params.heads_per_kv_head(), S::kFoundWords);
    const int32_t first_head = walk.head;
#pragma unroll 1
    for (int32_t i = threadIdx.x / 32 - 4; i < all; i += kWarps) {
      walk.head = first_head + i / words;
      walk.base = i % words * 32;
      walk.look(false);
      if (threadIdx.x % 32 == 0) {
        shared.found[i] = walk.found;
        shared.partial[i] = walk.partial;
      }
    }
  }

  // Which of the 32 tiles the keys meet.
  __device__ __forceinline__ void look([[maybe_unused]] bool turns) {
    const int32_t tile = base + threadIdx.x % 32;
    const int32_t n = key_tile.tile;
    bool meets = false, hides = false;
    detail = mask::kWholeCell;
    if (tile < params.q_tiles) {
      const QueryTile plan = params.prepared.load_tile(params.plan(key_tile.batch, head) * params.q_tiles + tile);
      const bool in_main = n >= plan.main.begin && n < plan.main.end;
      const bool in_first = n >= plan.first_begin && n < plan.first_end;
      meets = in_main || in_first;
      hides = !(n >= plan.main.full_begin && n < plan.main.full_end);
      if (meets && params.list.rows > 0) {
        detail = find_cell<16>(params.list, list_slice(params.list, key_tile.batch, head),
                               tile * Config::kBlockQ / mask::kCell, n * Config::kBlockKv / mask::kCell);
        meets = detail != kNoCell;
        hides |= detail != mask::kWholeCell;
      }
      if constexpr (kOrdered) {
        if (meets && turns) turn = turn_of(plan, tile);
      }
    }
    found = __ballot_sync(~0u, meets);
    partial = __ballot_sync(~0u, meets && hides);
  }

  // How many key tiles that start before this one meet the same queries.
  __device__ __forceinline__ int32_t turn_of(const QueryTile& plan, int32_t tile) const {
    const KeyOrder& order = params.key_order;
    const int32_t n = key_tile.tile;
    if (params.list.rows == 0) {
      return order.before(n, [&](int32_t begin, int32_t end) {
        return max_of(min_of(end, plan.main.end) - max_of(begin, plan.main.begin), 0) +
               max_of(min_of(end, plan.first_end) - max_of(begin, plan.first_begin), 0);
      });
    }
    const int64_t slice = list_slice(params.list, key_tile.batch, head);
    return count_listed(params.list, slice, tile * Config::kBlockQ / mask::kCell, mask::kCell / Config::kBlockKv,
                        [&](int32_t other) {
                          const bool meets = (other >= plan.main.begin && other < plan.main.end) ||
                                             (other >= plan.first_begin && other < plan.first_end);
                          return meets && order.starts_before(other, n);
                        });
  }

  // The next step; tile negative after the last.
  __device__ __forceinline__ Step next() {
#pragma unroll 1
    while (found == 0) {
      base += 32;
      if (base >= params.q_tiles) {
        if (head == last_head) return {-1, 0, 0, 0, 0};
        ++head;
        base = 0;
      }
      // PERF: a look takes a chain of loads, so it is left out where the words say enough.
      if (++word < S::kFoundWords) {
        found = shared.found[word];
        partial = shared.partial[word];
        detail = mask::kWholeCell;
        if (found == 0 || !(kOrdered || (partial != 0 && params.list.rows > 0))) continue;
      }
      look(kOrdered);
    }
    const int32_t at = __ffs(found) - 1;
    found &= found - 1;
    return {base + at, head, static_cast<int32_t>(partial >> at & 1u), __shfl_sync(~0u, detail, at),
            __shfl_sync(~0u, turn, at)};
  }
};

// The same of a key tile whose query tiles are a range: a document's, or a band's.
template <class Config, bool kOrdered>
struct RangeWalk {
  const KernelParams& params;
  const Shared<Config>& shared;
  const decltype(Shared<Config>::own)& own;  // in shared memory
  int32_t head, last_head, tile;

  __device__ __forceinline__ RangeWalk(const KernelParams& params, Shared<Config>& shared)
      : params(params), shared(shared), own(shared.own) {
    head = shared.key_tile.kv_head * params.heads_per_kv_head();
    last_head = head + params.heads_per_kv_head() - 1;
    tile = own.begin;
  }

  __device__ __forceinline__ Step next() {
    if (tile >= own.end) {
      if (head == last_head || own.begin >= own.end) return {-1, 0, 0, 0, 0};
      ++head;
      tile = own.begin;
    }
    const int32_t at = tile++;
    return {at, head, at < own.full_begin || at >= own.full_end, mask::kWholeCell, turn_of(at)};
  }

  // How many key tiles that start before this one meet the same queries.
  __device__ __forceinline__ int32_t turn_of([[maybe_unused]] int32_t query_tile) const {
    if constexpr (kOrdered) {
      const int32_t first_row = query_tile * Config::kBlockQ;
      const int32_t last_row = min_of(first_row + Config::kBlockQ, params.len_q) - 1;
      const Range met = params.band.key_tiles_of(first_row, last_row, params.len_kv, Config::kBlockKv);
      return params.key_order.before(shared.key_tile.tile, [&](int32_t begin, int32_t end) {
        return max_of(min_of(end, met.end) - max_of(begin, met.begin), 0);
      });
    }
    return 0;
  }
};

template <class Config, bool kOrdered>
struct DqWarpgroup {
  using S = Shared<Config>;
  using Element = typename Config::Element;
  using Mma = sm90::Wgmma<64, Element>;
  using DsOperand = sm90::MnMajor<typename S::DsTile>;
  using KOperand = sm90::MnMajor<typename S::KTile>;
  using OtherOperand = sm90::MnMajor<typename S::OtherTile>;
  static constexpr int32_t kColumnPieces = Config::kHeadDim / 64;
  // Whether a step's pieces wait in shared memory until all are there, for their turn too, and dS is free meanwhile.
  static constexpr bool kHeld = (kOrdered || Config::kHoldsPieces) && Config::kStagings >= Config::kCtaPieces;

  const KernelParams& params;
  S& shared;
  const KeyTile& key_tile;  // in shared memory

  __device__ __forceinline__ uint32_t lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ uint32_t warp() const { return threadIdx.x / 32; }
  __device__ __forceinline__ uint32_t rank() const { return rank_of_cta<Config>(); }

  __device__ __forceinline__ void load_keys() {
    const int32_t tile_key = first_key_of<Config>(key_tile, shared.own);
    const int32_t first_key = tile_key + rank() * Config::kCtaKeys;
    const sm90::Sequence from = {key_tile.kv_head, key_tile.batch, key_tile.residue};
    shared.full_kv.arrive_expect(sizeof(shared.k) + sizeof(shared.v));
    sm90::load_tile<typename S::KTile, sm90::kStridedRank>(shared.k, params.k, first_key, from, shared.full_kv);
    sm90::load_tile<typename S::KTile, sm90::kStridedRank>(shared.v, params.v, first_key, from, shared.full_kv);
    if constexpr (S::kClustered) {
      sm90::load_tile<typename S::OtherTile, sm90::kStridedRank>(shared.k + S::KTile::kBytes, params.k,
                                                                 tile_key + (rank() ^ 1u) * Config::kCtaKeys, from,
                                                                 shared.full_kv, rank() * S::OtherTile::kColumns);
    }
  }

  // SYNC: clusters: for both CTAs, which have released the stage in both.
  __device__ static __forceinline__ void load_queries(char* tile, const sm90::TensorMap& tensor, int32_t row,
                                                      sm90::Sequence from, sm90::Barrier& full) {
    if constexpr (S::kClustered) {
      sm90::load_tile_share<typename S::QTile, Config::kCluster, sm90::kStridedRank>(tile, tensor, row, from, full,
                                                                                     rank_of_cta<Config>());
    } else {
      sm90::load_tile<typename S::QTile, sm90::kStridedRank>(tile, tensor, row, from, full);
    }
  }

  // Q, dO, their numbers, and where pairs may be hidden their rows' keys. One thread.
  __device__ __forceinline__ void load_step(const Step& step, uint32_t stage) {
    sm90::Barrier& full = shared.full[stage];
    shared.step[stage] = step;
    if (step.tile < 0) return full.arrive();
    const bool rows = Config::kRowsShared && step.partial != 0;
    const Prepared& prepared = params.prepared;
    const uint32_t runs = !rows ? 0 : prepared.firsts != nullptr ? 2 : 1;
    full.arrive_expect(2 * S::QTile::kBytes + S::kStatBytes + runs * S::kRunBytes);
    int32_t row = step.tile * Config::kBlockQ;
    if constexpr (Config::kPacked) row += shared.own.first_row - shared.own.begin * Config::kBlockQ;
    const sm90::Sequence from = {step.head, key_tile.batch, key_tile.residue};
    load_queries(shared.q[stage], params.q, row, from, full);
    const int64_t sequence = params.sequence(key_tile.batch, step.head, key_tile.residue);
    const void* stats = Config::kTerms ? prepared.terms : prepared.stats;
    copy(shared.stats[stage],
         static_cast<const char*>(stats) + (sequence * params.q_tiles + step.tile) * int64_t{S::kStatBytes},
         S::kStatBytes, full);
    load_queries(shared.dout[stage], params.dout, row, from, full);
    if (rows) {
      const int64_t plan = params.plan(key_tile.batch, step.head);
      const int64_t first = (plan * params.q_tiles + step.tile) * Config::kBlockQ;
      copy(shared.rows[stage][0], prepared.mains + first, S::kRunBytes, full);
      if (runs > 1) copy(shared.rows[stage][1], prepared.firsts + first, S::kRunBytes, full);
    }
  }

  __device__ static void copy(void* to, const void* from, uint32_t bytes, sm90::Barrier& full) {
    sm90::ptx::cp_async_bulk(sm90::ptx::space_cluster, sm90::ptx::space_global, to, from, bytes, &full.word);
  }

  // Of a step's, this CTA's first. Its own are counted from there.
  __device__ __forceinline__ int32_t first_piece() const { return rank() * Config::kCtaPieces; }

  // A 64 x 64 piece of dQ: rows 64 * (piece / columns) …, columns 64 * (piece % columns) …; in clusters of both CTAs' keys.
  // Part by part of dS, from the first on.
  __device__ __forceinline__ void multiply(float (&dq)[32], int32_t piece, uint32_t buffer, int32_t part) {
    constexpr int32_t kColumns = kColumnPieces / Config::kCluster, kSteps = Config::kCtaKeys / 16;
    const uint32_t ds = static_cast<uint32_t>(__cvta_generic_to_shared(shared.ds[buffer]));
    const uint32_t k = static_cast<uint32_t>(__cvta_generic_to_shared(shared.k));
    const uint32_t column = piece % kColumns;
    const uint64_t a = DsOperand::descriptor(ds + piece / kColumns * S::DsTile::kGroupBytes);
    const uint64_t own = KOperand::descriptor(k + (rank() * kColumns + column) * S::KTile::kGroupBytes);
    const uint64_t other = OtherOperand::descriptor(k + S::KTile::kBytes + column * S::OtherTile::kGroupBytes);
    sm90::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps * Config::kCluster; ++i) {
      if (i % kSteps * Config::kDsParts / kSteps != part) continue;
      const uint64_t b = i < kSteps ? own + KOperand::step(i) : other + OtherOperand::step(i - kSteps);
      Mma::template ss<true, true>(dq, a + DsOperand::step(i), b, i > 0);
    }
    sm90::wgmma_commit();
  }

  // A warp's part of it, from registers.
  __device__ __forceinline__ void add_columns(const float (&dq)[32], int32_t piece, float* target, int32_t turn) {
    float* to = target + (first_piece() * DqPiece::kFloats + warp() * DqPiece::kWarpFloats + 4 * lane());
#pragma unroll
    for (int e = 0; e < 32; e += 4) {
      float* at = to + piece * DqPiece::kFloats + DqPiece::offset(0, e);
      const float4 x = {dq[e], dq[e + 1], dq[e + 2], dq[e + 3]};
      if (kOrdered && turn == 0) {
        *reinterpret_cast<float4*>(at) = x;
      } else {
        sm90::add4(at, x);
      }
    }
  }

  // A warp's part of a piece to shared memory, on its way to the sum.
  __device__ __forceinline__ void stage(const float (&dq)[32], int32_t piece) {
    float* part = shared.staging[piece % Config::kStagings] + warp() * DqPiece::kWarpFloats;
    // SYNC: the copy that used this buffer last has read it. Held pieces were all copied in the step before.
    if ((!kHeld || piece == 0) && sm90::elect()) sm90::wait_stores_read<kHeld ? 0 : Config::kStagings - 1>();
    __syncwarp();
#pragma unroll
    for (int e = 0; e < 32; e += 4) {
      *reinterpret_cast<float4*>(part + DqPiece::offset(lane(), e)) = {dq[e], dq[e + 1], dq[e + 2], dq[e + 3]};
    }
    sm90::fence_async_proxy();
    __syncwarp();
  }

  // Adds it to memory; the first turn stores it, so that in deterministic mode nobody has to clear the sum. One thread.
  __device__ __forceinline__ void add(int32_t piece, float* target, int32_t turn) {
    const float* part = shared.staging[piece % Config::kStagings] + warp() * DqPiece::kWarpFloats;
    float* to = target + (first_piece() + piece) * DqPiece::kFloats + warp() * DqPiece::kWarpFloats;
    constexpr uint32_t kBytes = DqPiece::kWarpFloats * sizeof(float);
    if (kOrdered && turn == 0) {
      sm90::ptx::cp_async_bulk(sm90::ptx::space_global, sm90::ptx::space_shared, to, part, kBytes);
    } else {
      sm90::ptx::cp_reduce_async_bulk(sm90::ptx::space_global, sm90::ptx::space_shared, sm90::ptx::op_add, to, part,
                                      kBytes);
    }
    sm90::ptx::cp_async_bulk_commit_group();
  }

  // Deterministic mode: key tiles add to the same 16 rows in the order in which they started, which is each warp's own affair.
  // A turn begins when those before have ended; `seen` of them had when this was asked last. One thread.
  // SYNC: nothing is read of what they wrote, and the L2, where sums are made, takes an addition that is issued behind this
  // loop after theirs. So there is nothing to acquire.
  __device__ __forceinline__ void wait_turn(int32_t at, int32_t turn, int32_t seen) const {
    while (seen < turn) seen = sm90::load_relaxed(turns(at));
  }
  __device__ __forceinline__ int32_t* turns(int32_t at) const {
    return params.prepared.turns + int64_t{at} * (4 * Config::kCluster) + 4 * rank() + warp();
  }

  // Ends the turns of the steps before, when there are kTurns of them or these are the last.
  // SYNC: additions that are complete are so for this thread. Without the fence another SM's, let in by the counter, were
  // seen to come before them.
  __device__ __forceinline__ void end_turns(int32_t (&open)[Config::kTurns], int32_t& count, bool last) const {
    if (!last && ++count < Config::kTurns) return;
    count = 0;
    // SYNC: the other lanes' additions are this one's too.
    if constexpr (!S::kStaged) __syncwarp();
    if (sm90::elect()) {
      sm90::wait_stores();
      sm90::fence_gpu();
#pragma unroll
      for (int i = 0; i < Config::kTurns; ++i) {
        if (open[i] >= 0) sm90::add_relaxed(turns(open[i]), 1);
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Config::kTurns; ++i) open[i] = -1;
  }

  __device__ void run() {
    std::conditional_t<Config::kLooks, Walk<Config, kOrdered>, RangeWalk<Config, kOrdered>> walk(params, shared);
    Place<Config::kStages> ahead;
    bool more = true;
    // SYNC: one warp loads; `ahead` is as many steps in front of the others' as there are stages, less one.
    const auto load_next = [&] {
      if (warp() != 0 || !more) return;
      const Step step = walk.next();
      more = step.tile >= 0;
      shared.empty[ahead.stage].wait(ahead.parity ^ 1u);
      if (sm90::elect()) load_step(step, ahead.stage);
      __syncwarp();
      ahead.advance();
    };
#pragma unroll 1
    for (int32_t s = 0; s < Config::kStages - 1; ++s) load_next();
    shared.full_kv.wait(0);

    Place<Config::kStages> at;
    Place<Config::kDsBuffers> buffer;
    [[maybe_unused]] int32_t open[Config::kTurns], steps = 0;  // tiles whose turns are to end
#pragma unroll
    for (int i = 0; i < Config::kTurns; ++i) open[i] = -1;
#pragma unroll 1
    for (;; at.advance(), buffer.advance()) {
      if constexpr (Config::kDsParts == 1) load_next();
      shared.full[at.stage].wait(at.parity);
      const int32_t tile = __shfl_sync(~0u, shared.step[at.stage].tile, 0);
      if (tile < 0) break;
      const int64_t place =
          params.sequence(key_tile.batch, shared.step[at.stage].head, key_tile.residue) * params.q_tiles + tile;
      [[maybe_unused]] const int32_t turn = shared.step[at.stage].turn;
      // SYNC: the four warps need not keep step. A stage is filled again only when all of them have read whose it was.
      __syncwarp();
      if (lane() == 0) shared.empty[at.stage].arrive();
      [[maybe_unused]] float* target = params.prepared.dq + place * (Config::kPieces * DqPiece::kFloats);
      [[maybe_unused]] int32_t seen = 0;
      if (kOrdered && sm90::elect()) seen = sm90::load_relaxed(turns(static_cast<int32_t>(place)));
      shared.full_ds[buffer.stage][0].wait(buffer.parity);
#pragma unroll
      for (int32_t piece = 0; piece < Config::kCtaPieces; ++piece) {
        float dq[32];
#pragma unroll
        for (int32_t part = 0; part < Config::kDsParts; ++part) {
          if (piece == 0 && part > 0) shared.full_ds[buffer.stage][part].wait(buffer.parity);
          multiply(dq, piece, buffer.stage, part);
          // PERF: not ahead of the first part, which may be there before the slower consumers leave the stage.
          if (Config::kDsParts > 1 && piece == 0 && part == 0) load_next();
          // NOTE: behind a product in flight, and a step late: by now most additions are complete.
          if (kOrdered && piece == 0 && part == 0) end_turns(open, steps, false);
          sm90::wgmma_wait<0>();
          sm90::pin_registers(dq);
          if (piece == Config::kCtaPieces - 1) release_in_cluster<Config>(shared.empty_ds[buffer.stage][part], lane());
        }
        if constexpr (S::kStaged) {
          stage(dq, piece);
          if (!kHeld && sm90::elect()) {
            if (kOrdered && piece == 0) wait_turn(static_cast<int32_t>(place), turn, seen);
            add(piece, target, turn);
          }
        } else {
          if (kOrdered && piece == 0) {
            if (sm90::elect()) wait_turn(static_cast<int32_t>(place), turn, seen);
            __syncwarp();
          }
          add_columns(dq, piece, target, turn);
        }
      }
      if constexpr (kHeld) {
        if (sm90::elect()) {
          if (kOrdered) wait_turn(static_cast<int32_t>(place), turn, seen);
#pragma unroll
          for (int32_t piece = 0; piece < Config::kCtaPieces; ++piece) add(piece, target, turn);
        }
      }
      if constexpr (kOrdered) {
#pragma unroll
        for (int i = Config::kTurns - 1; i > 0; --i) open[i] = open[i - 1];
        open[0] = static_cast<int32_t>(place);
      }
    }
    if constexpr (kOrdered) end_turns(open, steps, true);
    // SYNC: shared memory outlives the copies that read it.
    if (S::kStaged && sm90::elect()) sm90::wait_stores_read();
  }
};

}  // namespace flashmsa::bwd
