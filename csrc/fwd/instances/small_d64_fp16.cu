#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> small_entries_d64_fp16() { return make_small_entries<SmallConfig64<__half>>(); }

}  // namespace flashmsa::fwd
