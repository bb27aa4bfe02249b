#include "decode/launch.cuh"

namespace flashmsa::decode {

KernelEntry entry_d256_fp16() { return make_entry<__half, 256>(); }

}  // namespace flashmsa::decode
