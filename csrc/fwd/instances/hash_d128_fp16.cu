#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> hash_entries_d128_fp16() { return make_indexed_entries<IndexConfig128<__half>>(); }

}  // namespace flashmsa::fwd
