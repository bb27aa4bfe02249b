#include "decode/launch.cuh"

namespace flashmsa::decode {

KernelEntry entry_d256_bf16() { return make_entry<Config256<__nv_bfloat16>>(); }

}  // namespace flashmsa::decode
