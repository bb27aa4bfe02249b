#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> entries_d192x128_fp16() {
  return make_interval_entries<Config192x128<__half>, CompositeConfig192x128<__half>>();
}

}  // namespace flashmsa::fwd
