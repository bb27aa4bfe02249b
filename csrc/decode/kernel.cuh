// Attention of few queries to long caches on sm_90a: O = softmax(scale * Q K^T over the allowed keys) V.
//
// Roles       four warps attend, four load a chunk of each tile. The rows of a kv head, its query heads for every query, fill 1, 2 or 4 tiles of
//             16; each warp has one tile and, with the others of that tile, deals out the chunks of keys.
// Shared      a ring of tiles of K and V, four chunks each; O, references and sums of the warps: shared.cuh.
// Barriers    full (TMA bytes, or one arrival a lane) and empty (one arrival of every warp that reads it), for every chunk.
// Schedule    0. find the CTA's share from the lengths
//             1. a part: queries to registers, the rows' keys to shared memory
//             2. a chunk: wait K, S = Q K^T, softmax, wait V, O += P V
//             3. the warps' O, references and sums to shared memory; merged, and merged with other CTAs' parts
//             4. the next part
// Blocks      (head, slice), heads first, so that neighbours read the same tokens' heads together; (rank, head, sequence) with
//             clusters.
#pragma once

#include "decode/attend.cuh"
#include "decode/merge.cuh"

namespace flashmsa::decode {

// The places of the CTA's rows, by a thread each.
template <class Config>
__device__ __forceinline__ void write_rows(const KernelParams& p, Shared<Config>& shared, int32_t head,
                                           int32_t group_row, int32_t thread) {
  if (thread >= kGroupRows) return;
  const int32_t row = group_row + thread, query = row / p.q_heads_per_kv_head;
  const int32_t h = head * p.q_heads_per_kv_head + row - query * p.q_heads_per_kv_head;
  shared.rows[thread] = {h * p.q.stride_head + query * p.q.stride_seq, h * p.out.stride_head + query * p.out.stride_seq,
                         h * p.lse_stride_head + query * p.lse_stride_seq, query, h};
}

// The rules of the CTA's rows, by a thread each.
template <class Config>
__device__ __forceinline__ void write_rules(const KernelParams& p, Shared<Config>& shared, const Sequence& s) {
  const int32_t row = static_cast<int32_t>(threadIdx.x);
  if (row >= kGroupRows) return;
  const int32_t i = shared.rows[row].query, h = shared.rows[row].head;
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

// A chunk: K, V and what is between.
template <class Config>
__device__ __forceinline__ void attend_chunk(const KernelParams& p, Shared<Config>& shared,
                                             Attention<Config>& attention, const Sequence& sequence, int32_t number,
                                             int32_t slot, uint32_t parity) {
  constexpr int32_t kChunk = Config::kChunk;
  // SYNC: the slot is filled again when all of its warps have read it.
  const auto release = [&](int32_t index) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.empty[index].arrive();
  };
  float s[kChunk / 2];
  shared.full[slot].wait(parity);
  attention.scores(s, static_cast<uint32_t>(__cvta_generic_to_shared(shared.slots[slot])));
  release(slot);

  if (p.softcap) [[unlikely]]
    attn::apply_softcap(s, p.cap);
  bool masked = !contains(attention.whole_chunks, number);
  uint2 seen = {0, 0};
  if (masked || p.alibi_slopes != nullptr) [[unlikely]] {
    const int32_t own = attention.own_key(sequence, number);
    masked = !__all_sync(~0u, contains(attention.whole, own) || threadIdx.x % 32 >= kChunk);
    if (masked || p.alibi_slopes != nullptr) seen = attention.apply_rules(s, sequence, own, masked);
  }
  uint32_t weights[kChunk / 16][4];
  attention.weigh(s, weights);

  shared.full[slot + 1].wait(parity);
  if (masked && attention.has_nonfinite(shared.slots[slot + 1])) [[unlikely]] {
    attention.add_seen_values(weights, shared.slots[slot + 1], seen);
  } else {
    attention.add_values(weights, static_cast<uint32_t>(__cvta_generic_to_shared(shared.slots[slot + 1])));
  }
  release(slot + 1);
}

// The chunks of a part that this warp takes: of every tile those of its group.
template <class Config>
__device__ __forceinline__ void attend_part(const KernelParams& p, Shared<Config>& shared, Attention<Config>& attention,
                                            const Walk& walk, RingPlace& ring) {
  const int32_t group = threadIdx.x / 32 >> p.row_tiles_log2, groups = kWarps >> p.row_tiles_log2;
  const Sequence& sequence = shared.table[walk.index].sequence;
#pragma unroll 1
  for (int32_t tile = walk.begin; tile < walk.end; tile += kWarps) {
#pragma unroll 1
    for (int32_t chunk = group; chunk < kWarps; chunk += groups) {
      const int32_t slot = Shared<Config>::k_slot(ring.stage, chunk);
      if (tile + chunk < walk.end) [[likely]] {
        attend_chunk(p, shared, attention, sequence, tile + chunk, slot, ring.parity);
      } else {
        // SYNC: a slot that goes round empty is given back when it was given, not before.
        shared.full[slot].wait(ring.parity);
        shared.full[slot + 1].wait(ring.parity);
        if (threadIdx.x % 32 == 0) {
          shared.empty[slot].arrive();
          shared.empty[slot + 1].arrive();
        }
      }
    }
    ring.advance<Config::kStages>();
  }
}

// Named barriers: 1 is sync_attending's.
inline constexpr uint32_t kQueriesAsked = 2;

template <class Config>
__global__ void __launch_bounds__(kThreads, 1) paged_decode_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<Shared<Config>*>(shared_memory);

