#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> dropout_entries_d256_bf16() {
  return make_dropout_entries<DropConfig256<__nv_bfloat16>, GeneralConfig256<__nv_bfloat16>>();
}

}  // namespace flashmsa::fwd
