// Tensor maps, and TMA loads and stores through them: every element of a tile, and nothing beside it.
#include <memory>
#include <stdexcept>

#include "gpu_test.cuh"
#include "sm90/tensor_map.h"
#include "sm90/tma.cuh"

namespace flashmsa::test {
namespace {

using sm90::Barrier;
using sm90::kPlainRank;
using sm90::kStridedRank;
using sm90::SwizzledTile;
using sm90::TensorExtent;
using sm90::TensorMap;

struct Place {
  int32_t row, head, batch;
  int32_t residue = 0;
  int32_t column = 0;  // of stores
};

// ---- Layouts ----------------------------------------------------------------------------------------------------------

// A tensor inside its storage, in elements. `first` leaves room for what lies before it.
struct Layout {
  const char* name;
  TensorExtent extent;
  int64_t stride_batch, stride_head, stride_seq;
  int64_t first = 1024;
  int64_t stride_residue = 0;

  int64_t index(const Place& place, int32_t row, int32_t column) const {
    return first + place.batch * stride_batch + place.head * stride_head + place.residue * stride_residue +
           row * stride_seq + column;
  }
  int64_t storage() const {
    const Place last = {extent.length - 1, extent.heads - 1, extent.batch - 1, extent.residues - 1};
    return index(last, last.row, extent.head_dim - 1) + 1025;
  }
  TensorRef ref(uint16_t* storage) const {
    return {storage + first, stride_batch, stride_head, stride_seq, stride_residue};
  }
  bool has(int32_t row, int32_t column) const { return row < extent.length && column < extent.head_dim; }
};

Layout contiguous(TensorExtent e) {
  const int64_t d = e.head_dim;
  return {"contiguous", e, e.heads * e.length * d, e.length * d, d};
}
Layout transposed(TensorExtent e) {
  const int64_t d = e.head_dim;
  return {"transposed", e, e.length * e.heads * d, d, e.heads * d};
}
// The middle one of a (batch, length, 3, heads, head_dim) tensor.
Layout packed(TensorExtent e) {
  const int64_t d = e.head_dim;
  return {"packed", e, e.length * 3 * e.heads * d, d, 3 * e.heads * d, 1024 + e.heads * d};
}
Layout padded_rows(TensorExtent e) {
  const int64_t d = e.head_dim + 8;
  return {"padded rows", e, e.heads * e.length * d, e.length * d, d};
}
Layout expanded_heads(TensorExtent e) { return {"expanded heads", e, int64_t{e.length} * e.head_dim, 0, e.head_dim}; }
Layout expanded_batches(TensorExtent e) {
  return {"expanded batches", e, 0, int64_t{e.length} * e.head_dim, e.head_dim};
}
Layout expanded_both(TensorExtent e) { return {"expanded heads and batches", e, 0, 0, e.head_dim}; }

// A layout's rows as sequences of every `dilation`-th row. Where that does not divide the length the first sequences have a
// row more than the others: one layout for each of the two. Strides that count nothing are -1, which no map holds.
std::vector<Layout> dilated(const Layout& whole, int32_t dilation) {
  const int32_t length = whole.extent.length, longer = length % dilation;
  std::vector<Layout> parts;
  const auto add = [&](int32_t begin, int32_t end, int32_t rows) {
    if (begin == end || rows == 0) return;
    Layout part = whole;
    part.name = "dilated";
    part.extent.length = rows;
    part.extent.residues = end - begin;
    part.first += begin * whole.stride_seq;
    part.stride_residue = end - begin > 1 ? whole.stride_seq : -1;
    part.stride_seq = rows > 1 ? whole.stride_seq * dilation : -1;
    parts.push_back(part);
  };
  add(0, longer, length / dilation + 1);
  add(longer, dilation, length / dilation);
  return parts;
}

// Some divide the length, one is longer than short lengths.
std::vector<int32_t> dilations(int32_t length) { return {1, 2, 3, 7, 64, std::min(length + 5, 70)}; }

// ---- Loads ------------------------------------------------------------------------------------------------------------

template <class Tile>
struct LoadPlan {
  alignas(1024) char tile[Tile::kBytes];
  Barrier full;
};

// Block i brings places[i] and copies the tile out as it lies.
template <class Tile, int kRank>
__global__ void load_kernel(const __grid_constant__ TensorMap map, const Place* places, char* tiles) {
  auto& shared = shared_as<LoadPlan<Tile>>();
  // What TMA does not write must show.
  for (uint32_t i = threadIdx.x; i < Tile::kBytes; i += blockDim.x) shared.tile[i] = 0x5A;
  // SYNC: these writes come before TMA's.
  sm90::fence_async_proxy();
  if (threadIdx.x == 0) {
    sm90::prefetch_map(map);
    shared.full.init(1);
    sm90::fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const Place place = places[blockIdx.x];
    shared.full.arrive_expect(Tile::kBytes);
    sm90::load_tile<Tile, kRank>(shared.tile, map, place.row, {place.head, place.batch, place.residue}, shared.full);
  }
  shared.full.wait(0);
  block_copy(tiles + size_t{blockIdx.x} * Tile::kBytes, shared.tile, Tile::kBytes);
}

// Rows at the start, in the middle, over the end, and past it; heads, batches and residues at random and the last ones.
template <class Tile>
std::vector<Place> load_places(Random& random, const TensorExtent& e) {
  std::vector<Place> places;
  for (const int32_t row : {0, 1, 13, Tile::kRows, e.length - Tile::kRows, e.length - 1, e.length, e.length + 12345}) {
    if (row < 0) continue;
    places.push_back(
        {row, random.between(0, e.heads - 1), random.between(0, e.batch - 1), random.between(0, e.residues - 1)});
  }
  places.push_back({0, e.heads - 1, e.batch - 1, e.residues - 1});
  return places;
}

// `value` gives the element of a place that the tensor has.
template <class Tile, int kRank, class Value>
void check_load(const Layout& layout, const TensorMap& map, const std::vector<Place>& places, const Value& value) {
  const TensorExtent& e = layout.extent;
  DeviceArray<Place> device_places(places);
  DeviceArray<char> tiles(places.size() * Tile::kBytes);
  launch(load_kernel<Tile, kRank>, static_cast<int>(places.size()), 128, sizeof(LoadPlan<Tile>), map,
         device_places.data(), tiles.data());
  const std::vector<char> bytes = tiles.read();
  for (size_t i = 0; i < places.size(); ++i) {
    const Place& place = places[i];
    for (int32_t r = 0; r < Tile::kRows; ++r) {
      for (int32_t c = 0; c < Tile::kColumns; ++c) {
        uint16_t found;
        std::memcpy(&found, &bytes[i * Tile::kBytes + Tile::offset(r, c)], 2);
        const bool inside = layout.has(place.row + r, c);
        const uint16_t wanted = inside ? value(place, place.row + r, c) : 0;
        EXPECT(found == wanted,
               "%s %d x %d x %d x %d x %d: row %d + %d, residue %d, head %d, batch %d, column %d: %04x, not %04x",
               layout.name, e.batch, e.heads, e.residues, e.length, e.head_dim, place.row, r, place.residue, place.head,
               place.batch, c, found, wanted);
      }
    }
  }
}

template <class Tile, int kRank = kPlainRank>
void check_load(Random& random, const Layout& layout) {
  const std::vector<uint16_t> storage = random_patterns(random, layout.storage());
  DeviceArray<uint16_t> device(storage);
  const DType dtype = random.coin() ? DType::kBF16 : DType::kF16;
  const TensorMap map = sm90::make_tile_map<Tile>(layout.ref(device.data()), layout.extent, dtype, "x", kRank);
  check_load<Tile, kRank>(
      layout, map, load_places<Tile>(random, layout.extent),
      [&](const Place& place, int32_t row, int32_t column) { return storage[layout.index(place, row, column)]; });
}

GPU_TEST(load_tile_shapes) {
  check_load<SwizzledTile<16, 64>>(random, contiguous({2, 3, 100, 64}));
  check_load<SwizzledTile<192, 64>>(random, contiguous({2, 3, 500, 64}));
  check_load<SwizzledTile<128, 128>>(random, contiguous({2, 3, 300, 128}));
  check_load<SwizzledTile<64, 256>>(random, contiguous({2, 3, 150, 256}));
  check_load<SwizzledTile<256, 64>>(random, contiguous({2, 3, 600, 64}));
}

// Columns past head_dim read as zero, also where the next row's elements lie there, and so do whole groups of 64.
GPU_TEST(load_head_dims) {
  for (const int32_t head_dim : {8, 40, 56, 64}) {
    check_load<SwizzledTile<64, 64>>(random, contiguous({2, 2, 77, head_dim}));
    check_load<SwizzledTile<64, 64>>(random, transposed({2, 2, 77, head_dim}));
  }
  for (const int32_t head_dim : {8, 40, 72, 96, 120}) {
    check_load<SwizzledTile<64, 128>>(random, contiguous({2, 2, 77, head_dim}));
    check_load<SwizzledTile<64, 128>>(random, transposed({2, 2, 77, head_dim}));
  }
  for (const int32_t head_dim : {8, 72, 136, 200, 248}) {
    check_load<SwizzledTile<64, 256>>(random, contiguous({2, 2, 77, head_dim}));
  }
}

// Rows past the length read as zero, also where the next head begins there.
GPU_TEST(load_lengths) {
  for (const int32_t length : {1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129}) {
    check_load<SwizzledTile<64, 64>>(random, contiguous({2, 3, length, 64}));
    check_load<SwizzledTile<128, 128>>(random, transposed({2, 3, length, 128}));
  }
}

GPU_TEST(load_strides) {
  for (const int32_t head_dim : {64, 40, 128, 72}) {
    check_load<SwizzledTile<64, 128>>(random, transposed({2, 5, 100, head_dim}));
    check_load<SwizzledTile<64, 128>>(random, packed({2, 5, 100, head_dim}));
    check_load<SwizzledTile<64, 128>>(random, padded_rows({2, 5, 100, head_dim}));
  }
}

GPU_TEST(load_expanded) {
  for (const int32_t head_dim : {64, 40, 128}) {
    check_load<SwizzledTile<64, 128>>(random, expanded_heads({3, 5, 100, head_dim}));
    check_load<SwizzledTile<64, 128>>(random, expanded_batches({3, 5, 100, head_dim}));
    check_load<SwizzledTile<64, 128>>(random, expanded_both({3, 5, 100, head_dim}));
  }
}

// A dimension of one element may have any stride, also one that a map cannot hold.
GPU_TEST(load_meaningless_strides) {
  check_load<SwizzledTile<64, 64>>(random, {"one head", {2, 1, 50, 64}, 50 * 64, 3, 64});
  check_load<SwizzledTile<64, 64>>(random, {"one batch", {1, 2, 50, 64}, -5, 50 * 64, 64});
  check_load<SwizzledTile<64, 64>>(random, {"one row", {2, 2, 1, 64}, 128, 64, 1});
}

// More than 2^31 elements between two batches, more than 2^32 bytes between two heads.
GPU_TEST(load_far_strides) {
  using Tile = SwizzledTile<64, 64>;
  Layout layout = {"far", {2, 2, 100, 64}, (int64_t{1} << 31) + 64 * 1000, (int64_t{1} << 31) + 64 * 5000, 64, 0};
  const int64_t piece = int64_t{layout.extent.length} * 64;
  const std::vector<uint16_t> values = random_patterns(random, 4 * piece);
  uint16_t* device = nullptr;
  FLASHMSA_CHECK_CUDA(cudaMalloc(&device, (layout.index({0, 1, 1}, 0, 0) + piece) * 2));
  const std::unique_ptr<uint16_t, cudaError_t (*)(void*)> owner(device, cudaFree);
  for (int32_t b = 0; b < 2; ++b) {
    for (int32_t h = 0; h < 2; ++h) {
      FLASHMSA_CHECK_CUDA(cudaMemcpy(device + layout.index({0, h, b}, 0, 0), &values[(2 * b + h) * piece], piece * 2,
                                     cudaMemcpyHostToDevice));
    }
  }
  const TensorMap map = sm90::make_tile_map<Tile>(layout.ref(device), layout.extent, DType::kBF16, "x");
  check_load<Tile, kPlainRank>(layout, map, {{0, 0, 0}, {50, 0, 1}, {50, 1, 0}, {99, 1, 1}},
                               [&](const Place& place, int32_t row, int32_t column) {
                                 return values[(2 * place.batch + place.head) * piece + row * 64 + column];
                               });
}

// A strided map of one sequence is what a plain one is.
GPU_TEST(load_strided_one_sequence) {
  check_load<SwizzledTile<128, 128>, kStridedRank>(random, contiguous({2, 3, 300, 128}));
  check_load<SwizzledTile<192, 64>, kStridedRank>(random, transposed({2, 5, 300, 40}));
  check_load<SwizzledTile<32, 256>, kStridedRank>(random, expanded_heads({3, 5, 100, 200}));
  check_load<SwizzledTile<64, 64>, kStridedRank>(random, {"one row", {2, 2, 1, 64}, 128, 64, 1});
}

// Every dilation-th row, also where the dilation does not divide the length, and where it is longer: rows past a sequence's
// end read as zero, although others begin there.
template <class Tile>
void check_dilated_load(Random& random, const Layout& whole) {
  for (const int32_t dilation : dilations(whole.extent.length)) {
    for (const Layout& part : dilated(whole, dilation)) check_load<Tile, kStridedRank>(random, part);
  }
}

GPU_TEST(load_dilated) {
  for (const int32_t length : {1, 64, 130, 400}) {
    check_dilated_load<SwizzledTile<64, 64>>(random, contiguous({2, 3, length, 64}));
    check_dilated_load<SwizzledTile<64, 128>>(random, transposed({2, 3, length, 72}));
    check_dilated_load<SwizzledTile<128, 128>>(random, packed({2, 3, length, 128}));
    check_dilated_load<SwizzledTile<32, 256>>(random, expanded_heads({2, 3, length, 256}));
    check_dilated_load<SwizzledTile<64, 64>>(random, expanded_both({2, 3, length, 40}));
  }
}

// ---- Maps that the driver refuses -------------------------------------------------------------------------------------

void expect_refusal(const TensorRef& tensor, TensorExtent extent, std::initializer_list<const char*> parts,
                    int rank = kPlainRank) {
  std::string text = "no error";
  try {
    sm90::make_tile_map<SwizzledTile<64, 64>>(tensor, extent, DType::kBF16, "keys", rank);
  } catch (const std::runtime_error& error) {
    text = error.what();
  }
  for (const char* part : parts) EXPECT(text.find(part) != std::string::npos, "'%s' is not in: %s", part, text.c_str());
}

GPU_TEST(map_refused_says_every_field) {
  DeviceArray<uint16_t> data(1 << 16);
  expect_refusal({data.data() + 1, 64 * 96, 32 * 96, 96}, {3, 2, 32, 72},
                 {"keys", "address", "type bf16", "dims, byte strides, box: 72/2/64 32/192/64 2/6144/1 3/12288/1"});
  expect_refusal({data.data(), 64 * 100, 32 * 100, 100}, {3, 2, 32, 72},
                 {"keys", " 72/2/64 32/200/64 2/6400/1 3/12800/1"});
  expect_refusal({data.data(), 64 * 96, 32 * 96, 4 * 96, 100}, {3, 2, 8, 72, 4},
                 {" 72/2/64 8/768/64 4/200/1 2/6144/1 3/12288/1"}, kStridedRank);
}

// A tensor without rows has a map too: nothing is ever loaded through it.
GPU_TEST(map_of_an_empty_tensor) {
  DeviceArray<uint16_t> data(64);
  const TensorMap map =
      sm90::make_tile_map<SwizzledTile<64, 64>>({data.data(), 0, 0, 64}, {1, 1, 0, 64}, DType::kF16, "k");
  EXPECT(map.head_step == 0 && map.batch_step == 0, "steps %d, %d", map.head_step, map.batch_step);
}

// ---- Stores -----------------------------------------------------------------------------------------------------------

constexpr int32_t kStores = 2;  // by each warp, one after the other, from the same buffer

// A warp for every 16 rows of the tile: puts them into shared memory, stores them, waits until they are read, and puts the
// next tile's there. What it then finds in memory at its first element goes to `echo`.
template <class Tile, int kRank>
__global__ void store_kernel(const __grid_constant__ TensorMap map, const Place* places, const char* tiles,
                             TensorRef out, TensorExtent extent, uint16_t* echo) {
  auto& shared = shared_as<TilePlan<Tile>>();
  const int32_t lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
  for (int32_t n = blockIdx.x * kStores; n < (blockIdx.x + 1) * kStores; ++n) {
    const Place place = places[n];
    for (int32_t group = 0; group < Tile::kGroups; ++group) {
      const int64_t offset = group * Tile::kGroupBytes + warp_row * sm90::kSwizzleRowBytes;
      const auto* from = reinterpret_cast<const uint4*>(tiles + int64_t{n} * Tile::kBytes + offset);
      for (int32_t i = lane; i < 16 * 8; i += 32) reinterpret_cast<uint4*>(shared.tile + offset)[i] = from[i];
    }
    sm90::fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
      sm90::store_rows<Tile, kRank>(map, shared.tile + warp_row * sm90::kSwizzleRowBytes, place.column,
                                    place.row + warp_row, {place.head, place.batch, place.residue});
      sm90::wait_stores_read();
    }
    __syncwarp();
  }
  if (lane != 0) return;
  sm90::wait_stores();
  const Place last = places[(blockIdx.x + 1) * kStores - 1];
  if (last.row + warp_row >= extent.length || last.column >= extent.head_dim) return;
  echo[threadIdx.x / 32 + blockIdx.x * (blockDim.x / 32)] = *reinterpret_cast<volatile const uint16_t*>(
      static_cast<const uint16_t*>(out.data) + last.batch * out.stride_batch + last.head * out.stride_head +
      last.residue * out.stride_residue + (last.row + warp_row) * out.stride_seq + last.column);
}

// Sequences take two tiles, the first at `first_row`; every third of them and all around them keep their poison.
template <class Tile, int kRank = kPlainRank>
void check_store(Random& random, const Layout& layout, int32_t first_row) {
  const TensorExtent& e = layout.extent;
  constexpr int kWarps = Tile::kRows / 16;
  std::vector<Place> places;
  for (int32_t n = 0; n < e.batch * e.heads * e.residues; ++n) {
    const int32_t residue = n % e.residues, head = n / e.residues % e.heads, batch = n / e.residues / e.heads;
    if ((batch + head + residue) % 3 == 2) continue;  // a neighbour
    for (int32_t column = 0; column < e.head_dim; column += Tile::kColumns) {
      places.push_back({first_row, head, batch, residue, column});
      places.push_back({first_row + Tile::kRows, head, batch, residue, column});
    }
  }
  const std::vector<uint16_t> tiles = random_patterns(random, places.size() * Tile::kBytes / 2);
  const std::vector<uint16_t> poison = random_patterns(random, layout.storage());
  const size_t blocks = places.size() / kStores;
  const DeviceArray<uint16_t> device(poison), device_tiles(tiles), echo(blocks * kWarps);
  const DeviceArray<Place> device_places(places);
  const DType dtype = random.coin() ? DType::kBF16 : DType::kF16;
  const TensorMap map = sm90::make_tensor_map(layout.ref(device.data()), e, dtype, 16, "out", kRank);
  launch(store_kernel<Tile, kRank>, static_cast<int>(blocks), 32 * kWarps, sizeof(TilePlan<Tile>), map,
         device_places.data(), device_tiles.as<const char>(), layout.ref(device.data()), e, echo.data());

  std::vector<uint16_t> wanted = poison;
  const std::vector<uint16_t> echoed = echo.read(), found = device.read();
  for (size_t n = 0; n < places.size(); ++n) {
    const Place& place = places[n];
    const uint16_t* tile = &tiles[n * Tile::kBytes / 2];
    for (int32_t r = 0; r < Tile::kRows; ++r) {
      for (int32_t c = 0; c < Tile::kColumns; ++c) {
        if (!layout.has(place.row + r, place.column + c)) continue;
        wanted[layout.index(place, place.row + r, place.column + c)] = tile[Tile::offset(r, c) / 2];
      }
      if (n % kStores == kStores - 1 && r % 16 == 0 && layout.has(place.row + r, place.column)) {
        EXPECT(echoed[n / kStores * kWarps + r / 16] == tile[Tile::offset(r, 0) / 2], "%s: row %d after wait_stores()",
               layout.name, place.row + r);
      }
    }
  }
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT(found[i] == wanted[i],
           "%s %d x %d x %d x %d x %d, from row %d: element %zu of the storage: %04x, not %04x (%s)", layout.name,
           e.batch, e.heads, e.residues, e.length, e.head_dim, first_row, i, found[i], wanted[i],
           found[i] == poison[i] ? "not written" : "written");
  }
}

