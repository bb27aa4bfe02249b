// The two native backends behind one shape, for the dispatcher's device keys.
#pragma once

#include <c10/core/DeviceGuard.h>

#include <vector>

#include "binding/arguments.h"

namespace flashmsa::binding {

// What a backward pass leaves for the gradient of sinks: lse and delta of the same rows in the same order, fp32, heads in
// the second dimension; of f64 their sink_terms.
struct DeltaRows {
  at::Tensor lse, delta, sink_terms;
};

// at::parallel_for over the CPU backend.
struct CpuBackend {
  static constexpr Rows kRows = Rows::kUnitStride;
  static constexpr bool kRunsWithoutKeys = true;

  static void check_device(at::Device) {}
  static c10::OptionalDeviceGuard make_current(at::Device) { return c10::OptionalDeviceGuard(); }
  static at::Tensor empty(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);
  static void run(Call& call);
  // Writes dq, dk and dv. Of calls with queries and keys.
  static std::vector<DeltaRows> run_backward(BackwardCall& call);
};

// The sm_90a kernels on the current stream of the tensors' device. Only in builds with kernels.
struct CudaBackend {
  static constexpr Rows kRows = Rows::kTma;
  static constexpr bool kRunsWithoutKeys = false;

  // Raises where the device has no kernels.
  static void check_device(at::Device device);
  static c10::OptionalDeviceGuard make_current(at::Device device) { return c10::OptionalDeviceGuard(device); }
  // What follows needs the device to be current.
  static at::Tensor empty(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);
  static void run(Call& call);
  // Writes dq, dk and dv. Of calls with queries and keys.
  static std::vector<DeltaRows> run_backward(BackwardCall& call);
};

}  // namespace flashmsa::binding
