#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> entries_d128_bf16() {
  std::vector<KernelEntry> entries = make_short_document_entries<DocumentConfig128<__nv_bfloat16>>();
  for (const KernelEntry& entry : make_entries<Config128<__nv_bfloat16>, Config128<__nv_bfloat16>>()) {
    entries.push_back(entry);
  }
  return entries;
}

}  // namespace flashmsa::fwd
