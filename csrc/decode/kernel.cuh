// Attention of few queries to long caches on sm_90a: O = softmax(scale * Q K^T over the allowed keys) V.
//
// Roles       four or eight warps attend, four load, a chunk or two of each tile. The rows of a kv head, its query heads for
//             every query, fill 1, 2 or 4 tiles of 16; each warp has one tile and, with the others of that tile, deals out the
//             chunks of keys. By wgmma (ByWarpgroups in config.h) the eight warps are two warpgroups, of 64 rows each: of the
//             same, and then they deal out the chunks, or of 128, and then both take every chunk.
// Shared      a ring of tiles of K and V; O, references and sums of the warps: shared.cuh.
// Barriers    full (TMA bytes, or one arrival a lane) and empty (one arrival of every warp that reads it), for every chunk; in a
//             cluster pushed_full (bytes of the parts that other CTAs send). Named ones: kBegun (all threads: barriers, rows, table),
//             kAttended (those that attend, in a cluster all: the warps' rows): merge.cuh.
// Schedule    0. find the CTA's share from the lengths
//             1. a part: queries to registers, the rows' keys to shared memory
//             2. a chunk: wait K, S = Q K^T, softmax, wait V, O += P V
//             3. the warps' O, references and sums to shared memory; merged, and merged with other CTAs' parts by the CTA
//                that has the sequence's first
//             4. the next part
// Blocks      paged_decode_kernel: (head, slice), heads first, so that neighbours read the same tokens' heads together;
//             cluster_decode_kernel: (rank, head, sequence).
#pragma once

#include "decode/attend.cuh"
#include "decode/merge.cuh"

