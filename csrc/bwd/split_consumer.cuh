// The consumers of head dim 256, where one warpgroup cannot hold both gradients of 64 keys: one has dV and makes P, the other
// dK and makes dS of it. P^T and dS^T pass through the same tile of shared memory, which two steps take in turns.
#pragma once

#include "bwd/pairs.cuh"

namespace flashmsa::bwd {

enum class Gradient { kValues, kKeys };

//      dV and P                                        dK and dS
//   1. S^T(i) = K Q(i)^T goes to the tensor cores      dP^T(i) = V dO(i)^T
//      behind the gradient of step i-1; both arrive: Q and dO of i-1 are free for our part
//   2. P^T(i), to shared memory                        dS^T(i) from P^T(i) there, whose place it takes
//   3. dV += P^T(i) dO(i) goes to the tensor cores     dK += dS^T(i) Q(i)
template <class Config, Gradient kOf>
struct SplitConsumer : Pairs<Config> {
  using Base = Pairs<Config>;
  using Base::kGradients;
  using Base::kPairs;
  using Base::kSubs;
  using Base::params;
  using Base::shared;
  using typename Base::Fragment;
  using typename Base::Kept;
  using typename Base::KeyOperand;
  using typename Base::S;
  static constexpr bool kValues = kOf == Gradient::kValues;
  static constexpr bool kDropout = Config::Extra::kDropout;
  using Buffer = Place<Config::kDsBuffers>;

  __device__ __forceinline__ SplitConsumer(const KernelParams& params, S& shared) : Base(params, shared) {}

  // 2. S^T to P^T: `weights` for dV, and in shared memory what dS takes.
  __device__ __forceinline__ void make_p(float (&s)[kPairs], Fragment& weights, const Kept& kept, uint32_t stage,
                                         const Buffer& buffer, int sub) {
    Fragment apart;
    Fragment& w = Config::Extra::kGeneral ? apart : weights;
    this->weigh(s, weights, w, kept, stage, sub);
    if (sub == 0) shared.empty_ds[buffer.stage][0].wait(buffer.parity ^ 1u);
    this->store_fragment(w, shared.ds[buffer.stage], sub);
    if constexpr (kDropout && !Config::Extra::kGeneral) this->drop(weights, kept);
    __syncwarp();
    if (sub == kSubs - 1) this->release(shared.full_p[buffer.stage]);
  }

  // 2. dP^T to dS^T.
  __device__ __forceinline__ void make_ds(float (&dp)[kPairs], Fragment& weights, const Kept& kept, uint32_t stage,
                                          const Buffer& buffer, int sub) {
    if (sub == 0) shared.full_p[buffer.stage].wait(buffer.parity);
    Fragment w;
    this->load_fragment(w, shared.ds[buffer.stage], sub);
    this->differentiate(dp, w, weights, kept, stage, sub);
    __syncwarp();
    this->store_fragment(weights, shared.ds[buffer.stage], sub);
    if (sub == kSubs - 1) this->publish(buffer.stage, 0);
  }

  __device__ __forceinline__ void step(float (&gradient)[kGradients], uint64_t rows, uint32_t stage, uint32_t before,
                                       const Buffer& buffer, int sub) {
    float pairs[kPairs];
    this->template issue_pairs<false>(pairs, rows,
                                      Base::queries(kValues ? shared.q[stage] : shared.dout[stage], sub));  // 1
    Kept kept;
    if constexpr (kDropout) kept = this->draw(stage, sub);
    sm90::wgmma_wait<1>();
    if (sub == 0 && before != stage) release_in_cluster<Config>(shared.empty[before], this->lane());
    sm90::wgmma_wait<0>();
    sm90::pin_registers(pairs);
    sm90::pin_registers(gradient);
    Fragment weights;
    if constexpr (kValues) {
      make_p(pairs, weights, kept, stage, buffer, sub);  // 2
    } else {
      make_ds(pairs, weights, kept, stage, buffer, sub);
    }
    this->issue_gradient(gradient, weights, Base::queries(kValues ? shared.dout[stage] : shared.q[stage], sub));  // 3
  }

  __device__ __forceinline__ void run() {
    float gradient[kGradients];
#pragma unroll
    for (int e = 0; e < kGradients; ++e) gradient[e] = 0.0f;
    shared.full_kv.wait(0);
    const uint64_t rows = KeyOperand::descriptor(Base::address(kValues ? shared.k : shared.v));
    Place<Config::kStages> at;
    Buffer buffer;
    uint32_t before = 0;
    shared.full[0].wait(0);
#pragma unroll 1
    while (Base::uniform(shared.step[at.stage].tile) >= 0) {
      const uint32_t stage = at.stage;
#pragma unroll
      for (int sub = 0; sub < kSubs; ++sub) step(gradient, rows, stage, before, buffer, sub);
      before = stage;
      at.advance();
      buffer.advance();
      shared.full[at.stage].wait(at.parity);
    }
    sm90::wgmma_wait<0>();
    sm90::pin_registers(gradient);
    const bool suspect = this->finish(gradient, kValues ? params.value_scale() : params.scale);
    this->note((kValues ? 0 : 4) + this->warp_key() / sm90::kWarpRows, suspect);
    // SYNC: both are done with Q, dO and V before these become room for results.
    this->release(shared.finished);
    shared.finished.wait(0);
    if constexpr (Config::kPacked) {
      char* staging = kValues ? shared.v : shared.q[0];
      this->stage(gradient, staging);
      this->send_own(kValues ? params.dv : params.dk, kValues ? params.dv_rows : params.dk_rows,
                     kValues ? params.head_dim_v : params.head_dim, staging);
    } else {
      this->store(gradient, kValues ? params.dv : params.dk, kValues ? shared.v : shared.q[0]);
    }
    this->finish_stores();
  }
};

}  // namespace flashmsa::bwd
