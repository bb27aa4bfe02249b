#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> dropout_entries_d128_fp16() {
  return make_dropout_entries<DropConfig128<__half>, GeneralConfig128<__half>>();
}

}  // namespace flashmsa::fwd
