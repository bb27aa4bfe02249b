// From parts of rows to rows: parts of the warps of a CTA, of the CTAs of a cluster, of CTAs anywhere.
#pragma once

#include <type_traits>

#include "attn/softmax.cuh"
#include "decode/walk.cuh"
#include "sm90/async_copy.cuh"
#include "sm90/atomic.cuh"
#include "sm90/cluster.cuh"
#include "sm90/matrix.cuh"
#include "sm90/registers.cuh"

namespace flashmsa::decode {

// Four columns of a row: O = sum of P V, the reference and the sum of P.
struct RowPart {
  float4 o = {0.0f, 0.0f, 0.0f, 0.0f};
  float reference = attn::kNegativeInfinity, sum = 0.0f;

  // Several parts together. PERF: their factors do not wait for each other.
  template <int32_t kCount>
  __device__ __forceinline__ void add(const float2 (&ml)[kCount], const float4 (&x)[kCount]) {
    float top = reference;
#pragma unroll
    for (int32_t n = 0; n < kCount; ++n) top = fmaxf(top, ml[n].x);
    const float offset = top == attn::kNegativeInfinity ? 0.0f : -top;
    const float mine = sm90::exp2_approx(reference + offset);
    o = {o.x * mine, o.y * mine, o.z * mine, o.w * mine};
    sum *= mine;
#pragma unroll
    for (int32_t n = 0; n < kCount; ++n) {
      const float theirs = sm90::exp2_approx(ml[n].x + offset);
      o.x = fmaf(x[n].x, theirs, o.x);
      o.y = fmaf(x[n].y, theirs, o.y);
      o.z = fmaf(x[n].z, theirs, o.z);
      o.w = fmaf(x[n].w, theirs, o.w);
      sum = fmaf(ml[n].y, theirs, sum);
    }
    reference = top;
  }
};

// Named barriers of a CTA.
inline constexpr uint32_t kAttended = 1, kBegun = 2;

// The barrier of all warps that attend. In a cluster the others, who write the rows' places, arrive at it too.
template <class Config>
__device__ __forceinline__ void sync_attending() {
  sm90::bar_sync(kAttended, Config::kClustered ? Config::kThreads : Config::kAttending);
}

template <class Config>
struct Merger {
  using Element = typename Config::Element;

  const KernelParams& p;
  Shared<Config>& shared;
  const int32_t head, group_row;  // kv head; the CTA's first row among its rows
  const int32_t job, jobs;        // head and group of rows, of so many

  // The CTA's rows of a sequence that there are.
  __device__ __forceinline__ int32_t rows_of(const Sequence& s) const {
    return clamp(s.queries * p.q_heads_per_kv_head - group_row, 0, Config::kGroupRows);
  }

  // What this thread merges: four columns of every step-th row.
  struct Items {
    int32_t row, step, column;
  };
  __device__ __forceinline__ Items items() const {
    const int32_t thread = static_cast<int32_t>(threadIdx.x);
    // PERF: no divisions where the columns are as many as the bucket's.
    if (p.head_dim_v == Config::kHeadDim) [[likely]] {
      constexpr int32_t kQuads = Config::kHeadDim / 4;
      return {thread / kQuads, Config::kAttending / kQuads, thread % kQuads * 4};
    }
    const int32_t quads = p.head_dim_v / 4;
    int32_t step = Config::kAttending / quads;
    if (Config::kGroupRows > kMergedRows) step = min_of(step, kMergedRows);
    const int32_t row = thread / quads;
    // Threads that are left over have no row.
    return {row < step ? row : Config::kGroupRows, step, (thread - row * quads) * 4};
  }

  // Over the warps that share a row's tile.
  __device__ __forceinline__ RowPart of_warps(int32_t row, int32_t column) const {
    const int32_t in_tile = row % kTileRows;
    float2 ml[Config::kSharers];
    float4 o[Config::kSharers];
#pragma unroll
    for (int32_t n = 0; n < Config::kSharers; ++n) {
      const int32_t warp = row / kTileRows + (n << p.row_tiles_log2);
      const bool there = warp < Config::kWarps;
      ml[n] = there ? shared.ml[warp][in_tile] : make_float2(attn::kNegativeInfinity, 0.0f);
      o[n] = there ? *reinterpret_cast<const float4*>(&shared.o[warp][in_tile][column]) : float4{};
    }
    RowPart part;
    part.add(ml, o);
    return part;
  }

