#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> score_entries_d128_fp16() {
  return make_score_entries<Config128<__half>, Config128<__half>, ScoreConfig128<__half>>();
}

}  // namespace flashmsa::fwd
