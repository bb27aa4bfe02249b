// One warp's attention: 16 rows, a chunk of keys at a time; by mma.sync, or by wgmma together with the warpgroup's other warps.
#pragma once

#include "attn/epilogue.cuh"
#include "attn/softmax.cuh"
#include "decode/loader.cuh"
#include "sm90/fragment.h"
#include "sm90/matrix.cuh"
#include "sm90/mma.cuh"
#include "sm90/registers.cuh"
#include "sm90/wgmma.cuh"

namespace flashmsa::decode {

// Bits of a pair of elements: their exponents, and what carries out of one that is all ones.
template <class Element>
inline constexpr uint32_t kExponents = 0x7F807F80;
template <>
inline constexpr uint32_t kExponents<__half> = 0x7C007C00;
template <class Element>
inline constexpr uint32_t kLowestExponents = 0x00800080;
template <>
inline constexpr uint32_t kLowestExponents<__half> = 0x04000400;

template <class Element>
__device__ __forceinline__ uint32_t nonfinite(uint32_t pair) {
  return (pair & kExponents<Element>)+kLowestExponents<Element> & 0x80008000;
}

__device__ __forceinline__ float2 unpack_pair(uint32_t bits, __nv_bfloat16) {
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000)};
}
__device__ __forceinline__ float2 unpack_pair(uint32_t bits, __half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}

template <class Config>
struct Attention {
  using Element = typename Config::Element;
  static constexpr int32_t kHeadDim = Config::kHeadDim;
  static constexpr int32_t kChunk = Config::kChunk;
  static constexpr int32_t kGroups = kHeadDim / 64;

  const KernelParams& p;
  Shared<Config>& shared;
  const int32_t first_row;  // of this warp's tile, in the CTA's rows
  const ChunkLayout<Config> layout;

  uint32_t q[Config::kQInRegisters ? kHeadDim / 16 : 1][4];
  float o[kHeadDim / 2];
  attn::OnlineSoftmax softmax;
  mask::Interval whole;  // keys that all of the rows see
  mask::Interval whole_chunks;  // numbers of chunks that are among them; not with selected pages

  __device__ __forceinline__ Attention(const KernelParams& params, Shared<Config>& shared_memory, int32_t row_tile)
      : p(params), shared(shared_memory), first_row(row_tile * kTileRows), layout{params.piece_log2} {}

  __device__ __forceinline__ int32_t lane() const { return threadIdx.x % 32; }

  // ---- A part's beginning ---------------------------------------------------------------------------------------------

  // Bits of Q's fragments: asked for, and not looked at yet.
  using QueryBits = uint32_t[kHeadDim / 16][4];

