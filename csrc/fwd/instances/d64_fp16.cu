#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> entries_d64_fp16() {
  return make_entries<Config64<__half>, ListConfig64<__half>, CompositeConfig64<__half>>();
}

}  // namespace flashmsa::fwd
