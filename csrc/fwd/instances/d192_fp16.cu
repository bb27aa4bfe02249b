#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> entries_d192_fp16() { return make_interval_entries<Config192<__half>, Config192<__half>>(); }

}  // namespace flashmsa::fwd
