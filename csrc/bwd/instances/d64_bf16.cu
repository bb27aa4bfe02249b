#include "bwd/launch.cuh"

namespace flashmsa::bwd {

std::vector<KernelEntry> entries_d64_bf16() { return make_entries<Config64, __nv_bfloat16>(); }

}  // namespace flashmsa::bwd
