// The operators that prepare masks ahead of attention, and what each device does for them.
//
//   flashmsa::bucket_sort, bucket_rows, gather_rows, scatter_rows   of csrc/hash
//   flashmsa::block_list                                            of csrc/blocks
#pragma once

#include <c10/core/Device.h>

#include "blocks/list.h"
#include "hash/rows.h"

namespace flashmsa::binding {

// Ordinary threads; at::parallel_for.
struct CpuPrepare {
  static void check_device(const char*, at::Device) {}
  static void sort(const hash::SortParams& params, at::Device);
  static void intervals(const hash::IntervalParams& params, at::Device);
  static void move(const hash::RowsJob* jobs, int32_t count, at::Device);
  static void count_list(const blocks::ListParams& params, void* workspace, at::Device);
  static void fill_list(const blocks::ListParams& params, void* workspace, at::Device);
};

// The kernels, on the current stream of the device, which must be current. Only in builds with kernels.
struct CudaPrepare {
  // Raises, with the argument's name, where the device has no kernels.
  static void check_device(const char* name, at::Device device);
  static void sort(const hash::SortParams& params, at::Device device);
  static void intervals(const hash::IntervalParams& params, at::Device device);
  static void move(const hash::RowsJob* jobs, int32_t count, at::Device device);
  static void count_list(const blocks::ListParams& params, void* workspace, at::Device device);
  static void fill_list(const blocks::ListParams& params, void* workspace, at::Device device);
};

}  // namespace flashmsa::binding
