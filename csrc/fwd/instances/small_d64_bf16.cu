#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> small_entries_d64_bf16() { return make_small_entries<SmallConfig64<__nv_bfloat16>>(); }

}  // namespace flashmsa::fwd
