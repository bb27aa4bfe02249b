// Rows that lie in memory in another order than they are attended to: three warps of the producer warpgroup bring them, a
// row at a time, where TMA would need them in one piece.
#pragma once

#include "attn/slow_rows.cuh"
#include "fwd/shared.cuh"
#include "sm90/async_copy.cuh"

namespace flashmsa::fwd {

// K and V for attn::SlowRow.
template <class Mask, class Element>
struct IndexedRows {
  const typename Mask::Params& params;
  const typename Mask::Block& block;
  attn::StridedRows<Element> rows;

  __device__ __forceinline__ const Element* k(int32_t key) const { return rows.k(Mask::key(params, block, key)); }
  __device__ __forceinline__ const Element* v(int32_t key) const { return rows.v(Mask::key(params, block, key)); }
};

// One of the warps that load Q, K and V, 16 bytes a lane: a share of the rows of each tile, in eights. Otherwise as Producer.
// PERF: a tile's places are read a block ahead, and K's serve V.
// SYNC: copies of this kind write through the generic proxy. Each lane's arrival at full_* follows its copies, and the
// consumers cross to the async proxy behind their wait: see Consumer::wait_k.
template <class Mask, class Config>
struct IndexedLoader {
  using S = Shared<Mask, Config>;
  using Work = TileWork<Mask, Config>;
  using Element = typename Config::Element;
  static constexpr int32_t kChunks = Config::kHeadDim / 8;  // of 16 bytes in a row
  static_assert(Config::kHeadDim == Config::kHeadDimV);
  static constexpr int32_t kRowsAtOnce = 32 / kChunks;
  static_assert(8 % kRowsAtOnce == 0 && kChunks <= 32);

  const KernelParams<Mask>& params;
  S& shared;
  const int32_t loader;

  // The tensor's rows that this warp brings of a tile. kRowsAtOnce rows are copied at a time by as many groups of lanes, and
  // lane l of a group has its l-th row, and the one that comes kChunks times later.
  struct Places {
    uint32_t row[2];
  };

  static __device__ __forceinline__ int32_t lane() { return threadIdx.x % 32; }

  // Of a tile's eights loader l brings those from first_eight(l) to first_eight(l + 1).
  template <class Tile>
  static constexpr int32_t kEights = Tile::kRows / 8;
  template <class Tile>
  static __device__ __forceinline__ int32_t first_eight(int32_t loader) {
    return (loader * kEights<Tile> + kLoaders<Mask> - 1) / kLoaders<Mask>;
  }

  // NOTE: read in shared memory where needed: a producer's few registers do not hold it.
  __device__ __forceinline__ const Work& work(uint32_t round) const { return shared.work[S::WorkRing::stage(round)]; }

  // Of the tile whose first row is `first` in an order of `length`. Behind its end the last row again: no key there is
  // visible, and no such query is stored.
  template <class Tile>
  __device__ __forceinline__ Places look_up(const int32_t* order, int32_t first, int32_t length) const {
    const int32_t own = first + first_eight<Tile>(loader) * 8 + lane() % kChunks * kRowsAtOnce + lane() / kChunks;
    const uint32_t last = static_cast<uint32_t>(length - 1);
    Places places;
#pragma unroll
    for (int32_t slot = 0; slot < 2; ++slot) {
      // NOTE: clamped, so that an order that is none leads nowhere out of bounds.
      places.row[slot] = min_of(static_cast<uint32_t>(order[min_of(own + 32 * slot, length - 1)]), last);
    }
    return places;
  }

