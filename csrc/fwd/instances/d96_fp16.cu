#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> entries_d96_fp16() {
  return make_interval_entries<Config96<__half>, CompositeConfig96<__half>>();
}

}  // namespace flashmsa::fwd
