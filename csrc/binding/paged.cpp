// Schemas, checks and dispatch of the operators over paged caches. Sizes are checked as SymInt, so that the same checks
// serve a tracer. What lengths and tables hold is never looked at here: every backend clamps it.
#include "binding/paged.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/stack.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include "binding/arguments.h"
#include "binding/build.h"
#include "cpu/paged.h"

namespace flashmsa::binding {
namespace {

using at::IntArrayRef;
using at::Tensor;
using at::TensorList;
using c10::SymInt;
using OptionalTensor = std::optional<Tensor>;
using Pair = std::tuple<Tensor, Tensor>;

constexpr int64_t kMinHeadDim = 8, kMaxHeadDim = 256, kHeadDimStep = 8;
constexpr int64_t kMaxCount = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxTreeRows = 32;

// ---- Checks

void check_int32(const char* name, const Tensor& tensor, const Tensor& first, int64_t dim, const char* shape) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == at::kInt, name, ": dtype ", dtype_name(tensor.scalar_type()),
                   " is not supported; must be torch.int32, as by ", name, ".to(torch.int32)");
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, name, ": layout ", tensor.layout(), "; must be torch.strided");
  TORCH_CHECK_VALUE(tensor.device() == first.device(), name, ": on ", tensor.device(), ", the cache is on ",
                    first.device(), "; move it with ", name, ".to(device)");
  TORCH_CHECK_VALUE(tensor.dim() == dim, name, ": shape ", tensor.sym_sizes(), "; must be ", shape);
}

void check_batch(const char* name, const Tensor& tensor, const SymInt& batch) {
  TORCH_CHECK_VALUE(tensor.sym_size(0) == batch, name, ": shape ", tensor.sym_sizes(), " does not match the batch of ",
                    batch);
}

void check_dtype(const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
      return;
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e5m2:
      TORCH_CHECK_NOT_IMPLEMENTED(false, name, ": dtype ", dtype_name(tensor.scalar_type()),
                                  " is not implemented yet; keep the cache in torch.bfloat16");
    default:
      TORCH_CHECK_TYPE(false, name, ": dtype ", dtype_name(tensor.scalar_type()),
                       " is not supported; must be torch.float16, torch.bfloat16, torch.float32 or torch.float64");
  }
}

void check_head_dim(const char* name, const SymInt& head_dim) {
  TORCH_CHECK_VALUE(head_dim >= kMinHeadDim && head_dim <= kMaxHeadDim && head_dim % kHeadDimStep == 0, name,
                    ": head_dim ", head_dim, " is not supported; must be a multiple of ", kHeadDimStep, " from ",
                    kMinHeadDim, " to ", kMaxHeadDim);
}

// Where each dimension of a cache is: pages (page, slot, head, column), dense (page, head, slot, column).
struct Axes {
  int64_t slot, head;
  const char* shape;
};
constexpr Axes kPaged = {1, 2, "(pages, page_size, heads, head_dim)"};
constexpr Axes kDense = {2, 1, "(batch, heads, length, head_dim)"};

// One of the two caches by itself. They are read, and written, where they lie.
void check_cache(const char* name, const Tensor& cache, const Axes& axes, int64_t alignment) {
  TORCH_CHECK_TYPE(cache.layout() == at::kStrided, name, ": layout ", cache.layout(), "; must be torch.strided");
  TORCH_CHECK_VALUE(cache.dim() == 4, name, ": shape ", cache.sym_sizes(), "; must be ", axes.shape);
  check_head_dim(name, cache.sym_size(3));
  for (const int64_t dim : {0, 1, 2}) {
    TORCH_CHECK_VALUE(within(cache.sym_size(dim), kMaxLength), name, ": shape ", cache.sym_sizes(),
                      " is above the limit of ", kMaxLength);
  }
  TORCH_CHECK_VALUE(cache.sym_stride(3) == 1, name, ": strides ", cache.sym_strides(),
                    "; the last must be 1, since a cache is never copied: lay it out with head_dim innermost");
  if (alignment == 1 || cache.is_meta()) return;
  const int64_t step = alignment / static_cast<int64_t>(cache.itemsize());
  for (const int64_t dim : {0, 1, 2}) {
    const SymInt stride = cache.sym_stride(dim);
    TORCH_CHECK_VALUE(cache.sym_size(dim) <= 1 || (stride % step == 0 && stride >= 0), name, ": strides ",
                      cache.sym_strides(), "; must be multiples of ", step, " elements (", alignment,
                      " bytes), since a cache is never copied");
  }
  TORCH_CHECK_VALUE(cache.sym_size(axes.slot) <= 1 || cache.sym_stride(axes.slot) >= cache.sym_size(3), name,
                    ": strides ", cache.sym_strides(), " let slots overlap; each slot must have its own memory");
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(cache.const_data_ptr()) % alignment == 0, name,
                    ": its memory does not begin at a multiple of ", alignment,
                    " bytes; a cache is never copied, so it must");
}

// k_pages and v_pages together.
void check_caches(const Tensor& k, const Tensor& v, const Axes& axes, int64_t alignment) {
  check_dtype("k_pages", k);
  check_cache("k_pages", k, axes, alignment);
  TORCH_CHECK_TYPE(v.scalar_type() == k.scalar_type(), "v_pages: dtype ", dtype_name(v.scalar_type()),
                   " does not match k_pages' ", dtype_name(k.scalar_type()));
  TORCH_CHECK_VALUE(v.device() == k.device(), "v_pages: on ", v.device(), ", k_pages on ", k.device(),
                    "; all on one device");
  check_cache("v_pages", v, axes, alignment);
  for (const int64_t dim : {0, 1, 2}) {
    TORCH_CHECK_VALUE(v.sym_size(dim) == k.sym_size(dim), "v_pages: shape ", v.sym_sizes(), " does not match k_pages' ",
                      k.sym_sizes(), "; only head_dim may differ");
  }
}

