#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> entries_d64_bf16() {
  return make_entries<Config64<__nv_bfloat16>, ListConfig64<__nv_bfloat16>, CompositeConfig64<__nv_bfloat16>>();
}

}  // namespace flashmsa::fwd
