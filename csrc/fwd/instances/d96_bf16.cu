#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> entries_d96_bf16() {
  return make_interval_entries<Config96<__nv_bfloat16>, CompositeConfig96<__nv_bfloat16>>();
}

}  // namespace flashmsa::fwd
