// What the decode kernel is given, and its shared memory.
#pragma once

#include "attn/score.cuh"
#include "core/paged.h"
#include "decode/config.h"
#include "sm90/barrier.cuh"
#include "sm90/pool_map.h"

namespace flashmsa::decode {

// How the keys of a sequence are cut into parts.
enum class Plan : int32_t {
  kBalanced,   // every CTA takes the same share of all keys; where it begins and ends, sequences are cut
  kFixed,      // every sequence is cut into `parts`
  kInvariant,  // ... into parts that follow from its own length
  kCluster     // one cluster a sequence and head
};

struct KernelParams {
  sm90::PoolMap k_map, v_map;
  PoolRef k, v;
  bool by_tma;     // else cp.async, row by row
  int32_t piece, piece_log2;  // slots of a page that lie together in a chunk
  uint64_t policy;

  TensorRef q, out;
  float* lse;
  int64_t lse_stride_batch, lse_stride_head, lse_stride_seq;
  const int32_t* cu_seqlens_q;
  int32_t len_q, total_q;
  int32_t batch, heads_q, heads_kv, q_heads_per_kv_head;
  int32_t head_dim, head_dim_v;

  // Row r of a kv head: query r / q_heads_per_kv_head, head r % q_heads_per_kv_head of that kv head's. They are dealt to
  // CTAs in groups of kGroupRows; of a group 2^row_tiles_log2 tiles of 16 rows are in use.
  int32_t row_groups, row_tiles_log2;
  int32_t part_rows;  // rows of a group as parts are stored

  int32_t num_pages, page_size, capacity;
  const int32_t* block_table;
  int64_t block_table_stride;
  const int32_t* kv_lens;
  const int2* selected;            // (batch, selected_stride): (logical, physical) pages, ascending; null: all pages
  const int32_t* selected_count;  // (batch)
  int32_t selected_stride;

  BandArgs band;
  bool banded;
  const int32_t* tree_bits;
  float scale_log2, inverse_scale_log2;
  uint32_t q_keep, q_flip;  // applied to the bits of q: for scales of 0, and below 0
  bool softcap;
  attn::CapParams cap;
  const float* sinks;
  const float* alibi_slopes;
  int64_t alibi_stride_batch;
  float alibi_factor;

  Plan plan;
  bool equal;      // sequences, if any lists of pages are full, that the loaders need no table for: see EqualWalk
  int32_t slices;  // CTAs of a head; clusters: CTAs of one, 8 or 16
  int32_t parts;   // kFixed; kInvariant: at most so many
  float* part_o;   // (parts in all, part_rows, head_dim_v)
  float2* part_ml; // (parts in all, part_rows): reference and sum
  uint64_t* arrived;  // (parts in all): `ticket` where a part is stored; null: no sequence is cut
  uint64_t ticket;    // this call's alone
  bool waits;      // for the kernel before, which makes `selected`
};

// What a plain kernel knows that there is not.
template <class Config>
struct Options {
  const KernelParams& p;

  __device__ __forceinline__ bool banded() const { return !Config::kPlain && p.banded; }
  __device__ __forceinline__ bool tree() const { return !Config::kPlain && p.tree_bits != nullptr; }
  __device__ __forceinline__ bool alibi() const { return !Config::kPlain && p.alibi_slopes != nullptr; }
  __device__ __forceinline__ bool softcap() const { return !Config::kPlain && p.softcap; }
  __device__ __forceinline__ bool sinks() const { return !Config::kPlain && p.sinks != nullptr; }
  __device__ __forceinline__ bool packed() const { return !Config::kPlain && p.cu_seqlens_q != nullptr; }
};

struct Sequence {
  int32_t batch;
  int32_t first_row, queries;  // packed: rows of q; else 0, len_q
  int32_t kv_len;
  int32_t pages;  // selected; else not used
  int32_t first_begin, first_chunks, main_begin, chunks;
  int32_t unit, units;  // chunks of a unit; units

  // The first of the chunk's keys is this times the chunk. Not with selected pages.
  __device__ __forceinline__ int32_t chunk(int32_t number) const {
    return number < first_chunks ? first_begin + number : main_begin + number - first_chunks;
  }
};

// A row of a kv head.
struct RowIndex {
  int32_t query, head;
};

// The same, and where it lies, whatever the sequence.
struct RowPlace {
  int64_t q_offset, out_offset, lse_offset;  // elements, from the sequence's first query and head 0
  int32_t query, head;
};

struct TableEntry {
  Sequence sequence;
  int32_t begin, end;  // in units, from the first of the 32 sequences that a warp wrote together
};

// Where a ring stands.
struct RingPlace {
  int32_t stage = 0;
  uint32_t parity = 0;

  template <int32_t kStages>
  __device__ __forceinline__ void advance() {
    if (++stage < kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

template <class Config>
struct Shared {
  alignas(1024) char slots[Config::kSlots][Config::kSlotBytes];  // a ring of tiles: chunks of K and of V, in turn
  union {
    // Each warp's O at the end of a part; before, fragments of Q that are not in registers, and weights that take the long way.
    alignas(16) float o[Config::kWarps][kTileRows][Config::kORow];
    // When that is stored: parts of this and other CTAs, four columns a thread.
    float4 parts[Config::kClustered ? 1 : Config::kMergedSlots][Config::kAttending];
  };
  float2 parts_ml[Config::kClustered ? 1 : kMergedRows][kMergedParts];
  float2 ml[Config::kWarps][kTileRows];  // reference and sum of each warp's rows
  // Parts of rows that the CTAs of a cluster sent here.
  alignas(16) float pushed[Config::kClustered ? kTileRows : 1][Config::kHeadDim];
  float2 pushed_ml[Config::kClustered ? kTileRows : 1];
  RowPlace rows[Config::kGroupRows];
  int4 keys[Config::kGroupRows];  // of each row: first run, main run
  uint32_t tree[Config::kGroupRows];
  float2 alibi[Config::kGroupRows];  // slope, position (an int32_t's bits)
  sm90::Barrier full[Config::kSlots];  // one arrival and the bytes, or one arrival a lane
  sm90::Barrier empty[Config::kSlots];  // one arrival of every warp that reads the chunk

  sm90::Barrier pushed_full;  // one arrival and the bytes of the parts that were sent here
  TableEntry table[Config::kClustered ? 1 : kTable];  // sequences in a row
  int32_t warp_units[kTable / 32];  // of 32 sequences of the table each
  int32_t table_begin;  // units before the table

  static __device__ __forceinline__ int32_t k_slot(int32_t stage, int32_t chunk) {
    return (stage * Config::kTileChunks + chunk) * 2;
  }
  // Where a sequence of the table begins and ends, in units over all sequences.
  __device__ __forceinline__ int2 units_of(int32_t index) const {
    int32_t before = table_begin;
#pragma unroll 1
    for (int32_t warp = 0; warp < index / 32; ++warp) before += warp_units[warp];
    return {before + table[index].begin, before + table[index].end};
  }
};

}  // namespace flashmsa::decode
