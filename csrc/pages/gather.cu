// Pages to a dense view: a copy, bound by memory.
//
// CTAs of one warp move boxes of slots x heads x head_dim through a ring in shared memory, and no byte passes through registers:
//   1. a lane a page loads the pages of a tile, kStages - 1 tiles ahead; their ids are read one tile earlier still
//   2. when a tile is full, its rows past the length become zero, and one box stores it
// Tiles past a length are not loaded. What is too small for boxes is moved by plain loads and stores. Either way addresses and
// strides are multiples of 16 bytes.
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>

#include "core/cuda_check.h"
#include "pages/pages.h"
#include "sm90/tma.cuh"

namespace flashmsa::pages {
namespace {

// PERF: GB/s read and written, page 16 and 64, of a device copy's 4137: 3 CTAs an SM with 4 x 16 KB 3849 and 3864; 2: 3844,
// 3843; 1: 3040, 3438; 4 with 3 x 16 KB 3844, 3866, with 4 x 8 KB 3794, 3801, with 6 x 8 KB 3781, 3820.
constexpr int32_t kStages = 4;
constexpr int32_t kStageBytes = 16384;
constexpr int32_t kCtasPerSm = 3;
constexpr int32_t kMaxBox = 256;  // of a TMA box's dimension
constexpr int32_t kLanes = 32;
using Word = uint4;  // of what is moved without boxes

// Both tensors of a call, K and V, as the kernels see them.
struct Side {
  CUtensorMap from, to;  // (words, heads, slots, pages) and (words, heads, slots, batch)
  PoolRef pool;
  TensorRef dense;
  int32_t row_bytes;  // of one head at one slot
  int32_t tile_slots;  // a tile: tile_slots x tile_heads rows
  int32_t tile_heads;
  int32_t piece_slots;  // of a tile that lie on one page
  int32_t slot_blocks, head_groups;
};

struct Params {
  Side side[2];
  const int32_t* block_table;
  int64_t block_table_stride;
  const int32_t* kv_lens;
  int32_t num_pages, page_size, heads, batch;
  int32_t length;  // of the dense view: max_pages * page_size
};

__device__ __forceinline__ int32_t used_length(const Params& p, int32_t batch) {
  return p.num_pages > 0 ? clamp(p.kv_lens[batch], 0, p.length) : 0;
}

// NOTE: only for slots before the length; entries behind it are not looked at.
__device__ __forceinline__ int32_t page_of(const Params& p, int32_t batch, int32_t logical) {
  return clamp(p.block_table[batch * p.block_table_stride + logical], 0, p.num_pages - 1);
}

// ---- By boxes ---------------------------------------------------------------------------------------------------------------

struct alignas(128) Ring {
  char stage[kStages][kStageBytes];
  sm90::Barrier full[kStages];  // lane 0 + TMA bytes (1); the warp waits
  int32_t valid[kStages];  // slots of the tile before the length
};

struct Tile {
  int32_t side, batch, slot, head;  // the first
};

// A tile as far as its loads are concerned. Lanes differ in `page`.
struct Source {
  Tile tile;
  int32_t valid;
  int32_t page;
};

struct BoxCopy {
  const Params& p;
  Ring& ring;
  int32_t tiles[2];

  __device__ __forceinline__ int32_t lane() const { return threadIdx.x; }

  __device__ __forceinline__ Tile tile(int32_t index) const {
    Tile t;
    t.side = index >= tiles[0];
    if (t.side == 1) index -= tiles[0];
    const Side& side = p.side[t.side];
    t.head = index % side.head_groups * side.tile_heads;
    index /= side.head_groups;
    t.slot = index % side.slot_blocks * side.tile_slots;
    t.batch = index / side.slot_blocks;
    return t;
  }

  // The slot in the sequence at which this lane's piece begins.
  __device__ __forceinline__ int32_t piece_slot(const Source& source) const {
    return source.tile.slot + lane() * p.side[source.tile.side].piece_slots;
  }
  __device__ __forceinline__ bool loads_piece(const Source& source) const {
    return lane() * p.side[source.tile.side].piece_slots < source.valid;
  }

  __device__ __forceinline__ Source find(int32_t index) const {
    Source source = {tile(index), 0, 0};
    const int32_t left = used_length(p, source.tile.batch) - source.tile.slot;
    source.valid = clamp(left, 0, p.side[source.tile.side].tile_slots);
    if (loads_piece(source)) source.page = page_of(p, source.tile.batch, piece_slot(source) / p.page_size);
    return source;
  }

  __device__ __forceinline__ void load(const Source& source, uint32_t n) {
    const Side& side = p.side[source.tile.side];
    const uint32_t stage = n % kStages;
    const int32_t piece_bytes = side.piece_slots * side.tile_heads * side.row_bytes;
    if (lane() == 0) {
      ring.valid[stage] = source.valid;
      ring.full[stage].arrive_expect(ceil_div(source.valid, side.piece_slots) * piece_bytes);
    }
    __syncwarp();
    if (loads_piece(source)) {
      const int32_t coordinates[4] = {0, source.tile.head, piece_slot(source) % p.page_size, source.page};
      sm90::load_box(ring.stage[stage] + lane() * piece_bytes, side.from, coordinates, ring.full[stage]);
    }
  }

