#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> small_entries_d128_fp16() { return make_small_entries<SmallConfig128<__half>>(); }

}  // namespace flashmsa::fwd
