#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> score_entries_d256_bf16() {
  return make_score_entries<Config256<__nv_bfloat16>, Config256<__nv_bfloat16>, ScoreConfig256<__nv_bfloat16>>();
}

}  // namespace flashmsa::fwd