  __device__ __forceinline__ void store(int32_t index, uint32_t n) {
    const Tile t = tile(index);
    const Side& side = p.side[t.side];
    const uint32_t stage = n % kStages;
    ring.full[stage].wait(n / kStages & 1);
    const int32_t valid = ring.valid[stage];
    const int32_t slot_bytes = side.tile_heads * side.row_bytes;
    if (valid < side.tile_slots) {
      for (int32_t at = valid * slot_bytes + lane() * 16; at < side.tile_slots * slot_bytes; at += kLanes * 16) {
        *reinterpret_cast<uint4*>(ring.stage[stage] + at) = uint4{0, 0, 0, 0};
      }
      sm90::fence_async_proxy();
    }
    __syncwarp();
    if (lane() == 0) {
      const int32_t coordinates[4] = {0, t.head, t.slot, t.batch};
      sm90::store_box(side.to, coordinates, ring.stage[stage]);
    }
  }

  __device__ __forceinline__ void run() {
    const int32_t total = tiles[0] + tiles[1];
    const int32_t step = gridDim.x;
    const int32_t first = blockIdx.x;
    const auto index = [&](uint32_t n) { return first + static_cast<int32_t>(n) * step; };
    const auto exists = [&](uint32_t n) { return index(n) < total; };
    for (uint32_t n = 0; n < kStages - 1 && exists(n); ++n) load(find(index(n)), n);
    Source ahead = {};
    if (exists(kStages - 1)) ahead = find(index(kStages - 1));
#pragma unroll 1
    for (uint32_t n = 0; exists(n); ++n) {
      store(index(n), n);
      // SYNC: the store before this one has read its stage, which the next load fills.
      if (lane() == 0) sm90::wait_stores_read<1>();
      __syncwarp();
      if (exists(n + kStages - 1)) load(ahead, n + kStages - 1);
      if (exists(n + kStages)) ahead = find(index(n + kStages));
    }
    if (lane() == 0) sm90::wait_stores();
  }
};

__global__ void __launch_bounds__(kLanes) gather_boxes_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char shared_memory[];
  Ring& ring = *reinterpret_cast<Ring*>(shared_memory);
  if (threadIdx.x == 0) {
    for (int32_t s = 0; s < kStages; ++s) ring.full[s].init(1);
    sm90::fence_barrier_init();
  }
  __syncwarp();
  const auto tiles = [&](const Side& side) { return side.head_groups * side.slot_blocks * p.batch; };
  BoxCopy{p, ring, {tiles(p.side[0]), tiles(p.side[1])}}.run();
}

// Whether a box of a side can be: one begins at a multiple of 128 bytes, and counts its columns in words of 4 bytes.
bool boxes_fit(const Side& side) {
  const int32_t piece_bytes = side.piece_slots * side.tile_heads * side.row_bytes;
  return side.row_bytes <= 4 * kMaxBox && piece_bytes % 128 == 0;
}

// Addresses and strides in multiples of 16 bytes, as both ways ask for. The binding sees to it; an address that is not would
// end the context.
bool aligned(const Side& side, int32_t element_bytes) {
  int64_t all = int64_t{side.row_bytes} | static_cast<int64_t>(reinterpret_cast<uintptr_t>(side.pool.data)) |
                static_cast<int64_t>(reinterpret_cast<uintptr_t>(side.dense.data));
  for (const int64_t stride : {side.pool.stride_page, side.pool.stride_slot, side.pool.stride_head,
                               side.dense.stride_batch, side.dense.stride_seq, side.dense.stride_head}) {
    all |= stride * element_bytes;
  }
  return all % static_cast<int64_t>(sizeof(Word)) == 0;
}

// The largest power of two that is at most x > 0.
int32_t power_below(int32_t x) {
  int32_t power = 1;
  while (power <= x / 2) power *= 2;
  return power;
}

void shape_tiles(Side& side, const Params& p) {
  const int32_t rows = max_of(1, kStageBytes / side.row_bytes);
  // Whichever of slots and heads are neighbours in a page.
  const bool slots_inner = side.pool.stride_slot < side.pool.stride_head;
  side.tile_heads = slots_inner ? 1 : min_of(min_of(p.heads, rows), kMaxBox);
  side.piece_slots = min_of(p.page_size & -p.page_size, power_below(max_of(1, rows / side.tile_heads)));
  side.piece_slots = min_of(side.piece_slots, kMaxBox);
  side.tile_slots = power_below(min_of(min_of(rows / side.tile_heads, kMaxBox), side.piece_slots * kLanes));
  side.slot_blocks = ceil_div(p.length, side.tile_slots);
  side.head_groups = ceil_div(p.heads, side.tile_heads);
}

void make_maps(Side& side, const Params& p, int32_t element_bytes) {
  const sm90::MapFormat format = {CU_TENSOR_MAP_DATA_TYPE_UINT32, CU_TENSOR_MAP_SWIZZLE_NONE,
                                  CU_TENSOR_MAP_L2_PROMOTION_NONE};
  const auto bytes = [&](int64_t stride) { return stride * element_bytes; };
  const sm90::MapDimension words = {side.row_bytes / 4, 4, side.row_bytes / 4};
  const sm90::MapDimension from[4] = {words,
                                      {p.heads, bytes(side.pool.stride_head), side.tile_heads},
                                      {p.page_size, bytes(side.pool.stride_slot), side.piece_slots},
                                      {p.num_pages, bytes(side.pool.stride_page), 1}};
  const sm90::MapDimension to[4] = {words,
                                    {p.heads, bytes(side.dense.stride_head), side.tile_heads},
                                    {p.length, bytes(side.dense.stride_seq), side.tile_slots},
                                    {p.batch, bytes(side.dense.stride_batch), 1}};
  // Without pages nothing is loaded.
  side.from = sm90::encode_map(p.num_pages > 0 ? side.pool.data : side.dense.data, format, from, 4, "the pages");
  side.to = sm90::encode_map(side.dense.data, format, to, 4, "the gathered view");
}

// ---- By loads and stores ----------------------------------------------------------------------------------------------------

constexpr int32_t kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    gather_words_kernel(const __grid_constant__ Params p, int32_t element_bytes) {
  const Side& side = p.side[blockIdx.y];
  const int32_t words = side.row_bytes / static_cast<int32_t>(sizeof(Word));
  const int64_t count = int64_t{p.batch} * p.length * p.heads * words;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
    const int32_t word = static_cast<int32_t>(i % words);
    const int64_t row = i / words;
    const int32_t head = static_cast<int32_t>(row % p.heads);
    const int32_t slot = static_cast<int32_t>(row / p.heads % p.length);
    const int32_t batch = static_cast<int32_t>(row / p.heads / p.length);
    Word value = {};
    if (slot < used_length(p, batch)) {
      const int64_t from = page_of(p, batch, slot / p.page_size) * side.pool.stride_page +
                           slot % p.page_size * side.pool.stride_slot + head * side.pool.stride_head;
      value = reinterpret_cast<const Word*>(static_cast<const char*>(side.pool.data) + from * element_bytes)[word];
    }
    const int64_t to = batch * side.dense.stride_batch + slot * side.dense.stride_seq + head * side.dense.stride_head;
    reinterpret_cast<Word*>(static_cast<char*>(side.dense.data) + to * element_bytes)[word] = value;
  }
}

