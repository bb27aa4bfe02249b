#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> score_entries_d64_fp16() {
  return make_score_entries<CompositeConfig64<__half>, ListConfig64<__half>, ScoreConfig64<__half>>();
}

}  // namespace flashmsa::fwd
