#include "decode/launch.cuh"

namespace flashmsa::decode {

KernelEntry entry_d64_fp16() { return make_entry<__half, 64>(); }

}  // namespace flashmsa::decode
