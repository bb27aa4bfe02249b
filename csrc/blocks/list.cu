// The lists of list.h on the device: count the entries of every cell row, scan the counts, fill the lists.
//
//   classify_kernel   with a mask only: what each cell is, a warp a cell
//   count_kernel      a warp a cell row
//   scan_kernel       one CTA
//   fill_kernel       a warp a cell row; reads the blocks again rather than keep what grows with them
//   tile_kernel       with a mask only: a warp a bit tile
#include <cstdint>

#include "blocks/cell.h"
#include "core/cuda_check.h"

namespace flashmsa::blocks {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / 32;
// NOTE: said, because the compiler else aims at more and spills.
constexpr int32_t kCtasOfSm = 4;
constexpr int32_t kScanThreads = 1024;
constexpr int32_t kScanRows = 4;    // of a thread at once
constexpr int32_t kUnroll = 4;      // loads of a lane in flight
constexpr int64_t kMaxCtas = 4096;  // of kernels that walk on

__device__ __forceinline__ int64_t warp_number() { return int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; }
__device__ __forceinline__ int32_t lane_number() { return threadIdx.x % 32; }

// ---- Words of a mask of pairs

// Bit k: byte k of the four is not zero.
__device__ __forceinline__ uint32_t nonzero_bits(uint32_t bytes) {
  return (__vcmpne4(bytes, 0) & 0x01010101u) * 0x01020408u >> 24;
}

__device__ __forceinline__ uint32_t nonzero_bits(const uint4& bytes) {
  return nonzero_bits(bytes.x) | nonzero_bits(bytes.y) << 4 | nonzero_bits(bytes.z) << 8 | nonzero_bits(bytes.w) << 12;
}

// Word `word` of row `row` of a cell whose blocks are `set`. kAligned: 16 bytes of keys can be read at once.
template <bool kAligned>
__device__ __forceinline__ uint32_t cell_word(const ListParams& p, const uint8_t* plane, int32_t cell_row, uint32_t set,
                                              int32_t column, int32_t row, int32_t word) {
  const int64_t query = int64_t{kCell} * cell_row + row;
  const uint32_t inside = inside_word(p, column, word);
  if (query >= p.len_q || inside == 0 || !word_is_set(set, row, word)) return 0;
  const int64_t key = int64_t{kCell} * column + 32 * word;
  const uint8_t* keys = plane + query * p.mask_stride_row + key * p.mask_stride_key;
  if (kAligned && inside == ~0u) {
    const uint4* vectors = reinterpret_cast<const uint4*>(keys);
    return nonzero_bits(vectors[0]) | nonzero_bits(vectors[1]) << 16;
  }
  return read_word(keys, p.mask_stride_key, inside);
}

// What the warp's cell is: a lane takes word lane % 4 of every eighth row.
template <bool kAligned>
__device__ __forceinline__ Cell masked_cell(const ListParams& p, const RowIndex& at, uint32_t set, int32_t column) {
  const uint8_t* plane = mask_plane(p, at);
  const int32_t word = lane_number() % kTileWords;
  const uint32_t inside = inside_word(p, column, word);
  bool any = false, all = true;
#pragma unroll 4
  for (int32_t row = lane_number() / kTileWords; row < kCell; row += 32 / kTileWords) {
    const uint32_t bits = cell_word<kAligned>(p, plane, at.row, set, column, row, word);
    any = any || bits != 0;
    all = all && (bits == inside || int64_t{kCell} * at.row + row >= p.len_q);
  }
  any = __any_sync(~0u, any);
  all = __all_sync(~0u, all);
  return all ? Cell::kWhole : any ? Cell::kMixed : Cell::kAbsent;
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads, kCtasOfSm) classify_kernel(const ListParams p, const Workspace w) {
  const int32_t columns = p.cell_columns();
  const int64_t cells = p.rows() * columns;
  for (int64_t cell = warp_number(); cell < cells; cell += int64_t{gridDim.x} * kWarps) {
    const RowIndex at = row_index(p, cell / columns);
    const int32_t column = static_cast<int32_t>(cell % columns);
    const Quarters q = quarters(p, cell_row(p, at), column);
    const Cell result = q.set == 0 ? Cell::kAbsent : masked_cell<kAligned>(p, at, q.set, column);
    if (lane_number() == 0) w.cells[cell] = static_cast<uint8_t>(result);
  }
}

// ---- Rows of cells

// A lane's cell, and the quarters of it that are set.
struct Seen {
  Cell cell;
  uint32_t set;
};

template <bool kMask>
__device__ __forceinline__ Seen see(const ListParams& p, const Workspace& w, int64_t index, const CellRow& row,
                                    int32_t column) {
  if (column >= p.cell_columns()) return {Cell::kAbsent, 0};
  if constexpr (kMask) {
    return {static_cast<Cell>(w.cells[index * p.cell_columns() + column]), 0};
  } else {
    const Quarters q = quarters(p, row, column);
    return {cell_of(q), q.set};
  }
}

template <bool kMask>
__global__ void __launch_bounds__(kThreads, kCtasOfSm) count_kernel(const ListParams p, const Workspace w) {
  const int64_t index = warp_number();
  if (index >= p.rows()) return;
  const CellRow row = cell_row(p, row_index(p, index));
  int32_t whole = 0, mixed = 0;
  for (int32_t first = 0; first < p.cell_columns(); first += 32 * kUnroll) {
#pragma unroll
    for (int32_t k = 0; k < kUnroll; ++k) {
      const Seen seen = see<kMask>(p, w, index, row, first + 32 * k + lane_number());
      whole += seen.cell == Cell::kWhole;
      mixed += seen.cell == Cell::kMixed;
    }
  }
  whole = __reduce_add_sync(~0u, whole);
  mixed = __reduce_add_sync(~0u, mixed);
  if (lane_number() == 0) w.counts[index] = {whole, mixed};
}

// The sum of `value` over the CTA's threads before this one; `total`: over all. `sums` is free again after a barrier.
__device__ __forceinline__ int64_t sum_before(int64_t value, int64_t (&sums)[kScanThreads / 32], int64_t& total) {
  int64_t sum = value;
#pragma unroll
  for (int32_t step = 1; step < 32; step *= 2) {
    const int64_t below = __shfl_up_sync(~0u, sum, step);
    if (lane_number() >= step) sum += below;
  }
  if (lane_number() == 31) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  const int64_t of_warp = sums[lane_number()];
  int64_t before = lane_number() < static_cast<int32_t>(threadIdx.x / 32) ? of_warp : 0;
  total = of_warp;
#pragma unroll
  for (int32_t step = 16; step > 0; step /= 2) {
    before += __shfl_xor_sync(~0u, before, step);
    total += __shfl_xor_sync(~0u, total, step);
  }
  return before + sum - value;
}

// Which entries a row keeps depends on the mixed cells before it, where each of them needs a tile; where it starts, on
// the entries that rows before it keep.
__global__ void __launch_bounds__(kScanThreads) scan_kernel(const ListParams p, const Workspace w) {
  __shared__ int64_t tile_sums[kScanThreads / 32], entry_sums[kScanThreads / 32];
  const int64_t rows = p.rows();
  Totals totals;
  int64_t kept_entries = 0;
  for (int64_t base = 0; base < rows; base += kScanThreads * kScanRows) {
    const int64_t first = base + int64_t{threadIdx.x} * kScanRows;
    RowCount count[kScanRows];
    int64_t mixed = 0, total;
#pragma unroll
    for (int32_t k = 0; k < kScanRows; ++k) {
      count[k] = first + k < rows ? w.counts[first + k] : RowCount{0, 0};
      mixed += count[k].mixed;
    }
    const int64_t tiles_before = totals.tiles + sum_before(mixed, tile_sums, total);
    totals.tiles += total;

    int64_t tiles = tiles_before, kept = 0;
#pragma unroll
    for (int32_t k = 0; k < kScanRows; ++k) {
      kept += count[k].whole + keep_row(p, count[k], 0, tiles).mixed;
      totals.entries += count[k].whole + count[k].mixed;
      tiles += count[k].mixed;
    }
    int64_t entries = kept_entries + sum_before(kept, entry_sums, total);
    kept_entries += total;

    tiles = tiles_before;
#pragma unroll
    for (int32_t k = 0; k < kScanRows; ++k) {
      const int64_t index = first + k;
      if (index < rows) {
        const RowKept row = keep_row(p, count[k], entries, tiles);
        const int64_t at = start_index(p, index);
        w.tile_before[index] = static_cast<int32_t>(min_of<int64_t>(tiles, kMaxCapacity));
        p.row_start[at] = row.start;
        if (index % p.cell_rows() == p.cell_rows() - 1) p.row_start[at + 1] = row.end;
        p.whole_count[index] = row.whole;
        entries += count[k].whole + row.mixed;
        tiles += count[k].mixed;
      }
    }
  }
  // A thread has summed the entries of its own rows.
  int64_t all_entries;
  __syncthreads();
  sum_before(totals.entries, entry_sums, all_entries);
  if (threadIdx.x == 0) {
    *w.totals = {all_entries, totals.tiles};
    w.tile_before[rows] = static_cast<int32_t>(min_of<int64_t>(totals.tiles, kMaxCapacity));
  }
}

template <bool kMask>
__global__ void __launch_bounds__(kThreads, kCtasOfSm) fill_kernel(const ListParams p, const Workspace w) {
  const int64_t index = warp_number();
  if (index >= p.rows()) return;
  const int64_t start = p.row_start[start_index(p, index)];
  const int64_t end = p.row_start[start_index(p, index) + 1];
  if (start >= end) return;
  const CellRow row = cell_row(p, row_index(p, index));
  const uint32_t below = (1u << lane_number()) - 1;
  const int64_t first_mixed = start + w.counts[index].whole;
  const int32_t first_tile = kMask ? w.tile_before[index] : 0;
  int64_t whole_at = start, mixed_at = first_mixed;
  for (int32_t first = 0; first < p.cell_columns(); first += 32 * kUnroll) {
    Seen seen[kUnroll];
#pragma unroll
    for (int32_t k = 0; k < kUnroll; ++k) seen[k] = see<kMask>(p, w, index, row, first + 32 * k + lane_number());
#pragma unroll
    for (int32_t k = 0; k < kUnroll; ++k) {
      const uint32_t whole = __ballot_sync(~0u, seen[k].cell == Cell::kWhole);
      const uint32_t mixed = __ballot_sync(~0u, seen[k].cell == Cell::kMixed);
      const bool is_whole = seen[k].cell == Cell::kWhole;
      const int64_t at = is_whole ? whole_at + __popc(whole & below) : mixed_at + __popc(mixed & below);
      if (seen[k].cell != Cell::kAbsent && at < end) {
        p.cells[at] = first + 32 * k + lane_number();
        const int64_t of_mixed = kMask ? first_tile + (at - first_mixed) : seen[k].set;
        p.detail[at] = is_whole ? -1 : static_cast<int32_t>(of_mixed);
      }
      whole_at += __popc(whole);
      mixed_at += __popc(mixed);
    }
  }
}

// The row whose mixed cells hold tile `tile`: the last with tile_before[row] <= tile that has any.
__device__ __forceinline__ int64_t row_of_tile(const ListParams& p, const Workspace& w, int32_t tile) {
  int64_t low = 0, high = p.rows();
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (w.tile_before[middle + 1] > tile) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads, kCtasOfSm) tile_kernel(const ListParams p, const Workspace w) {
  const int64_t tiles = min_of<int64_t>(w.totals->tiles, p.tile_capacity);
  for (int64_t tile = warp_number(); tile < tiles; tile += int64_t{gridDim.x} * kWarps) {
    const int64_t index = row_of_tile(p, w, static_cast<int32_t>(tile));
    const int64_t start = p.row_start[start_index(p, index)];
    const int64_t entry = start + w.counts[index].whole + (tile - w.tile_before[index]);
    // Dropped: no entry holds the tile.
    if (entry >= p.row_start[start_index(p, index) + 1]) continue;
    const RowIndex at = row_index(p, index);
    const int32_t column = p.cells[entry];
    const uint32_t set = quarters(p, cell_row(p, at), column).set;
    const uint8_t* plane = mask_plane(p, at);
    uint32_t* bits = p.bits + tile * (kCell * kTileWords);
#pragma unroll 4
    for (int32_t i = lane_number(); i < kCell * kTileWords; i += 32) {
      bits[i] = cell_word<kAligned>(p, plane, at.row, set, column, i / kTileWords, i % kTileWords);
    }
  }
}

// ---- Launches

uint32_t ctas_of(int64_t warps) { return static_cast<uint32_t>((warps + kWarps - 1) / kWarps); }

bool is_aligned(const ListParams& p) {
  const int64_t strides = p.mask_stride_batch | p.mask_stride_head | p.mask_stride_row;
  return p.mask_stride_key == 1 &&
         (reinterpret_cast<uintptr_t>(p.mask) % 16 | static_cast<uint64_t>(strides) % 16) == 0;
}

}  // namespace

