#include "decode/launch.cuh"

namespace flashmsa::decode {

KernelEntry entry_d64_fp16() { return make_entry<Config64<__half>>(); }

}  // namespace flashmsa::decode
