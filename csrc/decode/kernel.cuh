// Attention of few queries to long caches on sm_90a: O = softmax(scale * Q K^T over the allowed keys) V.
//
// Roles       four warps. The rows of a kv head, its query heads for every query, fill 1, 2 or 4 tiles of 16; each warp has
//             one tile and, with the others of that tile, deals out the chunks of keys. Warps that take the same chunks are
//             a group; its first warp loads for them.
// Shared      64 KB of K and V chunks, a ring of pairs for every group; O, references and sums of the warps: shared.cuh.
// Barriers    full (TMA bytes, or one arrival a lane), a slot; a slot is empty when the group's warps have met.
// Schedule    0. find the CTA's share from the lengths; load the first chunks
//             1. a part: queries to registers, the rows' keys to shared memory
//             2. a chunk: wait K, S = Q K^T, load the next K, softmax, wait V, O += P V, load the next V
//             3. the warps' O, references and sums to shared memory; merged, and merged with other CTAs' parts
//             4. the next part
// Blocks      CTA c works for head c % heads, so that neighbours read the same tokens' heads together; in a cluster, for one
//             sequence and head.
#pragma once

#include "decode/attend.cuh"
#include "decode/merge.cuh"

namespace flashmsa::decode {

// The rules of the CTA's rows, by a thread each.
template <class Config>
__device__ __forceinline__ void write_rules(const KernelParams& p, Shared<Config>& shared, const Sequence& s,
                                            int32_t head, int32_t group_row) {
  const int32_t row = static_cast<int32_t>(threadIdx.x);
  if (row >= kGroupRows) return;
  const int32_t i = (group_row + row) / p.q_heads_per_kv_head;
  const int32_t h = head * p.q_heads_per_kv_head + (group_row + row) - i * p.q_heads_per_kv_head;
  if (i >= s.queries) {
    // Rows that there are not forbid nothing.
    shared.keys[row] = {0, 0, 0, kUnbounded};
    shared.tree[row] = ~0u;
    shared.alibi[row] = {0.0f, 0.0f};
    return;
  }
  const mask::TwoRuns keys = keys_of(p, s, i);
  shared.keys[row] = {keys.first.begin, keys.first.end, keys.main.begin, keys.main.end};
  if (p.tree_bits != nullptr) {
    shared.tree[row] = static_cast<uint32_t>(p.tree_bits[int64_t{s.batch} * p.len_q + i]);
  }
  if (p.alibi_slopes != nullptr) {
    shared.alibi[row] = {p.alibi_slopes[s.batch * p.alibi_stride_batch + h] * p.alibi_factor,
                         __int_as_float(i + s.kv_len - s.queries)};
  }
}

// Where a ring stands.
struct RingPlace {
  int32_t stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance(int32_t stages) {
    if (++stage < stages) return;
    stage = 0;
    parity ^= 1;
  }
};

// Warps that take the same chunks, and their slots.
template <class Config>
struct Group {
  int32_t index, count;  // of the groups
  int32_t log2;          // of its warps
  bool leads;            // this warp loads

  __device__ __forceinline__ int32_t stages() const { return Config::kPairs << log2; }
  __device__ __forceinline__ int32_t slot(int32_t stage) const { return (index * stages() + stage) * 2; }
  // SYNC: all of its warps have read a slot before it is filled again.
  __device__ __forceinline__ void meet() const {
    if (log2 == 0) {
      __syncwarp();
    } else {
      sm90::bar_sync(1 + index, 32 << log2);
    }
  }
};

// The chunks of a part that are this warp's group's.
template <class Config>
__device__ __forceinline__ void attend_part(const KernelParams& p, Shared<Config>& shared, Attention<Config>& attention,
                                            Loader<Config>& loader, const Group<Config>& group, const Walk& walk,
                                            RingPlace& ring) {
  constexpr int32_t kChunk = Config::kChunk;
  const Sequence& sequence = shared.table[walk.index].sequence;
#pragma unroll 1
  for (int32_t number = walk.begin + group.index; number < walk.end; number += group.count) {
    const int32_t slot = group.slot(ring.stage);
    const int32_t own = attention.own_key(sequence, number);

    float s[kChunk / 2];
    shared.full[slot].wait(ring.parity);
    attention.scores(s, static_cast<uint32_t>(__cvta_generic_to_shared(shared.slots[slot])));
    group.meet();
    const bool loads = group.leads && loader.more;
    if (loads) loader.load_k(slot);

    if (p.softcap) attn::apply_softcap(s, p.cap);
    const bool lane_whole = own >= attention.whole.begin && own < attention.whole.end;
    const bool masked = !__all_sync(~0u, lane_whole || threadIdx.x % 32 >= kChunk);
    uint2 seen = {0, 0};
    if (masked || p.alibi_slopes != nullptr) seen = attention.apply_rules(s, sequence, own, masked);
    uint32_t weights[kChunk / 16][4];
    attention.weigh(s, weights);

    shared.full[slot + 1].wait(ring.parity);
    if (masked && attention.has_nonfinite(shared.slots[slot + 1])) {
      attention.add_seen_values(weights, shared.slots[slot + 1], seen);
    } else {
      attention.add_values(weights, static_cast<uint32_t>(__cvta_generic_to_shared(shared.slots[slot + 1])));
    }
    group.meet();
    if (loads) {
      loader.load_v(slot + 1);
      loader.advance();
    }
    ring.advance(group.stages());
  }
}

template <class Config>
__global__ void __launch_bounds__(kThreads, Config::kCtas) paged_decode_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<Shared<Config>*>(shared_memory);