  // What the rows of a part end with: the factor of O, and lse.
  struct RowEnd {
    float factor, lse;
  };
  __device__ __forceinline__ RowEnd end_of(const RowPlace& place, float reference, float sum) const {
    constexpr float kLn2 = 0.693147180559945309f, kLog2E = 1.44269504088896341f;
    const bool empty = sum == 0.0f;  // 0, whatever its sink
    float factor = 1.0f, sink = attn::kNegativeInfinity;
    if (Options<Config>{p}.sinks()) [[unlikely]] {
      sink = p.sinks[place.head] * kLog2E;
      if (sink != attn::kNegativeInfinity) {
        const float top = fmaxf(reference, sink);
        factor = sm90::exp2_approx(reference - top);
        sum = fmaf(sum, factor, sm90::exp2_approx(sink - top));
        reference = top;
      }
    }
    return {empty ? 0.0f : factor * sm90::reciprocal_approx(sum),
            (empty ? sink : reference + sm90::log2_approx(sum)) * kLn2};
  }

  __device__ __forceinline__ Element* out_row(const Sequence& s, const RowPlace& place) const {
    return static_cast<Element*>(p.out.data) + s.batch * p.out.stride_batch + s.first_row * p.out.stride_seq +
           place.out_offset;
  }
  __device__ __forceinline__ void store_lse(const Sequence& s, const RowPlace& place, float lse) const {
    if (p.lse == nullptr) return;
    p.lse[s.batch * p.lse_stride_batch + s.first_row * p.lse_stride_seq + place.lse_offset] = lse;
  }

  // The final result of four columns.
  __device__ __forceinline__ void store(const Sequence& s, int32_t row, int32_t column, RowPart part) const {
    const RowPlace& place = shared.rows[row];
    const RowEnd end = end_of(place, part.reference, part.sum);
    const uint2 packed = {sm90::pack2<Element>(part.o.x * end.factor, part.o.y * end.factor),
                          sm90::pack2<Element>(part.o.z * end.factor, part.o.w * end.factor)};
    *reinterpret_cast<uint2*>(out_row(s, place) + column) = packed;
    if (column == 0) store_lse(s, place, end.lse);
  }

  // ---- Rows without a part --------------------------------------------------------------------------------------------

  // The rows of a sequence of which nothing is seen, and packed rows behind those that were promised; by one thread.
  __device__ __forceinline__ void store_unseen(const Sequence& s) const {
    if (s.units == 0) {
#pragma unroll 1
      for (int32_t row = 0; row < rows_of(s); ++row) {
#pragma unroll 1
        for (int32_t column = 0; column < p.head_dim_v; column += 4) store(s, row, column, RowPart());
      }
    }
    if (!Options<Config>{p}.packed() || group_row != 0) return;
    const int32_t end = clamp(p.cu_seqlens_q[s.batch + 1], s.first_row, p.total_q);
    for (int32_t h = 0; h < p.q_heads_per_kv_head; ++h) {
      for (int32_t row = s.first_row + s.queries; row < end; ++row)
        clear_row(head * p.q_heads_per_kv_head + h, row, 0, 1);
    }
  }

  __device__ __forceinline__ void clear_row(int64_t h, int64_t row, int32_t first, int32_t step) const {
    Element* out = static_cast<Element*>(p.out.data) + h * p.out.stride_head + row * p.out.stride_seq;
    for (int32_t quad = first; quad < p.head_dim_v / 4; quad += step) reinterpret_cast<uint2*>(out)[quad] = {0, 0};
    if (first == 0 && p.lse != nullptr) {
      p.lse[h * p.lse_stride_head + row * p.lse_stride_seq] = attn::kNegativeInfinity;
    }
  }

