#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> score_entries_d128_bf16() {
  return make_score_entries<Config128<__nv_bfloat16>, Config128<__nv_bfloat16>, ScoreConfig128<__nv_bfloat16>>();
}

}  // namespace flashmsa::fwd
