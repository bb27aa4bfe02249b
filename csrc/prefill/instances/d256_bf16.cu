#include "prefill/launch.cuh"

namespace flashmsa::prefill {

std::vector<KernelEntry> entries_d256_bf16() { return make_entries<fwd::Config256<__nv_bfloat16>>(); }

}  // namespace flashmsa::prefill