void count_list(const ListParams& p, void* workspace, void* stream_handle) {
  cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  const Workspace w = workspace_at(p, workspace);
  const int64_t cells = p.rows() * p.cell_columns();
  if (p.mask != nullptr && cells > 0) {
    const auto kernel = is_aligned(p) ? classify_kernel<true> : classify_kernel<false>;
    kernel<<<ctas_of(min_of(cells, kMaxCtas * kWarps)), kThreads, 0, stream>>>(p, w);
    FLASHMSA_CHECK_CUDA(cudaGetLastError());
  }
  if (p.rows() > 0) {
    const auto kernel = p.mask != nullptr ? count_kernel<true> : count_kernel<false>;
    kernel<<<ctas_of(p.rows()), kThreads, 0, stream>>>(p, w);
    FLASHMSA_CHECK_CUDA(cudaGetLastError());
  }
  scan_kernel<<<1, kScanThreads, 0, stream>>>(p, w);
  FLASHMSA_CHECK_CUDA(cudaGetLastError());
}

void fill_list(const ListParams& p, void* workspace, void* stream_handle) {
  cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  const Workspace w = workspace_at(p, workspace);
  if (p.rows() == 0 || p.cell_columns() == 0) return;
  const auto fill = p.mask != nullptr ? fill_kernel<true> : fill_kernel<false>;
  fill<<<ctas_of(p.rows()), kThreads, 0, stream>>>(p, w);
  FLASHMSA_CHECK_CUDA(cudaGetLastError());
  if (p.mask == nullptr || p.tile_capacity == 0) return;
  const auto tile = is_aligned(p) ? tile_kernel<true> : tile_kernel<false>;
  tile<<<ctas_of(min_of<int64_t>(p.tile_capacity, kMaxCtas * kWarps)), kThreads, 0, stream>>>(p, w);
  FLASHMSA_CHECK_CUDA(cudaGetLastError());
}

}  // namespace flashmsa::blocks
