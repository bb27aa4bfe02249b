// Every CUDA runtime call is checked; a failure names the call and its place.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace flashmsa {

inline void check_cuda(cudaError_t error, const char* call, const char* file, int line) {
  if (error == cudaSuccess) return;
  throw std::runtime_error("flashmsa: " + std::string(call) + " failed at " + file + ":" + std::to_string(line) + ": " +
                           cudaGetErrorName(error) + ", " + cudaGetErrorString(error));
}

}  // namespace flashmsa

#define FLASHMSA_CHECK_CUDA(call) ::flashmsa::check_cuda((call), #call, __FILE__, __LINE__)
