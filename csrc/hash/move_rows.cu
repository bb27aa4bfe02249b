// Moves rows to the places that an order gives, or back. Bound by memory: each thread has several rows in flight.
#include <stdexcept>
#include <string>

#include "core/cuda_check.h"
#include "hash/rows.h"

namespace flashmsa::hash {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kUnroll = 8;  // rows of a thread

struct Jobs {
  RowsJob job[kMaxRowsJobs];
  int64_t first_cta[kMaxRowsJobs + 1];
  int32_t log_lanes[kMaxRowsJobs];  // of a row: one loads 16 bytes of it, or 4
  int32_t count;
};

template <class Word>
int32_t log_lanes_of(const RowsJob& job) {
  const int32_t words = job.row_bytes / static_cast<int32_t>(sizeof(Word));
  int32_t log = 0;
  while (log < 5 && (1 << log) < words) ++log;
  return log;
}

// kUnroll rows a thread, kThreads / lanes apart.
template <class Word>
__device__ __forceinline__ void move_block(const RowsJob& job, int32_t log_lanes, int64_t block) {
  const int32_t lanes = 1 << log_lanes;
  const int32_t rows_at_once = kThreads >> log_lanes;
  const int32_t rows = rows_at_once * kUnroll;
  const int32_t blocks_of_head = (job.length - 1) / rows + 1;
  const int64_t index = block / blocks_of_head;
  const int64_t batch = index / job.heads;
  const int64_t head = index % job.heads;
  const int64_t first = block % blocks_of_head * rows + (threadIdx.x >> log_lanes);
  const int32_t words = job.row_bytes / static_cast<int32_t>(sizeof(Word));
  const char* from = static_cast<const char*>(job.from.data) + batch * job.from.stride_batch +
                     head / job.from_group * job.from.stride_head;
  char* to = static_cast<char*>(job.to.data) + batch * job.to.stride_batch + head * job.to.stride_head;
  const int32_t* order = job.order.row(batch, head / job.order_group);
  const uint32_t last = static_cast<uint32_t>(job.length - 1);

  uint32_t other[kUnroll];
#pragma unroll
  for (int32_t k = 0; k < kUnroll; ++k) {
    const int64_t row = first + k * rows_at_once;
    // NOTE: clamped, so that an order that is none leads nowhere out of bounds.
    other[k] = row <= last ? min_of(static_cast<uint32_t>(__ldg(order + row)), last) : 0;
  }
  for (int32_t word = threadIdx.x & (lanes - 1); word < words; word += lanes) {
    Word value[kUnroll];
#pragma unroll
    for (int32_t k = 0; k < kUnroll; ++k) {
      const int64_t row = first + k * rows_at_once;
      const int64_t source = job.scatter ? row : other[k];
      if (row <= last) value[k] = __ldg(reinterpret_cast<const Word*>(from + source * job.from.stride_row) + word);
    }
#pragma unroll
    for (int32_t k = 0; k < kUnroll; ++k) {
      const int64_t row = first + k * rows_at_once;
      const int64_t target = job.scatter ? other[k] : row;
      if (row <= last) reinterpret_cast<Word*>(to + target * job.to.stride_row)[word] = value[k];
    }
  }
}

__global__ void __launch_bounds__(kThreads) move_rows_kernel(const __grid_constant__ Jobs jobs) {
  const int64_t cta = blockIdx.x;
  int32_t j = 0;
  while (j + 1 < jobs.count && cta >= jobs.first_cta[j + 1]) ++j;
  const int64_t block = cta - jobs.first_cta[j];
  if (jobs.job[j].row_bytes % 16 == 0) {
    move_block<uint4>(jobs.job[j], jobs.log_lanes[j], block);
  } else {
    move_block<uint32_t>(jobs.job[j], jobs.log_lanes[j], block);
  }
}

}  // namespace

void move_rows(const RowsJob* list, int32_t count, void* stream) {
  if (count > kMaxRowsJobs) {
    throw std::runtime_error("flashmsa: " + std::to_string(count) + " jobs of rows; one launch takes " +
                             std::to_string(kMaxRowsJobs));
  }
  Jobs jobs{};
  int64_t ctas = 0;
  for (int32_t j = 0; j < count; ++j) {
    const RowsJob& job = list[j];
    const int64_t heads = int64_t{job.batch} * job.heads;
    if (heads == 0 || job.length == 0 || job.row_bytes == 0) continue;
    const int32_t n = jobs.count++;
    jobs.job[n] = job;
    jobs.log_lanes[n] = job.row_bytes % 16 == 0 ? log_lanes_of<uint4>(job) : log_lanes_of<uint32_t>(job);
    jobs.first_cta[n] = ctas;
    ctas += heads * ((job.length - 1) / ((kThreads >> jobs.log_lanes[n]) * kUnroll) + 1);
  }
  if (ctas == 0) return;
  if (ctas > INT32_MAX) throw std::runtime_error("flashmsa: too many rows to move in one launch; split the batch");
  jobs.first_cta[jobs.count] = ctas;
  move_rows_kernel<<<static_cast<uint32_t>(ctas), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(jobs);
  FLASHMSA_CHECK_CUDA(cudaGetLastError());
}

}  // namespace flashmsa::hash
