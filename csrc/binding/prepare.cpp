// Schemas, checks and dispatch of the operators that prepare masks. Sizes are checked as SymInt, so that the same checks
// serve a tracer.
#include "binding/prepare.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "binding/arguments.h"
#include "binding/build.h"

namespace flashmsa::binding {
namespace {

using at::Tensor;
using at::TensorList;
using c10::SymInt;

constexpr int64_t kMaxCount = std::numeric_limits<int32_t>::max();  // batches, heads, entries

// ---- Checks

void check_tensor(const char* name, const Tensor& tensor, at::ScalarType dtype, int64_t dim, const char* shape) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, name, ": dtype ", dtype_name(tensor.scalar_type()), "; must be ",
                   dtype_name(dtype));
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, name, ": layout ", tensor.layout(),
                   " is not supported; must be torch.strided");
  TORCH_CHECK_VALUE(tensor.dim() == dim, name, ": shape ", tensor.sym_sizes(), "; must be ", shape);
}

void check_length(const char* name, const SymInt& length) {
  TORCH_CHECK_VALUE(length >= 0 && within(length, kMaxLength), name, ": ", length,
                    " is not supported; must be from 0 to ", kMaxLength);
}

void check_same_device(const char* name, const Tensor& tensor, const char* first_name, const Tensor& first) {
  TORCH_CHECK_VALUE(tensor.device() == first.device(), name, ": on ", tensor.device(), ", ", first_name, " is on ",
                    first.device());
}

void check_int32(const char* name, const Tensor& tensor) {
  check_tensor(name, tensor, at::kInt, 3, "(batch, heads, length)");
  check_length(name, tensor.sym_size(2));
  TORCH_CHECK_VALUE(within(tensor.sym_size(0), kMaxCount) && within(tensor.sym_size(1), kMaxCount), name, ": shape ",
                    tensor.sym_sizes(), " is above the limit of ", kMaxCount, " batches or heads");
}

// The batch of two tensors of which one may have a single batch for all.
SymInt common_batch(const char* name_a, const SymInt& a, const char* name_b, const SymInt& b) {
  TORCH_CHECK_VALUE(a == b || a == 1 || b == 1, name_b, ": batch ", b, " does not match ", name_a, "'s ", a,
                    "; must be the same, or 1");
  return a == 1 ? b : a;
}

// The heads of two tensors of which one's may each serve a group of the other's.
SymInt common_heads(const char* name_a, const SymInt& a, const char* name_b, const SymInt& b) {
  const SymInt& few = a < b ? a : b;
  const SymInt& many = a < b ? b : a;
  TORCH_CHECK_VALUE(few > 0 ? many % few == 0 : many == 0 || many == 1, name_b, ": ", b, " heads do not match ", name_a,
                    "'s ", a, "; one must divide the other");
  return few == 0 ? few : many;
}

// ---- Addresses

// With a unit last stride: `tensor` itself, or a copy.
Tensor with_unit_stride(const Tensor& tensor) {
  return tensor.size(-1) <= 1 || tensor.stride(-1) == 1 ? tensor : tensor.contiguous();
}

int64_t shared_stride(const Tensor& tensor, int64_t dim) { return tensor.size(dim) == 1 ? 0 : tensor.stride(dim); }

hash::Plane<const int32_t> plane_of(const Tensor& tensor) {
  return {tensor.const_data_ptr<int32_t>(), shared_stride(tensor, 0), shared_stride(tensor, 1)};
}

int32_t to_int(int64_t value) { return static_cast<int32_t>(value); }

// ---- bucket_sort

void check_sort(const Tensor& bucket) { check_int32("bucket", bucket); }

template <class Device>
Tensor bucket_sort_on(const Tensor& bucket_argument) {
  check_sort(bucket_argument);
  Device::check_device("bucket", bucket_argument.device());
  const c10::DeviceGuard guard(bucket_argument.device());
  const Tensor bucket = with_unit_stride(bucket_argument);
  Tensor order = at::empty(bucket.sizes(), bucket.options());
  if (order.numel() == 0) return order;
  hash::SortParams params;
  params.bucket = plane_of(bucket);
  params.order = order.mutable_data_ptr<int32_t>();
  params.batch = to_int(bucket.size(0));
  params.heads = to_int(bucket.size(1));
  params.length = to_int(bucket.size(2));
  Device::sort(params, bucket.device());
  return order;
}

