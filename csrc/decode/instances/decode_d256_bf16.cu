#include "decode/launch.cuh"

namespace flashmsa::decode {

KernelEntry entry_d256_bf16() { return make_entry<__nv_bfloat16, 256>(); }

}  // namespace flashmsa::decode
