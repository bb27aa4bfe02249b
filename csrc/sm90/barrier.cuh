// mbarriers and the producer/consumer pipeline on top of them.
#pragma once

#include <cuda/ptx>

#include <cstdint>

namespace flashmsa::sm90 {

namespace ptx = cuda::ptx;

// An mbarrier in shared memory. One thread initialises it, then fence_barrier_init and a block barrier publish it.
struct Barrier {
  uint64_t word;

  __device__ void init(uint32_t arrivals) { ptx::mbarrier_init(&word, arrivals); }

  __device__ void arrive() { ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &word); }

  // Arrives and announces `bytes` that TMA copies will bring.
  __device__ void arrive_expect(uint32_t bytes) {
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &word, bytes);
  }

  // Returns when the phase with this parity has completed.
  __device__ void wait(uint32_t parity) {
    while (!ptx::mbarrier_try_wait_parity(&word, parity)) {
    }
  }

  // The same for who has time: asks seldom, and leaves the issue slots to others.
  __device__ void wait_idly(uint32_t parity) {
    while (!ptx::mbarrier_try_wait_parity(&word, parity)) __nanosleep(200);
  }

  // Whether the phase with this parity has completed.
  __device__ bool test(uint32_t parity) { return ptx::mbarrier_test_wait_parity(&word, parity); }
};

__device__ inline void fence_barrier_init() { ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster); }

// The n-th use of a ring of kStages buffers: which buffer, and the parities to wait for. Consumers wait until it is full;
// the producer until it is empty, which a fresh barrier is at once, so that the first round needs no special case.
// NOTE: one counter serves several rings that advance together; a register a ring would spill at head_dim 64.
// NOTE: where kStages is no power of two the counter may not wrap around: 2^32 uses of a ring by one CTA take hours.
template <int kStages>
struct Ring {
  static_assert(kStages > 0);

  static __device__ __forceinline__ uint32_t stage(uint32_t n) { return n % kStages; }
  static __device__ __forceinline__ uint32_t full_parity(uint32_t n) { return n / kStages & 1u; }
  static __device__ __forceinline__ uint32_t empty_parity(uint32_t n) { return full_parity(n) ^ 1u; }
};

}  // namespace flashmsa::sm90
