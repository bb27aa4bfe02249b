#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> small_entries_d128_bf16() { return make_small_entries<SmallConfig128<__nv_bfloat16>>(); }

}  // namespace flashmsa::fwd
