// The Python module flashmsa._C.
//
// attention and attention_out read their arguments with the C API: pybind11's casters cost a call about as much again as
// torch's dispatcher, and do not say which argument was wrong.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "binding/arguments.h"
#include "binding/build.h"
#include "binding/few_queries.h"
#include "binding/ops.h"
#include "binding/paged_module.h"
#include "binding/tile_counts.h"
#include "mask/list.h"

#ifdef FLASHMSA_WITH_CUDA
#include "bwd/backward.h"
#include "decode/decode.h"
#include "fwd/forward.h"
#endif

namespace flashmsa::binding {
namespace {

// ---- Reading arguments

const char* type_name(PyObject* object) { return Py_TYPE(object)->tp_name; }

const at::Tensor& read_tensor(const char* name, PyObject* object) {
  TORCH_CHECK_TYPE(THPVariable_Check(object), name, ": must be a torch.Tensor, not ", type_name(object));
  const at::Tensor& tensor = THPVariable_Unpack(object);
  // Here, because the dispatcher knows no operator of ours for them and says only that.
  TORCH_CHECK_TYPE(!tensor.is_nested(), name,
                   ": a nested tensor is not supported; pack the sequences one after another "
                   "under a Document mask");
  TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, name, ": layout ", tensor.layout(),
                   " is not supported; must be torch.strided, as ", name, ".to_dense() gives");
  return tensor;
}

int64_t read_int(const char* name, PyObject* object) {
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    TORCH_CHECK_TYPE(false, name, ": must be a 64-bit int, not ", type_name(object));
  }
  return value;
}

std::optional<double> read_scale(PyObject* object) {
  if (object == Py_None) return std::nullopt;
  // NOTE: a tensor is a number to Python as well, but reading it waits for its device and drops its gradient.
  TORCH_CHECK_TYPE(!THPVariable_Check(object) && !PyBool_Check(object), "scale: must be a float or None, not ",
                   type_name(object), THPVariable_Check(object) ? "; multiply q by it instead" : "");
  const double value = PyFloat_AsDouble(object);
  if (value == -1.0 && PyErr_Occurred() != nullptr) {
    const bool too_large = PyErr_ExceptionMatches(PyExc_OverflowError);
    PyErr_Clear();
    TORCH_CHECK_VALUE(!too_large, "scale: an int that no float can hold; must be finite");
    TORCH_CHECK_TYPE(false, "scale: must be a float or None, not ", type_name(object));
  }
  return value;
}

double read_float(const char* name, PyObject* object) {
  TORCH_CHECK_TYPE(!THPVariable_Check(object) && !PyBool_Check(object), name, ": must be a float, not ",
                   type_name(object));
  const double value = PyFloat_AsDouble(object);
  if (value == -1.0 && PyErr_Occurred() != nullptr) {
    const bool too_large = PyErr_ExceptionMatches(PyExc_OverflowError);
    PyErr_Clear();
    TORCH_CHECK_VALUE(!too_large, name, ": an int that no float can hold; must be finite");
    TORCH_CHECK_TYPE(false, name, ": must be a float, not ", type_name(object));
  }
  return value;
}

std::optional<at::Tensor> read_optional_tensor(const char* name, PyObject* object) {
  if (object == Py_None) return std::nullopt;
  return read_tensor(name, object);
}

template <class Each>
void read_sequence(const char* name, PyObject* object, const Each& each) {
  TORCH_CHECK_TYPE(PyTuple_Check(object) || PyList_Check(object), name, ": must be a tuple or list, not ",
                   type_name(object));
  PyObject** items = PySequence_Fast_ITEMS(object);
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) each(items[i]);
}

// The fourteen arguments of the schema, in its order. Borrows the caller's tensors.
struct CallArguments {
  const at::Tensor& q;
  const at::Tensor& k;
  const at::Tensor& v;
  int64_t mask;
  c10::SmallVector<int64_t, 4> mask_ints;
  c10::SmallVector<at::Tensor, 4> mask_tensors;
  std::optional<double> scale;
  double softcap;
  std::optional<at::Tensor> sinks;
  std::optional<at::Tensor> alibi_slopes;
  double dropout_p;
  std::optional<at::Tensor> rng_state;
  bool deterministic;
  bool return_lse;

