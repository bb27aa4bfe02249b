// Brings chunks of K and V: a lane asks for a piece of a page by TMA, or, for pages too small for it, for single rows by
// cp.async.
#pragma once

#include <type_traits>

#include "decode/walk.cuh"
#include "sm90/async_copy.cuh"
#include "sm90/pool_box.cuh"

namespace flashmsa::decode {

// A chunk in shared memory: pieces one behind the other, each [kHeadDim / 64][piece][64] elements, swizzled by 128 bytes.
// For wgmma, which finds all of a chunk by two strides, pieces have eight rows.
inline constexpr int32_t kWarpgroupPiece = 8;
template <class Config>
struct ChunkLayout {
  int32_t piece_log2;

  // A row's columns [0, 64), as they would lie unswizzled; further columns are group_bytes apart.
  __device__ __forceinline__ uint32_t row(int32_t row) const {
    if constexpr (Config::kByWarpgroups) {
      return sm90::RowMajorTile<Config::kChunk, Config::kHeadDim>::chunk_offset(row, 0) -
             sm90::swizzled_chunk(row, 0) * 16;
    }
    const int32_t in_piece = row & ((1 << piece_log2) - 1);
    return (row - in_piece) * Config::kHeadDim * 2 + in_piece * sm90::kSwizzleRowBytes;
  }
  __device__ __forceinline__ uint32_t group_bytes() const {
    if constexpr (Config::kByWarpgroups) return sm90::kSwizzleRowBytes * kWarpgroupPiece;
    return sm90::kSwizzleRowBytes << piece_log2;
  }
};

// A warp loads every kLoaders-th chunk of a tile. They run ahead of those that attend by the stages of the ring.
template <class Config, class Walk>
struct Loader {
  static constexpr int32_t kChunk = Config::kChunk;

  const KernelParams& p;
  Shared<Config>& shared;
  static constexpr int32_t kOwn = Config::kTileChunks / kLoaders;  // chunks of a tile that a warp loads

  const int32_t head, first;  // the warp's first chunk of a tile
  Walk walk;
  int32_t at = 0;  // first chunk of the tile, in the part
  // Pieces, or rows, that a lane has of each chunk; where they lie, the page as the table has it.
  static constexpr int32_t kLaneRows = max_of(kChunk / 32, 1);
  int32_t page[kOwn][kLaneRows] = {}, slot[kOwn][kLaneRows] = {};

  __device__ __forceinline__ int32_t lane() const { return threadIdx.x % 32; }

  // Loads the tiles of the parts that are before `walk`. PERF: the two ways apart: what the compiler works out ahead of the loop
  // for rows took a hundred instructions, which came from memory, before the first piece too.
  __device__ __forceinline__ void run(RingPlace& ring) {
    if (std::is_same_v<Walk, EqualWalk> || p.by_tma) [[likely]] {
      run_by<true>(ring);
    } else {
      if constexpr (!std::is_same_v<Walk, EqualWalk>) run_by<false>(ring);
    }
  }

 private:
  __device__ __forceinline__ int32_t chunk(int32_t n) const { return first + n * kLoaders; }

  template <bool kTma>
  __device__ __forceinline__ void run_by(RingPlace& ring) {
    bool more = false;
#pragma unroll 1
    do {
      const bool here = more;
      bool inside[kOwn];
      int32_t own_page[kOwn][kLaneRows], own_slot[kOwn][kLaneRows];
#pragma unroll
      for (int32_t n = 0; n < kOwn; ++n) {
        inside[n] = at + chunk(n) < walk.end;
#pragma unroll
        for (int32_t i = 0; i < (kTma ? 1 : kLaneRows); ++i) {
          own_page[n][i] = clamp(page[n][i], 0, p.num_pages - 1);
          own_slot[n][i] = slot[n][i];
        }
      }
      // PERF: the next tile's pages are asked for here and used a tile later. The only place to do so, the first tile's too: short
      // code is there sooner.
      more = advance<kTma>();
      if (!here) continue;
#pragma unroll
      for (int32_t n = 0; n < kOwn; ++n) {
        const int32_t index = Shared<Config>::k_slot(ring.stage, chunk(n));
        load<kTma>(index, ring.parity, inside[n], own_page[n], own_slot[n], p.k_map, p.k, p.head_dim);
        load<kTma>(index + 1, ring.parity, inside[n], own_page[n], own_slot[n], p.v_map, p.v, p.head_dim_v);
      }
      ring.advance<Config::kStages>();
    } while (more);
  }

