#include "decode/launch.cuh"

namespace flashmsa::decode {

KernelEntry entry_d128_bf16() { return make_entry<__nv_bfloat16, 128>(); }

}  // namespace flashmsa::decode
