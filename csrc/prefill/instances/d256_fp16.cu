#include "prefill/launch.cuh"

namespace flashmsa::prefill {

std::vector<KernelEntry> entries_d256_fp16() { return make_entries<fwd::Config256<__half>>(); }

}  // namespace flashmsa::prefill
