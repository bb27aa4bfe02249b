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

// One warp's, the first of those that share chunks. Its position runs ahead of theirs by the stages of their ring.
template <class Config>
struct Loader {
  const KernelParams& p;
  Shared<Config>& shared;
  const int32_t head, group, groups;
  Walk walk;
  int32_t at;   // chunk of the part
  bool more;    // there is a chunk to ask for
  int32_t page, slot;  // where this lane's piece, or row, of it lies; the page as the table has it

  __device__ __forceinline__ Loader(const KernelParams& params, Shared<Config>& shared_memory, int32_t kv_head,
                                    int32_t group_index, int32_t group_count)
      : p(params), shared(shared_memory), head(kv_head), group(group_index), groups(group_count), walk{} {}

  __device__ __forceinline__ int32_t lane() const { return threadIdx.x % 32; }

  __device__ __forceinline__ void begin(const Walk& from) {
    walk = from;
    walk.end = at = 0;
    more = true;
    advance();
  }

  // To the next chunk. PERF: its pages are asked for here and used a chunk later.
  __device__ __forceinline__ void advance() {
    at += groups;
    while (at >= walk.end) {
      if (!walk.next(p, shared)) {
        more = false;
        return;
      }
      at = walk.begin + group;
    }
    locate();
  }

  __device__ __forceinline__ void locate() {
    const Sequence& s = shared.table[walk.index].sequence;
    const int32_t offset = p.by_tma ? lane() * p.piece : lane();
    if (offset >= Config::kChunk) return;
    const int32_t chunk = p.selected != nullptr ? at : s.chunk(at);
    const int32_t key = chunk * Config::kChunk + offset;
    if (p.block_table == nullptr && p.selected == nullptr) {
      page = s.batch;
      slot = p.by_tma ? key : min_of(key, p.page_size - 1);
      return;
    }
    int32_t logical = static_cast<int32_t>(static_cast<uint32_t>(key) / static_cast<uint32_t>(p.page_size));
    slot = key - logical * p.page_size;
    // NOTE: behind the length the last page stands in; its scores are masked. The table is not read there.
    logical = min_of(logical, s.pages - 1);
    page = p.selected != nullptr ? p.selected[int64_t{s.batch} * p.selected_stride + logical].y
                                 : p.block_table[s.batch * p.block_table_stride + logical];
  }

  __device__ __forceinline__ void load_k(int32_t index) { load(index, p.k_map, p.k, p.head_dim); }
  __device__ __forceinline__ void load_v(int32_t index) { load(index, p.v_map, p.v, p.head_dim_v); }

 private:
  __device__ __forceinline__ void load(int32_t index, const sm90::PoolMap& map, const PoolRef& pool, int32_t columns) {
    const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(shared.slots[index]));
    sm90::Barrier& full = shared.full[index];
    page = clamp(page, 0, p.num_pages - 1);
    if (p.by_tma) {
      // SYNC: the bytes are announced before a piece can arrive.
      if (lane() == 0) full.arrive_expect(Config::kSlotBytes);
      __syncwarp();
      if (lane() * p.piece < Config::kChunk) {
        sm90::load_piece(target + lane() * p.piece * Config::kHeadDim * 2, map, {slot, head, page},
                         p.piece * sm90::kSwizzleRowBytes, full, p.policy);
      }
    } else {
      load_rows(target, pool, columns);
      sm90::arrive_after_copies(full);
    }
  }

  __device__ __forceinline__ void load_rows(uint32_t target, const PoolRef& pool, int32_t columns) const {
    constexpr int32_t kParts = Config::kHeadDim / 8;  // 16-byte parts of a row
    const int32_t part = lane() % kParts, row = lane() / kParts;
    const bool inside = part * 8 < columns;
    const char* base = static_cast<const char*>(pool.data) + (head * pool.stride_head + (inside ? part * 8 : 0)) * 2;
    const uint64_t own = static_cast<uint64_t>(page * pool.stride_page + slot * pool.stride_slot) * 2;
    const uint32_t low = static_cast<uint32_t>(own), high = static_cast<uint32_t>(own >> 32);
    const uint32_t group = target + part / 8 * (Config::kChunk * sm90::kSwizzleRowBytes);
#pragma unroll
    for (int32_t n = 0; n < Config::kChunk * kParts / 32; ++n) {
      const int32_t from = n * (32 / kParts) + row;
      const uint64_t offset = uint64_t{__shfl_sync(~0u, high, from)} << 32 | __shfl_sync(~0u, low, from);
      const uint32_t to = from * sm90::kSwizzleRowBytes + sm90::swizzled_chunk(from, part % 8) * 16;
      sm90::copy_async_16(group + to, base + offset, inside ? 16 : 0);
    }
  }
};

}  // namespace flashmsa::decode
