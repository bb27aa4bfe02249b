#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> entries_d128_bf16() {
  return make_entries_by_length<Config128<__nv_bfloat16>, DocumentConfig128<__nv_bfloat16>,
                                ShortDocumentConfig128<__nv_bfloat16>>();
}

}  // namespace flashmsa::fwd
