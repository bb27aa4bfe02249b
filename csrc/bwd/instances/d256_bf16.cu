#include "bwd/launch.cuh"

namespace flashmsa::bwd {

std::vector<KernelEntry> entries_d256_bf16() { return make_entries<Config256, __nv_bfloat16>(); }

}  // namespace flashmsa::bwd
