#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> entries_d128_bf16() {
  return make_entries<Config128<__nv_bfloat16>, Config128<__nv_bfloat16>>();
}

}  // namespace flashmsa::fwd
