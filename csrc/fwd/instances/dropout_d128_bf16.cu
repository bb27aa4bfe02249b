#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> dropout_entries_d128_bf16() {
  return make_dropout_entries<DropConfig128<__nv_bfloat16>, GeneralConfig128<__nv_bfloat16>>();
}

}  // namespace flashmsa::fwd