Tensor bucket_sort_meta(const Tensor& bucket) {
  check_sort(bucket);
  return at::empty_symint(bucket.sym_sizes(), bucket.options());
}

// ---- bucket_rows

using Pair = std::tuple<Tensor, Tensor>;

void check_order(const char* bucket_name, const Tensor& bucket, const char* order_name, const Tensor& order,
                 const char* length_name, int64_t length) {
  check_int32(bucket_name, bucket);
  check_int32(order_name, order);
  check_same_device(order_name, order, bucket_name, bucket);
  TORCH_CHECK_VALUE(bucket.sym_sizes() == order.sym_sizes(), order_name, ": shape ", order.sym_sizes(),
                    " does not match ", bucket_name, "'s ", bucket.sym_sizes());
  TORCH_CHECK_VALUE(bucket.sym_size(2) == length, length_name, ": ", length, " does not match ", bucket_name,
                    "'s length ", bucket.sym_size(2));
}

// Shape of the result.
std::array<SymInt, 3> check_rows(const Tensor& q_bucket, const Tensor& q_order, const Tensor& kv_bucket,
                                 const Tensor& kv_order, int64_t len_q, int64_t len_kv) {
  check_order("q_bucket", q_bucket, "q_order", q_order, "len_q", len_q);
  check_order("kv_bucket", kv_bucket, "kv_order", kv_order, "len_kv", len_kv);
  check_same_device("kv_bucket", kv_bucket, "q_bucket", q_bucket);
  return {common_batch("q_bucket", q_bucket.sym_size(0), "kv_bucket", kv_bucket.sym_size(0)),
          common_heads("q_bucket", q_bucket.sym_size(1), "kv_bucket", kv_bucket.sym_size(1)), SymInt(len_q)};
}

template <class Device>
Pair bucket_rows_on(const Tensor& q_bucket, const Tensor& q_order, const Tensor& kv_bucket, const Tensor& kv_order,
                    bool causal, int64_t len_q, int64_t len_kv) {
  const auto sizes = check_rows(q_bucket, q_order, kv_bucket, kv_order, len_q, len_kv);
  Device::check_device("q_bucket", q_bucket.device());
  const c10::DeviceGuard guard(q_bucket.device());
  const std::array<Tensor, 4> inputs{with_unit_stride(q_bucket), with_unit_stride(q_order), with_unit_stride(kv_bucket),
                                     with_unit_stride(kv_order)};
  Tensor begin = at::empty_symint(sizes, q_bucket.options());
  Tensor end = at::empty_symint(sizes, q_bucket.options());
  if (begin.numel() == 0) return {begin, end};
  hash::IntervalParams params;
  params.q_bucket = plane_of(inputs[0]);
  params.q_order = plane_of(inputs[1]);
  params.kv_bucket = plane_of(inputs[2]);
  params.kv_order = plane_of(inputs[3]);
  params.begin = begin.mutable_data_ptr<int32_t>();
  params.end = end.mutable_data_ptr<int32_t>();
  params.batch = to_int(begin.size(0));
  params.heads = to_int(begin.size(1));
  params.heads_q = to_int(q_bucket.size(1));
  params.heads_kv = to_int(kv_bucket.size(1));
  params.len_q = to_int(len_q);
  params.len_kv = to_int(len_kv);
  params.causal = causal;
  Device::intervals(params, q_bucket.device());
  return {begin, end};
}

Pair bucket_rows_meta(const Tensor& q_bucket, const Tensor& q_order, const Tensor& kv_bucket, const Tensor& kv_order,
                      bool, int64_t len_q, int64_t len_kv) {
  const auto sizes = check_rows(q_bucket, q_order, kv_bucket, kv_order, len_q, len_kv);
  return {at::empty_symint(sizes, q_bucket.options()), at::empty_symint(sizes, q_bucket.options())};
}

// ---- gather_rows, scatter_rows