  static constexpr Py_ssize_t kCount = 14;

  explicit CallArguments(PyObject* const* a)
      : q(read_tensor("q", a[0])),
        k(read_tensor("k", a[1])),
        v(read_tensor("v", a[2])),
        mask(read_int("mask", a[3])),
        scale(read_scale(a[6])),
        softcap(read_float("softcap", a[7])),
        sinks(read_optional_tensor("sinks", a[8])),
        alibi_slopes(read_optional_tensor("alibi_slopes", a[9])),
        dropout_p(read_float("dropout_p", a[10])),
        rng_state(read_optional_tensor("seed", a[11])),
        deterministic(PyObject_IsTrue(a[12]) == 1),
        return_lse(PyObject_IsTrue(a[13]) == 1) {
    read_sequence("mask_ints", a[4], [&](PyObject* item) { mask_ints.push_back(read_int("mask_ints", item)); });
    read_sequence("mask_tensors", a[5],
                  [&](PyObject* item) { mask_tensors.push_back(read_tensor("mask_tensors", item)); });
  }
};

void expect_count(const char* function, Py_ssize_t count, Py_ssize_t want) {
  TORCH_CHECK_TYPE(count == want, function, "() takes ", want, " positional arguments, got ", count);
}

PyObject* wrap(Result&& result) {
  THPObjectPtr tuple(PyTuple_New(2));
  if (!tuple) throw python_error();
  PyTuple_SET_ITEM(tuple.get(), 0, THPVariable_Wrap(std::get<0>(std::move(result))));
  PyTuple_SET_ITEM(tuple.get(), 1, THPVariable_Wrap(std::get<1>(std::move(result))));
  return tuple.release();
}

PyObject* py_attention(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  expect_count("attention", count, CallArguments::kCount);
  const CallArguments a(args);
  Result result = [&] {
    const py::gil_scoped_release no_gil;
    return attention(a.q, a.k, a.v, a.mask, a.mask_ints, a.mask_tensors, a.scale, a.softcap, a.sinks, a.alibi_slopes,
                     a.dropout_p, a.rng_state, a.deterministic, a.return_lse);
  }();
  return wrap(std::move(result));
  END_HANDLE_TH_ERRORS
}

PyObject* py_attention_out(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  expect_count("attention_out", count, CallArguments::kCount + 1);
  const CallArguments a(args);
  at::Tensor out = read_tensor("out", args[CallArguments::kCount]);
  at::Tensor lse = [&] {
    const py::gil_scoped_release no_gil;
    return attention_out(a.q, a.k, a.v, a.mask, a.mask_ints, a.mask_tensors, a.scale, a.softcap, a.sinks,
                         a.alibi_slopes, a.dropout_p, a.rng_state, a.deterministic, a.return_lse, out);
  }();
  return wrap({std::move(out), std::move(lse)});
  END_HANDLE_TH_ERRORS
}

PyMethodDef kMethods[] = {
    {"attention", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(py_attention)), METH_FASTCALL,
     "attention(q, k, v, mask, mask_ints, mask_tensors, scale, softcap, sinks, alibi_slopes, dropout_p, rng_state, "
     "deterministic, return_lse) -> (out, lse)\n\n"
     "flashmsa::attention by position, through torch's dispatcher."},
    {"attention_out", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(py_attention_out)), METH_FASTCALL,
     "attention_out(q, k, v, mask, mask_ints, mask_tensors, scale, softcap, sinks, alibi_slopes, dropout_p, rng_state, "
     "deterministic, return_lse, out) -> (out, lse)\n\n"
     "flashmsa::attention.out by position, and the tensor it wrote to."},
    {nullptr, nullptr, 0, nullptr},
};

// ---- Facts about the build

