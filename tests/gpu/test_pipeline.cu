// Barriers, rings, named barriers and registers that move between warpgroups.
#include "gpu_test.cuh"
#include "sm90/barrier.cuh"
#include "sm90/registers.cuh"

namespace flashmsa::test {
namespace {

using sm90::Barrier;
using sm90::Ring;
namespace ptx = cuda::ptx;

// ---- Barrier --------------------------------------------------------------------------------------------------------

// One thread alone: after every arrival, has the phase of parity 0 completed, and that of parity 1?
__global__ void phases_kernel(uint32_t arrivals, int32_t phases, int32_t* completed) {
  __shared__ Barrier barrier;
  barrier.init(arrivals);
  sm90::fence_barrier_init();
  const auto look = [&] {
    for (uint32_t parity = 0; parity < 2; ++parity)
      *completed++ = ptx::mbarrier_test_wait_parity(&barrier.word, parity);
  };
  look();
  for (int32_t i = 0; i < phases * static_cast<int32_t>(arrivals); ++i) {
    barrier.arrive();
    look();
  }
}

// The phase of n full counts of arrivals runs: the last one that completed has parity (n - 1) % 2, and a fresh barrier
// looks as though a phase of parity 1 had.
GPU_TEST(barrier_phases) {
  constexpr int32_t kPhases = 5;
  for (const uint32_t arrivals : {1u, 2u, 3u, 8u, 128u, 384u}) {
    const int32_t looks = 1 + kPhases * static_cast<int32_t>(arrivals);
    DeviceArray<int32_t> completed(2 * looks);
    launch(phases_kernel, 1, 1, 0, arrivals, kPhases, completed.data());
    const std::vector<int32_t> seen = completed.read();
    for (int32_t look = 0; look < looks; ++look) {
      const int32_t last = look / static_cast<int32_t>(arrivals) % 2 == 1 ? 0 : 1;
      for (int32_t parity = 0; parity < 2; ++parity) {
        EXPECT(seen[2 * look + parity] == (parity == last), "count %u, after %d arrivals, parity %d", arrivals, look,
               parity);
      }
    }
  }
}

// completed[0]: before the bytes came; [1]: after wait() returned. The copy arrives after the announcement.
__global__ void expect_kernel(const uint4* from, uint4* to, int32_t* completed) {
  alignas(128) __shared__ uint4 data[64];
  __shared__ Barrier barrier;
  barrier.init(1);
  sm90::fence_barrier_init();
  for (uint32_t phase = 0; phase < 3; ++phase) {
    barrier.arrive_expect(sizeof data);
    completed[2 * phase] = ptx::mbarrier_test_wait_parity(&barrier.word, phase % 2);
    ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, data, from + 64 * phase, sizeof data, &barrier.word);
    barrier.wait(phase % 2);
    completed[2 * phase + 1] = ptx::mbarrier_test_wait_parity(&barrier.word, phase % 2);
    for (int i = 0; i < 64; ++i) to[64 * phase + i] = data[i];
    // SYNC: the reads above come before the next copy's writes.
    ptx::fence_proxy_async(ptx::space_shared);
  }
}

GPU_TEST(barrier_expects_bytes) {
  std::vector<uint16_t> values = random_patterns(random, 3 * 64 * 8);
  DeviceArray<uint16_t> from(values), to(values.size());
  DeviceArray<int32_t> completed(6);
  launch(expect_kernel, 1, 1, 0, from.as<const uint4>(), to.as<uint4>(), completed.data());
  const std::vector<int32_t> seen = completed.read();
  for (int phase = 0; phase < 3; ++phase) {
    EXPECT(seen[2 * phase] == 0, "phase %d completed without its bytes", phase);
    EXPECT(seen[2 * phase + 1] == 1, "phase %d: wait() returned early", phase);
  }
  EXPECT(to.read() == values, "data differ");
}

// ---- Ring -----------------------------------------------------------------------------------------------------------

constexpr uint32_t kConsumerWarps = 4;

template <int kStages>
struct RingPlan {
  Barrier full[kStages];   // producer (1)          consumers wait
  Barrier empty[kStages];  // consumer warps        producer waits
  uint32_t data[kStages][32];
};

__host__ __device__ uint32_t ring_word(uint32_t n, uint32_t lane) { return n * 2654435761u + lane * 40503u; }

// Now and then somebody is late. Which one differs from use to use.
__device__ void dawdle(uint32_t n, uint32_t who) {
  const uint32_t x = (n * 97u + who * 31u) * 2654435761u;
  if (x >> 30 == 0) __nanosleep(x % 2000);
}

// kIdly: with the wait that asks seldom.
template <bool kIdly>
__device__ void wait_for(Barrier& barrier, uint32_t parity) {
  if constexpr (kIdly) {
    barrier.wait_idly(parity);
  } else {
    barrier.wait(parity);
  }
}

// Warp 0: one producer thread. The others: consumers; each lane writes down what it found in use n.
template <int kStages, bool kIdly>
__global__ void ring_kernel(uint32_t uses, uint32_t* seen) {
  using R = Ring<kStages>;
  auto& shared = shared_as<RingPlan<kStages>>();
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      shared.full[s].init(1);
      shared.empty[s].init(kConsumerWarps);
    }
    sm90::fence_barrier_init();
  }
  __syncthreads();

  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (uint32_t n = 0; n < uses; ++n) {
      dawdle(n, 0);
      wait_for<kIdly>(shared.empty[R::stage(n)], R::empty_parity(n));
      for (uint32_t i = 0; i < 32; ++i) shared.data[R::stage(n)][i] = ring_word(n, i);
      shared.full[R::stage(n)].arrive();
    }
  } else if (warp > 0) {
    for (uint32_t n = 0; n < uses; ++n) {
      wait_for<kIdly>(shared.full[R::stage(n)], R::full_parity(n));
      dawdle(n, warp);
      seen[(n * kConsumerWarps + warp - 1) * 32 + lane] = shared.data[R::stage(n)][lane];
      __syncwarp();
      if (lane == 0) shared.empty[R::stage(n)].arrive();
    }
  }
}