  // Asks for this warp's rows of a tile; columns past head_dim become zero.
  // PERF: four instructions a copy, and four addresses at a time. With 64-bit products and a test of each row, 25
  // instructions one after another, a warp got 3 bytes a cycle.
  template <class Tile>
  __device__ __forceinline__ void copy(const Places& places, const TensorRef& tensor, sm90::Sequence sequence,
                                       int32_t head_dim, char* buffer) const {
    constexpr int32_t kMost = (kEights<Tile> + kLoaders<Mask> - 1) / kLoaders<Mask>;
    constexpr int32_t kLeast = kEights<Tile> / kLoaders<Mask>;
    static_assert(kMost <= 8, "a lane has two places");
    constexpr int32_t kCopies = 8 / kRowsAtOnce;  // of an eight
    constexpr int32_t kBatch = min_of(kCopies, 4);
    const int32_t chunk = lane() % kChunks, row = lane() / kChunks;
    const uint32_t bytes = chunk * 8 < head_dim ? 16 : 0;
    const Element* column = attn::row_of<Element>(tensor, sequence, 0) + (bytes > 0 ? chunk * 8 : 0);
    const int32_t begin = first_eight<Tile>(loader), eights = first_eight<Tile>(loader + 1) - begin;
    const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(buffer)) + chunk / 8 * Tile::kGroupBytes +
                            begin * sm90::kSwizzleAtomBytes + row * sm90::kSwizzleRowBytes +
                            sm90::swizzled_chunk(row, chunk % 8) * 16;
    // In pieces of 16 bytes, which fit: rows_within_reach in forward.cpp.
    const uint32_t step = static_cast<uint32_t>(tensor.stride_seq / 8);
    const uint32_t steps[2] = {places.row[0] * step, places.row[1] * step};
#pragma unroll
    for (int32_t eight = 0; eight < kMost; ++eight) {
      if (eight >= kLeast && eight >= eights) break;
#pragma unroll
      for (int32_t first = 0; first < kCopies; first += kBatch) {
        const Element* from[kBatch];
#pragma unroll
        for (int32_t i = 0; i < kBatch; ++i) {
          from[i] =
              sm90::advance_16(column, __shfl_sync(~0u, steps[eight / 4], eight % 4 * kCopies + first + i, kChunks));
        }
#pragma unroll
        for (int32_t i = 0; i < kBatch; ++i) {
          // Row r + s, where s is a multiple of kRowsAtOnce, a power of two, and r is less: its swizzle is that of r, xor s.
          const uint32_t s = (first + i) * kRowsAtOnce;
          sm90::copy_async_16((target ^ s * 16) + s * sm90::kSwizzleRowBytes + eight * sm90::kSwizzleAtomBytes, from[i],
                              bytes);
        }
      }
    }
  }

  __device__ __forceinline__ void load_q(uint32_t round) {
    const uint32_t slot = S::WorkRing::stage(round);
    shared.full_work[slot].wait(S::WorkRing::full_parity(round));
    const Work& tile = work(round);
    if (tile.entry.row_block < 0) return;
    const Places places = look_up<typename S::QTile>(tile.entry.block.q_order, tile.first_row(), params.len_q);
    const uint32_t stage = S::QRing::stage(round);
    shared.empty_q[stage].wait(S::QRing::empty_parity(round));
    copy<typename S::QTile>(places, params.q_rows, tile.queries(), params.head_dim, shared.q[stage]);
    sm90::arrive_after_copies(shared.full_q[stage]);
  }

  // The keys of a step's block.
  __device__ __forceinline__ Places key_places(const Work& tile, int32_t step) const {
    const int32_t first = Mask::origin(params.mask, tile.entry.block) + tile.entry.tiles.visit(step) * Config::kBlockKv;
    return look_up<typename S::KTile>(tile.entry.block.kv_order, first, params.mask.len_kv);
  }

  __device__ __forceinline__ void run() {
    uint32_t key_blocks = 0;  // of K asked for so far; V runs one behind within a tile
    load_q(0);

    for (uint32_t round = 0;; ++round) {
      const Work& tile = work(round);
      if (tile.entry.row_block < 0) break;
      if (lane() == 0) shared.begun[S::WorkRing::stage(round)].arrive();
      const int32_t steps = tile.entry.tiles.count();
      const int32_t q_step = Config::kQInRegisters || Config::kQStages > 1 ? min_of(steps, 2) : steps;
      Places next = {}, here = {};
      if (steps > 0) next = key_places(tile, 0);
#pragma unroll 1
      for (int32_t step = 0; step <= steps; ++step) {
        const uint32_t n = key_blocks + step;
        const uint32_t stage = S::KvRing::stage(n), before = S::KvRing::stage(n - 1);
        const Places previous = here;  // V runs one step behind
        here = next;
        if (step < steps) {
          if (step + 1 < steps) next = key_places(tile, step + 1);
          shared.empty_k[stage].wait(S::KvRing::empty_parity(n));
          copy<typename S::KTile>(here, params.k_rows, tile.keys(), params.head_dim, shared.k[stage]);
          sm90::arrive_after_copies(shared.full_k[stage]);
        }
        if (step > 0) {
          shared.empty_v[before].wait(S::KvRing::empty_parity(n - 1));
          copy<typename S::VTile>(previous, params.v_rows, tile.keys(), params.head_dim_v, shared.v[before]);
          sm90::arrive_after_copies(shared.full_v[before]);
        }
        if (step == q_step) load_q(round + 1);
      }
      key_blocks += steps;
    }
  }
};

}  // namespace flashmsa::fwd
