// The consumers of head dim 256, where one warpgroup cannot hold both gradients of 64 keys: one has dV and makes P, the other
// dK and makes dS of it. P^T and dS^T pass through the same tile of shared memory, which two steps take in turns.
#pragma once

#include "bwd/pairs.cuh"
#include "sm90/registers.cuh"

namespace flashmsa::bwd {

// SYNC: both are done with Q, dO and V before these become room for results. A named barrier of the two warpgroups.
inline constexpr uint32_t kConsumersBarrier = 1;

// S^T = K Q^T, P^T, dV += P^T dO.
//   1. behind dV of step i-1, S^T(i) goes to the tensor cores; both arrive: Q, dO of i-1 are free for our part
//   2. P^T(i), to shared memory
//   3. dV += P^T(i) dO(i) goes to the tensor cores
template <class Config>
struct ValueConsumer : Pairs<Config> {
  using Base = Pairs<Config>;
  using typename Base::Fragment;
  using typename Base::Kept;
  using typename Base::KeyOperand;
  using typename Base::S;
  using Base::kGradients;
  using Base::kPairs;
  using Base::kSubs;
  using Base::params;
  using Base::shared;

  __device__ __forceinline__ ValueConsumer(const KernelParams& params, S& shared) : Base(params, shared, 0) {}

  __device__ __forceinline__ void run() {
    float dv[kGradients];
#pragma unroll
    for (int e = 0; e < kGradients; ++e) dv[e] = 0.0f;
    shared.full_kv.wait(0);
    const uint64_t keys = KeyOperand::descriptor(Base::address(shared.k));
    Place<Config::kStages> at;
    Place<Config::kDsBuffers> buffer;
    uint32_t before = 0;
    shared.full[0].wait(0);
    float s[kPairs];
#pragma unroll 1
    while (Base::uniform(shared.step[at.stage].tile) >= 0) {
      const uint32_t stage = at.stage;
#pragma unroll
      for (int sub = 0; sub < kSubs; ++sub) {
        this->template issue_pairs<false>(s, keys, Base::queries(shared.q[stage], sub));
        Kept kept;
        if constexpr (Config::Extra::kDropout) kept = this->draw(stage, sub);
        sm90::wgmma_wait<0>();  // 1
        sm90::pin_registers(s);
        sm90::pin_registers(dv);
        if (sub == 0 && before != stage) this->release(shared.empty[before]);
        Fragment p, apart;
        Fragment& w = Config::Extra::kDropout ? apart : p;
        this->weigh(s, p, w, kept, stage, sub);  // 2
        if (sub == 0) shared.empty_ds[buffer.stage].wait(buffer.parity ^ 1u);
        this->store_fragment(w, shared.ds[buffer.stage], sub);
        __syncwarp();
        if (sub == kSubs - 1) this->release(shared.full_p[buffer.stage]);
        this->issue_gradient(dv, p, Base::queries(shared.dout[stage], sub));  // 3
      }
      before = stage;
      at.advance();
      buffer.advance();
      shared.full[at.stage].wait(at.parity);
    }
    sm90::wgmma_wait<0>();
    sm90::pin_registers(dv);
    this->note(this->warp_key() / sm90::kWarpRows, this->finish(dv, params.value_scale()));
    sm90::bar_sync(kConsumersBarrier, 2 * sm90::kWarpgroupThreads);
    this->store(dv, params.dv, shared.v);
  }
};

// dP^T = V dO^T, dS^T, dK += dS^T Q.
//   1. behind dK of step i-1, dP^T(i) goes to the tensor cores; both arrive: Q, dO of i-1 are free for our part
//   2. P^T(i) from shared memory; dS^T(i) takes its place
//   3. dK += dS^T(i) Q(i) goes to the tensor cores
template <class Config>
struct GradientConsumer : Pairs<Config> {
  using Base = Pairs<Config>;
  using typename Base::Fragment;
  using typename Base::Kept;
  using typename Base::KeyOperand;
  using typename Base::S;
  using Base::kGradients;
  using Base::kPairs;
  using Base::kSubs;
  using Base::params;
  using Base::shared;

  __device__ __forceinline__ GradientConsumer(const KernelParams& params, S& shared) : Base(params, shared, 0) {}

  __device__ __forceinline__ void run() {
    float dk[kGradients];
#pragma unroll
    for (int e = 0; e < kGradients; ++e) dk[e] = 0.0f;
    shared.full_kv.wait(0);
    const uint64_t values = KeyOperand::descriptor(Base::address(shared.v));
    Place<Config::kStages> at;
    Place<Config::kDsBuffers> buffer;
    uint32_t before = 0;
    shared.full[0].wait(0);
    float dp[kPairs];
#pragma unroll 1
    while (Base::uniform(shared.step[at.stage].tile) >= 0) {
      const uint32_t stage = at.stage;
#pragma unroll
      for (int sub = 0; sub < kSubs; ++sub) {
        this->template issue_pairs<false>(dp, values, Base::queries(shared.dout[stage], sub));
        Kept kept;
        if constexpr (Config::Extra::kDropout) kept = this->draw(stage, sub);
        sm90::wgmma_wait<0>();  // 1
        sm90::pin_registers(dp);
        sm90::pin_registers(dk);
        if (sub == 0 && before != stage) this->release(shared.empty[before]);
        if (sub == 0) shared.full_p[buffer.stage].wait(buffer.parity);  // 2
        Fragment w, ds;
        this->load_fragment(w, shared.ds[buffer.stage], sub);
        this->differentiate(dp, w, ds, kept, stage, sub);
        __syncwarp();
        this->store_fragment(ds, shared.ds[buffer.stage], sub);
        if (sub == kSubs - 1) this->publish(shared.full_ds[buffer.stage]);
        this->issue_gradient(dk, ds, Base::queries(shared.q[stage], sub));  // 3
      }
      before = stage;
      at.advance();
      buffer.advance();
      shared.full[at.stage].wait(at.parity);
    }
    sm90::wgmma_wait<0>();
    sm90::pin_registers(dk);
    this->note(4 + this->warp_key() / sm90::kWarpRows, this->finish(dk, params.scale));
    sm90::bar_sync(kConsumersBarrier, 2 * sm90::kWarpgroupThreads);
    this->store(dk, params.dk, shared.q[0]);
  }
};

}  // namespace flashmsa::bwd
