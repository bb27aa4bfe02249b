#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> hash_entries_d256_fp16() { return make_indexed_entries<IndexConfig256<__half>>(); }

}  // namespace flashmsa::fwd