py::dict build_info() {
  py::dict info;
  info["cuda"] = kWithCuda;
  info["cuda_version"] = kWithCuda ? py::object(py::str(kCudaVersion)) : py::none();
  info["arch"] = kWithCuda ? py::object(py::str("sm_90a")) : py::none();
  info["compiler"] = __VERSION__;
  info["torch"] = FLASHMSA_TORCH_VERSION;
  info["reason"] = kWithCuda ? py::object(py::none()) : py::str(kCudaLeftOut);
  return info;
}

#ifdef FLASHMSA_WITH_CUDA
const char* mask_name(MaskKind kind) {
#define FLASHMSA_NAME(Mask) \
  if (kind == mask::Mask::kKind) return mask::Mask::kName;
  FLASHMSA_FOR_EACH_MASK(FLASHMSA_NAME)
  FLASHMSA_NAME(Hash)
  FLASHMSA_NAME(Band)
#undef FLASHMSA_NAME
  return "unknown";
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return "float16";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF32:
      return "float32";
    case DType::kF64:
      return "float64";
  }
  return "unknown";
}

py::dict describe(const fwd::KernelInfo& kernel) {
  py::dict d;
  d["name"] = kernel.name;
  d["mask"] = mask_name(kernel.mask);
  d["softcap"] = kernel.softcap;
  d["alibi"] = kernel.alibi;
  d["dropout"] = kernel.dropout;
  d["general"] = kernel.general;
  d["dtype"] = dtype_name(kernel.dtype);
  d["head_dim_bucket"] = kernel.head_dim_bucket;
  d["head_dim_v_bucket"] = kernel.head_dim_v_bucket;
  d["block_q"] = kernel.block_q;
  d["block_kv"] = kernel.block_kv;
  d["stages"] = kernel.stages;
  d["consumer_warpgroups"] = kernel.consumer_warpgroups;
  d["threads"] = kernel.threads;
  d["registers_producer"] = kernel.registers_producer;
  d["registers_consumer"] = kernel.registers_consumer;
  d["ctas_per_sm"] = kernel.ctas_per_sm;
  d["shared_memory"] = kernel.shared_memory;
  d["least_packed"] = kernel.least_packed;
  return d;
}

py::dict describe(const bwd::KernelInfo& kernel) {
  py::dict d;
  d["name"] = kernel.name;
  d["packed"] = kernel.packed;
  d["band"] = kernel.band;
  d["dropout"] = kernel.dropout;
  d["general"] = kernel.general;
  d["dtype"] = dtype_name(kernel.dtype);
  d["head_dim_bucket"] = kernel.head_dim_bucket;
  d["block_q"] = kernel.block_q;
  d["block_kv"] = kernel.block_kv;
  d["stages"] = kernel.stages;
  d["threads"] = kernel.threads;
  d["shared_memory"] = kernel.shared_memory;
  return d;
}
#endif

py::list kernels() {
  py::list list;
#ifdef FLASHMSA_WITH_CUDA
  for (const fwd::KernelInfo& kernel : fwd::kernels()) list.append(describe(kernel));
#endif
  return list;
}

void replace_kernel(const std::string& name, const std::string& by) {
#ifdef FLASHMSA_WITH_CUDA
  fwd::replace_kernel(name, by);
#else
  throw std::invalid_argument("kernel: " + name + " by " + by + ", but this build has no kernels: " + kCudaLeftOut);
#endif
}

py::list backward_kernels() {
  py::list list;
#ifdef FLASHMSA_WITH_CUDA
  for (const bwd::KernelInfo& kernel : bwd::kernels()) list.append(describe(kernel));
#endif
  return list;
}