template <int kStages, bool kIdly = false>
void check_ring() {
  constexpr uint32_t kUses = 203;
  DeviceArray<uint32_t> seen(kUses * kConsumerWarps * 32);
  launch(ring_kernel<kStages, kIdly>, 1, 32 * (1 + kConsumerWarps), sizeof(RingPlan<kStages>), kUses, seen.data());
  const std::vector<uint32_t> words = seen.read();
  for (uint32_t i = 0; i < words.size(); ++i) {
    const uint32_t n = i / 32 / kConsumerWarps;
    EXPECT(words[i] == ring_word(n, i % 32), "use %u, consumer %u, lane %u: %08x", n, i / 32 % kConsumerWarps, i % 32,
           words[i]);
  }
}

GPU_TEST(ring_1_stage) { check_ring<1>(); }
GPU_TEST(ring_2_stages) { check_ring<2>(); }
GPU_TEST(ring_4_stages) { check_ring<4>(); }
GPU_TEST(ring_waits_idly) {
  check_ring<1, true>();
  check_ring<4, true>();
}

// Thread 0 waits for phase after phase, each completed early or late by thread 32; before[n]: had it, when the wait began.
// after[n]: has it, once the wait is over.
__global__ void idle_kernel(int32_t phases, int32_t* before, int32_t* after) {
  __shared__ Barrier barrier, next;
  if (threadIdx.x == 0) {
    barrier.init(1);
    next.init(1);
    sm90::fence_barrier_init();
  }
  __syncthreads();
  for (int32_t n = 0; n < phases; ++n) {
    if (threadIdx.x == 0) {
      if (n % 2 == 0) __nanosleep(5000);
      before[n] = ptx::mbarrier_test_wait_parity(&barrier.word, n % 2);
      barrier.wait_idly(n % 2);
      after[n] = ptx::mbarrier_test_wait_parity(&barrier.word, n % 2);
      next.arrive();
    } else if (threadIdx.x == 32) {
      if (n % 2 == 1) __nanosleep(5000);
      barrier.arrive();
      next.wait(n % 2);
    }
  }
}

// NOTE: when a sleep ends is the hardware's choice, so that single phases may go the other way.
GPU_TEST(barrier_waits_idly) {
  constexpr int32_t kPhases = 200;
  DeviceArray<int32_t> before(kPhases), after(kPhases);
  launch(idle_kernel, 1, 64, 0, kPhases, before.data(), after.data());
  const std::vector<int32_t> early = before.read(), done = after.read();
  for (int32_t n = 0; n < kPhases; ++n) EXPECT(done[n] == 1, "phase %d: wait_idly() returned early", n);
  const auto completed = std::count(early.begin(), early.end(), 1);
  EXPECT(0 < completed && completed < kPhases, "%d of %d phases had completed before", int(completed), kPhases);
}

// ---- bar_sync ---------------------------------------------------------------------------------------------------------

constexpr int kGroups = 3;

