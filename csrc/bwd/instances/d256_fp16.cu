#include "bwd/launch.cuh"

namespace flashmsa::bwd {

std::vector<KernelEntry> entries_d256_fp16() { return make_entries<Config256, __half>(); }

}  // namespace flashmsa::bwd
