#include "bwd/launch.cuh"

namespace flashmsa::bwd {

std::vector<KernelEntry> entries_d128_fp16() { return make_entries<Config128, __half>(); }

}  // namespace flashmsa::bwd