// What the kernels take.
void check_page_size(const SymInt& size) {
  TORCH_CHECK_VALUE(size > 0, "k_pages: page_size is 0; must be 1, 8, or a multiple of 16");
  TORCH_CHECK_VALUE(size == 1 || size == 8 || size % 16 == 0, "k_pages: page_size ", size,
                    " is not supported; must be 1, 8, or a multiple of 16, the nearest is ",
                    size < 4    ? SymInt(1)
                    : size < 12 ? SymInt(8)
                                : (size + 8) / 16 * 16);
}

void check_table(const Tensor& table, const Tensor& cache, const SymInt& page_size) {
  check_int32("block_table", table, cache, 2, "(batch, max_pages)");
  TORCH_CHECK_VALUE(within(table.sym_size(0), kMaxCount), "block_table: shape ", table.sym_sizes(),
                    " is above the limit of ", kMaxCount, " sequences");
  TORCH_CHECK_VALUE(within(table.sym_size(1) * page_size, kMaxLength), "block_table: ", table.sym_size(1), " pages of ",
                    page_size, " tokens are above the limit of ", kMaxLength, " for a sequence");
}

struct PagedSizes {
  SymInt batch, len_q, heads_q, heads_kv;
};

PagedSizes check_queries(const PagedArguments& a, const Axes& axes) {
  const bool packed = a.cu_seqlens_q.has_value();
  TORCH_CHECK_TYPE(a.q.layout() == at::kStrided, "q: layout ", a.q.layout(), "; must be torch.strided");
  TORCH_CHECK_VALUE(a.q.dim() == (packed ? 3 : 4), "q: shape ", a.q.sym_sizes(), "; must be ",
                    packed ? "packed, (tokens, heads, head_dim), with cu_seqlens_q"
                           : "(batch, heads, length, head_dim); packed tokens need cu_seqlens_q");
  TORCH_CHECK_TYPE(a.q.scalar_type() == a.k_pages.scalar_type(), "q: dtype ", dtype_name(a.q.scalar_type()),
                   " does not match k_pages' ", dtype_name(a.k_pages.scalar_type()), "; cast with q.to(k_pages.dtype)");
  TORCH_CHECK_VALUE(a.q.device() == a.k_pages.device(), "q: on ", a.q.device(), ", k_pages on ", a.k_pages.device(),
                    "; all on one device");
  PagedSizes s;
  if (packed) {
    check_int32("cu_seqlens_q", *a.cu_seqlens_q, a.q, 1, "(batch + 1,)");
    TORCH_CHECK_VALUE(a.cu_seqlens_q->sym_size(0) >= 1, "cu_seqlens_q: is empty; must be (batch + 1,), the first 0");
    s.batch = a.cu_seqlens_q->sym_size(0) - 1;
    s.len_q = a.max_seqlen_q >= 0 ? SymInt(a.max_seqlen_q) : a.q.sym_size(0);
  } else {
    s.batch = a.q.sym_size(0);
    s.len_q = a.q.sym_size(2);
  }
  s.heads_q = a.q.sym_size(1);
  s.heads_kv = a.k_pages.sym_size(axes.head);
  const SymInt head_dim = a.q.sym_size(packed ? 2 : 3);
  TORCH_CHECK_VALUE(head_dim == a.k_pages.sym_size(3), "k_pages: head_dim ", a.k_pages.sym_size(3),
                    " does not match q's ", head_dim);
  TORCH_CHECK_VALUE(s.heads_kv > 0 ? s.heads_q % s.heads_kv == 0 : s.heads_q == 0, "k_pages: ", s.heads_kv,
                    " heads do not divide q's ", s.heads_q, "; query head h uses kv head h // (heads_q / heads_kv)");
  for (const SymInt& size : {s.batch, s.len_q, s.heads_q, a.q.sym_size(0)}) {
    TORCH_CHECK_VALUE(within(size, kMaxLength), "q: shape ", a.q.sym_sizes(), " is above the limit of ", kMaxLength);
  }
  return s;
}

void check_query_pages(const PagedArguments& a, const PagedSizes& s) {
  TORCH_CHECK_VALUE(a.query_block > 0 && a.query_block <= kMaxLength, "query_block: ", a.query_block,
                    "; must be a positive number of queries, the default is 128");
  if (!a.query_pages.has_value()) return;
  check_int32("query_pages", *a.query_pages, a.q, 3, "(batch, query blocks, pages)");
  check_batch("query_pages", *a.query_pages, s.batch);
  const SymInt blocks = (s.len_q + (a.query_block - 1)) / a.query_block;
  TORCH_CHECK_VALUE(a.query_pages->sym_size(1) == blocks, "query_pages: shape ", a.query_pages->sym_sizes(),
                    "; must have ", blocks, " blocks of ", a.query_block, " queries for a length of ", s.len_q);
  TORCH_CHECK_VALUE(within(a.query_pages->sym_size(2), kMaxLength), "query_pages: shape ", a.query_pages->sym_sizes(),
                    " is above the limit of ", kMaxLength);
}

void check_tree(const PagedArguments& a, const PagedSizes& s) {
  if (!a.tree_mask.has_value()) return;
  TORCH_CHECK_NOT_IMPLEMENTED(!a.cu_seqlens_q.has_value(),
                              "tree_mask: not implemented for packed queries; give q as (batch, heads, length, "
                              "head_dim)");
  check_int32("tree_mask", *a.tree_mask, a.q, 2, "(batch, len_q), a word of bits for each query");
  check_batch("tree_mask", *a.tree_mask, s.batch);
  TORCH_CHECK_VALUE(a.tree_mask->sym_size(1) == s.len_q, "tree_mask: shape ", a.tree_mask->sym_sizes(),
                    " does not match q's length ", s.len_q);
  TORCH_CHECK_VALUE(s.len_q <= kMaxTreeRows, "tree_mask: ", s.len_q, " queries; a word has bits for ", kMaxTreeRows);
}

