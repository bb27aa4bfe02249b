#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> entries_d192_bf16() {
  return make_interval_entries<Config192<__nv_bfloat16>, Config192<__nv_bfloat16>>();
}

}  // namespace flashmsa::fwd
