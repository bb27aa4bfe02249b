// From a bool mask of blocks to sorted lists of cells of 128 x 128, by kernels or on the CPU. No torch, no CUDA headers.
//
// A cell is whole where all its pairs inside the lengths are allowed, mixed where some are. Each cell row's entries are
// its whole cells, ascending, then its mixed ones, ascending.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/types.h"
#include "cpu/forward.h"

namespace flashmsa::blocks {

inline constexpr int32_t kCell = 128;  // rows and keys of a cell
inline constexpr int32_t kHalf = 64;  // block sizes are multiples of it
inline constexpr int32_t kTileWords = kCell / 32;  // of a row of a bit tile
inline constexpr int32_t kMaxCapacity = INT32_MAX;  // entries are numbered by int32

struct ListParams {
  int32_t batch = 0, heads = 0;  // of the lists
  int32_t len_q = 0, len_kv = 0;
  int32_t block_q = 0, block_kv = 0;  // multiples of 64

  // Bytes, zero or not: (batch, heads, ceil(len_q / block_q), ceil(len_kv / block_kv)). Strides in elements, any.
  const uint8_t* blocks = nullptr;
  int64_t blocks_stride_batch = 0, blocks_stride_head = 0, blocks_stride_row = 0, blocks_stride_key = 0;

  // Or nullptr: every pair of a set block is allowed. (batch, heads, len_q, len_kv): only those set here too.
  const uint8_t* mask = nullptr;
  int64_t mask_stride_batch = 0, mask_stride_head = 0, mask_stride_row = 0, mask_stride_key = 0;

  // Entries beyond `capacity`, and mixed cells beyond `tile_capacity` (where there is a mask), are dropped.
  int32_t capacity = kMaxCapacity, tile_capacity = kMaxCapacity;

  int32_t* row_start = nullptr;  // (batch, heads, cell rows + 1): index of each row's first entry, over everything
  int32_t* whole_count = nullptr;  // (batch, heads, cell rows): how many of its entries are whole
  int32_t* cells = nullptr;  // (capacity): an entry's cell column
  // (capacity): -1 of a whole cell. Of a mixed one without mask 4 bits, bit 2a + b: its 64-row half a and 64-key half b
  // is set (and begins inside the lengths); with mask the index of its bit tile.
  int32_t* detail = nullptr;
  uint32_t* bits = nullptr;  // (tile_capacity, 128, 4): bit k of word w of a row is its key 32w + k; with mask only

  FLASHMSA_HD int32_t cell_rows() const { return static_cast<int32_t>((int64_t{len_q} + kCell - 1) / kCell); }
  FLASHMSA_HD int32_t cell_columns() const { return static_cast<int32_t>((int64_t{len_kv} + kCell - 1) / kCell); }
  FLASHMSA_HD int64_t rows() const { return int64_t{batch} * heads * cell_rows(); }
};

// Entries and bit tiles of a mask, capacities aside.
struct Totals {
  int64_t entries = 0;
  int64_t tiles = 0;
};

// Bytes of workspace for one list: O(cell rows), and with a mask one byte a cell; 16-byte aligned, its content does not
// matter. The capacities do not count.
size_t list_workspace_size(const ListParams& params);

// Writes row_start and whole_count, as the capacities allow, and leaves what fill_list needs in the workspace, whose first
// 16 bytes are a Totals. Capacities may be lowered between the two to no less than the totals. Both launch on `stream` (a cudaStream_t), do not synchronise and can be captured.
void count_list(const ListParams& params, void* workspace, void* stream);
// Writes cells, detail and bits; entries that no row holds are left as they are.
void fill_list(const ListParams& params, void* workspace, void* stream);

// On host memory; the workspace as above.
void count_list_cpu(const ListParams& params, void* workspace, const cpu::ParallelFor& parallel_for);
void fill_list_cpu(const ListParams& params, void* workspace, const cpu::ParallelFor& parallel_for);

}  // namespace flashmsa::blocks
