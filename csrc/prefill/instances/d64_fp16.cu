#include "prefill/launch.cuh"

namespace flashmsa::prefill {

std::vector<KernelEntry> entries_d64_fp16() { return make_entries<fwd::PageConfig64<__half>>(); }

}  // namespace flashmsa::prefill
