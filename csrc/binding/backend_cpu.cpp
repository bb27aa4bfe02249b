#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>

#include "binding/backend.h"
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
  cpu::attention_forward(call.params, parallel_for);
}

}  // namespace flashmsa::binding