// Shape of one result: x's, with the batch and heads of whichever has more.
std::vector<SymInt> check_move(const Tensor& x, const Tensor& order) {
  TORCH_CHECK_VALUE(x.dim() == 3 || x.dim() == 4, "x: shape ", x.sym_sizes(),
                    "; must be (batch, heads, length) or (batch, heads, length, dim)");
  TORCH_CHECK_TYPE(x.layout() == at::kStrided, "x: layout ", x.layout(), " is not supported; must be torch.strided");
  check_int32("order", order);
  check_same_device("order", order, "x", x);
  TORCH_CHECK_VALUE(x.sym_size(2) == order.sym_size(2), "order: length ", order.sym_size(2), " does not match x's ",
                    x.sym_size(2));
  const SymInt bytes = x.dim() == 4 ? x.sym_size(3) * x.element_size() : SymInt(x.element_size());
  TORCH_CHECK_VALUE(bytes == 4 || (bytes % 16 == 0 && bytes <= kMaxLength), "x: rows of ", bytes,
                    " bytes; must be a multiple of 16, or 4");
  std::vector<SymInt> sizes = x.sym_sizes().vec();
  sizes[0] = common_batch("x", sizes[0], "order", order.sym_size(0));
  sizes[1] = common_heads("x", sizes[1], "order", order.sym_size(1));
  return sizes;
}

void check_jobs(TensorList xs, TensorList orders) {
  TORCH_CHECK_VALUE(xs.size() == orders.size(), "orders: ", orders.size(), " tensors for ", xs.size(), " of xs");
  TORCH_CHECK_VALUE(xs.size() <= hash::kMaxRowsJobs, "xs: ", xs.size(), " tensors; one call takes up to ",
                    hash::kMaxRowsJobs);
  for (const Tensor& x : xs) check_same_device("xs", x, "xs[0]", xs[0]);
}

// Rows where they lie, or a copy whose rows are aligned.
Tensor with_aligned_rows(const Tensor& x, int64_t row_bytes) {
  const int64_t alignment = row_bytes == 4 ? 4 : 16;
  bool good = x.dim() == 3 || x.size(3) <= 1 || x.stride(3) == 1;
  good = good && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % alignment == 0;
  for (int64_t dim = 0; dim < 3; ++dim) {
    good = good && (x.size(dim) == 1 || x.stride(dim) * x.element_size() % alignment == 0);
  }
  return good ? x : x.clone(at::MemoryFormat::Contiguous);
}

hash::RowsRef rows_of(const void* data, const Tensor& x) {
  const int64_t bytes = x.element_size();
  return {const_cast<void*>(data), shared_stride(x, 0) * bytes, shared_stride(x, 1) * bytes, x.stride(2) * bytes};
}

hash::RowsJob make_job(const Tensor& x, const Tensor& order, const Tensor& result, int64_t row_bytes, bool scatter) {
  hash::RowsJob job;
  job.from = rows_of(x.const_data_ptr(), x);
  job.to = rows_of(result.mutable_data_ptr(), result);
  job.order = plane_of(order);
  job.batch = to_int(result.size(0));
  job.heads = to_int(result.size(1));
  job.length = to_int(result.size(2));
  job.from_group = job.heads / to_int(x.size(1));
  job.order_group = job.heads / to_int(order.size(1));
  job.row_bytes = to_int(row_bytes);
  job.scatter = scatter;
  return job;
}

template <class Device, bool kScatter>
std::vector<Tensor> move_rows_on(TensorList xs, TensorList orders) {
  check_jobs(xs, orders);
  std::vector<Tensor> results, kept;
  std::vector<hash::RowsJob> jobs;
  if (xs.empty()) return results;
  const c10::DeviceGuard guard(xs[0].device());
  for (size_t i = 0; i < xs.size(); ++i) {
    const std::vector<SymInt> sizes = check_move(xs[i], orders[i]);
    Device::check_device("xs", xs[i].device());
    results.push_back(at::empty_symint(sizes, xs[i].options()));
    const Tensor& result = results.back();
    if (result.numel() == 0) continue;
    const int64_t row_bytes = (result.dim() == 4 ? result.size(3) : 1) * result.element_size();
    kept.push_back(with_aligned_rows(xs[i], row_bytes));
    kept.push_back(with_unit_stride(orders[i]));
    jobs.push_back(make_job(kept[kept.size() - 2], kept.back(), result, row_bytes, kScatter));
  }
  Device::move(jobs.data(), to_int(static_cast<int64_t>(jobs.size())), xs[0].device());
  return results;
}

std::vector<Tensor> move_rows_meta(TensorList xs, TensorList orders) {
  check_jobs(xs, orders);
  std::vector<Tensor> results;
  for (size_t i = 0; i < xs.size(); ++i) {
    results.push_back(at::empty_symint(check_move(xs[i], orders[i]), xs[i].options()));
  }
  return results;
}