  // Packed rows before the first sequence and behind the last: a warp each, over all CTAs.
  __device__ __forceinline__ void clear_outside() const {
    if (!Options<Config>{p}.packed() || threadIdx.x >= Config::kAttending) [[likely]]
      return;
    const int32_t begin = clamp(p.cu_seqlens_q[0], 0, p.total_q);
    const int32_t end = clamp(p.cu_seqlens_q[p.batch], begin, p.total_q);
    const int32_t outside = begin + p.total_q - end;
    const int64_t warps = int64_t{gridDim.x} * gridDim.y * Config::kWarps;
    for (int64_t n = (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * Config::kWarps + threadIdx.x / 32;
         n < int64_t{outside} * p.heads_q; n += warps) {
      const int32_t row = static_cast<int32_t>(n % outside);
      clear_row(n / outside, row < begin ? row : end + row - begin, threadIdx.x % 32, 32);
    }
  }

  // ---- Parts of the CTAs of a cluster, through each other's shared memory ---------------------------------------------

  // By all threads, first of all.
  __device__ __forceinline__ void begin_cluster() const {
    // PERF: by a warp that attends; those that load are what all wait for.
    if (threadIdx.x < 32) {
      if (sm90::elect()) {
        shared.pushed_full.init(1);
        sm90::fence_barrier_init();
      }
      __syncwarp();
    }
    sm90::cluster_arrive_relaxed();
  }

  // Rows are dealt to the CTAs; each sends its parts to the row's. Sixteen rows at a time: so many parts of rows arrive at
  // most. PERF: the stores count on a barrier of the row's CTA, which waits for its parts alone; the others wait for nothing.
  __device__ __forceinline__ void merge_cluster(const Sequence& s) const {
    const int32_t rows = rows_of(s), size_log2 = cluster_size_log2(), rank = static_cast<int32_t>(blockIdx.x);
    const Items mine = items();
    uint32_t parity = 0;
    // SYNC: every CTA of the cluster has begun, so that its memory and its barrier are there.
    sm90::cluster_wait();
#pragma unroll 1
    for (int32_t base = 0; base < rows; base += kTileRows) {
      const int32_t here = min_of(rows - base, kTileRows);
      const int32_t own = here > rank ? (here - rank - 1 >> size_log2) + 1 : 0;
      // SYNC: the rows before are read.
      if (base > 0) sm90::cluster_sync();
      if (threadIdx.x == 0 && own > 0) {
        shared.pushed_full.arrive_expect((own << size_log2) * (p.head_dim_v * 4 + 8));
      }
#pragma unroll 1
      for (int32_t row = mine.row; row < here; row += mine.step) {
        const RowPart part = of_warps(base + row, mine.column);
        const uint32_t target = row & ((1 << size_log2) - 1);
        const int32_t place = (row >> size_log2 << size_log2) + rank;
        const uint32_t barrier = sm90::map_shared(&shared.pushed_full, target);
        sm90::store_async(sm90::map_shared(&shared.pushed[place][mine.column], target), part.o, barrier);
        if (mine.column == 0) {
          sm90::store_async(sm90::map_shared(&shared.pushed_ml[place], target), make_float2(part.reference, part.sum),
                            barrier);
        }
      }
      if (own == 0) continue;
      shared.pushed_full.wait(parity);
      parity ^= 1;
#pragma unroll 1
      for (int32_t n = mine.row; n < own; n += mine.step) {
        RowPart part;
#pragma unroll 1
        for (int32_t place = n << size_log2; place < (n + 1) << size_log2; place += 8) {
          float2 ml[8];
          float4 o[8];
#pragma unroll
          for (int32_t i = 0; i < 8; ++i) {
            ml[i] = shared.pushed_ml[place + i];
            o[i] = *reinterpret_cast<const float4*>(&shared.pushed[place + i][mine.column]);
          }
          part.add(ml, o);
        }
        store(s, base + (n << size_log2) + rank, mine.column, part);
      }
    }
  }

  // For the warps that have no part in it.
  __device__ __forceinline__ void wait_for_cluster(const Sequence& s) const {
    const int32_t rows = rows_of(s);
    __syncwarp();
    sm90::cluster_wait();
    for (int32_t base = kTileRows; base < rows; base += kTileRows) sm90::cluster_sync();
  }

  // ---- Parts of CTAs anywhere, through memory -------------------------------------------------------------------------

  // Where a part lies: n for n = 0 at first, else at others + n * step.
  struct Places {
    int64_t first, others;
    int32_t step;
  };

  // The rows of this CTA's part: final, where it is `whole`, its sequence's only one; else to its place among the parts.
  __device__ __forceinline__ void store_own(const Sequence& s, bool whole, int64_t index) const {
    const int32_t rows = rows_of(s);
    const Items mine = items();
#pragma unroll 1
    for (int32_t row = mine.row; row < rows; row += mine.step) {
      const RowPart part = of_warps(row, mine.column);
      if (whole) {
        store(s, row, mine.column, part);
        continue;
      }
      const int64_t place = index * p.part_rows + row;
      __stcg(reinterpret_cast<float4*>(p.part_o + place * p.head_dim_v + mine.column), part.o);
      if (mine.column == 0) __stcg(p.part_ml + place, make_float2(part.reference, part.sum));
    }
  }

  // The same for a warp that has its rows alone, from its accumulators. PERF: the warps neither meet nor read each other's O:
  // where a part ends, memory soon has nothing to do.
  template <class Attention>
  __device__ __forceinline__ void store_accumulators(const Sequence& s, const Attention& attention, bool whole,
                                                     int64_t index) const {
    const int32_t rows = rows_of(s) - attention.first_row, lane = threadIdx.x % 32;
    const auto& o = attention.o;
    // Finished rows go through shared memory, for stores of whole ones.
    constexpr int32_t kParts = Config::kHeadDim / 8;  // 16-byte parts of a row
    auto finished = reinterpret_cast<uint32_t (*)[Config::kHeadDim / 2 + 4]>(shared.o[threadIdx.x / 32]);
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const int32_t row = lane / 4 + 8 * slot;
      const float2 ml = attention.row_ml(slot);
      if (row >= rows) continue;
      if (whole) {
        const RowPlace& place = shared.rows[attention.first_row + row];
        const RowEnd end = end_of(place, ml.x, ml.y);
        if (lane % 4 == 0) store_lse(s, place, end.lse);
#pragma unroll
        for (int j = 0; j < kParts; ++j) {
          finished[row][4 * j + lane % 4] =
              sm90::pack2<Element>(o[4 * j + 2 * slot] * end.factor, o[4 * j + 2 * slot + 1] * end.factor);
        }
        continue;
      }
      const int64_t place = index * p.part_rows + attention.first_row + row;
      float* to = p.part_o + place * p.head_dim_v + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        if (8 * j >= p.head_dim_v) break;
        __stcg(reinterpret_cast<float2*>(to + 8 * j), make_float2(o[4 * j + 2 * slot], o[4 * j + 2 * slot + 1]));
      }
      if (lane % 4 == 0) __stcg(p.part_ml + place, ml);
    }
    if (!whole) return;
    __syncwarp();
    const int32_t part = lane % kParts;
#pragma unroll
    for (int32_t n = 0; n < kTileRows * kParts / 32; ++n) {
      const int32_t row = n * (32 / kParts) + lane / kParts;
      if (row >= rows || 8 * part >= p.head_dim_v) continue;
      *reinterpret_cast<uint4*>(out_row(s, shared.rows[attention.first_row + row]) + 8 * part) =
          *reinterpret_cast<const uint4*>(&finished[row][4 * part]);
    }
  }

