// The consumers of head dims up to 128: each warpgroup owns 64 keys, dK and dV of them.
#pragma once

#include "bwd/pairs.cuh"

namespace flashmsa::bwd {

template <class Config>
struct KeyConsumer : Pairs<Config> {
  using Base = Pairs<Config>;
  using Base::kGradients;
  using Base::kPairs;
  using Base::kQuerySteps;
  using Base::kSubs;
  using Base::params;
  using Base::shared;
  using typename Base::Fragment;
  using typename Base::Kept;
  using typename Base::KeyOperand;
  using typename Base::S;

  static constexpr bool kDropping = Config::Extra::kDropout && !Config::Extra::kGeneral;

  uint64_t k_descriptor, v_descriptor;
  uint32_t part;  // of dS, that this warpgroup makes

  __device__ __forceinline__ KeyConsumer(const KernelParams& params, S& shared, int32_t warpgroup)
      : Base(params, shared), part(Config::kDsParts > 1 ? warpgroup : 0) {
    const uint32_t rows = warpgroup * sm90::kWarpgroupRows * sm90::kSwizzleRowBytes;
    k_descriptor = KeyOperand::descriptor(Base::address(shared.k) + rows);
    v_descriptor = KeyOperand::descriptor(Base::address(shared.v) + rows);
  }

  // One query tile, or a part of one:
  //   1. S^T(i) = K Q(i)^T and, behind it, dK += dS^T(i-1) Q(i-1) go to the tensor cores
  //   2. S^T(i) arrives: P^T(i)
  //   3. dK arrives: Q(i-1) and dO(i-1) are free; in bands hidden pairs leave P^T(i)
  //   4. dP^T(i) = V dO(i)^T - Δ(i), and behind it dV += P^T(i) dO(i)
  //   5. dP^T(i) arrives: dS^T(i), to shared memory for dQ
  //   6. dV arrives
  // NOTE: the first tile finds dS^T(i-1) = 0 and takes its own Q, stage == before, for Q(i-1).
  __device__ __forceinline__ void step(float (&dk)[kGradients], float (&dv)[kGradients], Fragment& ds, uint32_t stage,
                                       uint32_t before, const Place<Config::kDsBuffers>& buffer, int sub) {
    float s[kPairs];
    this->issue_s(s, k_descriptor, stage, sub);  // 1
    this->issue_gradient(
        dk, ds, sub == 0 ? Base::queries(shared.q[before], kSubs - 1) : Base::queries(shared.q[stage], sub - 1));
    Kept kept;
    if constexpr (Config::Extra::kGeneral) kept = this->draw(stage, sub);

    sm90::wgmma_wait<1>();  // 2
    sm90::pin_registers(s);
    Fragment p, apart;
    Fragment& w = Config::Extra::kGeneral ? apart : p;
    this->weigh(s, p, w, kept, stage, sub);

    sm90::wgmma_wait<0>();  // 3
    sm90::pin_registers(dk);
    if (sub == 0 && before != stage) release_in_cluster<Config>(shared.empty[before], this->lane());
    if (Config::Extra::kBand && Base::uniform(shared.step[stage].partial) != 0) this->hide_outside_band(p, stage, sub);

    float dp[kPairs];
    this->issue_dp(dp, v_descriptor, stage, sub);  // 4
    this->issue_gradient(dv, p, Base::queries(shared.dout[stage], sub));

    // 5. NOTE: wide tiles wait for dV too, whose weights' registers become dS.
    sm90::wgmma_wait<Base::kWide ? 0 : 1>();
    sm90::pin_registers(dp);
    if constexpr (Base::kWide) sm90::pin_registers(dv);
    this->differentiate(dp, w, ds, kept, stage, sub);
    if (sub == 0) shared.empty_ds[buffer.stage][part].wait(buffer.parity ^ 1u);
    this->store_fragment(ds, shared.ds[buffer.stage], sub);
    if (sub == kSubs - 1) this->publish(buffer.stage, part);

    if constexpr (!Base::kWide) {
      sm90::wgmma_wait<0>();  // 6
      sm90::pin_registers(dv);
    }
  }

