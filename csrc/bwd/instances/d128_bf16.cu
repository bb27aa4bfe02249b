#include "bwd/launch.cuh"

namespace flashmsa::bwd {

std::vector<KernelEntry> entries_d128_bf16() { return make_entries<Config128, __nv_bfloat16>(); }

}  // namespace flashmsa::bwd
