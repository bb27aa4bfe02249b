#include "bwd/launch.cuh"

namespace flashmsa::bwd {

std::vector<KernelEntry> entries_d64_fp16() { return make_entries<Config64, __half>(); }

}  // namespace flashmsa::bwd