using Move = std::vector<Tensor>(TensorList, TensorList);

// Gradients are attention's affair; here none is dropped in silence.
template <bool kScatter>
std::vector<Tensor> move_rows_autograd(c10::DispatchKeySet keys, TensorList xs, TensorList orders) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(kScatter ? "flashmsa::scatter_rows" : "flashmsa::gather_rows", "")
                             .typed<Move>();
  for (const Tensor& x : xs) {
    TORCH_CHECK_NOT_IMPLEMENTED(!x.requires_grad() || !at::GradMode::is_enabled(),
                                "xs: requires grad, but moving rows has no backward pass; call under torch.no_grad()");
    TORCH_CHECK_NOT_IMPLEMENTED(!x._fw_grad(/*level=*/0).defined(),
                                "xs: carries a forward-mode tangent, but moving rows has no derivative; detach it");
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return op.redispatch(keys & c10::after_ADInplaceOrView_keyset, xs, orders);
}

// ---- block_list

using List = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

struct ListArguments {
  const Tensor& blocks;
  int64_t block_q, block_kv, len_q, len_kv;
  const std::optional<Tensor>& mask;
  int64_t capacity, tile_capacity;

  bool has_mask() const { return mask.has_value() && mask->defined(); }
  bool counts_first() const { return capacity < 0 || (has_mask() && tile_capacity < 0); }
};

void check_block_size(const char* name, int64_t size) {
  TORCH_CHECK_VALUE(size > 0 && size % blocks::kHalf == 0 && size <= kMaxLength, name, ": ", size,
                    " is not supported; must be a positive multiple of ", blocks::kHalf);
}

void check_pairs(const ListArguments& a) {
  const Tensor& mask = *a.mask;
  check_tensor("bits_mask", mask, at::kBool, 4, "(batch, heads, len_q, len_kv)");
  check_same_device("bits_mask", mask, "blocks", a.blocks);
  TORCH_CHECK_VALUE(mask.sym_size(2) == a.len_q && mask.sym_size(3) == a.len_kv, "bits_mask: shape ", mask.sym_sizes(),
                    " does not match len_q ", a.len_q, " and len_kv ", a.len_kv);
  for (const int64_t dim : {0, 1}) {
    TORCH_CHECK_VALUE(mask.sym_size(dim) == a.blocks.sym_size(dim) || mask.sym_size(dim) == 1, "bits_mask: shape ",
                      mask.sym_sizes(), " does not match blocks' ", a.blocks.sym_sizes(),
                      "; batch and heads must be the same, or 1");
  }
}

void check_list(const ListArguments& a) {
  check_tensor("blocks", a.blocks, at::kBool, 4, "(batch, heads, q blocks, kv blocks)");
  check_block_size("block_q", a.block_q);
  check_block_size("block_kv", a.block_kv);
  check_length("len_q", a.len_q);
  check_length("len_kv", a.len_kv);
  const int64_t rows = ceil_div(a.len_q, a.block_q);
  const int64_t columns = ceil_div(a.len_kv, a.block_kv);
  TORCH_CHECK_VALUE(a.blocks.sym_size(2) == rows && a.blocks.sym_size(3) == columns, "blocks: shape ",
                    a.blocks.sym_sizes(), " does not match lengths ", a.len_q, " and ", a.len_kv, " in blocks of ",
                    a.block_q, " x ", a.block_kv, "; must end in (", rows, ", ", columns, ")");
  TORCH_CHECK_VALUE(within(a.blocks.sym_size(0), kMaxCount) && within(a.blocks.sym_size(1), kMaxCount),
                    "blocks: shape ", a.blocks.sym_sizes(), " is above the limit of ", kMaxCount, " batches or heads");
  TORCH_CHECK_VALUE(a.capacity == -1 || (a.capacity >= 1 && a.capacity <= kMaxCount), "capacity: ", a.capacity,
                    "; must be from 1 to ", kMaxCount, ", or -1 to count first");
  TORCH_CHECK_VALUE(a.tile_capacity >= -1 && a.tile_capacity <= kMaxCount, "tile_capacity: ", a.tile_capacity,
                    "; must be from 0 to ", kMaxCount, ", or -1 to count first");
  if (a.has_mask()) check_pairs(a);
}

const uint8_t* bytes_of(const Tensor& tensor) { return static_cast<const uint8_t*>(tensor.const_data_ptr()); }

