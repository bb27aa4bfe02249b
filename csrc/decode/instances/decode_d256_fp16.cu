#include "decode/launch.cuh"

namespace flashmsa::decode {

KernelEntry entry_d256_fp16() { return make_entry<Config256<__half>>(); }

}  // namespace flashmsa::decode
