// From PagedParams to a launch, for one kernel instance; and the table entry that describes it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <type_traits>

#include "core/cuda_check.h"
#include "decode/kernel.cuh"
#include "decode/prepare.h"
#include "decode/table.h"

namespace flashmsa::decode {

inline constexpr int32_t kMostParts = 256;  // of a sequence by num_splits
inline constexpr int64_t kMostEntries = int64_t{1}
                                        << 30;  // of lists of pages, some of which are brought to the L2 ahead
// PERF: up to kShortClusterKeys no warp has more than two chunks, and more warps only take longer to merge. Up to kClusterKeys a
// cluster a sequence and head is faster than all SMs and a merge through memory; up to kLongClusterKeys where clusters, of 16
// CTAs if so many find room, fill the SMs. Their CTAs do not spread evenly over the SMs, which longer sequences feel. With
// lengths that the host does not know up to kUnequalClusterKeys: clusters that are left alone read at most twice as fast.
inline constexpr int32_t kShortClusterKeys = 2048, kClusterKeys = 8192, kUnequalClusterKeys = 32768,
                         kLongClusterKeys = 49152;
// PERF: slots of a box of long streams. Its columns come 64 at a time, so that the halves of a longer box's rows come from memory
// apart: with 32 slots 1 to 3 % slower, with 8 the same. Where the latency counts, fewer boxes are faster.
inline constexpr int32_t kStreamPiece = 16;
// PERF: streams of at most a few times the L2 are faster when they leave it at once; what it holds stays there for the next call.
inline constexpr int64_t kStayBytes = int64_t{40} << 20, kEvictFirstBytes = int64_t{240} << 20;
// The same of listed pages, some of which are brought there ahead.
inline constexpr int64_t kEvictFirstListedBytes = int64_t{320} << 20;

// Lets the kernel have its shared memory, and clusters of 16 CTAs.
template <class Config>
cudaError_t allow_clusters() {
  const auto kernel = cluster_decode_kernel<Config>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared<Config>));
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

// A launch of clusters of `size` CTAs. `attribute` outlives it.
template <class Config>
cudaLaunchConfig_t cluster_config(int32_t size, int32_t jobs, int32_t batch, cudaLaunchAttribute& attribute) {
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = size;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(size, jobs, batch);
  config.blockDim = dim3(Config::kThreads);
  config.dynamicSmemBytes = sizeof(Shared<Config>);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return config;
}

// The grid of one call and its workspace; from shapes alone.
struct Grid {
  int32_t capacity;  // keys of a sequence
  int32_t rows, row_groups, row_tiles_log2;
  int32_t jobs;  // kv heads x groups of rows
  Plan plan;
  bool wide;  // twice the warps
  bool by_warpgroups;
  int32_t slices, parts, ctas;
  bool shared;  // sequences may be cut: parts and their marks
  int64_t parts_in_all;
  size_t arrived, part_ml, part_o, selected, selected_count, bytes;  // offsets, and the end
};

// NOTE: causal with one query a sequence forbids nothing.
inline bool is_banded(const PagedParams& p) {
  BandArgs band = p.band;
  if (band.right[0] >= p.len_q - 1) band.right[0] = kUnbounded;
  return mask::Composite::bounded(band) || p.tree_bits != nullptr;
}

// A call for the plain kernels.
inline bool is_plain(const PagedParams& p) {
  return !is_banded(p) && p.alibi_slopes == nullptr && !(p.softcap > 0) && p.sinks == nullptr &&
         p.cu_seqlens_q == nullptr;
}

// All sequences have the same work, as far as the host can tell.
inline bool equal_work(const PagedParams& p) {
  return p.kv_lens == nullptr && p.query_pages == nullptr && p.cu_seqlens_q == nullptr && !is_banded(p);
}

// The same, or masks hide from each row no key but such as come behind it, so that the last one sees all keys.
inline bool equal_keys(const PagedParams& p) {
  BandArgs band = p.band;
  if (band.right[0] >= 0) band.right[0] = kUnbounded;
  return p.kv_lens == nullptr && p.query_pages == nullptr && p.cu_seqlens_q == nullptr && p.tree_bits == nullptr &&
         !mask::Composite::bounded(band);
}

// Clusters of a size that run at once on the current device; 0 where there is none.
template <class Config>
int32_t clusters_at_once(int32_t size) {
  constexpr int kDevices = 64;
  static std::atomic<int32_t> known[kDevices][2] = {};  // and 1
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  std::atomic<int32_t>& slot = known[device % kDevices][size == 16];
  if (const int32_t found = slot.load(std::memory_order_relaxed); found > 0) return found - 1;
  int count = 0;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = cluster_config<Config>(size, 1, 1, attribute);
  if (allow_clusters<Config>() != cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&count, cluster_decode_kernel<Config>, &config) != cudaSuccess) {
    count = 0;
    cudaGetLastError();
  }
  slot.store(count + 1, std::memory_order_relaxed);
  return count;
}