void check_numbers(const PagedArguments& a, const PagedSizes& s) {
  const bool wide = a.q.scalar_type() == at::kDouble;
  const auto finite = [&](double x) { return wide ? std::isfinite(x) : std::isfinite(static_cast<float>(x)); };
  TORCH_CHECK_VALUE(!a.scale.has_value() || finite(*a.scale), "scale: ", a.scale.value_or(0.0),
                    " is not finite in fp32; must be finite, the default is 1/sqrt(head_dim)");
  TORCH_CHECK_VALUE(finite(a.softcap) && a.softcap >= 0.0, "softcap: ", a.softcap,
                    " is not supported; must be positive and finite in fp32, or 0 for none");
  TORCH_CHECK_VALUE(a.num_splits >= 0 && a.num_splits <= kMaxCount, "num_splits: ", a.num_splits,
                    "; must be positive, or 0 to let it be chosen");
  TORCH_CHECK_VALUE(!a.batch_invariant || a.num_splits == 0, "num_splits: ", a.num_splits,
                    " with batch_invariant=True, which has parts of a fixed size; must be 0");
  const auto check = [&](const char* name, const Tensor& tensor, bool batched) {
    TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat, name, ": dtype ", dtype_name(tensor.scalar_type()),
                     " is not supported; must be torch.float32");
    TORCH_CHECK_VALUE(tensor.device() == a.q.device(), name, ": on ", tensor.device(), ", q is on ", a.q.device(),
                      "; all on one device");
    const bool good =
        (tensor.dim() == 1 && tensor.sym_size(0) == s.heads_q) ||
        (batched && tensor.dim() == 2 && tensor.sym_size(0) == s.batch && tensor.sym_size(1) == s.heads_q);
    TORCH_CHECK_VALUE(good, name, ": shape ", tensor.sym_sizes(), "; must be (", s.heads_q, ",)",
                      batched ? ", or with the batch in front" : "");
  };
  if (a.sinks.has_value()) check("sinks", *a.sinks, false);
  if (a.alibi_slopes.has_value()) check("alibi_slopes", *a.alibi_slopes, true);
}

void check_paged_mask(const PagedArguments& a, const PagedSizes& s) {
  const bool known = a.mask == static_cast<int64_t>(MaskKind::kDense) ||
                     a.mask == static_cast<int64_t>(MaskKind::kCausal) ||
                     a.mask == static_cast<int64_t>(MaskKind::kComposite);
  TORCH_CHECK_NOT_IMPLEMENTED(known, "mask: kind ", a.mask,
                              " over a paged cache is not implemented; Dense, Causal, SlidingWindow, PrefixLM and "
                              "intersections of them are");
  check_mask<SymInt>(a.mask, a.mask_ints, a.mask_tensors, a.q.device(),
                     {s.batch, s.heads_q, s.heads_kv, s.len_q, SymInt(0)});
  const int64_t flags = a.mask == static_cast<int64_t>(MaskKind::kComposite) ? a.mask_ints[a.mask_ints.size() - 2] : 0;
  TORCH_CHECK_NOT_IMPLEMENTED((flags & kDocuments) == 0,
                              "mask: documents over a paged cache are not implemented; give each document a row of "
                              "block_table");
  const bool from_start =
      (flags & kStartPositions) != 0 || (a.mask == static_cast<int64_t>(MaskKind::kCausal) && a.mask_ints[0] != 0);
  TORCH_CHECK_NOT_IMPLEMENTED(!from_start || !a.alibi_slopes.has_value(),
                              "alibi_slopes: not implemented over a paged cache with align=\"top-left\"; its positions "
                              "count from the end");
}

PagedSizes check_paged(const PagedArguments& a, int64_t alignment) {
  const Axes& axes = a.block_table.has_value() ? kPaged : kDense;
  check_caches(a.k_pages, a.v_pages, axes, alignment);
  const PagedSizes s = check_queries(a, axes);
  if (a.block_table.has_value()) {
    check_page_size(a.k_pages.sym_size(axes.slot));
    check_table(*a.block_table, a.q, a.k_pages.sym_size(axes.slot));
    check_batch("block_table", *a.block_table, s.batch);
    TORCH_CHECK_VALUE(a.kv_lens.has_value(), "kv_lens: None; must be int32 (batch,), the length of each sequence");
  } else {
    check_batch("k_pages", a.k_pages, s.batch);
  }
  if (a.kv_lens.has_value()) {
    check_int32("kv_lens", *a.kv_lens, a.q, 1, "(batch,), the length of each sequence");
    check_batch("kv_lens", *a.kv_lens, s.batch);
  }
  check_query_pages(a, s);
  TORCH_CHECK_VALUE(!a.query_pages.has_value() || a.block_table.has_value(),
                    "query_pages: given without block_table; a dense cache has no pages");
  check_tree(a, s);
  check_numbers(a, s);
  check_paged_mask(a, s);
  if (a.workspace.has_value()) {
    TORCH_CHECK_VALUE(a.workspace->device() == a.q.device(), "workspace: on ", a.workspace->device(), ", q is on ",
                      a.q.device(), "; all on one device");
    TORCH_CHECK_VALUE(a.workspace->is_contiguous(), "workspace: strides ", a.workspace->sym_strides(),
                      "; must be contiguous, as flashmsa.paged_workspace gives it");
  }
  return s;
}

