#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> dropout_entries_d64_bf16() {
  return make_dropout_entries<DropConfig64<__nv_bfloat16>, GeneralConfig64<__nv_bfloat16>>();
}

}  // namespace flashmsa::fwd