template <class Kernels>
inline constexpr bool kHasWarpgroups = !std::is_void_v<typename Kernels::RowsShares>;

// Chooses clusters, where they are best.
template <class Kernels>
bool choose_clusters(const PagedParams& p, int32_t num_sms, Grid& grid) {
  const int64_t clusters = int64_t{p.batch} * grid.jobs;
  if (p.cu_seqlens_q != nullptr || clusters == 0 || clusters * 8 > num_sms || grid.capacity > kLongClusterKeys)
    return false;
  grid.wide = grid.capacity > kShortClusterKeys && grid.capacity <= kClusterKeys &&
              clusters <= clusters_at_once<typename Kernels::WideCluster>(8);
  grid.slices = 8;
  if (!grid.wide) {
    if (grid.capacity > kClusterKeys && clusters * 16 <= num_sms &&
        clusters <= clusters_at_once<typename Kernels::PackedCluster>(16)) {
      grid.slices = 16;
    }
    // PERF: many rows without clusters: 1x32768, 128 rows, 127 -> 79 us.
    if (kHasWarpgroups<Kernels> && grid.row_tiles_log2 == 2 && grid.capacity > kClusterKeys) return false;
    const bool fills = clusters * grid.slices * 8 >= num_sms * 7;
    const bool alike =
        equal_work(p) || (p.query_pages == nullptr && !is_banded(p) && grid.capacity <= kUnequalClusterKeys);
    if (grid.capacity > kClusterKeys && !(fills && alike)) return false;
    if (clusters > clusters_at_once<typename Kernels::PackedCluster>(grid.slices)) return false;
  }
  grid.plan = Plan::kCluster;
  grid.ctas = p.batch * grid.jobs * grid.slices;
  return true;
}

// No sequence is cut where a CTA's share begins or ends.
inline bool whole_sequences(const PagedParams& p, const Grid& grid) {
  const int64_t units = ceil_div(grid.capacity, kGrainKeys), total = units * p.batch;
  return equal_work(p) && units > 0 && total % grid.slices == 0 && total / grid.slices % units == 0;
}

// The rows of a kv head to CTAs, `most` to each.
inline void deal_rows(const PagedParams& p, int32_t most, Grid& grid) {
  const int32_t all_rows = p.heads_q / p.heads_kv * p.len_q;
  grid.row_groups = max_of(ceil_div(all_rows, most), 1);
  grid.rows = min_of(all_rows, most);
  grid.row_tiles_log2 = 0;
  while (kTileRows << grid.row_tiles_log2 < grid.rows) ++grid.row_tiles_log2;
  grid.jobs = p.heads_kv * grid.row_groups;
}

// More rows than two tiles of mma.sync hold are for wgmma, where there are keys enough for its longer beginnings and merges;
// whatever the batch, where no batch may change a result.
// PERF: 8 heads of 128 rows: 2x4096 keys .8 times as fast, 4x4096 as fast, 8x4096 1.16 times; of 64 rows 4x4096 1.01 times.
template <class Kernels>
bool takes_warpgroups(const PagedParams& p, int32_t num_sms, const Grid& grid) {
  if (!kHasWarpgroups<Kernels> || grid.row_tiles_log2 < 2) return false;
  if (grid.plan != Plan::kBalanced) return true;
  return int64_t{p.batch} * p.heads_kv * grid.capacity >= int64_t{12} * num_sms * (grid.row_groups > 1 ? 128 : 64);
}

