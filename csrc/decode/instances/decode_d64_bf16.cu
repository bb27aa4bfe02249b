#include "decode/launch.cuh"

namespace flashmsa::decode {

KernelEntry entry_d64_bf16() { return make_entry<__nv_bfloat16, 64>(); }

}  // namespace flashmsa::decode
