#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> entries_d128_fp16() {
  return make_entries_by_length<Config128<__half>, DocumentConfig128<__half>, ShortDocumentConfig128<__half>>();
}

}  // namespace flashmsa::fwd
