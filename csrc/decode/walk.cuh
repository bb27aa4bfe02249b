// Which keys a CTA takes: from the lengths, on the device, the same arithmetic in every CTA.
//
// The keys that some row of a sequence sees, in chunks, are its work; chunks are numbered through both runs of keys, or
// through the selected pages. Units of chunks are dealt out; a part is what a CTA takes of a sequence at a time.
#pragma once

#include "decode/shared.cuh"
#include "mask/composite.h"

namespace flashmsa::decode {

// The keys of query i by the band alone.
__device__ __forceinline__ mask::TwoRuns keys_of(const KernelParams& p, const Sequence& s, int32_t i) {
  if (!p.banded) [[likely]]
    return {{0, 0}, {0, s.kv_len}};
  mask::Composite::Params params = {};
  params.global = mask::make_bounds(p.band, s.batch, 0, s.queries, 0, s.kv_len);
  params.has_global = true;
  params.len_kv = s.kv_len;
  mask::Composite::Block block = {};
  block.prefix[0] = params.global.prefix[0];
  block.prefix[1] = params.global.prefix[1];
  const mask::TwoRuns keys = mask::Composite::row_without_documents(params, block, i);
  return {mask::first_run(keys), keys.main};
}

template <int32_t kChunk>
__device__ __forceinline__ void find_chunks(const KernelParams& p, Sequence& s) {
  s.first_begin = s.first_chunks = s.main_begin = s.chunks = 0;
  if (s.queries == 0 || s.kv_len == 0) return;
  if (p.selected != nullptr) [[unlikely]] {
    s.pages = p.selected_count[s.batch];
    s.chunks = static_cast<int32_t>(ceil_div<int64_t>(int64_t{s.pages} * p.page_size, kChunk));
    return;
  }
  if (p.block_table != nullptr) s.pages = ceil_div(s.kv_len, p.page_size);
  if (!p.banded) [[likely]] {
    s.chunks = ceil_div(s.kv_len, kChunk);
    return;
  }
  const mask::TwoRunTiles tiles = mask::key_tiles(keys_of(p, s, 0), keys_of(p, s, s.queries - 1), kChunk);
  int32_t begin = tiles.main.begin, end = tiles.main.end;
  if (p.tree_bits != nullptr) {
    const int32_t tail = max_of(s.kv_len - s.queries, 0) / kChunk;
    begin = begin < end ? min_of(begin, tail) : tail;
    end = ceil_div(s.kv_len, kChunk);
  }
  s.first_begin = tiles.first_begin;
  s.first_chunks = max_of((begin < end ? min_of(tiles.first_end, begin) : tiles.first_end) - tiles.first_begin, 0);
  s.main_begin = begin;
  s.chunks = s.first_chunks + end - begin;
}

template <int32_t kChunk>
__device__ __forceinline__ Sequence read_sequence(const KernelParams& p, int32_t batch) {
  Sequence s;
  s.batch = batch;
  s.first_row = 0;
  s.queries = p.len_q;
  if (p.cu_seqlens_q != nullptr) [[unlikely]] {
    s.first_row = clamp(p.cu_seqlens_q[batch], 0, p.total_q);
    s.queries = min_of(clamp(p.cu_seqlens_q[batch + 1], s.first_row, p.total_q) - s.first_row, p.len_q);
  }
  s.kv_len = p.kv_lens == nullptr ? p.capacity : clamp(p.kv_lens[batch], 0, p.capacity);
  s.pages = 0;
  find_chunks<kChunk>(p, s);

  if (p.plan == Plan::kCluster) {
    s.unit = s.chunks;
    s.units = 1;
  } else if (p.plan == Plan::kBalanced) {
    s.unit = kGrainKeys / kChunk;
    s.units = ceil_div(s.chunks, kGrainKeys / kChunk);
  } else [[unlikely]] {
    int32_t parts = p.parts;
    if (p.plan == Plan::kInvariant) parts = min_of(parts, ceil_div(s.chunks, kInvariantKeys / kChunk));
    s.unit = max_of(ceil_div(s.chunks, max_of(parts, 1)), 1);
    s.units = ceil_div(s.chunks, s.unit);
  }
  return s;
}

// x * y / z, rounded down. PERF: a division of 64 bits takes several times as long.
__device__ __forceinline__ int32_t scaled(uint32_t x, uint32_t y, uint32_t z) {
  const uint64_t product = uint64_t{x} * y;
  if (product >> 32 != 0) [[unlikely]]
    return static_cast<int32_t>(product / z);
  return static_cast<int32_t>(static_cast<uint32_t>(product) / z);
}

// A CTA's share: units [from, to) of all sequences' in a row. Of `total` units slice i of `slices` takes
// [begin_of(i), begin_of(i + 1)); unit u is slice_of(u)'s.
struct Share {
  int32_t from, to, total, slices;

