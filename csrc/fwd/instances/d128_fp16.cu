#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> entries_d128_fp16() {
  using Element = __half;
  std::vector<KernelEntry> entries = make_short_document_entries<ShortDocumentConfig128<Element>>();
  for (const KernelEntry& entry :
       make_entries<Config128<Element>, Config128<Element>, Config128<Element>, DocumentConfig128<Element>>()) {
    entries.push_back(entry);
  }
  return entries;
}

}  // namespace flashmsa::fwd
