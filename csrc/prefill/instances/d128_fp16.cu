#include "prefill/launch.cuh"

namespace flashmsa::prefill {

std::vector<KernelEntry> entries_d128_fp16() { return make_entries<fwd::Config128<__half>>(); }

}  // namespace flashmsa::prefill