// ---- Addresses

int32_t to_int(int64_t value) { return static_cast<int32_t>(value); }

PoolRef pool_ref(const Tensor& cache, const Axes& axes) {
  const auto stride = [&](int64_t d, int64_t of_one) { return cache.size(d) > 1 ? cache.stride(d) : of_one; };
  const int64_t row = stride(axes.slot, cache.size(3));
  return {const_cast<void*>(cache.const_data_ptr()), stride(0, 0), row, stride(axes.head, cache.size(3))};
}

const int32_t* ints(const OptionalTensor& tensor, std::vector<Tensor>& held) {
  return tensor.has_value() ? held.emplace_back(tensor->contiguous()).const_data_ptr<int32_t>() : nullptr;
}

const int32_t* table_ref(const Tensor& table, int64_t& stride, std::vector<Tensor>& held) {
  const bool unit = table.size(1) <= 1 || table.stride(1) == 1;
  const Tensor& rows = held.emplace_back(unit ? table : table.contiguous());
  stride = rows.size(0) > 1 ? rows.stride(0) : rows.size(1);
  return rows.const_data_ptr<int32_t>();
}

// (tokens, heads, ...) as one batch of (batch, heads, length, ...).
Tensor as_batch(const Tensor& packed) { return packed.unsqueeze(0).transpose(1, 2); }

void set_band(PagedParams& p, const PagedArguments& a, std::vector<Tensor>& held) {
  const MaskArgs mask = make_mask(a.mask, a.mask_ints, a.mask_tensors, p.heads_q, held);
  p.band = mask.global;
  if (mask.kind == MaskKind::kCausal) p.band.right[mask.top_left] = 0;
}

void set_cache(PagedParams& p, const PagedArguments& a, std::vector<Tensor>& held) {
  const Axes& axes = a.block_table.has_value() ? kPaged : kDense;
  p.k_pages = pool_ref(a.k_pages, axes);
  p.v_pages = pool_ref(a.v_pages, axes);
  p.num_pages = to_int(a.k_pages.size(0));
  p.page_size = to_int(a.k_pages.size(axes.slot));
  p.max_pages = 1;
  if (a.block_table.has_value()) {
    p.block_table = table_ref(*a.block_table, p.block_table_stride, held);
    p.max_pages = to_int(a.block_table->size(1));
  }
  p.kv_lens = ints(a.kv_lens, held);
  p.query_block = to_int(a.query_block);
  if (a.query_pages.has_value()) {
    p.query_pages = ints(a.query_pages, held);
    p.query_blocks = to_int(a.query_pages->size(1));
    p.pages_per_block = to_int(a.query_pages->size(2));
  }
}

void set_queries(PagedCall& call, const PagedArguments& a, Rows rows) {
  PagedParams& p = call.params;
  const bool packed = a.cu_seqlens_q.has_value();
  call.q = readable(packed ? as_batch(a.q) : a.q, rows);
  p.q = tensor_ref(call.q);
  p.heads_q = to_int(call.q.size(1));
  p.total_q = to_int(packed ? call.q.size(2) : call.q.size(0) * call.q.size(2));
  p.len_q = to_int(call.q.size(2));
  p.batch = to_int(call.q.size(0));
  if (!packed) return;
  p.cu_seqlens_q = ints(a.cu_seqlens_q, call.held);
  p.batch = to_int(a.cu_seqlens_q->size(0) - 1);
  if (a.max_seqlen_q >= 0) p.len_q = to_int(min_of<int64_t>(a.max_seqlen_q, p.total_q));
}

// Of checked arguments; out and lse are not set.
PagedCall make_paged_call(const PagedArguments& a, Rows rows) {
  PagedCall call;
  PagedParams& p = call.params;
  p.dtype = core_dtype(a.q.scalar_type());
  p.heads_kv = to_int(a.k_pages.size(a.block_table.has_value() ? kPaged.head : kDense.head));
  p.head_dim = to_int(a.k_pages.size(3));
  p.head_dim_v = to_int(a.v_pages.size(3));
  set_queries(call, a, rows);
  set_cache(p, a, call.held);
  set_band(p, a, call.held);
  p.tree_bits = ints(a.tree_mask, call.held);
  p.scale = a.scale.value_or(1.0 / std::sqrt(static_cast<double>(p.head_dim)));
  p.softcap = a.softcap;
  if (a.sinks.has_value()) p.sinks = call.held.emplace_back(a.sinks->contiguous()).const_data_ptr<float>();
  if (a.alibi_slopes.has_value()) {
    const Tensor& slopes = call.held.emplace_back(a.alibi_slopes->contiguous());
    p.alibi_slopes = slopes.const_data_ptr<float>();
    p.alibi_stride_batch = slopes.dim() == 2 ? p.heads_q : 0;
  }
  p.num_splits = to_int(a.num_splits);
  p.batch_invariant = a.batch_invariant;
  return call;
}

void set_result(PagedCall& call, const Tensor& out, const Tensor& lse) {
  PagedParams& p = call.params;
  const bool packed = p.cu_seqlens_q != nullptr;
  p.out = tensor_ref(packed ? as_batch(out) : out);
  if (lse.numel() == 0) return;
  p.lse = lse.mutable_data_ptr<float>();
  p.lse_stride_seq = 1;
  p.lse_stride_head = packed ? p.total_q : p.len_q;
  p.lse_stride_batch = packed ? 0 : int64_t{p.heads_q} * p.len_q;
}

// ---- paged_attention

