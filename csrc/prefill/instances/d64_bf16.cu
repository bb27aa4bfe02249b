#include "prefill/launch.cuh"

namespace flashmsa::prefill {

std::vector<KernelEntry> entries_d64_bf16() { return make_entries<fwd::PageConfig64<__nv_bfloat16>>(); }

}  // namespace flashmsa::prefill
