#include "decode/launch.cuh"

namespace flashmsa::decode {

KernelEntry entry_d64_bf16() { return make_entry<Config64<__nv_bfloat16>>(); }

}  // namespace flashmsa::decode