  __device__ __forceinline__ int32_t begin_of(int32_t slice) const {
    return scaled(static_cast<uint32_t>(total), static_cast<uint32_t>(slice), static_cast<uint32_t>(slices));
  }
  __device__ __forceinline__ int32_t slice_of(int32_t unit) const {
    // The last slice that begins at or before it: ceil((unit + 1) * slices / total) - 1.
    const uint64_t last = (uint64_t{static_cast<uint32_t>(unit)} + 1) * static_cast<uint32_t>(slices) - 1;
    const uint32_t units = static_cast<uint32_t>(total);
    if (last >> 32 != 0) [[unlikely]]
      return static_cast<int32_t>(last / units);
    return static_cast<int32_t>(static_cast<uint32_t>(last) / units);
  }
  // NOTE: no more slices than units, so that every slice between two of a sequence's has a part of it.
  static __device__ __forceinline__ Share make(int32_t total, int32_t slice, int32_t most_slices) {
    Share share = {0, 0, total, max_of(min_of(total, most_slices), 1)};
    if (slice >= share.slices) return share;
    share.from = share.begin_of(slice);
    share.to = share.begin_of(slice + 1);
    return share;
  }
};

// Inclusive sum over the threads of the block, and the sum of all.
template <class Config>
__device__ __forceinline__ int2 block_scan(Shared<Config>& shared, int32_t x) {
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int32_t step = 1; step < 32; step *= 2) {
    const int32_t below = __shfl_up_sync(~0u, x, step);
    if (lane >= step) x += below;
  }
  if (lane == 31) shared.scan[warp] = x;
  __syncthreads();
  int32_t total = 0, before = 0;
#pragma unroll
  for (int32_t w = 0; w < kThreads / 32; ++w) {
    if (w < warp) before += shared.scan[w];
    total += shared.scan[w];
  }
  return {x + before, total};
}

// Fills the table with the sequences from `base` on, before which are `before` units. Returns their units. Calls
// each(sequence) for every one, in one thread each.
template <class Config, class Each>
__device__ __forceinline__ int32_t write_table(const KernelParams& p, Shared<Config>& shared, int32_t base, int32_t end,
                                               int32_t before, const Each& each) {
  const int32_t batch = base + static_cast<int32_t>(threadIdx.x);
  const bool writes = threadIdx.x < kAttending;
  int32_t units = 0;
  if (writes && batch < end) {
    const Sequence s = read_sequence<Config::kChunk>(p, batch);
    units = s.units;
    shared.table[threadIdx.x].sequence = s;
    each(s);
  }
  const int2 sum = block_scan(shared, units);
  if (writes) {
    shared.table[threadIdx.x].begin = before + sum.x - units;
    shared.table[threadIdx.x].end = before + sum.x;
  }
  return sum.y;
}

// Goes through the parts of a share whose sequences are in the table.
struct Walk {
  int32_t index;  // in the table
  int32_t at, to;  // units
  int32_t begin, end;  // chunks of the part

  template <class Config>
  __device__ __forceinline__ bool next(const KernelParams& p, const Shared<Config>& shared) {
    if (at >= to) return false;
    while (at >= shared.table[index].end) ++index;
    const TableEntry& entry = shared.table[index];
    const Sequence& s = entry.sequence;
    if (p.plan == Plan::kCluster) {
      const int32_t rank = static_cast<int32_t>(blockIdx.x);
      begin = s.chunks * rank / kClusterSize;
      end = s.chunks * (rank + 1) / kClusterSize;
      at = to;
      return true;
    }
    const int32_t first = at - entry.begin;
    at = p.plan == Plan::kBalanced ? min_of(to, entry.end) : at + 1;
    begin = first * s.unit;
    end = min_of((at - entry.begin) * s.unit, s.chunks);
    return true;
  }
};

}  // namespace flashmsa::decode
