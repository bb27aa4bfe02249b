// The sort, the intervals and the moves of rows.h on the CPU.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "hash/interval_search.h"
#include "hash/radix.h"
#include "hash/rows.h"

namespace flashmsa::hash {
namespace {

constexpr int64_t kRowsOfATask = 1024;

// One stable counting pass from `source` (nullptr: 0, 1, 2 ...) to `target`.
void counting_pass(const int32_t* bucket, int32_t lowest, int32_t length, int32_t shift, int32_t bits,
                   const int32_t* source, int32_t* target) {
  std::array<int32_t, kMaxDigits + 1> start{};
  for (int32_t i = 0; i < length; ++i) ++start[digit_of(key_of(bucket[i], lowest), shift, bits) + 1];
  for (int32_t d = 0; d < kMaxDigits; ++d) start[d + 1] += start[d];
  for (int32_t i = 0; i < length; ++i) {
    const int32_t index = source == nullptr ? i : source[i];
    target[start[digit_of(key_of(bucket[index], lowest), shift, bits)]++] = index;
  }
}

void sort_segment(const int32_t* bucket, int32_t length, int32_t* order, std::vector<int32_t>& scratch) {
  const auto [lowest, highest] = std::minmax_element(bucket, bucket + length);
  const Digits digits = digits_of(key_of(*highest, *lowest));
  if (digits.passes == 0) {
    for (int32_t i = 0; i < length; ++i) order[i] = i;
    return;
  }
  if (digits.passes > 1) scratch.resize(length);
  const int32_t* source = nullptr;
  for (int32_t pass = 0; pass < digits.passes; ++pass) {
    // The last pass writes to `order`.
    int32_t* target = (digits.passes - 1 - pass) % 2 == 0 ? order : scratch.data();
    counting_pass(bucket, *lowest, length, pass * digits.bits, digits.bits, source, target);
    source = target;
  }
}

// Rows of `job` in [begin, end) of head `index`, counted over the batch.
void move_range(const RowsJob& job, int64_t index, int64_t begin, int64_t end) {
  const int64_t batch = index / job.heads;
  const int64_t head = index % job.heads;
  const char* from = static_cast<const char*>(job.from.data) + batch * job.from.stride_batch +
                     head / job.from_group * job.from.stride_head;
  char* to = static_cast<char*>(job.to.data) + batch * job.to.stride_batch + head * job.to.stride_head;
  const int32_t* order = job.order.row(batch, head / job.order_group);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t other = min_of(static_cast<uint32_t>(order[row]), static_cast<uint32_t>(job.length - 1));
    std::memcpy(to + (job.scatter ? other : row) * job.to.stride_row,
                from + (job.scatter ? row : other) * job.from.stride_row, job.row_bytes);
  }
}

}  // namespace

void sort_buckets_cpu(const SortParams& p, const cpu::ParallelFor& parallel_for) {
  if (p.length == 0) return;
  parallel_for(int64_t{p.batch} * p.heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<int32_t> scratch;
    for (int64_t i = begin; i < end; ++i) {
      sort_segment(p.bucket.row(i / p.heads, i % p.heads), p.length, p.order + i * p.length, scratch);
    }
  });
}

void bucket_rows_cpu(const IntervalParams& p, const cpu::ParallelFor& parallel_for) {
  parallel_for(int64_t{p.batch} * p.heads * p.len_q, kRowsOfATask, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const IntervalHead head = interval_head(p, at / p.len_q);
      const int64_t last = p.len_q - 1;
      const int32_t row =
          static_cast<int32_t>(min_of<int64_t>(static_cast<uint32_t>(head.q_order[at % p.len_q]), last));
      const int32_t bucket = head.q_bucket[row];
      p.begin[at] = first_behind(head.keys, 0, p.len_kv, start_of(bucket));
      p.end[at] = first_behind(head.keys, p.begin[at], p.len_kv, end_of(p, bucket, row));
    }
  });
}

void move_rows_cpu(const RowsJob* jobs, int32_t count, const cpu::ParallelFor& parallel_for) {
  for (int32_t j = 0; j < count; ++j) {
    const RowsJob& job = jobs[j];
    if (job.length == 0) continue;
    parallel_for(int64_t{job.batch} * job.heads * job.length, kRowsOfATask, [&](int64_t begin, int64_t end) {
      while (begin < end) {
        const int64_t head = begin / job.length;
        const int64_t stop = min_of(end, (head + 1) * job.length);
        move_range(job, head, begin - head * job.length, stop - head * job.length);
        begin = stop;
      }
    });
  }
}

}  // namespace flashmsa::hash