namespace flashmsa::decode {

// The places of the CTA's rows, by a thread each.
template <class Config>
__device__ __forceinline__ void write_rows(const KernelParams& p, Shared<Config>& shared, int32_t head,
                                           int32_t group_row, int32_t thread) {
  if (thread < 0 || thread >= Config::kGroupRows) return;
  const auto [query, h] = row_index(p, head, group_row + thread);
  shared.rows[thread] = {h * p.q.stride_head + query * p.q.stride_seq, h * p.out.stride_head + query * p.out.stride_seq,
                         h * p.lse_stride_head + query * p.lse_stride_seq, query, h};
}

// The rules of the CTA's rows, by a thread each.
template <class Config>
__device__ __forceinline__ void write_rules(const KernelParams& p, Shared<Config>& shared, int32_t head,
                                            int32_t group_row, const Sequence& s) {
  const int32_t row = static_cast<int32_t>(threadIdx.x);
  if (row >= Config::kGroupRows) return;
  const auto [i, h] = row_index(p, head, group_row + row);
  if (i >= s.queries) {
    // Rows that there are not forbid nothing.
    shared.keys[row] = {0, 0, 0, kUnbounded};
    shared.tree[row] = ~0u;
    shared.alibi[row] = {0.0f, 0.0f};
    return;
  }
  const mask::TwoRuns keys = keys_of<Config>(p, s, i);
  shared.keys[row] = {keys.first.begin, keys.first.end, keys.main.begin, keys.main.end};
  if (Options<Config>{p}.tree()) {
    shared.tree[row] = static_cast<uint32_t>(p.tree_bits[int64_t{s.batch} * p.len_q + i]);
  }
  if (Options<Config>{p}.alibi()) {
    shared.alibi[row] = {p.alibi_slopes[s.batch * p.alibi_stride_batch + h] * p.alibi_factor,
                         __int_as_float(i + s.kv_len - s.queries)};
  }
}

// A chunk: K, V and what is between. kSimple: all rows see all of it, and nothing is done to its scores.
template <bool kSimple, class Config>
__device__ __forceinline__ void attend_chunk(const KernelParams& p, Shared<Config>& shared,
                                             Attention<Config>& attention, const Sequence& sequence, int32_t number,
                                             int32_t slot, uint32_t parity) {
  constexpr int32_t kChunk = Config::kChunk;
  // SYNC: the slot is filled again when all of its warps have read it. The fence is what holds the arrival back until they
  // have: without it the last loads, whose values a product behind it takes, could still be on their way when the next chunk
  // came, on an SM where another kernel's loads stand before them.
  // wgmmas read as TMA writes, and are waited for.
  const auto release = [&](int32_t index, bool by_loads = !Config::kByWarpgroups) {
    if (by_loads) sm90::fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.empty[index].arrive();
  };
  // SYNC: rows that came by cp.async become visible to wgmma.
  const auto wait = [&](int32_t index) {
    shared.full[index].wait(parity);
    if (Config::kByWarpgroups && !p.by_tma) [[unlikely]]
      sm90::fence_async_proxy();
  };
  float s[kChunk / 2];
  wait(slot);
  const uint32_t k = static_cast<uint32_t>(__cvta_generic_to_shared(shared.slots[slot]));
  if constexpr (Config::kByWarpgroups) {
    attention.scores_by_warpgroup(s, k);
  } else {
    attention.scores(s, k);
  }
  release(slot);

  if (!kSimple && Options<Config>{p}.softcap()) [[unlikely]]
    attn::apply_softcap(s, p.cap);
  bool masked = !kSimple && !contains(attention.whole_chunks, number);
  typename Attention<Config>::Seen seen = {};
  if (!kSimple && (masked || Options<Config>{p}.alibi())) [[unlikely]] {
    int32_t own[Attention<Config>::kLaneKeys];
    attention.own_keys(sequence, number, own);
    bool whole = contains(attention.whole, own[0]);
    if constexpr (kChunk > 32) whole = whole && contains(attention.whole, own[1]);
    masked = !__all_sync(~0u, whole || threadIdx.x % 32 >= kChunk);
    if (Options<Config>{p}.alibi()) attention.apply_alibi(s, own);
    if (masked) {
      attention.find_seen(sequence, own, seen);
      attention.hide_unseen(s, seen);
    }
  }
  uint32_t weights[kChunk / 16][4];
  attention.weigh(s, weights);

  wait(slot + 1);
  const uint32_t v = static_cast<uint32_t>(__cvta_generic_to_shared(shared.slots[slot + 1]));
  if (masked && attention.has_nonfinite(shared.slots[slot + 1])) [[unlikely]] {
    attention.add_seen_values(weights, shared.slots[slot + 1], seen);
  } else if constexpr (Config::kByWarpgroups) {
    attention.add_values_by_warpgroup(weights, v);
  } else {
    attention.add_values(weights, v);
  }
  release(slot + 1, masked || !Config::kByWarpgroups);
}

// The chunks of a part that this warp takes: of every tile those of its group.
template <class Config>
__device__ __forceinline__ void attend_part(const KernelParams& p, Shared<Config>& shared, Attention<Config>& attention,
                                            const Sequence& sequence, int32_t begin, int32_t end, RingPlace& ring) {
  // PERF: where instructions and not memory limit, simple chunks, as most are, by code of their own, or what is done to others
  // lies between: 64 rows, causal, 2 % faster. Plain kernels have less of it; clusters' code is to be short.
  constexpr bool kApart = Config::kWarps > kLoaders && !Config::kPlain && !Config::kClustered;
  const bool simple = !Options<Config>{p}.softcap() && !Options<Config>{p}.alibi();
  int32_t group = threadIdx.x / 32 >> p.row_tiles_log2;
  const int32_t groups = Config::kWarps >> p.row_tiles_log2;
  // PERF: known to be the same in all lanes, it keeps wgmmas' descriptors in uniform registers.
  if constexpr (Config::kByWarpgroups) group = __shfl_sync(~0u, group, 0);
#pragma unroll 1
  for (int32_t tile = begin; tile < end; tile += Config::kTileChunks) {
#pragma unroll 1
    for (int32_t chunk = group; chunk < Config::kTileChunks; chunk += groups) {
      const int32_t slot = Shared<Config>::k_slot(ring.stage, chunk);
      if (tile + chunk < end) [[likely]] {
        const int32_t number = chunk_number<Config>(tile + chunk);
        if (kApart && simple && contains(attention.whole_chunks, number)) {
          attend_chunk<true>(p, shared, attention, sequence, number, slot, ring.parity);
        } else {
          attend_chunk<false>(p, shared, attention, sequence, number, slot, ring.parity);
        }
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

// A CTA of either kernel.
template <class Config>
struct Cta {
  const KernelParams& p;
  Shared<Config>& shared;
  const int32_t head, group_row;
  const int32_t warp;
  const Merger<Config> merger;
  Attention<Config> attention;
  RingPlace ring;

  __device__ __forceinline__ Cta(const KernelParams& params, Shared<Config>& shared_memory, int32_t job)
      : p(params),
        shared(shared_memory),
        head(params.row_groups == 1 ? job : job / params.row_groups),
        group_row((job - head * params.row_groups) * Config::kGroupRows),
        warp(__shfl_sync(~0u, static_cast<int32_t>(threadIdx.x) / 32, 0)),
        merger{params, shared, head, group_row, job, params.heads_kv * params.row_groups},
        attention(params, shared, warp & ((1 << params.row_tiles_log2) - 1)) {}

  __device__ __forceinline__ bool attends() const { return warp < Config::kWarps; }

  // Registers go from the warps that load to those that attend.
  template <bool kAttends>
  __device__ __forceinline__ void take_registers() const {
    if constexpr (Config::kRegistersLoading == 0) {
      // As they were compiled.
    } else if constexpr (kAttends) {
      sm90::setmaxnreg_inc<Config::kRegistersAttending>();
    } else {
      sm90::setmaxnreg_dec<Config::kRegistersLoading>();
    }
  }

  // By the warps that load, each for its own chunks: it needs no other warp's barriers to begin.
  __device__ __forceinline__ void begin() const {
    // PERF: one thread, known as one to the compiler, or each becomes a loop over lanes.
    if (sm90::elect()) {
      sm90::prefetch_pool(p.k_map);
      sm90::prefetch_pool(p.v_map);
      const uint32_t arrivals = p.by_tma ? 1 : 32, readers = 1 << p.row_tiles_log2;
#pragma unroll
      for (int32_t n = 0; n < Config::kSlots / kLoaders; ++n) {
        const int32_t slot = n / 2 * 2 * kLoaders + (warp - Config::kWarps) * 2 + n % 2;
        shared.full[slot].init(arrivals);
        shared.empty[slot].init(readers);
      }
      sm90::fence_barrier_init();
    }
    __syncwarp();
  }

  // By the warps that load.
  __device__ __forceinline__ void write_rows() const {
    decode::write_rows(p, shared, head, group_row, static_cast<int32_t>(threadIdx.x) - Config::kAttending);
  }

  // By the warps that load. PERF: the first queries go ahead of the first chunks, or they would wait for all of them; those that
  // attend, who will ask for them, need not be waited for.
  __device__ __forceinline__ void prefetch_first_queries(const Sequence& sequence) const {
    const int32_t thread = static_cast<int32_t>(threadIdx.x) - Config::kAttending;
    if constexpr (Config::kGroupRows == 32 * kLoaders) {
      attention.prefetch_row(sequence, thread, 0, 64);
    } else {
      attention.prefetch_queries(sequence, thread);
    }
  }

  // The share of a warp that loads, where no table is needed.
  __device__ __forceinline__ void load_equal() {
    EqualWalk walk = EqualWalk::make<Config>(p);
    if (walk.at < walk.to) {
      // The first queries, as above; each thread those of the row whose place it has written.
      walk.own.batch = static_cast<int32_t>(static_cast<uint32_t>(walk.at) / static_cast<uint32_t>(walk.own.units));
      const int32_t row = static_cast<int32_t>(threadIdx.x) - Config::kAttending;
      if (row < Config::kGroupRows) attention.prefetch_row(walk.own, row, 0, 64);
    }
    // SYNC: barriers and rows are there, for those that attend. They wait once: one table holds all sequences.
    sm90::bar_arrive(kBegun, Config::kThreads);
    Loader<Config, EqualWalk>{p, shared, head, warp - Config::kWarps, walk}.run(ring);
  }

  // 2 and 3 of a part, up to its rows in shared memory; after its rules are written.
  __device__ __forceinline__ void attend(const Sequence& sequence, int32_t begin, int32_t end) {
    attention.begin_part(sequence);
    attend_part(p, shared, attention, sequence, begin, end, ring);
    if (!attention.has_rows_alone()) attention.store(warp);
    // SYNC: the rows of all warps are there; and all have read the rules.
    sync_attending<Config>();
  }
};

// The parts of a share whose sequences are in the table, by the threads that attend.
template <class Config>
__device__ __forceinline__ void attend_share(const KernelParams& p, Shared<Config>& shared, Cta<Config>& cta, Walk walk,
                                             const Share& share, int32_t entries) {
  // The sequence whose queries are in shared memory already. SYNC: a merge takes their place, but under a balanced plan none
  // comes before the share's end.
  const bool looks_ahead = cta.attention.has_rows_alone() && p.plan == Plan::kBalanced;
  int32_t ahead = -1;
#pragma unroll 1
  while (walk.next(p, shared)) {
    const Sequence& sequence = shared.table[walk.index].sequence;
    // 1. Queries and rules.
    typename Attention<Config>::QueryBits bits;
    if (Config::kByWarpgroups && ahead == walk.index) {
      cta.attention.take_queries_ahead(bits);
    } else {
      cta.attention.ask_queries(sequence, cta.head, cta.group_row, bits);
    }
    if (walk.at < walk.to && walk.index + 1 < entries) {
      const Sequence& next = shared.table[walk.index + 1].sequence;
      if (Config::kByWarpgroups && looks_ahead) {
        ahead = walk.index + 1;
        cta.attention.ask_queries_ahead(next);
      } else {
        cta.attention.prefetch_queries(next, static_cast<int32_t>(threadIdx.x));
      }
    }
    write_rules(p, shared, cta.head, cta.group_row, sequence);
    // SYNC: the rules are written; and the part before is merged, whose O the next one's will replace, or Q.
    sync_attending<Config>();
    cta.attention.take_queries(bits);
    cta.attend(sequence, walk.begin, walk.end);
    cta.merger.share_part(walk, share, [&](bool whole, int64_t index) {
      if (cta.attention.has_rows_alone()) return cta.merger.store_accumulators(sequence, cta.attention, whole, index);
      cta.merger.store_own(sequence, whole, index);
    });
  }
}

// Finds the CTA's share, a table of sequences at a time, and calls work(walk, share, sequences in the table) for each table in
// which it has some. By all threads, the two roles apart: `kAttends` is what fills tables.
template <bool kAttends, class Config, class Work>
__device__ __forceinline__ void walk_share(const KernelParams& p, Shared<Config>& shared, const Cta<Config>& cta,
                                           const Work& work) {
  const int32_t slice = slice_index();
  // SYNC: behind the barrier, as it reads the CTA's rows too.
  const auto store_unseen = [&](bool unseen) {
    if (!unseen) [[likely]]
      return;
    const Sequence& s = shared.table[threadIdx.x].sequence;
    if (s.batch % p.slices == slice) cta.merger.store_unseen(s);
  };
  // One table does not hold all sequences: once through them for their sum first.
  bool counting = p.batch > kTable;
  int32_t total = 0, before = 0, base = 0;
#pragma unroll 1
  while (true) {
    bool unseen = false;
    if constexpr (kAttends) unseen = write_table(p, shared, base, before);
    // SYNC: the table is written; the first time also barriers and rows.
    sm90::bar_sync(kBegun, Config::kThreads);
    const int32_t units = table_units(shared);
    if (counting || p.batch <= kTable) {
      total += units;
      store_unseen(unseen);
    }
    if (!counting) {
      const Share share = Share::make(total, slice, p.slices);
      Walk walk;
      walk.at = max_of(share.from, before);
      walk.to = min_of(share.to, before + units);
      if (walk.at < walk.to) {
        walk.index = find_sequence(shared, walk.at);
        work(walk, share, min_of(p.batch - base, kTable));
      }
      if (before + units >= share.to) break;
    }
    before += units;
    base += kTable;
    if (base >= p.batch) {
      if (!counting) break;
      counting = false;
      before = base = 0;
    }
    // SYNC: the table is done with.
    sm90::bar_sync(kBegun, Config::kThreads);
  }
}

// Every CTA takes a share of all sequences.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) paged_decode_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<Shared<Config>*>(shared_memory);
  Cta<Config> cta(p, shared, static_cast<int32_t>(blockIdx.x));
  if (!cta.attends()) {
    cta.template take_registers<false>();
    cta.begin();
    cta.write_rows();
    // NOTE: under a band full lists are not equal work.
    if ((Config::kPlain || (Config::kByWarpgroups && p.selected == nullptr)) && EqualWalk::serves(p)) {
      cta.load_equal();
      return;
    }
    walk_share<false>(p, shared, cta, [&](const Walk& walk, const Share&, int32_t) {
      cta.prefetch_first_queries(shared.table[walk.index].sequence);
      Loader<Config, Walk>{p, shared, cta.head, cta.warp - Config::kWarps, walk}.run(cta.ring);
    });
    return;
  }
  cta.template take_registers<true>();
  cta.merger.clear_outside();
  walk_share<true>(p, shared, cta, [&](const Walk& walk, const Share& share, int32_t entries) {
    attend_share(p, shared, cta, walk, share, entries);
  });
  // SYNC: not done before the kernel that it may have overtaken is.
  if (p.waits && threadIdx.x == 0) cudaGridDependencySynchronize();
}

// A cluster takes a sequence. PERF: which one is known before its length is.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtas)
    cluster_decode_kernel(const __grid_constant__ KernelParams p) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<Shared<Config>*>(shared_memory);
  const int32_t batch = static_cast<int32_t>(blockIdx.z);
  Cta<Config> cta(p, shared, static_cast<int32_t>(blockIdx.y));
  cta.merger.begin_cluster();

  if (!cta.attends()) {
    cta.template take_registers<false>();
    cta.begin();
    // SYNC: the barriers are there. PERF: for those that attend to wait for; who loads waits for nothing, and leaves to later
    // what only a merge needs.
    sm90::bar_arrive(kBegun, Config::kThreads);
    const Sequence sequence = read_sequence<Config>(p, batch);
    Loader<Config, ClusterWalk>{p, shared, cta.head, cta.warp - Config::kWarps, {sequence}}.run(cta.ring);
    cta.write_rows();
    // SYNC: the rows are there.
    sm90::bar_arrive(kAttended, Config::kThreads);
    cta.merger.wait_for_cluster(sequence);
    return;
  }
  cta.template take_registers<true>();
  typename Attention<Config>::QueryBits bits;
  cta.attention.ask_queries({batch, 0, p.len_q}, cta.head, cta.group_row, bits);
  {
    // PERF: read twice, by each role for itself: one barrier less.
    const Sequence sequence = read_sequence<Config>(p, batch);
    write_rules(p, shared, cta.head, cta.group_row, sequence);
    if (threadIdx.x == 0) shared.table[0].sequence = sequence;
  }
  // SYNC: barriers, rules and the sequence are there.
  sm90::bar_sync(kBegun, Config::kThreads);
  const Sequence& sequence = shared.table[0].sequence;
  cta.attention.take_queries(bits);
  ClusterWalk walk{sequence};
  walk.next(p, shared);
  cta.attend(sequence, walk.begin, walk.end);
  cta.merger.merge_cluster(sequence);
}

}  // namespace flashmsa::decode