  // PERF: every load goes to an address that exists and nothing depends on any of them before the last is asked for: one
  // round trip to memory. Predicated ones make sixteen. Rows that there are not take the first one's queries; nobody looks
  // at what becomes of them.
  __device__ __forceinline__ void ask_queries(const Sequence& s, int32_t head, int32_t group_row,
                                              QueryBits& bits) const {
    const Element* base =
        static_cast<const Element*>(p.q.data) + s.batch * p.q.stride_batch + s.first_row * p.q.stride_seq;
    const uint32_t* rows[2];
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const RowIndex row = row_index(p, head, group_row + first_row + lane() / 4 + 8 * slot);
      const int64_t offset = row.head * p.q.stride_head + row.query * p.q.stride_seq;
      rows[slot] = reinterpret_cast<const uint32_t*>(base + (row.query < s.queries ? offset : 0)) + lane() % 4;
    }
    if (p.head_dim == kHeadDim) [[likely]] {
#pragma unroll
      for (int step = 0; step < kHeadDim / 16; ++step) {
#pragma unroll
        for (int r = 0; r < 4; ++r) bits[step][r] = __ldg(rows[r % 2] + step * 8 + r / 2 * 4);
      }
      return;
    }
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        bits[step][r] = __ldg(rows[r % 2] + min_of(step * 8 + r / 2 * 4, p.head_dim / 2 - 4));
      }
    }
  }

  __device__ __forceinline__ void take_queries(const QueryBits& bits) {
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      uint32_t a[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const bool inside = step * 16 + r / 2 * 8 < p.head_dim;
        a[r] = inside ? (bits[step][r] & p.q_keep) ^ p.q_flip : 0;
      }
      if constexpr (Config::kQInRegisters) {
#pragma unroll
        for (int r = 0; r < 4; ++r) q[step][r] = a[r];
      } else {
        q_slot(step) = {a[0], a[1], a[2], a[3]};
      }
    }
  }

  // The same through shared memory, behind this warp's finished rows, where it has its rows alone: asked for a part ahead.
  // PERF: asked for when the part begins they come behind all chunks that are in flight.
  static constexpr int32_t kAheadRow = kHeadDim / 2 + 4;  // words; 4 more, so that eight rows lie in different banks
  __device__ __forceinline__ uint32_t (*queries_ahead() const)[kAheadRow] {
    static_assert(!Config::kByWarpgroups || sizeof(shared.o[0]) >= 2 * kTileRows * kAheadRow * 4);
    return reinterpret_cast<uint32_t (*)[kAheadRow]>(shared.o[threadIdx.x / 32]) + kTileRows;
  }
  __device__ __forceinline__ void ask_queries_ahead(const Sequence& s) const {
    constexpr int32_t kParts = kHeadDim / 8;  // 16-byte parts of a row
    const Element* base =
        static_cast<const Element*>(p.q.data) + s.batch * p.q.stride_batch + s.first_row * p.q.stride_seq;
    const int32_t part = lane() % kParts;
    // SYNC: a sequence without keys may have been asked for and passed over.
    sm90::wait_for_copies();
#pragma unroll
    for (int32_t n = 0; n < kTileRows * kParts / 32; ++n) {
      const int32_t row = n * (32 / kParts) + lane() / kParts;
      const RowPlace& place = shared.rows[first_row + row];
      const bool inside = place.query < s.queries && part * 8 < p.head_dim;
      sm90::copy_async_16(static_cast<uint32_t>(__cvta_generic_to_shared(&queries_ahead()[row][part * 4])),
                          base + (inside ? place.q_offset + part * 8 : 0), inside ? 16 : 0);
    }
  }
  __device__ __forceinline__ void take_queries_ahead(QueryBits& bits) const {
    sm90::wait_for_copies();
    __syncwarp();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        bits[step][r] = queries_ahead()[lane() / 4 + r % 2 * 8][step * 8 + r / 2 * 4 + lane() % 4];
      }
    }
    // SYNC: they are read, before others are asked for.
    __syncwarp();
  }

  // Brings the queries of a sequence, of all tiles, to the L2; by two threads for each row. PERF: behind the chunks that are
  // in flight they would take microseconds from memory.
  __device__ __forceinline__ void prefetch_queries(const Sequence& s, int32_t thread) const {
    if (thread < 2 * Config::kGroupRows) prefetch_row(s, thread / 2, thread % 2 * 64, 128);
  }

  // Columns `first`, first + step … of one of them, 64 together.
  __device__ __forceinline__ void prefetch_row(const Sequence& s, int32_t row, int32_t first, int32_t step) const {
    const RowPlace& place = shared.rows[row];
    if (place.query >= s.queries) return;
    const Element* from = static_cast<const Element*>(p.q.data) + s.batch * p.q.stride_batch +
                          s.first_row * p.q.stride_seq + place.q_offset;
    for (int32_t column = first; column < p.head_dim; column += step) sm90::prefetch_l2(from + column);
  }

  // After shared.keys is written.
  __device__ __forceinline__ void begin_part(const Sequence& s) {
#pragma unroll
    for (int e = 0; e < kHeadDim / 2; ++e) o[e] = 0.0f;
    softmax = attn::OnlineSoftmax();
    int4 keys = shared.keys[first_row + lane() % kTileRows];
    if constexpr (Config::kByWarpgroups) {
      // SYNC: of a warpgroup's rows, so that its warps agree on what they do with a chunk: wgmmas need all of them.
      const int32_t row = first_row / sm90::kWarpgroupRows * sm90::kWarpgroupRows + lane();
      const int4 other = shared.keys[row + 32];
      keys = shared.keys[row];
      keys.z = max_of(keys.z, other.z);
      keys.w = min_of(keys.w, other.w);
    }
    whole.begin = __reduce_max_sync(~0u, keys.z);
    whole.end = __reduce_min_sync(~0u, keys.w);
    if (Options<Config>{p}.tree()) whole.end = min_of(whole.end, s.kv_len - s.queries);
    if (p.selected != nullptr) [[unlikely]] {
      // Of the pages in use only the last one, which the last one listed may be, can end behind what all rows see.
      const int32_t last_begins = (s.kv_len - 1) / p.page_size * p.page_size;
      const bool all_before = whole.begin <= 0 && whole.end >= last_begins;
      whole_chunks = {0, all_before ? max_of(s.pages - 1, 0) * p.page_size / kChunk : 0};
      return;
    }
    const int32_t shift = s.first_chunks - s.main_begin;
    whole_chunks.begin = max_of(ceil_div(whole.begin, kChunk) + shift, s.first_chunks);
    whole_chunks.end = whole.end / kChunk + shift;
  }

  // ---- A chunk --------------------------------------------------------------------------------------------------------

  // The keys that this lane stands for among the chunk's, 32 apart; kUnbounded: none.
  static constexpr int32_t kLaneKeys = max_of(kChunk / 32, 1);
  __device__ __forceinline__ void own_keys(const Sequence& s, int32_t number, int32_t (&own)[kLaneKeys]) const {
#pragma unroll
    for (int32_t i = 0; i < kLaneKeys; ++i) own[i] = own_key(s, number, lane() + 32 * i);
  }
  __device__ __forceinline__ int32_t own_key(const Sequence& s, int32_t number, int32_t offset) const {
    if (p.selected == nullptr) return s.chunk(number) * kChunk + offset;
    const int32_t key = number * kChunk + offset;
    const int32_t listed = static_cast<int32_t>(static_cast<uint32_t>(key) / static_cast<uint32_t>(p.page_size));
    if (listed >= s.pages) return kUnbounded;
    const int32_t page = p.selected[int64_t{s.batch} * p.selected_stride + listed].x;
    return page * p.page_size + key - listed * p.page_size;
  }

  __device__ __forceinline__ uint4& q_slot(int32_t step) const {
    return reinterpret_cast<uint4(*)[32]>(shared.o[threadIdx.x / 32])[step][lane()];
  }
  __device__ __forceinline__ void q_fragment(int32_t step, uint32_t (&a)[4]) const {
    if constexpr (Config::kQInRegisters) {
#pragma unroll
      for (int r = 0; r < 4; ++r) a[r] = q[step][r];
    } else {
      const uint4 x = q_slot(step);
      a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
    }
  }

  // S = Q K^T by a warpgroup: its four warps together.
  using ChunkTile = sm90::RowMajorTile<kChunk, kHeadDim>;
  __device__ __forceinline__ void scores_by_warpgroup(float (&s)[kChunk / 2], uint32_t k) const {
    using K = sm90::KMajor<ChunkTile>;
    const uint64_t tile = K::descriptor(k);
    sm90::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      sm90::Wgmma<kChunk, Element>::template rs<false>(s, q[step], tile + K::step(step), step > 0);
    }
    sm90::wgmma_commit();
    sm90::wgmma_wait<0>();
    sm90::pin_registers(s);
  }

  // O += P V, likewise.
  __device__ __forceinline__ void add_values_by_warpgroup(const uint32_t (&weights)[kChunk / 16][4], uint32_t v) {
    using V = sm90::MnMajor<ChunkTile>;
    const uint64_t tile = V::descriptor(v);
    sm90::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) {
      sm90::Wgmma<kHeadDim, Element>::template rs<true>(o, weights[step], tile + V::step(step), true);
    }
    sm90::wgmma_commit();
    sm90::wgmma_wait<0>();
    sm90::pin_registers(o);
  }

  // S = Q K^T.
  __device__ __forceinline__ void scores(float (&s)[kChunk / 2], uint32_t k) const {
#pragma unroll
    for (int e = 0; e < kChunk / 2; ++e) s[e] = 0.0f;
    uint32_t rows[kChunk / 16];
#pragma unroll
    for (int n = 0; n < kChunk / 16; ++n) {
      rows[n] = k + layout.row(n * 16 + lane() / 16 * 8) + lane() % 8 * sm90::kSwizzleRowBytes +
                sm90::swizzled_chunk(lane(), lane() / 8 % 2) * 16;
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (kGroups > 2 && group * 64 >= p.head_dim) break;
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        uint32_t a[4];
        q_fragment(group * 4 + step, a);
#pragma unroll
        for (int n = 0; n < kChunk / 16; ++n) {
          uint32_t b[4];
          sm90::ldmatrix_x4(b, rows[n] ^ (step * 32));
          sm90::mma_m16n8k16<Element>(s + 8 * n, a, b[0], b[1]);
          sm90::mma_m16n8k16<Element>(s + 8 * n + 4, a, b[2], b[3]);
        }
      }
#pragma unroll
      for (int n = 0; n < kChunk / 16; ++n) rows[n] += layout.group_bytes();
    }
  }

  // O += P V.
  __device__ __forceinline__ void add_values(const uint32_t (&weights)[kChunk / 16][4], uint32_t v) {
    uint32_t rows[kChunk / 16];
#pragma unroll
    for (int n = 0; n < kChunk / 16; ++n) {
      rows[n] = v + layout.row(n * 16 + lane() / 8 % 2 * 8) + lane() % 8 * sm90::kSwizzleRowBytes +
                sm90::swizzled_chunk(lane(), lane() / 16) * 16;
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (kGroups > 2 && group * 64 >= p.head_dim_v) break;
#pragma unroll
      for (int n = 0; n < kChunk / 16; ++n) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          uint32_t b[4];
          sm90::ldmatrix_x4_trans(b, rows[n] ^ (pair * 32));
          float* target = o + group * 32 + pair * 8;
          sm90::mma_m16n8k16<Element>(target, weights[n], b[0], b[1]);
          sm90::mma_m16n8k16<Element>(target + 4, weights[n], b[2], b[3]);
        }
        rows[n] += layout.group_bytes();
      }
    }
  }

  // Of both rows of this thread, which of the chunk's keys they see: bit = column.
  using Seen = uint32_t[2][kLaneKeys];

  // PERF: all of it is short: a part's last chunk alone needs it, so that it comes from memory.
  __device__ __forceinline__ void find_seen(const Sequence& sequence, const int32_t (&own)[kLaneKeys],
                                            Seen& seen) const {
    if (p.selected == nullptr && !Options<Config>{p}.tree()) [[likely]] {
      // Keys in a row.
#pragma unroll
      for (int slot = 0; slot < 2; ++slot) {
        const int4 keys = shared.keys[first_row + lane() / 4 + 8 * slot];
#pragma unroll
        for (int32_t i = 0; i < kLaneKeys; ++i) {
          const int32_t from = own[i] - lane();
          seen[slot][i] = ones_below(keys.y - from) & ~ones_below(keys.x - from) |
                          ones_below(keys.w - from) & ~ones_below(keys.z - from);
        }
      }
      return;
    }
    // Row by row, a lane for each key.
#pragma unroll 4
    for (int32_t row = 0; row < kTileRows; ++row) {
#pragma unroll
      for (int32_t i = 0; i < kLaneKeys; ++i) {
        const uint32_t bits = __ballot_sync(~0u, lane() < kChunk && is_seen(sequence, first_row + row, own[i]));
        if (row == lane() / 4) seen[0][i] = bits;
        if (row == lane() / 4 + 8) seen[1][i] = bits;
      }
    }
  }

  // The lowest n bits.
  static __device__ __forceinline__ uint32_t ones_below(int32_t n) {
    // NOTE: in C a shift by 32 is undefined; shl gives 0.
    uint32_t above;
    asm("shl.b32 %0, 1, %1;" : "=r"(above) : "r"(clamp(n, 0, 32)));
    return above - 1;
  }

  __device__ __forceinline__ void hide_unseen(float (&s)[kChunk / 2], const Seen& seen) const {
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
#pragma unroll
      for (int pair = 0; pair < kChunk / 8; ++pair) {
        const uint32_t bits = seen[slot][pair / 4] >> lane() % 4 * 2;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if ((bits & 1u << (pair % 4 * 8 + c)) == 0) s[pair * 4 + slot * 2 + c] = attn::kNegativeInfinity;
        }
      }
    }
  }

  __device__ __forceinline__ void apply_alibi(float (&s)[kChunk / 2], const int32_t (&own)[kLaneKeys]) const {
    const float2 alibi[2] = {shared.alibi[first_row + lane() / 4], shared.alibi[first_row + lane() / 4 + 8]};
#pragma unroll
    for (int pair = 0; pair < kChunk / 8; ++pair) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int32_t key = __shfl_sync(~0u, own[pair / 4], (pair * 8 + lane() % 4 * 2 + c) % 32);
#pragma unroll
        for (int slot = 0; slot < 2; ++slot) {
          float& x = s[pair * 4 + slot * 2 + c];
          x = fmaf(-alibi[slot].x, fabsf(static_cast<float>(__float_as_int(alibi[slot].y) - key)), x);
        }
      }
    }
  }

  __device__ __forceinline__ bool is_seen(const Sequence& s, int32_t row, int32_t key) const {
    const int4 keys = shared.keys[row];
    const bool in_first = static_cast<uint32_t>(key - keys.x) < static_cast<uint32_t>(keys.y - keys.x);
    const bool in_main = static_cast<uint32_t>(key - keys.z) < static_cast<uint32_t>(keys.w - keys.z);
    if (Options<Config>{p}.tree()) {
      const int32_t bit = key - (s.kv_len - s.queries);
      if (bit >= 0) return bit < s.queries && (shared.tree[row] >> bit & 1u) != 0;
    }
    return in_first || in_main;
  }

  // Is some value of the chunk NaN or infinite? The same answer in all lanes.
  __device__ __forceinline__ bool has_nonfinite(const char* v) const {
    uint32_t found = 0;
#pragma unroll 4
    for (int32_t at = lane() * 16; at < Config::kSlotBytes; at += 512) {
      const uint4 x = *reinterpret_cast<const uint4*>(v + at);
      found |= nonfinite<Element>(x.x) | nonfinite<Element>(x.y) | nonfinite<Element>(x.z) | nonfinite<Element>(x.w);
    }
    return __any_sync(~0u, found != 0);
  }

  // The same as add_values, in which a row takes only values that it sees: 0 times NaN would be NaN. The weights go through
  // shared memory.
  __device__ __forceinline__ void add_seen_values(const uint32_t (&weights)[kChunk / 16][4], const char* v,
                                                  Seen& seen) {
    constexpr int32_t kBehindQ = Config::kQInRegisters ? 0 : kHeadDim / 16 * 128;  // floats
    constexpr int32_t kColumns = min_of(kChunk, 32);
    // Queries that were asked for ahead lie behind them.
    static_assert(!Config::kByWarpgroups || kTileRows * kColumns <= kTileRows * kAheadRow);
    auto rows = reinterpret_cast<float (*)[kColumns]>(&shared.o[threadIdx.x / 32][0][0] + kBehindQ) + lane() / 4;
#pragma unroll
    for (int32_t i = 0; i < kLaneKeys; ++i) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const int pair = i * (kColumns / 8) + n;
#pragma unroll
        for (int slot = 0; slot < 2; ++slot) {
          *reinterpret_cast<float2*>(&rows[8 * slot][n * 8 + lane() % 4 * 2]) =
              unpack_pair(weights[pair / 2][pair % 2 * 2 + slot], Element{});
        }
      }
      __syncwarp();
      add_seen_keys(rows[0], v, 32 * i, seen[0][i], seen[1][i]);
      // SYNC: the weights are read.
      __syncwarp();
    }
  }

  // Up to 32 keys from `first` on, to which the columns of `weights` belong.
  __device__ __forceinline__ void add_seen_keys(const float* weights, const char* v, int32_t first, uint32_t low_seen,
                                                uint32_t high_seen) {
    const uint32_t any = __reduce_or_sync(~0u, low_seen | high_seen);
#pragma unroll 1
    for (int32_t key = 0; key < min_of(kChunk, 32); ++key) {
      if ((any >> key & 1u) == 0) continue;
      const float weight[2] = {weights[key], weights[8 * min_of(kChunk, 32) + key]};
      const bool sees[2] = {(low_seen >> key & 1u) != 0, (high_seen >> key & 1u) != 0};
      const char* row = v + layout.row(first + key);
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        const uint32_t at = j / 8 * layout.group_bytes() + sm90::swizzled_chunk(key, j % 8) * 16 + lane() % 4 * 4;
        const float2 x = unpack_pair(*reinterpret_cast<const uint32_t*>(row + at), Element{});
#pragma unroll
        for (int slot = 0; slot < 2; ++slot) {
          if (!sees[slot]) continue;
          o[4 * j + 2 * slot] = fmaf(weight[slot], x.x, o[4 * j + 2 * slot]);
          o[4 * j + 2 * slot + 1] = fmaf(weight[slot], x.y, o[4 * j + 2 * slot + 1]);
        }
      }
    }
  }

  // S becomes weights, O and the sums follow the rows' references.
  __device__ __forceinline__ void weigh(float (&s)[kChunk / 2], uint32_t (&weights)[kChunk / 16][4]) {
    if (softmax.outgrown(s)) {
      float factor[2];
      softmax.raise(s, p.scale_log2, p.inverse_scale_log2, factor);
      attn::scale_rows(o, factor);
    }
    softmax.template exponentiate<Element>(s, weights, p.scale_log2);
  }

  // ---- A part's end ---------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void store(int32_t warp) {
    auto& rows = shared.o[warp];
    const int32_t row = lane() / 4, column = lane() % 4 * 2;
#pragma unroll
    for (int j = 0; j < kHeadDim / 8; ++j) {
      *reinterpret_cast<float2*>(&rows[row][j * 8 + column]) = {o[4 * j], o[4 * j + 1]};
    }
    // PERF: most calls have no more than eight rows.
    if (p.part_rows > first_row + 8) {
#pragma unroll
      for (int j = 0; j < kHeadDim / 8; ++j) {
        *reinterpret_cast<float2*>(&rows[row + 8][j * 8 + column]) = {o[4 * j + 2], o[4 * j + 3]};
      }
    }
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const float2 ml = row_ml(slot);
      if (lane() % 4 == 0) shared.ml[warp][row + 8 * slot] = ml;
    }
  }

  // Reference and sum of a row.
  __device__ __forceinline__ float2 row_ml(int slot) const {
    float sum = softmax.sum[slot];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    return {softmax.reference[slot], sum};
  }

  // No other warp has a part of this one's rows.
  __device__ __forceinline__ bool has_rows_alone() const {
    return Config::kByWarpgroups && kTileRows << p.row_tiles_log2 == Config::kGroupRows;
  }
};

}  // namespace flashmsa::decode