GPU_TEST(store_rows_shapes) {
  check_store<SwizzledTile<192, 64>>(random, contiguous({2, 3, 400, 64}), 0);
  check_store<SwizzledTile<128, 128>>(random, contiguous({2, 3, 256, 128}), 0);
  check_store<SwizzledTile<128, 256>>(random, contiguous({2, 3, 256, 256}), 0);
}

// Rows past the length are dropped: the next head begins there.
GPU_TEST(store_rows_clips_rows) {
  for (const int32_t length : {1, 15, 16, 17, 65, 127, 128, 129, 200, 255}) {
    check_store<SwizzledTile<128, 64>>(random, contiguous({2, 3, length, 64}), 0);
    check_store<SwizzledTile<128, 128>>(random, transposed({2, 3, length, 128}), 0);
  }
  check_store<SwizzledTile<128, 64>>(random, contiguous({2, 3, 200, 64}), 13);
  check_store<SwizzledTile<128, 64>>(random, transposed({2, 3, 300, 64}), 121);
}

// Columns past head_dim are dropped: the next row or head begins there.
GPU_TEST(store_rows_clips_columns) {
  for (const int32_t head_dim : {8, 40, 56}) {
    check_store<SwizzledTile<192, 64>>(random, contiguous({2, 3, 300, head_dim}), 0);
    check_store<SwizzledTile<192, 64>>(random, transposed({2, 3, 300, head_dim}), 0);
  }
  for (const int32_t head_dim : {8, 72, 120}) {
    check_store<SwizzledTile<128, 128>>(random, contiguous({2, 3, 200, head_dim}), 0);
    check_store<SwizzledTile<128, 128>>(random, packed({2, 3, 200, head_dim}), 5);
  }
  check_store<SwizzledTile<128, 256>>(random, padded_rows({2, 3, 200, 200}), 0);
}