  static constexpr int32_t kAdded = 8;  // parts side by side
  static_assert(kAdded == 8 && kMergedParts == 16, "a round's slots");

  // A round of a merge: parts [first, first + count) of the rows from `base` on that `passes` passes take. Each pass has
  // 2^slots_log2 places in shared memory for each of its rows, those behind the last part empty.
  struct Round {
    int32_t base, passes, first, count, slots_log2;
  };

  // work(first, count) for all places of a row, so many side by side.
  template <class Work>
  __device__ __forceinline__ void for_slots(const Round& round, const Work& work) const {
    const int32_t slots = 1 << round.slots_log2;
    if (slots >= kAdded) {
#pragma unroll 1
      for (int32_t begin = 0; begin < slots; begin += kAdded) work(begin, std::integral_constant<int32_t, kAdded>());
    } else {
#pragma unroll 1
      for (int32_t begin = 0; begin < slots; begin += 2) work(begin, std::integral_constant<int32_t, 2>());
    }
  }

  // Asks for the parts of a round. PERF: for all before any is looked at, by loops of few instructions: the CTA that merges does
  // so once, and gets them from memory too.
  __device__ __forceinline__ void gather_parts(const Places& places, const Round& round, int32_t rows,
                                               const Items& mine) const {
    const int32_t thread = static_cast<int32_t>(threadIdx.x), last = round.count - 1;
    const int64_t first_place = places.first * p.part_rows, origin = places.others * p.part_rows;
    const int32_t step = places.step * p.part_rows;
    const auto place = [&](int32_t n) { return n == 0 ? first_place : origin + int64_t{n} * step; };
#pragma unroll 1
    for (int32_t pass = 0; pass < round.passes; ++pass) {
      const int32_t row = round.base + pass * mine.step + mine.row;
      if (row >= rows) break;
      for_slots(round, [&](int32_t begin, auto together) {
        constexpr int32_t kCount = decltype(together)::value;
#pragma unroll
        for (int32_t n = begin; n < begin + kCount; ++n) {
          const float* from = p.part_o + (place(round.first + min_of(n, last)) + row) * p.head_dim_v + mine.column;
          float4& to = shared.parts[(pass << round.slots_log2) + n][thread];
          sm90::copy_async_16(static_cast<uint32_t>(__cvta_generic_to_shared(&to)), from, n <= last ? 16 : 0);
        }
      });
    }
    const int32_t here = min_of(rows - round.base, round.passes * mine.step);
#pragma unroll 1
    for (int32_t i = thread; i < here << round.slots_log2; i += Config::kAttending) {
      const int32_t row = i >> round.slots_log2, n = i - (row << round.slots_log2);
      shared.parts_ml[row][n] = n <= last ? __ldcg(p.part_ml + place(round.first + n) + round.base + row)
                                          : make_float2(attn::kNegativeInfinity, 0.0f);
    }
  }

