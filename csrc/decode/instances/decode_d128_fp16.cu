#include "decode/launch.cuh"

namespace flashmsa::decode {

KernelEntry entry_d128_fp16() { return make_entry<Config128<__half>>(); }

}  // namespace flashmsa::decode