// Padded: contiguous in q's memory order, as attention's is. Packed: contiguous.
Tensor empty_out(const PagedArguments& a) {
  const SymInt dim = a.v_pages.sym_size(3);
  if (a.cu_seqlens_q.has_value()) {
    return at::empty_symint({a.q.sym_size(0), a.q.sym_size(1), dim}, a.q.options());
  }
  const SymInt batch = a.q.sym_size(0), heads = a.q.sym_size(1), length = a.q.sym_size(2);
  const bool heads_inside = TORCH_GUARD_OR_FALSE(a.q.sym_stride(1).sym_lt(a.q.sym_stride(2)));
  const SymInt plane = heads_inside ? heads * dim : length * dim;
  const std::array<SymInt, 4> sizes = {batch, heads, length, dim};
  const std::array<SymInt, 4> strides = heads_inside ? std::array<SymInt, 4>{length * plane, dim, plane, SymInt(1)}
                                                     : std::array<SymInt, 4>{heads * plane, plane, dim, SymInt(1)};
  return at::empty_strided_symint(sizes, strides, a.q.options());
}

Tensor empty_lse(const PagedArguments& a, bool return_lse) {
  const auto options = a.q.options().dtype(at::kFloat);
  if (!return_lse) return at::empty({0}, options);
  if (a.cu_seqlens_q.has_value()) return at::empty_symint({a.q.sym_size(1), a.q.sym_size(0)}, options);
  return at::empty_symint({a.q.sym_size(0), a.q.sym_size(1), a.q.sym_size(2)}, options);
}

// The result where there is no key at all, or no sequence.
void fill_without_keys(const PagedArguments& a, Tensor& out, Tensor& lse) {
  out.zero_();
  if (lse.numel() == 0) return;
  lse.fill_(-std::numeric_limits<double>::infinity());
  if (!a.sinks.has_value()) return;
  if (!a.cu_seqlens_q.has_value()) {
    lse.copy_(a.sinks->unsqueeze(-1));
  } else {
    const Tensor row = at::arange(lse.size(1), a.cu_seqlens_q->options());
    const Tensor outside = row.lt(a.cu_seqlens_q->select(0, 0)).logical_or_(row.ge(a.cu_seqlens_q->select(0, -1)));
    lse.copy_(a.sinks->unsqueeze(-1)).masked_fill_(outside, -std::numeric_limits<double>::infinity());
  }
}

template <class Device>
Pair paged_attention_on(const Tensor& q, const Tensor& k_pages, const Tensor& v_pages,
                        const OptionalTensor& block_table, const OptionalTensor& kv_lens,
                        const OptionalTensor& cu_seqlens_q, int64_t max_seqlen_q, const OptionalTensor& query_pages,
                        int64_t query_block, int64_t mask, IntArrayRef mask_ints, TensorList mask_tensors,
                        const OptionalTensor& tree_mask, std::optional<double> scale, double softcap,
                        const OptionalTensor& sinks, const OptionalTensor& alibi_slopes, int64_t num_splits,
                        bool batch_invariant, const OptionalTensor& workspace, bool return_lse) {
  const PagedArguments a{
      q,           k_pages,     v_pages,      block_table, kv_lens,         cu_seqlens_q, max_seqlen_q,
      query_pages, query_block, mask,         mask_ints,   mask_tensors,    tree_mask,    scale,
      softcap,     sinks,       alibi_slopes, num_splits,  batch_invariant, workspace};
  check_paged(a, Device::kAlignment);
  Device::check_device("q", q.device());
  const c10::DeviceGuard guard(q.device());
  Tensor out = empty_out(a), lse = empty_lse(a, return_lse);
  if (out.numel() == 0) return {out, lse};
  PagedCall call = make_paged_call(a, Device::kAlignment > 1 ? Rows::kTma : Rows::kUnitStride);
  const PagedParams& p = call.params;
  // NOTE: shapes alone. A cache without a page has nothing that a length could speak of. Lists of no page have no address, and
  // would pass for no lists.
  const bool lists_nothing = a.query_pages.has_value() && a.query_pages->size(2) == 0;
  if (p.batch == 0 || p.num_pages == 0 || p.page_size == 0 || p.max_pages == 0 || lists_nothing) {
    fill_without_keys(a, out, lse);
    return {out, lse};
  }
  set_result(call, out, lse);
  Device::attend(call, out, lse, workspace);
  return {std::move(out), std::move(lse)};
}

Pair paged_attention_meta(const Tensor& q, const Tensor& k_pages, const Tensor& v_pages,
                          const OptionalTensor& block_table, const OptionalTensor& kv_lens,
                          const OptionalTensor& cu_seqlens_q, int64_t max_seqlen_q, const OptionalTensor& query_pages,
                          int64_t query_block, int64_t mask, IntArrayRef mask_ints, TensorList mask_tensors,
                          const OptionalTensor& tree_mask, std::optional<double> scale, double softcap,
                          const OptionalTensor& sinks, const OptionalTensor& alibi_slopes, int64_t num_splits,
                          bool batch_invariant, const OptionalTensor& workspace, bool return_lse) {
  const PagedArguments a{
      q,           k_pages,     v_pages,      block_table, kv_lens,         cu_seqlens_q, max_seqlen_q,
      query_pages, query_block, mask,         mask_ints,   mask_tensors,    tree_mask,    scale,
      softcap,     sinks,       alibi_slopes, num_splits,  batch_invariant, workspace};
  check_paged(a, 1);
  return {empty_out(a), empty_lse(a, return_lse)};
}

// ---- gather_pages

void check_gather(const Tensor& k_pages, const Tensor& v_pages, const Tensor& block_table, const Tensor& kv_lens,
                  int64_t alignment) {
  check_caches(k_pages, v_pages, kPaged, alignment);
  check_page_size(k_pages.sym_size(1));
  check_table(block_table, k_pages, k_pages.sym_size(1));
  check_int32("kv_lens", kv_lens, k_pages, 1, "(batch,), the length of each sequence");
  check_batch("kv_lens", kv_lens, block_table.sym_size(0));
}

