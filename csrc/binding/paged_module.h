// What flashmsa._C says about paged caches, beside the operators.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace flashmsa::binding {

void define_paged(pybind11::module_& module);

}  // namespace flashmsa::binding
