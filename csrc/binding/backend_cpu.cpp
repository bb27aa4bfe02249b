#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>

#include "binding/backend.h"
#include "binding/backward_call.h"
#include "binding/prepare.h"
#include "binding/sorted_call.h"
#include "cpu/backward.h"
#include "cpu/forward.h"

namespace flashmsa::binding {

at::Tensor CpuBackend::empty(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return at::Tensor(at::detail::empty_strided_cpu(sizes, strides, dtype));
}

namespace {

const cpu::ParallelFor kParallelFor = [](int64_t count, int64_t grain,
                                         const std::function<void(int64_t, int64_t)>& body) {
  at::parallel_for(0, count, grain, body);
};

}  // namespace

void CpuBackend::run(Call& call) {
  if (call.params.mask.kind != MaskKind::kHash) return cpu::attention_forward(call.params, kParallelFor);
  SortedCall<CpuBackend, CpuPrepare> sorted(call);
  cpu::attention_forward(sorted.params(), kParallelFor);
  sorted.finish();
}

std::vector<DeltaRows> CpuBackend::run_backward(BackwardCall& call) {
  return run_backward_by_kind<CpuBackend, CpuPrepare>(
      call, [](const BackwardParams& params) { cpu::attention_backward(params, kParallelFor); });
}

}  // namespace flashmsa::binding