// Each warpgroup has a barrier of its own and uses it a different number of times; then all meet on one. A thread hands
// its word to one of another warp, so an early return shows.
__global__ void bar_sync_kernel(int32_t rounds, int32_t* seen, int32_t* seen_together) {
  __shared__ int32_t words[kGroups][128];
  const int32_t group = threadIdx.x / 128, thread = threadIdx.x % 128;
  const int32_t from = (thread + 37) % 128;
  for (int32_t round = 0; round < rounds * (group + 1); ++round) {
    dawdle(round, threadIdx.x / 32);
    words[group][thread] = round * 128 + thread;
    sm90::bar_sync(1 + group, 128);
    seen[(group * rounds * kGroups + round) * 128 + thread] = words[group][from];
    sm90::bar_sync(1 + group, 128);
  }
  words[group][thread] = -1 - static_cast<int32_t>(threadIdx.x);
  sm90::bar_sync(15, 128 * kGroups);
  seen_together[threadIdx.x] = words[(group + 1) % kGroups][from];
}

GPU_TEST(bar_sync) {
  constexpr int32_t kRounds = 20;
  DeviceArray<int32_t> seen(kGroups * kRounds * kGroups * 128), together(kGroups * 128);
  launch(bar_sync_kernel, 1, 128 * kGroups, 0, kRounds, seen.data(), together.data());
  const std::vector<int32_t> words = seen.read(), last = together.read();
  for (int32_t group = 0; group < kGroups; ++group) {
    for (int32_t thread = 0; thread < 128; ++thread) {
      const int32_t from = (thread + 37) % 128;
      for (int32_t round = 0; round < kRounds * (group + 1); ++round) {
        EXPECT(words[(group * kRounds * kGroups + round) * 128 + thread] == round * 128 + from,
               "group %d, round %d, thread %d", group, round, thread);
      }
      EXPECT(last[group * 128 + thread] == -1 - ((group + 1) % kGroups * 128 + from), "all groups: group %d, thread %d",
             group, thread);
    }
  }
}

// ---- setmaxnreg -------------------------------------------------------------------------------------------------------

// Of 384 threads that enter with 168 registers: 128 * (40 + 2 * 232) = 384 * 168.
constexpr int kEntryRegisters = 168;
constexpr int kValues = 200;  // held at once by a consumer thread: more than it entered with

// One step of what a consumer does to its values; any order of the sums would round otherwise.
__host__ __device__ __forceinline__ void mix(float (&x)[kValues]) {
#pragma unroll
  for (int i = 0; i < kValues; ++i) x[i] = fmaf(x[i], 0.5f, x[(i + 61) % kValues] * -0.375f);
}

__global__ void __launch_bounds__(384, 1)
    registers_kernel(const float* in, int32_t steps, float* out, int32_t* producers) {
  const int32_t warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    sm90::setmaxnreg_dec<40>();
    atomicAdd(&producers[blockIdx.x], 1);
  } else {
    sm90::setmaxnreg_inc<232>();
    const int32_t thread = threadIdx.x - 128;
    float x[kValues];
#pragma unroll
    for (int i = 0; i < kValues; ++i) x[i] = in[i * 256 + thread];
#pragma unroll 1
    for (int32_t step = 0; step < steps; ++step) mix(x);
#pragma unroll
    for (int i = 0; i < kValues; ++i) out[(blockIdx.x * kValues + i) * 256 + thread] = x[i];
  }
}

// Many blocks an SM, so that registers must come back when one ends.
GPU_TEST(setmaxnreg) {
  constexpr int32_t kBlocks = 400, kSteps = 7;
  cudaFuncAttributes attributes;
  FLASHMSA_CHECK_CUDA(cudaFuncGetAttributes(&attributes, registers_kernel));
  EXPECT(attributes.numRegs == kEntryRegisters, "the pool is made of %d registers a thread", attributes.numRegs);
  EXPECT(attributes.localSizeBytes == 0, "%zu bytes of local memory", attributes.localSizeBytes);
  if (attributes.numRegs < kEntryRegisters) return;  // it would hang

  const std::vector<float> values = random_normals(random, kValues * 256);
  DeviceArray<float> in(values), out(size_t{kBlocks} * kValues * 256);
  const std::vector<int32_t> zeros(kBlocks, 0);
  DeviceArray<int32_t> producers(zeros);
  launch(registers_kernel, kBlocks, 384, 0, in.data(), kSteps, out.data(), producers.data());
  const std::vector<float> result = out.read();
  for (int32_t thread = 0; thread < 256; ++thread) {
    float x[kValues];
    for (int i = 0; i < kValues; ++i) x[i] = values[i * 256 + thread];
    for (int32_t step = 0; step < kSteps; ++step) mix(x);
    for (int32_t block = 0; block < kBlocks; ++block) {
      for (int i = 0; i < kValues; ++i) {
        EXPECT(result[(block * kValues + i) * 256 + thread] == x[i], "block %d, thread %d, value %d", block, thread, i);
      }
    }
  }
  for (const int32_t count : producers.read()) EXPECT(count == 128, "%d producer threads", count);
}

}  // namespace
}  // namespace flashmsa::test

int main(int argc, char** argv) { return flashmsa::test::run_tests(argc, argv); }