blocks::ListParams make_list_params(const ListArguments& a) {
  blocks::ListParams p;
  p.batch = to_int(a.blocks.size(0));
  p.heads = to_int(a.blocks.size(1));
  p.len_q = to_int(a.len_q);
  p.len_kv = to_int(a.len_kv);
  p.block_q = to_int(a.block_q);
  p.block_kv = to_int(a.block_kv);
  p.blocks = bytes_of(a.blocks);
  p.blocks_stride_batch = a.blocks.stride(0);
  p.blocks_stride_head = a.blocks.stride(1);
  p.blocks_stride_row = a.blocks.stride(2);
  p.blocks_stride_key = a.blocks.stride(3);
  if (a.has_mask() && a.mask->numel() > 0) {
    p.mask = bytes_of(*a.mask);
    p.mask_stride_batch = shared_stride(*a.mask, 0);
    p.mask_stride_head = shared_stride(*a.mask, 1);
    p.mask_stride_row = a.mask->stride(2);
    p.mask_stride_key = a.mask->stride(3);
  }
  if (a.capacity >= 0) p.capacity = to_int(a.capacity);
  if (a.tile_capacity >= 0) p.tile_capacity = to_int(a.tile_capacity);
  return p;
}

// Waits for the device.
blocks::Totals read_totals(const Tensor& workspace) {
  const Tensor host = workspace.narrow(0, 0, sizeof(blocks::Totals)).cpu();
  blocks::Totals totals;
  std::memcpy(&totals, host.const_data_ptr(), sizeof(totals));
  TORCH_CHECK_VALUE(totals.entries <= kMaxCount && totals.tiles <= kMaxCount, "blocks: ", totals.entries,
                    " cells of 128 x 128, ", totals.tiles, " of them in part, are above the limit of ", kMaxCount,
                    "; split the heads");
  return totals;
}

template <class Device>
List block_list_on(const Tensor& blocks, int64_t block_q, int64_t block_kv, int64_t len_q, int64_t len_kv,
                   const std::optional<Tensor>& mask, int64_t capacity, int64_t tile_capacity) {
  const ListArguments a{blocks, block_q, block_kv, len_q, len_kv, mask, capacity, tile_capacity};
  check_list(a);
  const at::Device device = blocks.device();
  Device::check_device("blocks", device);
  const c10::DeviceGuard guard(device);
  const at::TensorOptions options = at::TensorOptions().device(device).dtype(at::kInt);
  blocks::ListParams p = make_list_params(a);
  Tensor row_start = at::empty({p.batch, p.heads, p.cell_rows() + int64_t{1}}, options);
  Tensor whole_count = at::empty({p.batch, p.heads, p.cell_rows()}, options);
  const Tensor workspace = at::empty({static_cast<int64_t>(blocks::list_workspace_size(p))}, options.dtype(at::kByte));
  if (p.rows() == 0) row_start.zero_();
  p.row_start = row_start.mutable_data_ptr<int32_t>();
  p.whole_count = whole_count.mutable_data_ptr<int32_t>();
  Device::count_list(p, workspace.mutable_data_ptr(), device);

  if (a.counts_first()) {
    const blocks::Totals totals = read_totals(workspace);
    if (capacity < 0) p.capacity = to_int(max_of<int64_t>(totals.entries, 1));
    if (tile_capacity < 0) p.tile_capacity = to_int(totals.tiles);
  }
  Tensor cells = at::empty({p.capacity}, options);
  Tensor detail = at::empty({p.capacity}, options);
  Tensor bits = at::empty({a.has_mask() ? p.tile_capacity : 0, blocks::kCell, blocks::kTileWords}, options);
  p.cells = cells.mutable_data_ptr<int32_t>();
  p.detail = detail.mutable_data_ptr<int32_t>();
  p.bits = static_cast<uint32_t*>(bits.mutable_data_ptr());
  Device::fill_list(p, workspace.mutable_data_ptr(), device);
  return {row_start, whole_count, cells, detail, bits};
}

