#include "prefill/launch.cuh"

namespace flashmsa::prefill {

std::vector<KernelEntry> entries_d128_bf16() { return make_entries<fwd::Config128<__nv_bfloat16>>(); }

}  // namespace flashmsa::prefill
