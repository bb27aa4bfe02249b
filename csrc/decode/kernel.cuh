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

// The chunks of a part that are this warp's group's.
template <class Config>
__device__ __forceinline__ void attend_part(const KernelParams& p, Shared<Config>& shared, Attention<Config>& attention,
                                            Loader<Config>& loader, const Walk<Config>& walk, uint32_t& used) {
  constexpr int32_t kChunk = Config::kChunk;
  const int32_t warp = threadIdx.x / 32;
  const int32_t stages_log2 = p.row_tiles_log2 + (Config::kPairs == 2 ? 1 : 0);
  const int32_t group = warp >> p.row_tiles_log2, groups = kWarps >> p.row_tiles_log2;
  const bool leads = (warp & ((1 << p.row_tiles_log2) - 1)) == 0;
  // SYNC: all warps of the group have read the slot before it is filled again.
  const auto release = [&] {
    if (p.row_tiles_log2 == 0) return __syncwarp();
    sm90::bar_sync(1 + group, 32 << p.row_tiles_log2);
  };
  const Sequence& sequence = walk.sequence;
#pragma unroll 1
  for (int32_t number = walk.begin + group; number < walk.end; number += groups, ++used) {
    const int32_t stage = static_cast<int32_t>(used & ((1u << stages_log2) - 1));
    const uint32_t parity = used >> stages_log2 & 1u;
    const int32_t slot = ((group << stages_log2) + stage) * 2;
    const int32_t own = attention.own_key(sequence, number);

    float s[kChunk / 2];
    shared.full[slot].wait(parity);
    attention.scores(s, static_cast<uint32_t>(__cvta_generic_to_shared(shared.slots[slot])));
    release();
    if (leads && loader.more) loader.load_k(slot);

    if (p.softcap) attn::apply_softcap(s, p.cap);
    const bool lane_whole = own >= attention.whole.begin && own < attention.whole.end;
    const bool masked = !__all_sync(~0u, lane_whole || threadIdx.x % 32 >= kChunk);
    uint2 seen = {0, 0};
    if (masked || p.alibi_slopes != nullptr) seen = attention.apply_rules(s, sequence, own, masked);
    uint32_t weights[kChunk / 16][4];
    attention.weigh(s, weights);

    shared.full[slot + 1].wait(parity);
    if (masked && attention.has_nonfinite(shared.slots[slot + 1])) {
      attention.add_seen_values(weights, shared.slots[slot + 1], seen);
    } else {
      attention.add_values(weights, static_cast<uint32_t>(__cvta_generic_to_shared(shared.slots[slot + 1])));
    }
    release();
    if (leads && loader.more) {
      loader.load_v(slot + 1);
      loader.advance();
    }
  }
}

template <class Config>
__global__ void __launch_bounds__(kThreads, Config::kCtas) paged_decode_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<Shared<Config>*>(shared_memory);

  // 0. The share.
  if (threadIdx.x == 0) {
    for (auto& full : shared.full) full.init(p.by_tma ? 1 : 32);
    sm90::fence_barrier_init();
  }
  // SYNC: the selected pages are the kernel before's.
  if (p.selected != nullptr) cudaGridDependencySynchronize();
  const int32_t jobs = p.heads_kv * p.row_groups;
  const int32_t job = p.plan == Plan::kCluster ? blockIdx.x / p.slices % jobs : blockIdx.x % jobs;
  const int32_t head = job / p.row_groups, group_row = job % p.row_groups * kGroupRows;
  const Merger<Config> merger{p, shared, head, group_row, job, jobs};
  Share share;
  if (p.plan == Plan::kCluster) {
    share = {static_cast<int32_t>(blockIdx.x / p.slices / jobs), 0, 0, 1, 1};
  } else {
    const int32_t slice = blockIdx.x / jobs;
    share = find_share(p, shared, slice, [&](const Sequence& s) {
      if (s.batch % p.slices == slice) merger.store_unseen(s);
    });
  }
  merger.clear_outside();
  __syncthreads();

  const int32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int32_t group = warp >> p.row_tiles_log2, groups = kWarps >> p.row_tiles_log2;
  const int32_t row_tile = warp & ((1 << p.row_tiles_log2) - 1);
  const int32_t stages = Config::kPairs << p.row_tiles_log2;
  Loader<Config> loader(p, shared, share, head, group, groups);
  if (row_tile == 0) {
#pragma unroll 1
    for (int32_t stage = 0; stage < stages && loader.more; ++stage) {
      loader.load_k((group * stages + stage) * 2);
      loader.load_v((group * stages + stage) * 2 + 1);
      loader.advance();
    }
  }

  Attention<Config> attention(p, shared, row_tile);
  uint32_t used = 0;  // chunks
  Walk<Config> walk(share);
#pragma unroll 1
  while (walk.next(p)) {
    // 1. Queries and rules.
    write_rules(p, shared, walk.sequence, head, group_row);
    attention.load_queries(walk.sequence, head, group_row);
    // SYNC: the rules are written; and the part before is merged, whose O the next one's will replace.
    __syncthreads();
    attention.find_whole(walk.sequence);
    // 2. Chunks.
    attend_part(p, shared, attention, loader, walk, used);
    // 3. Rows.
    attention.store(warp);
    __syncthreads();
    if (p.plan == Plan::kCluster) {
      merger.merge_cluster(walk.sequence);
    } else {
      merger.share_part(walk, share);
    }
  }
  // SYNC: not done before the kernel that it may have overtaken is.
  if (p.waits && threadIdx.x == 0) cudaGridDependencySynchronize();
}

}  // namespace flashmsa::decode
