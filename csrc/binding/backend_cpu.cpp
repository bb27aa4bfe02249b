#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>

#include "binding/backend.h"
#include "binding/prepare.h"
#include "binding/sorted_call.h"
#include "cpu/forward.h"

namespace flashmsa::binding {

at::Tensor CpuBackend::empty(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return at::Tensor(at::detail::empty_strided_cpu(sizes, strides, dtype));
}

void CpuBackend::run(Call& call) {
  static const cpu::ParallelFor parallel_for = [](int64_t count, int64_t grain,
                                                  const std::function<void(int64_t, int64_t)>& body) {
    at::parallel_for(0, count, grain, body);
  };
  if (call.params.mask.kind != MaskKind::kHash) return cpu::attention_forward(call.params, parallel_for);
  SortedCall<CpuBackend, CpuPrepare> sorted(call);
  cpu::attention_forward(sorted.params(), parallel_for);
  sorted.finish();
}

}  // namespace flashmsa::binding