// (batch, heads, length, columns), heads inside the sequence as in the pages.
Tensor empty_dense(const Tensor& cache, const Tensor& block_table) {
  const SymInt length = block_table.sym_size(1) * cache.sym_size(1);
  return at::empty_symint({block_table.sym_size(0), length, cache.sym_size(2), cache.sym_size(3)}, cache.options())
      .transpose(1, 2);
}

template <class Device>
Pair gather_pages_on(const Tensor& k_pages, const Tensor& v_pages, const Tensor& block_table, const Tensor& kv_lens) {
  check_gather(k_pages, v_pages, block_table, kv_lens, Device::kAlignment);
  Device::check_device("k_pages", k_pages.device());
  const c10::DeviceGuard guard(k_pages.device());
  Tensor k = empty_dense(k_pages, block_table), v = empty_dense(v_pages, block_table);
  if (k.numel() == 0) return {k, v};
  if (k_pages.size(0) == 0) return {k.zero_(), v.zero_()};
  std::vector<Tensor> held;
  pages::GatherParams p;
  p.k_pages = pool_ref(k_pages, kPaged);
  p.v_pages = pool_ref(v_pages, kPaged);
  p.num_pages = to_int(k_pages.size(0));
  p.page_size = to_int(k_pages.size(1));
  p.heads_kv = to_int(k_pages.size(2));
  p.head_dim = to_int(k_pages.size(3));
  p.head_dim_v = to_int(v_pages.size(3));
  p.block_table = table_ref(block_table, p.block_table_stride, held);
  p.batch = to_int(block_table.size(0));
  p.max_pages = to_int(block_table.size(1));
  p.kv_lens = ints(kv_lens, held);
  p.k = tensor_ref(k);
  p.v = tensor_ref(v);
  p.element_bytes = to_int(k_pages.itemsize());
  Device::gather(p, k_pages.device());
  return {k, v};
}

Pair gather_pages_meta(const Tensor& k_pages, const Tensor& v_pages, const Tensor& block_table, const Tensor& kv_lens) {
  check_gather(k_pages, v_pages, block_table, kv_lens, 1);
  return {empty_dense(k_pages, block_table), empty_dense(v_pages, block_table)};
}

// ---- append_kv

struct AppendArguments {
  const Tensor& k_pages;
  const Tensor& v_pages;
  const Tensor& block_table;
  const Tensor& kv_lens;
  const Tensor& k_new;
  const Tensor& v_new;
  const OptionalTensor& cu_seqlens;
  const OptionalTensor& rope_cos;
  const OptionalTensor& rope_sin;
};

void check_new(const char* name, const Tensor& tensor, const Tensor& cache, const char* cache_name, bool packed,
               const SymInt& batch) {
  TORCH_CHECK_VALUE(tensor.dim() == (packed ? 3 : 4), name, ": shape ", tensor.sym_sizes(), "; must be ",
                    packed ? "packed, (tokens, heads, head_dim), with cu_seqlens"
                           : "(batch, heads, tokens, head_dim); packed tokens need cu_seqlens");
  TORCH_CHECK_TYPE(tensor.scalar_type() == cache.scalar_type(), name, ": dtype ", dtype_name(tensor.scalar_type()),
                   " does not match ", cache_name, "' ", dtype_name(cache.scalar_type()));
  TORCH_CHECK_VALUE(tensor.device() == cache.device(), name, ": on ", tensor.device(), ", ", cache_name, " is on ",
                    cache.device(), "; all on one device");
  TORCH_CHECK_VALUE(tensor.sym_size(1) == cache.sym_size(2), name, ": ", tensor.sym_size(1), " heads do not match ",
                    cache_name, "' ", cache.sym_size(2));
  TORCH_CHECK_VALUE(tensor.sym_size(packed ? 2 : 3) == cache.sym_size(3), name, ": head_dim ",
                    tensor.sym_size(packed ? 2 : 3), " does not match ", cache_name, "' ", cache.sym_size(3));
  if (!packed) check_batch(name, tensor, batch);
  TORCH_CHECK_VALUE(within(tensor.sym_size(packed ? 0 : 2), kMaxLength), name, ": shape ", tensor.sym_sizes(),
                    " is above the limit of ", kMaxLength, " tokens");
}

void check_rope(const AppendArguments& a) {
  TORCH_CHECK_VALUE(a.rope_cos.has_value() == a.rope_sin.has_value(),
                    "rope: one of cos and sin without the other; give both, or none");
  if (!a.rope_cos.has_value()) return;
  const auto check = [&](const char* name, const Tensor& table) {
    TORCH_CHECK_TYPE(table.scalar_type() == at::kFloat || table.scalar_type() == a.k_pages.scalar_type(), name,
                     ": dtype ", dtype_name(table.scalar_type()), "; must be torch.float32, or k_pages' ",
                     dtype_name(a.k_pages.scalar_type()));
    TORCH_CHECK_VALUE(table.device() == a.k_pages.device(), name, ": on ", table.device(), ", k_pages on ",
                      a.k_pages.device(), "; all on one device");
    TORCH_CHECK_VALUE(table.dim() == 2 && table.sym_size(0) > 0, name, ": shape ", table.sym_sizes(),
                      "; must be (positions, rotary_dim / 2)");
    TORCH_CHECK_VALUE(table.sym_size(1) > 0 && table.sym_size(1) * 2 <= a.k_pages.sym_size(3), name, ": shape ",
                      table.sym_sizes(), " turns ", table.sym_size(1) * 2, " columns; k_pages has ",
                      a.k_pages.sym_size(3));
    TORCH_CHECK_VALUE(within(table.sym_size(0), kMaxCount), name, ": shape ", table.sym_sizes(),
                      " is above the limit of ", kMaxCount, " positions");
  };
  check("rope cos", *a.rope_cos);
  check("rope sin", *a.rope_sin);
  TORCH_CHECK_VALUE(a.rope_sin->sym_sizes() == a.rope_cos->sym_sizes(), "rope sin: shape ", a.rope_sin->sym_sizes(),
                    " does not match cos' ", a.rope_cos->sym_sizes());
  TORCH_CHECK_TYPE(a.rope_sin->scalar_type() == a.rope_cos->scalar_type(), "rope sin: dtype ",
                   dtype_name(a.rope_sin->scalar_type()), " does not match cos' ",
                   dtype_name(a.rope_cos->scalar_type()));
}

