// What the build decided, as setup.py and CMake define it.
#pragma once

namespace flashmsa::binding {

#ifdef FLASHMSA_WITH_CUDA
inline constexpr bool kWithCuda = true;
inline constexpr const char* kCudaLeftOut = "";
inline constexpr const char* kCudaVersion = FLASHMSA_CUDA_VERSION;
#else
inline constexpr bool kWithCuda = false;
inline constexpr const char* kCudaLeftOut = FLASHMSA_CUDA_LEFT_OUT;
inline constexpr const char* kCudaVersion = "";
#endif

}  // namespace flashmsa::binding
