#include "decode/launch.cuh"

namespace flashmsa::decode {

KernelEntry entry_d128_fp16() { return make_entry<__half, 128>(); }

}  // namespace flashmsa::decode