// A cache that is written to.
void check_apart(const char* name, const Tensor& cache) {
  // NOTE: a trace that does not know strides is checked when it runs.
  if (cache.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return;
  TORCH_CHECK_VALUE(!may_overlap_itself(cache), name, ": strides ", cache.strides(), " let elements of shape ",
                    cache.sizes(), " overlap; what is written to must own each of its elements");
}

// What is read while the caches are written. Where it lies in them, a copy, so that it is read as it was before.
Tensor apart_from(const Tensor& tensor, const Tensor& k_pages, const Tensor& v_pages) {
  return ranges_meet(tensor, k_pages) || ranges_meet(tensor, v_pages) ? tensor.clone() : tensor;
}

void check_append(const AppendArguments& a, int64_t alignment) {
  check_caches(a.k_pages, a.v_pages, kPaged, alignment);
  const SymInt page_size = a.k_pages.sym_size(1);
  TORCH_CHECK_VALUE(page_size > 0, "k_pages: page_size is 0; must be positive");
  check_apart("k_pages", a.k_pages);
  check_apart("v_pages", a.v_pages);
  check_table(a.block_table, a.k_pages, page_size);
  const SymInt batch = a.block_table.sym_size(0);
  check_int32("kv_lens", a.kv_lens, a.k_pages, 1, "(batch,), the length of each sequence before");
  check_batch("kv_lens", a.kv_lens, batch);
  const bool packed = a.cu_seqlens.has_value();
  if (packed) {
    check_int32("cu_seqlens", *a.cu_seqlens, a.k_pages, 1, "(batch + 1,)");
    TORCH_CHECK_VALUE(a.cu_seqlens->sym_size(0) == batch + 1, "cu_seqlens: shape ", a.cu_seqlens->sym_sizes(),
                      "; must be (", batch + 1, ",), one more than block_table has rows");
  }
  check_new("k_new", a.k_new, a.k_pages, "k_pages", packed, batch);
  check_new("v_new", a.v_new, a.v_pages, "v_pages", packed, batch);
  const int64_t tokens = packed ? 0 : 2;
  TORCH_CHECK_VALUE(a.v_new.sym_size(tokens) == a.k_new.sym_size(tokens), "v_new: ", a.v_new.sym_size(tokens),
                    " tokens do not match k_new's ", a.k_new.sym_size(tokens));
  check_rope(a);
}

template <class Device>
void append_kv_on(Tensor& k_pages, Tensor& v_pages, const Tensor& block_table, const Tensor& kv_lens,
                  const Tensor& k_new_argument, const Tensor& v_new_argument, const OptionalTensor& cu_seqlens,
                  const OptionalTensor& rope_cos, const OptionalTensor& rope_sin, bool rope_interleaved) {
  const AppendArguments a{k_pages,        v_pages,    block_table, kv_lens, k_new_argument,
                          v_new_argument, cu_seqlens, rope_cos,    rope_sin};
  check_append(a, Device::kAlignment);
  Device::check_device("k_pages", k_pages.device());
  const c10::DeviceGuard guard(k_pages.device());
  if (k_pages.numel() == 0 || block_table.numel() == 0 || k_new_argument.numel() == 0) return;
  const bool packed = cu_seqlens.has_value();
  const Rows rows = Device::kAlignment > 1 ? Rows::kTma : Rows::kUnitStride;
  // Gives a lazy clone memory of its own.
  k_pages.mutable_data_ptr();
  v_pages.mutable_data_ptr();
  const auto apart = [&](const Tensor& x) { return apart_from(x, k_pages, v_pages); };
  const Tensor k_new = readable(apart(packed ? as_batch(k_new_argument) : k_new_argument), rows);
  const Tensor v_new = readable(apart(packed ? as_batch(v_new_argument) : v_new_argument), rows);
  std::vector<Tensor> held;
  pages::AppendParams p;
  p.k_pages = pool_ref(k_pages, kPaged);
  p.v_pages = pool_ref(v_pages, kPaged);
  p.num_pages = to_int(k_pages.size(0));
  p.page_size = to_int(k_pages.size(1));
  p.heads_kv = to_int(k_pages.size(2));
  p.head_dim = to_int(k_pages.size(3));
  p.head_dim_v = to_int(v_pages.size(3));
  p.block_table = table_ref(block_table, p.block_table_stride, held);
  p.batch = to_int(block_table.size(0));
  p.max_pages = to_int(block_table.size(1));
  p.kv_lens = ints(kv_lens, held);
  p.k_new = tensor_ref(k_new);
  p.v_new = tensor_ref(v_new);
  p.cu_seqlens = ints(cu_seqlens, held);
  p.len_new = to_int(k_new.size(2));
  p.total_new = to_int(packed ? k_new.size(2) : k_new.size(0) * k_new.size(2));
  p.dtype = core_dtype(k_pages.scalar_type());
  if (rope_cos.has_value()) {
    p.rope_cos = held.emplace_back(apart(rope_cos->contiguous())).const_data_ptr();
    p.rope_sin = held.emplace_back(apart(rope_sin->contiguous())).const_data_ptr();
    p.rope_fp32 = rope_cos->scalar_type() == at::kFloat;
    p.rope_positions = to_int(rope_cos->size(0));
    p.rotary_dim = to_int(2 * rope_cos->size(1));
    p.rope_interleaved = rope_interleaved;
  }
  Device::append(p, k_pages.device());
}

void append_kv_meta(Tensor& k_pages, Tensor& v_pages, const Tensor& block_table, const Tensor& kv_lens,
                    const Tensor& k_new, const Tensor& v_new, const OptionalTensor& cu_seqlens,
                    const OptionalTensor& rope_cos, const OptionalTensor& rope_sin, bool) {
  check_append({k_pages, v_pages, block_table, kv_lens, k_new, v_new, cu_seqlens, rope_cos, rope_sin}, 1);
}

// ---- Autograd, vmap

// For all three operators: no gradient is dropped in silence, and what was written to is known to have changed.
void refuse_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  std::vector<Tensor> written;
  for (size_t n = 0; n < arguments.size(); ++n) {
    const c10::IValue& value = torch::jit::peek(*stack, n, arguments.size());
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const Tensor& tensor = value.toTensor();
    TORCH_CHECK_NOT_IMPLEMENTED(!tensor.requires_grad() || !at::GradMode::is_enabled(), arguments[n].name(),
                                ": requires grad, but caches are for inference: ", op.schema().name(),
                                " has no backward pass; call under torch.no_grad(), or use flashmsa.attention");
    TORCH_CHECK_NOT_IMPLEMENTED(!tensor._fw_grad(/*level=*/0).defined(), arguments[n].name(),
                                ": carries a forward-mode tangent, but forward-mode AD is not supported; detach it");
    if (arguments[n].alias_info() != nullptr && arguments[n].alias_info()->isWrite()) written.push_back(tensor);
  }
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  for (const Tensor& tensor : written) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
}

