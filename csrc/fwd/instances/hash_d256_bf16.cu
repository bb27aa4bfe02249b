#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> hash_entries_d256_bf16() { return make_indexed_entries<IndexConfig256<__nv_bfloat16>>(); }

}  // namespace flashmsa::fwd