  // To the next tile; false: there is none.
  template <bool kTma>
  __device__ __forceinline__ bool advance() {
    at += Config::kTileChunks;
    while (at >= walk.end) {
      if (!walk.next(p, shared)) return false;
      at = walk.begin;
    }
    const int32_t offset = kTma ? lane() << p.piece_log2 : lane();
#pragma unroll
    for (int32_t n = 0; n < kOwn; ++n) {
      const int32_t place = at + chunk(n);
      if (offset >= kChunk || place >= walk.end) continue;
#pragma unroll
      for (int32_t i = 0; i < (kTma ? 1 : kLaneRows); ++i) {
        locate(chunk_number<Config>(place), offset + 32 * i, page[n][i], slot[n][i]);
      }
    }
    return true;
  }

  // Key `offset` of a chunk.
  __device__ __forceinline__ void locate(int32_t number, int32_t offset, int32_t& page, int32_t& slot) const {
    const Sequence& s = walk.sequence(shared);
    // NOTE: behind the length its last key stands in, behind the list its last page; scores there are masked. Neither table nor
    // list is read there.
    const int32_t key =
        p.selected != nullptr ? number * kChunk + offset : min_of(s.chunk(number) * kChunk + offset, s.kv_len - 1);
    if (p.block_table == nullptr && p.selected == nullptr) {
      page = s.batch;
      slot = key;
      return;
    }
    int32_t logical = static_cast<int32_t>(static_cast<uint32_t>(key) / static_cast<uint32_t>(p.page_size));
    slot = key - logical * p.page_size;
    page = p.selected != nullptr ? p.selected[int64_t{s.batch} * p.selected_stride + min_of(logical, s.pages - 1)].y
                                 : p.block_table[s.batch * p.block_table_stride + logical];
  }

  // Fills a slot. A chunk that is not in the part goes round empty.
  template <bool kTma>
  __device__ __forceinline__ void load(int32_t index, uint32_t parity, bool inside,
                                       const int32_t (&own_page)[kLaneRows], const int32_t (&own_slot)[kLaneRows],
                                       const sm90::PoolMap& map, const PoolRef& pool, int32_t columns) {
    const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(shared.slots[index]));
    sm90::Barrier& full = shared.full[index];
    shared.empty[index].wait(parity ^ 1);
    if constexpr (kTma) {
      // SYNC: the bytes are announced before a piece can arrive.
      if (lane() == 0) full.arrive_expect(inside ? Config::kSlotBytes : 0);
      __syncwarp();
      if (inside && lane() << p.piece_log2 < kChunk) {
        sm90::load_piece(target + (lane() << p.piece_log2) * Config::kHeadDim * 2, map,
                         {own_slot[0], head, own_page[0]}, sm90::kSwizzleRowBytes << p.piece_log2, full, p.policy);
      }
      __syncwarp();
    } else {
      static_assert(kLaneRows <= 2);
#pragma unroll 1
      for (int32_t i = 0; i < (inside ? kLaneRows : 0); ++i) {
        constexpr int32_t kLast = kLaneRows - 1;
        load_rows(target, 32 * i, i == 0 ? own_page[0] : own_page[kLast], i == 0 ? own_slot[0] : own_slot[kLast], pool,
                  columns);
      }
      sm90::arrive_after_copies(full);
    }
  }

  // Rows from `first` on of a chunk, a lane's own each, 32 at most.
  __device__ __forceinline__ void load_rows(uint32_t target, int32_t first, int32_t own_page, int32_t own_slot,
                                            const PoolRef& pool, int32_t columns) const {
    constexpr int32_t kParts = Config::kHeadDim / 8;  // 16-byte parts of a row
    const int32_t part = lane() % kParts, row = lane() / kParts;
    const bool inside = part * 8 < columns;
    const char* base = static_cast<const char*>(pool.data) + (head * pool.stride_head + (inside ? part * 8 : 0)) * 2;
    const uint64_t own = static_cast<uint64_t>(own_page * pool.stride_page + own_slot * pool.stride_slot) * 2;
    const uint32_t low = static_cast<uint32_t>(own), high = static_cast<uint32_t>(own >> 32);
    using Tile = std::conditional_t<Config::kByWarpgroups, sm90::RowMajorTile<kChunk, Config::kHeadDim>,
                                    sm90::SwizzledTile<kChunk, Config::kHeadDim>>;
#pragma unroll
    for (int32_t n = 0; n < min_of(kChunk, 32) * kParts / 32; ++n) {
      const int32_t from = n * (32 / kParts) + row;
      const uint64_t offset = uint64_t{__shfl_sync(~0u, high, from)} << 32 | __shfl_sync(~0u, low, from);
      sm90::copy_async_16(target + Tile::chunk_offset(first + from, part), base + offset, inside ? 16 : 0);
    }
  }
};

}  // namespace flashmsa::decode
