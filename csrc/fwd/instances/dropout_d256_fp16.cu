#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> dropout_entries_d256_fp16() {
  return make_dropout_entries<DropConfig256<__half>, GeneralConfig256<__half>>();
}

}  // namespace flashmsa::fwd
