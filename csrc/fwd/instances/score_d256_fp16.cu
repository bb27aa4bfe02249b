#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> score_entries_d256_fp16() {
  return make_score_entries<Config256<__half>, Config256<__half>, ScoreConfig256<__half>>();
}

}  // namespace flashmsa::fwd
