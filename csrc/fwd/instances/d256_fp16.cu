#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> entries_d256_fp16() { return make_entries<Config256<__half>, Config256<__half>>(); }

}  // namespace flashmsa::fwd
