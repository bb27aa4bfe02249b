#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> hash_entries_d128_bf16() { return make_indexed_entries<IndexConfig128<__nv_bfloat16>>(); }

}  // namespace flashmsa::fwd