List block_list_meta(const Tensor& blocks, int64_t block_q, int64_t block_kv, int64_t len_q, int64_t len_kv,
                     const std::optional<Tensor>& mask, int64_t capacity, int64_t tile_capacity) {
  const ListArguments a{blocks, block_q, block_kv, len_q, len_kv, mask, capacity, tile_capacity};
  check_list(a);
  TORCH_CHECK_VALUE(!a.counts_first(),
                    "capacity, tile_capacity: -1 counts on the device first, which a tracer cannot; must be given");
  const at::TensorOptions options = blocks.options().dtype(at::kInt);
  const SymInt rows = ceil_div<int64_t>(len_q, blocks::kCell);
  const SymInt batch = blocks.sym_size(0), heads = blocks.sym_size(1);
  return {at::empty_symint({batch, heads, rows + 1}, options), at::empty_symint({batch, heads, rows}, options),
          at::empty({capacity}, options), at::empty({capacity}, options),
          at::empty({a.has_mask() ? tile_capacity : 0, blocks::kCell, blocks::kTileWords}, options)};
}

// ---- Builds without kernels

#ifndef FLASHMSA_WITH_CUDA
struct NoPrepare : CpuPrepare {
  static void check_device(const char* name, at::Device device) {
    TORCH_CHECK(false, name, ": on ", device, ", but this build of flashmsa has no CUDA kernels: ", kCudaLeftOut);
  }
};
using DevicePrepare = NoPrepare;
#else
using DevicePrepare = CudaPrepare;
#endif

template <class Device>
void implement(torch::Library& m) {
  m.impl("bucket_sort", &bucket_sort_on<Device>);
  m.impl("bucket_rows", &bucket_rows_on<Device>);
  m.impl("gather_rows", &move_rows_on<Device, false>);
  m.impl("scatter_rows", &move_rows_on<Device, true>);
  m.impl("block_list", &block_list_on<Device>);
}

const cpu::ParallelFor& parallel_for() {
  static const cpu::ParallelFor run = [](int64_t count, int64_t grain,
                                         const std::function<void(int64_t, int64_t)>& body) {
    at::parallel_for(0, count, grain, body);
  };
  return run;
}

}  // namespace

void CpuPrepare::sort(const hash::SortParams& params, at::Device) { hash::sort_buckets_cpu(params, parallel_for()); }

void CpuPrepare::intervals(const hash::IntervalParams& params, at::Device) {
  hash::bucket_rows_cpu(params, parallel_for());
}

void CpuPrepare::move(const hash::RowsJob* jobs, int32_t count, at::Device) {
  hash::move_rows_cpu(jobs, count, parallel_for());
}

void CpuPrepare::count_list(const blocks::ListParams& params, void* workspace, at::Device) {
  blocks::count_list_cpu(params, workspace, parallel_for());
}

void CpuPrepare::fill_list(const blocks::ListParams& params, void* workspace, at::Device) {
  blocks::fill_list_cpu(params, workspace, parallel_for());
}

TORCH_LIBRARY_FRAGMENT(flashmsa, m) {
  m.def("bucket_sort(Tensor bucket) -> Tensor order", {at::Tag::pt2_compliant_tag});
  m.def(
      "bucket_rows(Tensor q_bucket, Tensor q_order, Tensor kv_bucket, Tensor kv_order, bool causal, int len_q, "
      "int len_kv) -> (Tensor begin, Tensor end)",
      {at::Tag::pt2_compliant_tag});
  m.def("gather_rows(Tensor[] xs, Tensor[] orders) -> Tensor[]", {at::Tag::pt2_compliant_tag});
  m.def("scatter_rows(Tensor[] xs, Tensor[] orders) -> Tensor[]", {at::Tag::pt2_compliant_tag});
  m.def(
      "block_list(Tensor blocks, int block_q, int block_kv, int len_q, int len_kv, Tensor? bits_mask, int capacity, "
      "int tile_capacity) -> (Tensor row_start, Tensor whole_count, Tensor cells, Tensor detail, Tensor bits)",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(flashmsa, CPU, m) { implement<CpuPrepare>(m); }

TORCH_LIBRARY_IMPL(flashmsa, CUDA, m) { implement<DevicePrepare>(m); }

TORCH_LIBRARY_IMPL(flashmsa, Meta, m) {
  m.impl("bucket_sort", &bucket_sort_meta);
  m.impl("bucket_rows", &bucket_rows_meta);
  m.impl("gather_rows", &move_rows_meta);
  m.impl("scatter_rows", &move_rows_meta);
  m.impl("block_list", &block_list_meta);
}

TORCH_LIBRARY_IMPL(flashmsa, Autograd, m) {
  m.impl("gather_rows", &move_rows_autograd<false>);
  m.impl("scatter_rows", &move_rows_autograd<true>);
}

}  // namespace flashmsa::binding