template <class Kernels>
void choose_plan(const PagedParams& p, int32_t num_sms, Grid& grid) {
  grid.parts = 1;
  if (p.num_splits > 0) {
    grid.plan = Plan::kFixed;
    grid.parts = min_of(p.num_splits, kMostParts);
  } else if (p.batch_invariant) {
    grid.plan = Plan::kInvariant;
    grid.parts = kInvariantParts;
  } else if (choose_clusters<Kernels>(p, num_sms, grid)) {
    return;
  } else {
    grid.plan = Plan::kBalanced;
  }
  grid.by_warpgroups = takes_warpgroups<Kernels>(p, num_sms, grid);
  if constexpr (kHasWarpgroups<Kernels>) {
    if (grid.by_warpgroups) deal_rows(p, Kernels::RowsShares::kGroupRows, grid);
  }
  grid.wide = grid.row_tiles_log2 > 0;
  const int64_t units = grid.plan == Plan::kBalanced ? p.batch * ceil_div<int64_t>(grid.capacity, kGrainKeys)
                                                     : int64_t{p.batch} * grid.parts;
  int32_t slices = max_of(num_sms / grid.jobs, 1);
  // Where heads leave many SMs idle, or do not fit at once: several rounds of CTAs, so that the last one weighs less.
  if (slices * grid.jobs * 4 < num_sms * 3 || grid.jobs > num_sms) slices = max_of(4 * num_sms / grid.jobs, 1);
  // PERF: where it costs at most a sixteenth of them, as many slices for each sequence: equal ones then have parts of one CTA
  // each, and no CTA has two.
  if (p.batch > 0 && p.batch <= slices && slices % p.batch * 16 <= slices) slices -= slices % p.batch;
  grid.slices = static_cast<int32_t>(clamp<int64_t>(units, 1, slices));
  grid.ctas = grid.jobs * grid.slices;
}

template <class Kernels>
Grid make_grid(const PagedParams& p, int32_t num_sms) {
  Grid grid = {};
  const int64_t capacity = p.num_pages > 0 ? int64_t{p.max_pages} * p.page_size : 0;
  grid.capacity = static_cast<int32_t>(min_of<int64_t>(capacity, kUnbounded));
  deal_rows(p, kGroupRows, grid);
  choose_plan<Kernels>(p, num_sms, grid);

  grid.shared = grid.plan == Plan::kBalanced ? grid.slices > 1 && !whole_sequences(p, grid)
                                             : grid.plan != Plan::kCluster && grid.parts > 1;
  if (grid.shared) {
    grid.parts_in_all =
        grid.plan == Plan::kBalanced ? int64_t{2} * grid.ctas : int64_t{p.batch} * grid.jobs * grid.parts;
  }
  const auto take = [&](size_t bytes) {
    const size_t place = grid.bytes;
    grid.bytes += (bytes + 15) / 16 * 16;
    return place;
  };
  grid.arrived = take(sizeof(uint64_t) * grid.parts_in_all);
  grid.part_ml = take(sizeof(float2) * grid.parts_in_all * grid.rows);
  grid.part_o = take(sizeof(float) * grid.parts_in_all * grid.rows * p.head_dim_v);
  const size_t listed = p.query_pages != nullptr ? size_t{1} * p.batch * p.pages_per_block : 0;
  grid.selected = take(sizeof(int2) * listed);
  grid.selected_count = take(listed > 0 || p.query_pages != nullptr ? sizeof(int32_t) * p.batch : 0);
  return grid;
}

template <class Kernels>
size_t workspace_bytes(const PagedParams& p, int32_t num_sms) {
  return make_grid<Kernels>(p, num_sms).bytes;
}

template <class Config>
void set_pools(const PagedParams& p, const Grid& grid, KernelParams& params) {
  params.k = p.k_pages;
  params.v = p.v_pages;
  const bool brief = grid.plan == Plan::kCluster && grid.capacity <= kClusterKeys;
  params.piece = brief ? Config::kChunk : min_of(Config::kChunk, kStreamPiece);
  if (Config::kByWarpgroups) params.piece = kWarpgroupPiece;
  if (p.block_table != nullptr || p.query_pages != nullptr) {
    while (p.page_size % params.piece != 0) params.piece /= 2;
  }
  params.by_tma = grid.capacity > 0 && params.piece >= 8 &&
                  sm90::fits_tensor_map(p.k_pages, p.num_pages, p.page_size, p.heads_kv) &&
                  sm90::fits_tensor_map(p.v_pages, p.num_pages, p.page_size, p.heads_kv);
  if (params.by_tma) {
    params.k_map = sm90::make_pool_map(p.k_pages, p.num_pages, p.page_size, p.heads_kv, p.head_dim, p.dtype,
                                       params.piece, Config::kHeadDim, "k_pages");
    params.v_map = sm90::make_pool_map(p.v_pages, p.num_pages, p.page_size, p.heads_kv, p.head_dim_v, p.dtype,
                                       params.piece, Config::kHeadDim, "v_pages");
  } else {
    params.piece = Config::kByWarpgroups ? kWarpgroupPiece : Config::kChunk;
  }
  while (1 << params.piece_log2 < params.piece) ++params.piece_log2;
  const bool listed = p.query_pages != nullptr;
  const int64_t each =
      listed ? min_of(int64_t{p.pages_per_block} * p.page_size, int64_t{grid.capacity}) : grid.capacity;
  const int64_t keys = min_of(p.batch * each, int64_t{p.num_pages} * p.page_size);
  const int64_t bytes = keys * p.heads_kv * (p.head_dim + p.head_dim_v) * 2;
  const bool once =
      grid.row_groups == 1 && bytes > kStayBytes && bytes <= (listed ? kEvictFirstListedBytes : kEvictFirstBytes);
  params.policy = once ? sm90::kEvictFirst : sm90::kEvictNormal;
}

