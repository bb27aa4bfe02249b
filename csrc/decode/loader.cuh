// Brings chunks of K and V: a lane asks for a piece of a page by TMA, or, for pages too small for it, for single rows by
// cp.async.
#pragma once

#include "decode/walk.cuh"
#include "sm90/async_copy.cuh"
#include "sm90/pool_box.cuh"

namespace flashmsa::decode {

// A chunk in shared memory: pieces one behind the other, each [kHeadDim / 64][piece][64] elements, swizzled by 128 bytes.
template <class Config>
struct ChunkLayout {
  int32_t piece_log2;

  // Eight rows (a multiple of 8 is their first) of columns [0, 64); further columns are group_bytes apart.
  __device__ __forceinline__ uint32_t rows(int32_t row) const {
    const int32_t in_piece = row & ((1 << piece_log2) - 1);
    return (row - in_piece) * Config::kHeadDim * 2 + in_piece * sm90::kSwizzleRowBytes;
  }
  __device__ __forceinline__ uint32_t group_bytes() const { return sm90::kSwizzleRowBytes << piece_log2; }
};

// One warp. It runs ahead of those that attend by the stages of the ring.
template <class Config>
struct Loader {
  static constexpr int32_t kChunk = Config::kChunk;
  static constexpr int32_t kLanes = 32 / kWarps;  // of a chunk's pieces, by TMA

  const KernelParams& p;
  Shared<Config>& shared;
  const int32_t head;
  Walk walk;
  int32_t at;  // first chunk of the tile, in the part
  // Where this lane's piece of the tile lies, or its row of every chunk; pages as the table has them.
  int32_t page[kWarps], slot[kWarps];

  __device__ __forceinline__ int32_t lane() const { return threadIdx.x % 32; }

  // Loads all chunks of the parts from `from` on.
  __device__ __forceinline__ void run(const Walk& from, RingPlace& ring) {
    walk = from;
    walk.end = at = 0;
    bool more = advance();
#pragma unroll 1
    while (more) {
      const int32_t chunks = min_of(walk.end - at, kWarps);
      int32_t pages[kWarps], slots[kWarps];
#pragma unroll
      for (int32_t n = 0; n < kWarps; ++n) {
        pages[n] = clamp(page[n], 0, p.num_pages - 1);
        slots[n] = slot[n];
      }
      // PERF: the next tile's pages are asked for here and used a tile later.
      more = advance();
      load(ring, 0, chunks, pages, slots, p.k_map, p.k, p.head_dim);
      load(ring, 1, chunks, pages, slots, p.v_map, p.v, p.head_dim_v);
      ring.advance<Config::kStages>();
    }
  }

 private:
  // To the next tile; false: there is none.
  __device__ __forceinline__ bool advance() {
    at += kWarps;
    while (at >= walk.end) {
      if (!walk.next(p, shared)) return false;
      at = walk.begin;
    }
    if (p.by_tma) {
      if (lane() % kLanes * p.piece < kChunk) locate(at + lane() / kLanes, lane() % kLanes * p.piece, page[0], slot[0]);
    } else if (lane() < kChunk) {
#pragma unroll
      for (int32_t n = 0; n < kWarps; ++n) locate(at + n, lane(), page[n], slot[n]);
    }
    return true;
  }

  // Key `offset` of a chunk.
  __device__ __forceinline__ void locate(int32_t number, int32_t offset, int32_t& key_page, int32_t& key_slot) const {
    const Sequence& s = shared.table[walk.index].sequence;
    if (number >= walk.end) return;
    const int32_t key = (p.selected != nullptr ? number : s.chunk(number)) * kChunk + offset;
    if (p.block_table == nullptr && p.selected == nullptr) {
      key_page = s.batch;
      key_slot = p.by_tma ? key : min_of(key, p.page_size - 1);
      return;
    }
    int32_t logical = static_cast<int32_t>(static_cast<uint32_t>(key) / static_cast<uint32_t>(p.page_size));
    key_slot = key - logical * p.page_size;
    // NOTE: behind the length the last page stands in; its scores are masked. The table is not read there.
    logical = min_of(logical, s.pages - 1);
    key_page = p.selected != nullptr ? p.selected[int64_t{s.batch} * p.selected_stride + logical].y
                                     : p.block_table[s.batch * p.block_table_stride + logical];
  }

  // K (0) or V (1) of a tile of which `chunks` are in the part; the others' slots go round empty.
  __device__ __forceinline__ void load(const RingPlace& ring, int32_t which, int32_t chunks, const int32_t (&pages)[kWarps],
                                       const int32_t (&slots)[kWarps], const sm90::PoolMap& map, const PoolRef& pool,
                                       int32_t columns) {
    if (p.by_tma) {
      const int32_t chunk = lane() / kLanes, piece = lane() % kLanes * p.piece;
      const int32_t index = Shared<Config>::k_slot(ring.stage, chunk) + which;
      sm90::Barrier& full = shared.full[index];
      shared.empty[index].wait(ring.parity ^ 1);
      // SYNC: the bytes are announced before a piece can arrive.
      if (piece == 0) full.arrive_expect(chunk < chunks ? Config::kSlotBytes : 0);
      __syncwarp();
      if (chunk < chunks && piece < kChunk) {
        const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(shared.slots[index]));
        sm90::load_piece(target + piece * Config::kHeadDim * 2, map, {slots[0], head, pages[0]},
                         p.piece * sm90::kSwizzleRowBytes, full, p.policy);
      }
      __syncwarp();
      return;
    }
#pragma unroll
    for (int32_t n = 0; n < kWarps; ++n) {
      const int32_t index = Shared<Config>::k_slot(ring.stage, n) + which;
      shared.empty[index].wait(ring.parity ^ 1);
      if (n < chunks) {
        load_rows(static_cast<uint32_t>(__cvta_generic_to_shared(shared.slots[index])), pages[n], slots[n], pool, columns);
      }
      sm90::arrive_after_copies(shared.full[index]);
    }
  }

  __device__ __forceinline__ void load_rows(uint32_t target, int32_t own_page, int32_t own_slot, const PoolRef& pool,
                                            int32_t columns) const {
    constexpr int32_t kParts = Config::kHeadDim / 8;  // 16-byte parts of a row
    const int32_t part = lane() % kParts, row = lane() / kParts;
    const bool inside = part * 8 < columns;
    const char* base = static_cast<const char*>(pool.data) + (head * pool.stride_head + (inside ? part * 8 : 0)) * 2;
    const uint64_t own = static_cast<uint64_t>(own_page * pool.stride_page + own_slot * pool.stride_slot) * 2;
    const uint32_t low = static_cast<uint32_t>(own), high = static_cast<uint32_t>(own >> 32);
    const uint32_t group = target + part / 8 * (kChunk * sm90::kSwizzleRowBytes);
#pragma unroll 8
    for (int32_t n = 0; n < kChunk * kParts / 32; ++n) {
      const int32_t from = n * (32 / kParts) + row;
      const uint64_t offset = uint64_t{__shfl_sync(~0u, high, from)} << 32 | __shfl_sync(~0u, low, from);
      const uint32_t to = from * sm90::kSwizzleRowBytes + sm90::swizzled_chunk(from, part % 8) * 16;
      sm90::copy_async_16(group + to, base + offset, inside ? 16 : 0);
    }
  }
};

}  // namespace flashmsa::decode
