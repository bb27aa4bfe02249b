#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> dropout_entries_d64_fp16() {
  return make_dropout_entries<DropConfig64<__half>, GeneralConfig64<__half>>();
}

}  // namespace flashmsa::fwd