inline void set_score(const PagedParams& p, KernelParams& params) {
  constexpr float kLog2E = 1.44269504088896341f, kMax = std::numeric_limits<float>::max();
  // The softmax wants a scale above 0. Below 0 q changes its sign; at 0 it becomes 0, and any scale will do.
  const double scale = p.scale == 0 ? 1.0 : std::fabs(p.scale);
  params.q_keep = p.scale == 0 ? 0 : ~0u;
  params.q_flip = p.scale < 0 ? 0x80008000 : 0;
  // NOTE: a scale near fp32's end stays finite: infinity times a logit of 0 would be NaN.
  params.scale_log2 = std::min(static_cast<float>(scale) * kLog2E, kMax);
  params.inverse_scale_log2 = 1.0f / params.scale_log2;
  params.softcap = p.softcap > 0;
  params.cap = attn::make_cap(scale, p.softcap);
  params.sinks = p.sinks;
  params.alibi_slopes = p.alibi_slopes;
  params.alibi_stride_batch = p.alibi_stride_batch;
  params.alibi_factor = std::min(static_cast<float>(1.0 / scale), kMax);
}

// A number that no call had before, and that uninitialised memory does not hold but by a chance of 2^-64.
inline uint64_t next_ticket() {
  static std::atomic<uint64_t> calls = [] {
    std::random_device device;
    return uint64_t{device()} << 32 | device();
  }();
  uint64_t x = calls.fetch_add(1, std::memory_order_relaxed);
  // An invertible mix of its bits: neighbours differ in half of them.
  x = (x ^ x >> 32) * 0x9E3779B97F4A7C15;
  x = (x ^ x >> 29) * 0xD6E8FEB86659FD93;
  return x ^ x >> 32;
}

template <class Config>
KernelParams make_params(const PagedParams& p, const Grid& grid, void* workspace) {
  KernelParams params = {};
  set_pools<Config>(p, grid, params);
  set_score(p, params);
  params.q = p.q;
  params.out = p.out;
  params.lse = p.lse;
  params.lse_stride_batch = p.lse_stride_batch;
  params.lse_stride_head = p.lse_stride_head;
  params.lse_stride_seq = p.lse_stride_seq;
  params.cu_seqlens_q = p.cu_seqlens_q;
  params.len_q = p.len_q;
  params.total_q = p.total_q;
  params.batch = p.batch;
  params.heads_q = p.heads_q;
  params.heads_kv = p.heads_kv;
  params.q_heads_per_kv_head = p.heads_q / p.heads_kv;
  params.head_dim = p.head_dim;
  params.head_dim_v = p.head_dim_v;
  params.row_groups = grid.row_groups;
  params.row_tiles_log2 = grid.row_tiles_log2;
  params.part_rows = grid.rows;
  params.num_pages = p.num_pages;
  params.page_size = p.page_size;
  params.capacity = grid.capacity;
  params.block_table = p.block_table;
  params.block_table_stride = p.block_table_stride;
  params.kv_lens = p.kv_lens;
  params.band = p.band;
  params.banded = is_banded(p);
  params.tree_bits = p.tree_bits;
  params.plan = grid.plan;
  params.equal =
      grid.plan == Plan::kBalanced && (equal_keys(p) || p.query_pages != nullptr) && p.batch <= kTable && params.by_tma;
  params.slices = grid.slices;
  params.parts = grid.parts;
  char* space = static_cast<char*>(workspace);
  if (grid.shared) {
    params.arrived = reinterpret_cast<uint64_t*>(space + grid.arrived);
    params.ticket = next_ticket();
    params.part_ml = reinterpret_cast<float2*>(space + grid.part_ml);
    params.part_o = reinterpret_cast<float*>(space + grid.part_o);
  }
  if (p.query_pages != nullptr) {
    params.selected = reinterpret_cast<const int2*>(space + grid.selected);
    params.selected_count = reinterpret_cast<const int32_t*>(space + grid.selected_count);
    params.selected_stride = p.pages_per_block;
  }
  params.waits = params.selected != nullptr;
  return params;
}

