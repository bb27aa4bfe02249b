// Attention of many queries to pages: the forward kernel (fwd/kernel.cuh), with K and V brought page by page.
//
// Roles       warpgroup 0: a scheduler thread, and three warps that load; warpgroups 1 …: fwd::Consumer, 64 rows each
// Shared      as fwd/shared.cuh, but tiles of K and V are RowMajorTiles: all columns of 8 rows are one run of bytes, and a
//             page's piece is one box
// Barriers    as fwd/shared.cuh
// Schedule    0. ahead, by small kernels: query_pages sorted; the row blocks of all sequences planned, longest first
//             1. loaders: look up the pages of later blocks, four at a time; K(i) and V(i - 1), a lane a piece
//             2. consumers: as the forward kernel; rows of V behind the length become zero where a page ends in between
#pragma once

#include "fwd/consumer.cuh"
#include "prefill/producer.cuh"

namespace flashmsa::prefill {

inline constexpr int32_t kSchedulerWarp = 1;

template <class Mask, class Config, class Score>
__global__ void __launch_bounds__(Config::kThreads, 1)
    paged_attention_kernel(const __grid_constant__ fwd::KernelParams<Mask> params) {
  extern __shared__ __align__(1024) char shared_memory[];
  auto& shared = *reinterpret_cast<fwd::Shared<Mask, Config>*>(shared_memory);

  // Warp-uniform, and known as such to the compiler: descriptors that depend on it stay in uniform registers.
  const int32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int32_t warpgroup = warp / 4;
  if (threadIdx.x == 0) {
    sm90::prefetch_map(params.q);
    sm90::prefetch_map(params.k);
    sm90::prefetch_map(params.v);
    sm90::prefetch_map(params.out);
    shared.init_barriers();
  }
  __syncthreads();

  if (warpgroup == 0) {
    sm90::setmaxnreg_dec<Config::kRegistersProducer>();
    if (warp == kSchedulerWarp) {
      if (threadIdx.x % 32 != 0) return;
      // SYNC: the plan is the work of the kernel before, which this one may have overtaken.
      cudaGridDependencySynchronize();
      PageScheduler<Mask, Config>{params, shared}.run();
    } else {
      PageLoader<Mask, Config, Score>{params, shared, warp < kSchedulerWarp ? warp : warp - 1}.run();
    }
  } else {
    sm90::setmaxnreg_inc<Config::kRegistersConsumer>();
    fwd::Consumer<Mask, Config, Score>(params, shared, warpgroup - 1).run();
  }
}

}  // namespace flashmsa::prefill
