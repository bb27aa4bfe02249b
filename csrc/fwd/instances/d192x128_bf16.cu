#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> entries_d192x128_bf16() {
  return make_interval_entries<Config192x128<__nv_bfloat16>, CompositeConfig192x128<__nv_bfloat16>>();
}

}  // namespace flashmsa::fwd