template <class Config>
void launch_clusters_of(const Grid& grid, int32_t batch, const KernelParams& params, cudaStream_t stream) {
  // With selected pages it has a kernel before it too, and waits for it as any kernel does.
  FLASHMSA_CHECK_CUDA(allow_clusters<Config>());
  cudaLaunchAttribute attribute;
  cudaLaunchConfig_t config = cluster_config<Config>(grid.slices, grid.jobs, batch, attribute);
  config.stream = stream;
  FLASHMSA_CHECK_CUDA(cudaLaunchKernelEx(&config, cluster_decode_kernel<Config>, params));
}

template <class Config>
void launch_shares_of(const Grid& grid, const KernelParams& params, cudaStream_t stream) {
  const auto kernel = paged_decode_kernel<Config>;
  constexpr size_t kSharedBytes = sizeof(Shared<Config>);
  static_assert(kSharedBytes <= 227 * 1024, "more than a CTA can have");
  FLASHMSA_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  // The kernel's launch, and all it does up to its first merge, overlap the one before (programmatic dependent launch).
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid.jobs, grid.slices);
  config.blockDim = dim3(Config::kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = params.waits ? 1 : 0;
  FLASHMSA_CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, params));
}

template <class Config>
void launch_clusters(const PagedParams& p, const Grid& grid, const KernelParams& params, cudaStream_t stream) {
  if (is_plain(p)) return launch_clusters_of<Plain<Config>>(grid, p.batch, params, stream);
  launch_clusters_of<Config>(grid, p.batch, params, stream);
}

template <class Config>
void launch_shares(const PagedParams& p, const Grid& grid, const KernelParams& params, cudaStream_t stream) {
  if (is_plain(p)) return launch_shares_of<Plain<Config>>(grid, params, stream);
  launch_shares_of<Config>(grid, params, stream);
}

template <class Kernels>
void launch(const PagedParams& p, void* workspace, int32_t num_sms, cudaStream_t stream) {
  if (p.heads_q == 0 || (p.cu_seqlens_q == nullptr && (p.batch == 0 || p.len_q == 0))) return;
  const Grid grid = make_grid<Kernels>(p, num_sms);
  const auto make = [&] {
    if constexpr (kHasWarpgroups<Kernels>) {
      if (grid.by_warpgroups) return make_params<typename Kernels::RowsShares>(p, grid, workspace);
    }
    return make_params<typename Kernels::Shares>(p, grid, workspace);
  };
  const KernelParams params = make();
  if (params.waits) {
    PrepareParams before = {p.query_pages, p.pages_per_block, const_cast<int2*>(params.selected),
                            const_cast<int32_t*>(params.selected_count)};
    const int64_t entries = int64_t{p.batch} * p.pages_per_block;
    if (grid.plan != Plan::kCluster && params.by_tma && entries > 0 && entries <= kMostEntries) {
      before.ahead = {params.k_map, params.v_map, params.piece_log2,
                      grid.slices,  p.heads_kv,   static_cast<int32_t>(entries / grid.slices),
                      params.policy};
    }
    prepare(p, before, grid.capacity, stream);
  }
  if (grid.plan == Plan::kCluster) {
    if (grid.wide) return launch_clusters<typename Kernels::WideCluster>(p, grid, params, stream);
    return launch_clusters<typename Kernels::PackedCluster>(p, grid, params, stream);
  }
  if constexpr (kHasWarpgroups<Kernels>) {
    if (grid.by_warpgroups) return launch_shares<typename Kernels::RowsShares>(p, grid, params, stream);
  }
  if (grid.wide) return launch_shares<typename Kernels::WideShares>(p, grid, params, stream);
  launch_shares<typename Kernels::Shares>(p, grid, params, stream);
}

template <class Element>
inline constexpr DType kDTypeOf = DType::kBF16;
template <>
inline constexpr DType kDTypeOf<__half> = DType::kF16;

template <class Element, int32_t kHeadDim>
KernelEntry make_entry() {
  using Family = Kernels<Element, kHeadDim>;
  using Config = typename Family::Shares;
  constexpr DType kDType = kDTypeOf<Element>;
  KernelInfo info;
  info.name = "decode_d" + std::to_string(kHeadDim) + (kDType == DType::kF16 ? "_fp16" : "_bf16");
  info.dtype = kDType;
  info.head_dim_bucket = kHeadDim;
  info.block_kv = kGrainKeys;
  info.threads = Config::kThreads;
  info.shared_memory = sizeof(Shared<Config>);
  return {info, &workspace_bytes<Family>, &launch<Family>};
}

}  // namespace flashmsa::decode