py::object find_kernel(int64_t mask, at::ScalarType dtype, int32_t head_dim, int32_t head_dim_v, bool softcap,
                       bool alibi, bool dropout, bool backward, int32_t documents, bool causal, int32_t len_q,
                       int32_t len_kv, bool deterministic, const std::vector<int64_t>& mask_ints, int32_t batch,
                       int32_t heads_q) {
#ifdef FLASHMSA_WITH_CUDA
  BackwardParams call;
  AttentionParams& params = call.forward;
  std::vector<at::Tensor> held;
  if (!mask_ints.empty()) params.mask = make_mask(mask, mask_ints, {}, 1, held);
  params.mask.kind = kernel_kind(static_cast<MaskKind>(mask));
  // What lowering does beside that, as far as dropout asks: it strides tokens, or sorts them.
  const int32_t some_order = 0;
  if (static_cast<MaskKind>(mask) == MaskKind::kDilated) params.token_step = 2;
  if (static_cast<MaskKind>(mask) == MaskKind::kHash) params.mask.q_order = params.mask.kv_order = &some_order;
  params.softcap = softcap ? 1.0 : 0.0;
  const float some_slope = 0.0f;
  if (alibi) params.alibi_slopes = &some_slope;
  params.dropout_p = dropout ? 0.5 : 0.0;
  params.dtype = core_dtype(dtype);
  params.head_dim = head_dim;
  params.head_dim_v = head_dim_v;
  params.batch = batch;
  params.heads_q = heads_q;
  params.len_q = len_q;
  params.len_kv = len_kv;
  // NOTE: the composite mask's are in its tensors, and no kernel is chosen by them, but that it has some.
  if (mask_ints.empty()) {
    params.mask.num_documents = documents;
    params.mask.causal = causal;
    if (params.mask.kind == MaskKind::kComposite) params.mask.row_begin = &some_order;
  }
  if (backward) {
    call.deterministic = deterministic;
    const bwd::KernelInfo* kernel = bwd::find_kernel(call);
    if (kernel != nullptr) return describe(*kernel);
  } else {
    const fwd::KernelInfo* kernel = fwd::find_kernel(params);
    if (kernel != nullptr) return describe(*kernel);
  }
#endif
  return py::none();
}

// `from_start`: positions, which ALiBi counts from. Of calls without documents, given runs or blocks.
py::object few_queries_kernel(int64_t mask, at::ScalarType dtype, int32_t batch, int32_t heads_q, int32_t heads_kv,
                              int32_t len_q, int32_t len_kv, int32_t head_dim, int32_t head_dim_v, bool alibi,
                              bool from_start) {
  AttentionParams params;
  params.mask.kind = static_cast<MaskKind>(mask);
  params.mask.positions_top_left = from_start;
  params.dtype = core_dtype(dtype);
  params.batch = batch;
  params.heads_q = heads_q;
  params.heads_kv = heads_kv;
  params.len_q = len_q;
  params.len_kv = len_kv;
  params.head_dim = head_dim;
  params.head_dim_v = head_dim_v;
  const float some_slope = 0.0f;
  if (alibi) params.alibi_slopes = &some_slope;
  if (!has_few_queries(params)) return py::none();
#ifdef FLASHMSA_WITH_CUDA
  const decode::KernelInfo* kernel = decode::find_kernel(as_cache(params));
  if (kernel != nullptr) {
    py::dict d;
    d["name"] = kernel->name;
    d["head_dim_bucket"] = kernel->head_dim_bucket;
    d["block_kv"] = kernel->block_kv;
    d["threads"] = kernel->threads;
    d["shared_memory"] = kernel->shared_memory;
    return d;
  }
#endif
  return py::none();
}

