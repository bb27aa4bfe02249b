#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> dropout_entries_d256_bf16() {
  return make_dropout_entries<Config256<__nv_bfloat16>, CapConfig256<__nv_bfloat16>>();
}

}  // namespace flashmsa::fwd