void launch_words(const Params& p, int32_t element_bytes, int32_t num_sms, cudaStream_t stream) {
  const int32_t row_bytes = max_of(p.side[0].row_bytes, p.side[1].row_bytes);
  const int64_t words = int64_t{p.batch} * p.length * p.heads * row_bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t ctas = min_of(ceil_div(words, int64_t{kThreads}), int64_t{num_sms} * 32);
  gather_words_kernel<<<dim3(static_cast<uint32_t>(ctas), 2), kThreads, 0, stream>>>(p, element_bytes);
}

Params make_params(const GatherParams& g) {
  Params p = {};
  p.block_table = g.block_table;
  p.block_table_stride = g.block_table_stride;
  p.kv_lens = g.kv_lens;
  p.num_pages = g.num_pages;
  p.page_size = g.page_size;
  p.heads = g.heads_kv;
  p.batch = g.batch;
  p.length = g.max_pages * g.page_size;
  p.side[0].pool = g.k_pages;
  p.side[0].dense = g.k;
  p.side[0].row_bytes = g.head_dim * g.element_bytes;
  p.side[1].pool = g.v_pages;
  p.side[1].dense = g.v;
  p.side[1].row_bytes = g.head_dim_v * g.element_bytes;
  return p;
}

}  // namespace

void gather_pages(const GatherParams& g, int32_t num_sms, void* stream_handle) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  Params p = make_params(g);
  if (p.batch == 0 || p.length == 0 || p.heads == 0) return;
  bool boxes = true;
  for (Side& side : p.side) {
    if (!aligned(side, g.element_bytes)) {
      throw std::runtime_error("flashmsa: gather_pages has kernels for rows at multiples of 16 bytes alone");
    }
    shape_tiles(side, p);
    boxes = boxes && boxes_fit(side);
  }
  if (boxes) {
    for (Side& side : p.side) make_maps(side, p, g.element_bytes);
    int64_t tiles = 0;
    for (const Side& side : p.side) tiles += int64_t{side.head_groups} * side.slot_blocks * p.batch;
    FLASHMSA_CHECK_CUDA(
        cudaFuncSetAttribute(gather_boxes_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Ring)));
    const uint32_t ctas = static_cast<uint32_t>(min_of(tiles, int64_t{num_sms} * kCtasPerSm));
    gather_boxes_kernel<<<ctas, kLanes, sizeof(Ring), stream>>>(p);
  } else {
    launch_words(p, g.element_bytes, num_sms, stream);
  }
  FLASHMSA_CHECK_CUDA(cudaGetLastError());
}

}  // namespace flashmsa::pages