void refuse_vmap(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op.schema().name(),
                              ": vmap is not supported; fold the mapped dimension into the batch");
}

#ifndef FLASHMSA_WITH_CUDA
void refuse_cuda(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK(false, op.schema().name(), ": on CUDA, but this build of flashmsa has no CUDA kernels: ", kCudaLeftOut,
              "; backend=\"torch\" runs without them");
}
#endif

const cpu::ParallelFor& parallel_for() {
  static const cpu::ParallelFor run = [](int64_t count, int64_t grain,
                                         const std::function<void(int64_t, int64_t)>& body) {
    at::parallel_for(0, count, grain, body);
  };
  return run;
}

template <class Device>
void implement(torch::Library& m) {
  m.impl("paged_attention", &paged_attention_on<Device>);
  m.impl("gather_pages", &gather_pages_on<Device>);
  m.impl("append_kv", &append_kv_on<Device>);
}

constexpr const char* kNames[] = {"paged_attention", "gather_pages", "append_kv"};

}  // namespace

PagedCall describe_paged_call(const PagedArguments& args) {
  check_paged(args, 1);
  return make_paged_call(args, Rows::kUnitStride);
}

void CpuPaged::attend(PagedCall& call, const Tensor&, const Tensor&, const std::optional<Tensor>&) {
  cpu::paged_attention(call.params, parallel_for());
}

void CpuPaged::gather(const pages::GatherParams& params, at::Device) { cpu::gather_pages(params, parallel_for()); }

void CpuPaged::append(const pages::AppendParams& params, at::Device) { cpu::append_kv(params, parallel_for()); }

TORCH_LIBRARY_FRAGMENT(flashmsa, m) {
  m.def(
      "paged_attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor? block_table, Tensor? kv_lens, "
      "Tensor? cu_seqlens_q, int max_seqlen_q, Tensor? query_pages, int query_block, int mask, int[] mask_ints, "
      "Tensor[] mask_tensors, Tensor? tree_mask, float? scale, float softcap, Tensor? sinks, Tensor? alibi_slopes, "
      "int num_splits, bool batch_invariant, Tensor? workspace, bool return_lse) -> (Tensor out, Tensor lse)",
      {at::Tag::pt2_compliant_tag});
  m.def("gather_pages(Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor kv_lens) -> (Tensor k, Tensor v)",
        {at::Tag::pt2_compliant_tag});
  m.def(
      "append_kv(Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor block_table, Tensor kv_lens, Tensor k_new, "
      "Tensor v_new, Tensor? cu_seqlens, Tensor? rope_cos, Tensor? rope_sin, bool rope_interleaved) -> ()",
      {at::Tag::pt2_compliant_tag});
}

TORCH_LIBRARY_IMPL(flashmsa, CPU, m) { implement<CpuPaged>(m); }

TORCH_LIBRARY_IMPL(flashmsa, CUDA, m) {
#ifdef FLASHMSA_WITH_CUDA
  implement<CudaPaged>(m);
#else
  for (const char* name : kNames) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_cuda>());
#endif
}

TORCH_LIBRARY_IMPL(flashmsa, Meta, m) {
  m.impl("paged_attention", &paged_attention_meta);
  m.impl("gather_pages", &gather_pages_meta);
  m.impl("append_kv", &append_kv_meta);
}

TORCH_LIBRARY_IMPL(flashmsa, Autograd, m) {
  for (const char* name : kNames) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_gradients>());
}

TORCH_LIBRARY_IMPL(flashmsa, FuncTorchBatched, m) {
  for (const char* name : kNames) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_vmap>());
}

}  // namespace flashmsa::binding
