// Which keys a CTA takes: from the lengths, on the device, the same arithmetic in every CTA.
//
// The keys that some row of a sequence sees, in chunks, are its work; chunks are numbered through both runs of keys, or
// through the selected pages. Units of chunks are dealt out; a part is what a CTA takes of a sequence at a time.
#pragma once

#include "decode/shared.cuh"
#include "mask/composite.h"

namespace flashmsa::decode {

// Row `row` of a kv head. PERF: with one query a sequence no division; rows behind the last have a query that there is not.
__device__ __forceinline__ RowIndex row_index(const KernelParams& p, int32_t head, int32_t row) {
  const uint32_t heads = p.q_heads_per_kv_head;
  const int32_t query = p.len_q == 1 ? row >= p.q_heads_per_kv_head : static_cast<int32_t>(row / heads);
  return {query, head * p.q_heads_per_kv_head + row - query * p.q_heads_per_kv_head};
}

// The keys of query i by the band alone.
template <class Config>
__device__ __forceinline__ mask::TwoRuns keys_of(const KernelParams& p, const Sequence& s, int32_t i) {
  if (!Options<Config>{p}.banded()) [[likely]]
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

template <class Config>
__device__ __forceinline__ void find_chunks(const KernelParams& p, Sequence& s) {
  constexpr int32_t kChunk = Config::kChunk;
  s.first_begin = s.first_chunks = s.main_begin = s.chunks = 0;
  if (s.queries == 0 || s.kv_len == 0) return;
  if (p.selected != nullptr) [[unlikely]] {
    // SYNC: the selected pages are the kernel before's. The threads that a barrier lets pass behind this one see them too.
    cudaGridDependencySynchronize();
    s.pages = p.selected_count[s.batch];
    s.chunks = static_cast<int32_t>(ceil_div<int64_t>(int64_t{s.pages} * p.page_size, kChunk));
    return;
  }
  if (!Options<Config>{p}.banded()) [[likely]] {
    s.chunks = ceil_div(s.kv_len, kChunk);
    return;
  }
  const mask::TwoRunTiles tiles =
      mask::key_tiles(keys_of<Config>(p, s, 0), keys_of<Config>(p, s, s.queries - 1), kChunk);
  int32_t begin = tiles.main.begin, end = tiles.main.end;
  if (Options<Config>{p}.tree()) {
    const int32_t tail = max_of(s.kv_len - s.queries, 0) / kChunk;
    begin = begin < end ? min_of(begin, tail) : tail;
    end = ceil_div(s.kv_len, kChunk);
  }
  s.first_begin = tiles.first_begin;
  s.first_chunks = max_of((begin < end ? min_of(tiles.first_end, begin) : tiles.first_end) - tiles.first_begin, 0);
  s.main_begin = begin;
  s.chunks = s.first_chunks + end - begin;
}

template <class Config>
__device__ __forceinline__ Sequence read_sequence(const KernelParams& p, int32_t batch) {
  constexpr int32_t kChunk = Config::kChunk;
  Sequence s;
  s.batch = batch;
  s.first_row = 0;
  s.queries = p.len_q;
  if (Options<Config>{p}.packed()) [[unlikely]] {
    s.first_row = clamp(p.cu_seqlens_q[batch], 0, p.total_q);
    s.queries = min_of(clamp(p.cu_seqlens_q[batch + 1], s.first_row, p.total_q) - s.first_row, p.len_q);
  }
  s.kv_len = p.kv_lens == nullptr ? p.capacity : clamp(p.kv_lens[batch], 0, p.capacity);
  s.pages = 0;
  find_chunks<Config>(p, s);

  s.unit = s.units = 0;
  if (Config::kClustered) return s;
  if (p.plan == Plan::kBalanced) {
    s.unit = kGrainKeys / kChunk;
    s.units = ceil_div(s.chunks, kGrainKeys / kChunk);
  } else if (p.plan != Plan::kCluster) [[unlikely]] {
    int32_t parts = p.parts;
    if (p.plan == Plan::kInvariant) parts = min_of(parts, ceil_div(s.chunks, kInvariantKeys / kChunk));
    s.unit = max_of(ceil_div(s.chunks, max_of(parts, 1)), 1);
    s.units = ceil_div(s.chunks, s.unit);
  }
  return s;
}

// Which of a head's slices this CTA is. NOTE: the last ones begin first, for those before them may wait for them.
__device__ __forceinline__ int32_t slice_index() { return static_cast<int32_t>(gridDim.y - 1 - blockIdx.y); }

// A CTA's share: units [from, to) of all sequences' in a row. Slice i takes [begin_of(i), begin_of(i + 1)): the first `longer`
// slices one unit more than the others. Unit u is slice_of(u)'s.
struct Share {
  int32_t from, to, each, longer;

  __device__ __forceinline__ int32_t begin_of(int32_t slice) const { return slice * each + min_of(slice, longer); }
  __device__ __forceinline__ int32_t slice_of(int32_t unit) const {
    const uint32_t of_longer = longer * (each + 1), u = unit;
    return static_cast<int32_t>(u < of_longer ? u / (each + 1u)
                                              : longer + (u - of_longer) / static_cast<uint32_t>(max_of(each, 1)));
  }
  // NOTE: with fewer units than slices the last slices have none, so that every slice between two of a sequence's has a part
  // of it.
  static __device__ __forceinline__ Share make(int32_t total, int32_t slice, int32_t slices) {
    Share share;
    share.each = static_cast<int32_t>(static_cast<uint32_t>(total) / static_cast<uint32_t>(slices));
    share.longer = total - share.each * slices;
    share.from = share.begin_of(slice);
    share.to = share.begin_of(slice + 1);
    return share;
  }
};

// Fills the table with the sequences from `base` on, before which are `before` units, a thread each. Returns whether its thread's
// has rows that no part will store. A block barrier comes behind. PERF: one, which the caller's other work before it shares; sums
// over the warps are left to who needs them.
template <class Config>
__device__ __forceinline__ bool write_table(const KernelParams& p, Shared<Config>& shared, int32_t base,
                                            int32_t before) {
  const int32_t thread = static_cast<int32_t>(threadIdx.x), batch = base + thread;
  if (thread >= kTable) return false;
  int32_t units = 0;
  if (batch < p.batch) {
    const Sequence s = read_sequence<Config>(p, batch);
    units = s.units;
    shared.table[thread].sequence = s;
  }
  int32_t sum = units;
#pragma unroll
  for (int32_t step = 1; step < 32; step *= 2) {
    const int32_t below = __shfl_up_sync(~0u, sum, step);
    if (thread % 32 >= step) sum += below;
  }
  shared.table[thread].begin = sum - units;
  shared.table[thread].end = sum;
  if (thread % 32 == 31) shared.warp_units[thread / 32] = sum;
  if (thread == 0) shared.table_begin = before;
  return batch < p.batch && (units == 0 || Options<Config>{p}.packed());
}

// Units of the table.
template <class Config>
__device__ __forceinline__ int32_t table_units(const Shared<Config>& shared) {
  int32_t units = 0;
#pragma unroll
  for (int32_t warp = 0; warp < kTable / 32; ++warp) units += shared.warp_units[warp];
  return units;
}

// The place in the table of the sequence that unit `at`, which is in it, belongs to. All lanes of a warp together.
template <class Config>
__device__ __forceinline__ int32_t find_sequence(const Shared<Config>& shared, int32_t at) {
  int32_t warp = 0;
  at -= shared.table_begin;
#pragma unroll 1
  for (; at >= shared.warp_units[warp]; ++warp) at -= shared.warp_units[warp];
  const uint32_t behind = __ballot_sync(~0u, shared.table[warp * 32 + threadIdx.x % 32].end > at);
  return warp * 32 + __ffs(behind) - 1;
}

// Goes through the parts of a share whose sequences are in the table.
struct Walk {
  int32_t index = 0;  // in the table
  int32_t at = 0, to = 0;  // units
  int32_t begin = 0, end = 0;  // chunks of the part

  template <class Config>
  __device__ __forceinline__ const Sequence& sequence(const Shared<Config>& shared) const {
    return shared.table[index].sequence;
  }

  template <class Config>
  __device__ __forceinline__ bool next(const KernelParams& p, const Shared<Config>& shared) {
    if (at >= to) return false;
    int2 units = shared.units_of(index);
#pragma unroll 1
    while (at >= units.y) units = shared.units_of(++index);
    const Sequence& s = shared.table[index].sequence;
    const int32_t first = at - units.x;
    at = p.plan == Plan::kBalanced ? min_of(to, units.y) : at + 1;
    begin = first * s.unit;
    end = min_of((at - units.x) * s.unit, s.chunks);
    return true;
  }
};

// The same where all sequences have as many keys, and every row sees them: for the warps that load, who need no table then.
// PERF: it takes a microsecond to be there.
struct EqualWalk {
  Sequence own;
  int32_t at, to;  // units
  int32_t begin = 0, end = 0;

  // Whether it is so: by the host's word, or because every list of pages is full. All lanes of a warp together.
  static __device__ __forceinline__ bool serves(const KernelParams& p) {
    if (!p.equal) return false;
    if (p.selected == nullptr) return true;
    // SYNC: the lists are the kernel before's; for this warp's later reads of them too.
    cudaGridDependencySynchronize();
    bool full = true;
    for (int32_t batch = threadIdx.x % 32; batch < p.batch; batch += 32) {
      full = full && p.selected_count[batch] == p.selected_stride;
    }
    return __all_sync(~0u, full);
  }

  template <class Config>
  static __device__ __forceinline__ EqualWalk make(const KernelParams& p) {
    EqualWalk walk = {};
    walk.own.queries = p.len_q;
    walk.own.kv_len = p.capacity;
    walk.own.pages = p.selected_stride;
    const int32_t keys = p.selected == nullptr ? p.capacity : p.selected_stride * p.page_size;
    walk.own.chunks = ceil_div(keys, Config::kChunk);
    walk.own.unit = kGrainKeys / Config::kChunk;
    walk.own.units = ceil_div(keys, kGrainKeys);
    const Share share = Share::make(p.batch * walk.own.units, slice_index(), p.slices);
    walk.at = share.from;
    walk.to = share.to;
    return walk;
  }

  template <class Config>
  __device__ __forceinline__ const Sequence& sequence(const Shared<Config>&) const {
    return own;
  }

  template <class Config>
  __device__ __forceinline__ bool next(const KernelParams&, const Shared<Config>&) {
    if (at >= to) return false;
    own.batch = static_cast<int32_t>(static_cast<uint32_t>(at) / static_cast<uint32_t>(own.units));
    const int32_t before = own.batch * own.units;
    begin = (at - before) * own.unit;
    at = min_of(to, before + own.units);
    end = min_of((at - before) * own.unit, own.chunks);
    return true;
  }
};

// Clusters have 8 or 16 CTAs.
__device__ __forceinline__ int32_t cluster_size_log2() { return gridDim.x == 16 ? 4 : 3; }

// The number in its sequence of the chunk at `place` of a part. PERF: the CTAs of a cluster take chunks in turn, so that they
// read the same stretch of memory together instead of eight at equal distances: up to 6 % faster.
template <class Config>
__device__ __forceinline__ int32_t chunk_number(int32_t place) {
  if constexpr (Config::kClustered) return (place << cluster_size_log2()) + static_cast<int32_t>(blockIdx.x);
  return place;
}

// The one part of a CTA in a cluster: a share of the chunks of its sequence. Begin and end are places.
struct ClusterWalk {
  const Sequence& own;
  bool done = false;
  int32_t begin = 0, end = 0;

  template <class Config>
  __device__ __forceinline__ const Sequence& sequence(const Shared<Config>&) const {
    return own;
  }

  template <class Config>
  __device__ __forceinline__ bool next(const KernelParams&, const Shared<Config>&) {
    if (done) return false;
    // So many of its sequence's numbers are this CTA's.
    const int32_t rank = static_cast<int32_t>(blockIdx.x), size_log2 = cluster_size_log2();
    end = max_of(own.chunks - rank + (1 << size_log2) - 1, 0) >> size_log2;
    done = true;
    return true;
  }
};

}  // namespace flashmsa::decode
