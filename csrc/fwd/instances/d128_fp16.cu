#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> entries_d128_fp16() {
  std::vector<KernelEntry> entries = make_short_document_entries<DocumentConfig128<__half>>();
  for (const KernelEntry& entry : make_entries<Config128<__half>, Config128<__half>>()) {
    entries.push_back(entry);
  }
  return entries;
}

}  // namespace flashmsa::fwd
