#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> hash_entries_d64_fp16() { return make_indexed_entries<IndexConfig64<__half>>(); }

}  // namespace flashmsa::fwd
