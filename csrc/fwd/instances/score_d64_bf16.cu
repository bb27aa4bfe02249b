#include "fwd/launch.cuh"

namespace flashmsa::fwd {

std::vector<KernelEntry> score_entries_d64_bf16() {
  return make_score_entries<CompositeConfig64<__nv_bfloat16>, ListConfig64<__nv_bfloat16>,
                            ScoreConfig64<__nv_bfloat16>>();
}

}  // namespace flashmsa::fwd