  __device__ __forceinline__ void merge_parts(const Sequence& s, const Places& places, int32_t parts) const {
    const int32_t rows = rows_of(s);
    const Items mine = items();
    // Several passes at a time where all parts of each have room, or all parts of one pass, some at a time.
    Round round;
    round.slots_log2 = 1;
    while (1 << round.slots_log2 < min_of(parts, kMergedParts)) ++round.slots_log2;
    round.passes = 1;
    if (parts <= kMergedParts) {
      round.passes = clamp(Config::kMergedSlots >> round.slots_log2, 1, max_of(kMergedRows / mine.step, 1));
    }
#pragma unroll 1
    for (round.base = 0; round.base < rows; round.base += round.passes * mine.step) {
      RowPart part;
#pragma unroll 1
      for (round.first = 0; round.first < parts; round.first += kMergedParts) {
        round.count = min_of(parts - round.first, kMergedParts);
        // SYNC: the parts before are read.
        if (round.base + round.first > 0) sync_attending<Config>();
        gather_parts(places, round, rows, mine);
        sm90::wait_for_copies();
        // SYNC: the references and sums, which other threads brought, are there.
        sync_attending<Config>();
#pragma unroll 1
        for (int32_t pass = 0; pass < round.passes; ++pass) {
          const int32_t in_round = pass * mine.step + mine.row, row = round.base + in_round;
          if (row >= rows) break;
          if (round.first == 0) part = RowPart();
          for_slots(round, [&](int32_t begin, auto together) {
            constexpr int32_t kCount = decltype(together)::value;
            float2 ml[kCount];
            float4 o[kCount];
#pragma unroll
            for (int32_t n = 0; n < kCount; ++n) {
              ml[n] = shared.parts_ml[in_round][begin + n];
              o[n] = shared.parts[(pass << round.slots_log2) + begin + n][threadIdx.x];
            }
            part.add(ml, o);
          });
          if (round.first + kMergedParts >= parts) store(s, row, mine.column, part);
        }
      }
    }
  }

  // Waits until parts [begin, end) of a sequence are stored. Takes their marks away: a graph's next replay has the same ticket.
  __device__ __forceinline__ void wait_for_parts(const Places& places, int32_t begin, int32_t end) const {
#pragma unroll 1
    for (int32_t n = begin + static_cast<int32_t>(threadIdx.x); n < end; n += Config::kAttending) {
      uint64_t* arrived = p.arrived + (n == 0 ? places.first : places.others + int64_t{n} * places.step);
      while (sm90::load_acquire(arrived) != p.ticket) {
      }
      *arrived = 0;
    }
  }

  // Stores the part that `walk` stands at. The CTA that has a sequence's first part merges all of them, in order. It is its
  // share's last sequence, and the other CTAs' first, so that it waits only for what it could not do without.
  // SYNC: those other CTAs have begun: blocks begin in order, see slice_index().
  template <class Store>
  __device__ __forceinline__ void share_part(const Walk& walk, const Share& share, const Store& store_part) const {
    const Sequence& s = shared.table[walk.index].sequence;
    const int2 units = shared.units_of(walk.index);
    int32_t parts = s.units, mine = walk.at - units.x;  // mine: of the first ones
    int64_t own;
    Places places;
    if (p.plan == Plan::kBalanced) {
      // Every CTA has two places: for the part that its share begins with, and for one that begins later.
      const int32_t first = share.slice_of(units.x);
      parts = share.slice_of(units.y - 1) - first + 1;
      mine = 1;
      const auto place = [&](int64_t at) { return (at * jobs + job) * 2; };
      own = place(slice_index()) + (share.from < units.x);
      places = {place(first) + (share.begin_of(first) < units.x), place(first), 2 * jobs};
    } else {
      const int64_t first = (int64_t{s.batch} * jobs + job) * p.parts;
      own = first + walk.begin / s.unit;
      places = {first, first, 1};
    }
    store_part(parts == 1, own);
    if (parts == 1) return;
    // SYNC: the part is stored.
    sync_attending<Config>();
    if (share.from > units.x) {
      if (threadIdx.x == 0) sm90::store_release(p.arrived + own, p.ticket);
      return;
    }
    if (walk.at < min_of(share.to, units.y)) return;
    wait_for_parts(places, mine, parts);
    // SYNC: whichever thread saw them.
    sync_attending<Config>();
    merge_parts(s, places, parts);
  }
};

}  // namespace flashmsa::decode
