#include "decode/launch.cuh"

namespace flashmsa::decode {

KernelEntry entry_d128_bf16() { return make_entry<Config128<__nv_bfloat16>>(); }

}  // namespace flashmsa::decode