  // The same with dropout, where the whole weights are needed until dS is made, and no registers are left for a second
  // fragment:
  //   1. the gradients of step i-1 arrive: Q(i-1) and dO(i-1) are free; S^T(i) = K Q(i)^T goes to the tensor cores
  //   2. in its shadow, or in that of the gradients: which pairs are kept
  //   3. S^T(i) arrives: P^T(i), whole
  //   4. dP^T(i) = V dO(i)^T
  //   5. dP^T(i) arrives: dS^T(i), to shared memory for dQ; what is kept of P^T(i)
  //   6. dV += P^T(i) dO(i), dK += dS^T(i) Q(i)
  // PERF: one product after the other; the other warpgroup and dQ keep the tensor cores busy. S^T behind the gradients, or dP^T
  // beside S^T, takes registers that there are not: wgmma are serialised (C7512).
  __device__ __forceinline__ void step_dropping(float (&dk)[kGradients], float (&dv)[kGradients], uint32_t stage,
                                                uint32_t before, const Place<Config::kDsBuffers>& buffer, int sub) {
    // PERF: d64 4x4096 .98 of the time in that of S^T: the gradients are waited for sooner, and Q and dO go back. At d128, where
    // the gradients take twice as long, both passes together took 1.03 times as long.
    constexpr bool kDrawsAhead = Config::kHeadDim > 64;
    Kept kept;
    if constexpr (kDrawsAhead) kept = this->draw(stage, sub);  // 2
    sm90::wgmma_wait<0>();                                     // 1
    sm90::pin_registers(dk);
    sm90::pin_registers(dv);
    if (sub == 0 && before != stage) this->release(shared.empty[before]);
    float s[kPairs];
    this->template issue_pairs<false>(s, k_descriptor, Base::queries(shared.q[stage], sub));
    if constexpr (!kDrawsAhead) kept = this->draw(stage, sub);

    sm90::wgmma_wait<0>();  // 3
    sm90::pin_registers(s);
    Fragment p, ds;
    this->weigh(s, p, p, kept, stage, sub);

    float dp[kPairs];
    this->template issue_pairs<false>(dp, v_descriptor, Base::queries(shared.dout[stage], sub));  // 4
    sm90::wgmma_wait<0>();                                                                          // 5
    sm90::pin_registers(dp);
    this->differentiate(dp, p, ds, kept, stage, sub);
    this->drop(p, kept);
    if (sub == 0) shared.empty_ds[buffer.stage][part].wait(buffer.parity ^ 1u);
    this->store_fragment(ds, shared.ds[buffer.stage], sub);
    if (sub == kSubs - 1) this->publish(buffer.stage, part);

    this->issue_gradient(dv, p, Base::queries(shared.dout[stage], sub));  // 6
    this->issue_gradient(dk, ds, Base::queries(shared.q[stage], sub));
  }

  __device__ __forceinline__ void run() {
    float dk[kGradients], dv[kGradients];
    Fragment ds;
#pragma unroll
    for (int e = 0; e < kGradients; ++e) dk[e] = dv[e] = 0.0f;
#pragma unroll
    for (int i = 0; i < kQuerySteps * 4; ++i) ds[i / 4][i % 4] = 0;
    shared.full_kv.wait(0);

    Place<Config::kStages> at;
    Place<Config::kDsBuffers> buffer;
    uint32_t before = 0;
#pragma unroll 1
    for (;; buffer.advance()) {
      shared.full[at.stage].wait(at.parity);
      if (Base::uniform(shared.step[at.stage].tile) < 0) break;
#pragma unroll
      for (int sub = 0; sub < kSubs; ++sub) {
        if constexpr (kDropping) {
          step_dropping(dk, dv, at.stage, before, buffer, sub);
        } else {
          step(dk, dv, ds, at.stage, before, buffer, sub);
        }
      }
      before = at.stage;
      at.advance();
    }
    if constexpr (kDropping) {
      sm90::wgmma_wait<0>();
      sm90::pin_registers(dk);
      sm90::pin_registers(dv);
    } else if (at.stage != before) {
      this->issue_gradient(dk, ds, Base::queries(shared.q[before], kSubs - 1));
      sm90::wgmma_wait<0>();
      sm90::pin_registers(dk);
    }
    const bool k_suspect = this->finish(dk, params.scale), v_suspect = this->finish(dv, params.value_scale());
    this->note(this->warp_key() / sm90::kWarpRows, k_suspect || v_suspect);
    // SYNC: V's rows of a warpgroup are its own, and their last use is done. K's was the last dQ, the own part of it.
    if constexpr (Config::kPacked) {
      // PERF: dV waits for dK. Beside it there are no registers for the way row by row.
      this->stage(dv, shared.v);
    } else {
      this->store(dv, params.dv, shared.v);
    }
    static_assert(Config::kDsBuffers == 1);
    shared.empty_ds[0][part].wait(buffer.parity ^ 1u);
    if constexpr (Config::kPacked) {
      this->stage(dk, shared.k);
      this->send_own(params.dv, params.dv_rows, params.head_dim_v, shared.v);
      this->send_own(params.dk, params.dk_rows, params.head_dim, shared.k);
    } else {
      this->store(dk, params.dk, shared.k);
    }
    this->finish_stores();
  }
};

}  // namespace flashmsa::bwd