  const bool clustered = p.plan == Plan::kCluster;
  const int32_t job = clustered ? blockIdx.y : blockIdx.x, slice = clustered ? 0 : blockIdx.y;
  const int32_t head = p.row_groups == 1 ? job : job / p.row_groups;
  const int32_t group_row = (job - head * p.row_groups) * kGroupRows;
  const int32_t warp = __shfl_sync(~0u, static_cast<int32_t>(threadIdx.x) / 32, 0);
  const bool attends = warp < kWarps;
  const Merger<Config> merger{p, shared, head, group_row, job, p.heads_kv * p.row_groups};
  Loader<Config> loader{p, shared, head, warp - kWarps};
  Attention<Config> attention(p, shared, warp & ((1 << p.row_tiles_log2) - 1));
  RingPlace ring;

  const int32_t first = clustered ? static_cast<int32_t>(blockIdx.z) : 0, end = clustered ? first + 1 : p.batch;
  if (threadIdx.x == kAttending) {
    sm90::prefetch_pool(p.k_map);
    sm90::prefetch_pool(p.v_map);
  }
  if (threadIdx.x < Config::kSlots) {
    shared.full[threadIdx.x].init(p.by_tma ? 1 : 32);
    shared.empty[threadIdx.x].init(1 << p.row_tiles_log2);
    sm90::fence_barrier_init();
  }
  if (!attends) write_rows(p, shared, head, group_row, static_cast<int32_t>(threadIdx.x) - kAttending);
  // SYNC: barriers are made, rows written.
  __syncthreads();
  // PERF: in a cluster the sequence is known before its length is.
  if (clustered && attends) attention.load_queries({first, 0, p.len_q});
  // SYNC: the selected pages are the kernel before's.
  if (p.selected != nullptr) cudaGridDependencySynchronize();
  merger.clear_outside();

  // 0. The share: once through all sequences, a table at a time; then through those of the share, where one table does not
  // hold all.
  const bool many = end - first > kAttending;
  Share share = {};
  bool dealt = false;
  int32_t before = 0, units = 0;
#pragma unroll 1
  for (int32_t base = first;;) {
    if (!dealt || many) {
      // SYNC: the table before is done with.
      if (base > first || dealt) __syncthreads();
      units = write_table(p, shared, base, end, before, [&](const Sequence& s) {
        const bool rows_unseen = s.units == 0 || p.cu_seqlens_q != nullptr;
        if (rows_unseen && !dealt && !clustered && s.batch % p.slices == slice) [[unlikely]] {
          merger.store_unseen(s);
        }
      });
    }
    if (!dealt) {
      before += units;
      base += kAttending;
      if (base < end) continue;
      share = Share::make(before, slice, clustered ? 1 : p.slices);
      dealt = true;
      base = first;
      before = 0;
      if (many) continue;
    }
    Walk walk = {0, max_of(share.from, before), min_of(share.to, before + units), 0, 0};
    if (attends) {
      const TableEntry& own = shared.table[threadIdx.x];
      if (own.begin <= walk.at && walk.at < own.end) shared.first = static_cast<int32_t>(threadIdx.x);
    }
    // SYNC: the table is written.
    __syncthreads();
    walk.index = walk.at < walk.to ? shared.first : 0;
    const bool any = walk.at < walk.to;
    if (!attends) {
      // PERF: the first queries go ahead of the first chunks, or they would wait for all of them.
      if (any) sm90::bar_sync(kQueriesAsked, kThreads);
      loader.run(walk, ring);
      if (clustered) merger.wait_for_cluster();
    } else {
      const int32_t entries = min_of(end - base, kAttending);
      bool asked = false;
#pragma unroll 1
      while (walk.next(p, shared)) {
        const Sequence& sequence = shared.table[walk.index].sequence;
        // 1. Queries and rules.
        // SYNC: the part before is merged; Q will lie where its O does.
        if constexpr (!Config::kQInRegisters) sync_attending();
        if (!clustered) attention.load_queries(sequence);
        if (!asked) sm90::bar_arrive(kQueriesAsked, kThreads);
        asked = true;
        if (walk.at < walk.to && walk.index + 1 < entries) {
          attention.prefetch_queries(shared.table[walk.index + 1].sequence);
        }
        write_rules(p, shared, sequence);
        // SYNC: the rules are written; and the part before is merged, whose O the next one's will replace.
        sync_attending();
        attention.begin_part(sequence);
        // 2. Chunks.
        attend_part(p, shared, attention, walk, ring);
        // 3. Rows.
        attention.store(warp);
        sync_attending();
        if (clustered) {
          merger.merge_cluster(sequence);
        } else {
          merger.share_part(walk, share);
        }
      }
    }
    before += units;
    base += kAttending;
    if (base >= end || before >= share.to) break;
  }
  // SYNC: not done before the kernel that it may have overtaken is.
  if (p.waits && threadIdx.x == 0) cudaGridDependencySynchronize();
}

}  // namespace flashmsa::decode