py::dict tile_counts(int64_t mask, const std::vector<int64_t>& mask_ints, const std::vector<at::Tensor>& mask_tensors,
                     int32_t batch, int32_t heads_q, int32_t len_q, int32_t len_kv, int32_t block_q, int32_t block_kv,
                     std::optional<int32_t> heads_kv, bool dropout, int32_t least_packed) {
  check_mask<int64_t>(
      mask, mask_ints, mask_tensors, at::kCPU,
      {int64_t{batch}, int64_t{heads_q}, int64_t{heads_kv.value_or(heads_q)}, int64_t{len_q}, int64_t{len_kv}});
  // NOTE: lengths leave room below the largest int32 for a whole tile of this size.
  constexpr int32_t kMaxBlock = 65536;
  TORCH_CHECK_VALUE(block_q > 0 && block_kv > 0 && block_q <= kMaxBlock && block_kv <= kMaxBlock,
                    "block_q, block_kv: ", block_q, ", ", block_kv, "; must be positive, at most ", kMaxBlock);
  TORCH_CHECK_VALUE(batch >= 0 && heads_q >= 0 && len_q >= 0 && len_kv >= 0,
                    "batch, heads_q, len_q, len_kv: must not be negative");
  std::vector<at::Tensor> held;
  AttentionParams params;
  params.batch = batch;
  params.heads_q = heads_q;
  params.len_q = len_q;
  params.len_kv = len_kv;
  params.mask = make_mask(mask, mask_ints, mask_tensors, heads_q, held);
  params.dropout_p = dropout ? 0.5 : 0.0;
  const TileCounts counts = count_tiles(params, block_q, block_kv, least_packed);
  py::dict d;
  d["full"] = counts.full;
  d["partial"] = counts.partial;
  d["skipped"] = counts.skipped;
  d["allowed_pairs"] = counts.allowed_pairs;
  return d;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled part of flashmsa: the operator flashmsa::attention, and facts about this build.";
  if (PyModule_AddFunctions(m.ptr(), kMethods) != 0) throw py::error_already_set();
  define_paged(m);
  m.def("build_info", &build_info,
        "What was built: cuda, cuda_version, arch, compiler, torch, and the reason where kernels were left out.");
  m.def("kernels", &kernels, "Every compiled sm_90a forward kernel, as dicts.");
  m.def(
      "replace_kernel", &replace_kernel, py::arg("name"), py::arg("by"),
      "From now on the forward kernel `by` runs the calls of the one named `name` that it serves; itself: as compiled. "
      "ValueError for a name that no kernel has.");
  m.def("backward_kernels", &backward_kernels, "Every compiled sm_90a backward kernel, as dicts.");
  m.def(
      "find_kernel", torch::wrap_pybind_function(&find_kernel), py::arg("mask"), py::arg("dtype"), py::arg("head_dim"),
      py::arg("head_dim_v"), py::arg("softcap") = false, py::arg("alibi") = false, py::arg("dropout") = false,
      py::arg("backward") = false, py::arg("documents") = 0, py::arg("causal") = false, py::arg("len_q") = 0,
      py::arg("len_kv") = 0, py::arg("deterministic") = false, py::arg("mask_ints") = std::vector<int64_t>(),
      py::arg("batch") = 0, py::arg("heads_q") = 0,
      "The kernel for a mask kind, dtype, head dims and options, or None. For a document mask it depends on the "
      "documents' number and the lengths too, for its backward pass on deterministic mode as well; for the forward "
      "pass of a composite mask without tensors on its ints and the lengths, of dense and causal ones on batch, heads "
      "and lengths: few rows have small tiles.");
  m.def("few_queries_kernel", torch::wrap_pybind_function(&few_queries_kernel), py::arg("mask"), py::arg("dtype"),
        py::arg("batch"), py::arg("heads_q"), py::arg("heads_kv"), py::arg("len_q"), py::arg("len_kv"),
        py::arg("head_dim"), py::arg("head_dim_v"), py::arg("alibi") = false, py::arg("from_start") = false,
        "The decode kernel that runs a call of so few queries, without documents and dropout, in place of the kernel "
        "that find_kernel gives; None where that one runs it.");
  m.def("tile_counts", torch::wrap_pybind_function(&tile_counts), py::arg("mask"), py::arg("mask_ints"),
        py::arg("mask_tensors"), py::arg("batch"), py::arg("heads_q"), py::arg("len_q"), py::arg("len_kv"),
        py::arg("block_q"), py::arg("block_kv"), py::arg("heads_kv") = py::none(), py::arg("dropout") = false,
        py::arg("least_packed") = 0,
        "Tiles that are full, partial and skipped, and the allowed (query, key) pairs, over all batches and heads. "
        "dropout: as the kernels that drop weights lay them; least_packed: as the kernel of documents that says so in "
        "its entry does.");
}

}  // namespace flashmsa::binding