  if (threadIdx.x == 0) {
    sm90::prefetch_pool(p.k_map);
    sm90::prefetch_pool(p.v_map);
    for (auto& full : shared.full) full.init(p.by_tma ? 1 : 32);
    sm90::fence_barrier_init();
  }
  // SYNC: the selected pages are the kernel before's.
  if (p.selected != nullptr) cudaGridDependencySynchronize();
  const bool clustered = p.plan == Plan::kCluster;
  const int32_t block = static_cast<int32_t>(blockIdx.x), jobs = p.heads_kv * p.row_groups;
  const int32_t job = (clustered ? block / p.slices : block) % jobs;
  const int32_t slice = clustered ? 0 : block / jobs;
  const int32_t head = job / p.row_groups, group_row = job % p.row_groups * kGroupRows;
  const Merger<Config> merger{p, shared, head, group_row, job, jobs};
  merger.clear_outside();

  const int32_t warp = __shfl_sync(~0u, static_cast<int32_t>(threadIdx.x) / 32, 0);
  const int32_t row_tile = warp & ((1 << p.row_tiles_log2) - 1);
  const Group<Config> group = {warp >> p.row_tiles_log2, kWarps >> p.row_tiles_log2, p.row_tiles_log2, row_tile == 0};
  Loader<Config> loader(p, shared, head, group.index, group.count);
  Attention<Config> attention(p, shared, row_tile);
  RingPlace ring;

  // 0. The share: once through all sequences, a table at a time; then through those of the share, where one table does not
  // hold all.
  const int32_t first = clustered ? block / p.slices / jobs : 0, end = clustered ? first + 1 : p.batch;
  Share share = {};
  bool dealt = false;
  int32_t before = 0, units = 0;
#pragma unroll 1
  for (int32_t base = first;;) {
    if (!dealt || end - first > kThreads) {
      units = write_table(p, shared, base, end, before, [&](const Sequence& s) {
        if (!dealt && !clustered && s.batch % p.slices == slice) merger.store_unseen(s);
      });
    }
    if (!dealt) {
      before += units;
      base += kThreads;
      if (base < end) continue;
      share = Share::make(before, slice, clustered ? 1 : p.slices);
      dealt = true;
      base = first;
      before = 0;
      if (end - first > kThreads) continue;
    }
    // SYNC: the table is written.
    __syncthreads();
    Walk walk = {0, max_of(share.from, before), min_of(share.to, before + units), 0, 0};
    const TableEntry& own = shared.table[threadIdx.x];
    if (own.begin <= walk.at && walk.at < own.end) shared.first = static_cast<int32_t>(threadIdx.x);
    __syncthreads();
    walk.index = walk.at < walk.to ? shared.first : 0;
    if (group.leads) {
      loader.begin(walk);
      RingPlace fill = ring;
#pragma unroll 1
      for (int32_t n = 0; n < group.stages() && loader.more; ++n) {
        loader.load_k(group.slot(fill.stage));
        loader.load_v(group.slot(fill.stage) + 1);
        loader.advance();
        fill.advance(group.stages());
      }
    }
#pragma unroll 1
    while (walk.next(p, shared)) {
      const Sequence& sequence = shared.table[walk.index].sequence;
      // 1. Queries and rules.
      write_rules(p, shared, sequence, head, group_row);
      attention.load_queries(sequence, head, group_row);
      // SYNC: the rules are written; and the part before is merged, whose O the next one's will replace.
      __syncthreads();
      attention.find_whole(sequence);
      // 2. Chunks.
      attend_part(p, shared, attention, loader, group, walk, ring);
      // 3. Rows.
      attention.store(warp);
      __syncthreads();
      if (clustered) {
        merger.merge_cluster(sequence);
      } else {
        merger.share_part(walk, share);
      }
    }
    before += units;
    base += kThreads;
    if (base >= end || before >= share.to) break;
  }
  // SYNC: not done before the kernel that it may have overtaken is.
  if (p.waits && threadIdx.x == 0) cudaGridDependencySynchronize();
}

}  // namespace flashmsa::decode