// A tile narrower than the tensor goes to its columns in turn.
GPU_TEST(store_rows_at_columns) {
  for (const int32_t head_dim : {256, 200, 136, 72}) {
    check_store<SwizzledTile<128, 64>>(random, contiguous({2, 3, 200, head_dim}), 0);
    check_store<SwizzledTile<128, 128>>(random, transposed({2, 3, 200, head_dim}), 0);
  }
}

// Each sequence's rows to their places among the others; rows past its end are dropped, although others begin there.
template <class Tile>
void check_dilated_store(Random& random, const Layout& whole, int32_t first_row) {
  for (const int32_t dilation : dilations(whole.extent.length)) {
    for (const Layout& part : dilated(whole, dilation)) check_store<Tile, kStridedRank>(random, part, first_row);
  }
}

GPU_TEST(store_rows_dilated) {
  for (const int32_t length : {1, 64, 130, 400}) {
    check_dilated_store<SwizzledTile<128, 64>>(random, contiguous({2, 3, length, 64}), 0);
    check_dilated_store<SwizzledTile<128, 128>>(random, transposed({2, 3, length, 72}), 0);
    check_dilated_store<SwizzledTile<192, 64>>(random, packed({2, 3, length, 40}), 5);
    check_dilated_store<SwizzledTile<128, 128>>(random, padded_rows({2, 2, length, 256}), 0);
  }
}

}  // namespace
}  // namespace flashmsa::test

int main(int argc, char** argv) { return flashmsa::test::run_tests(argc, argv); }
