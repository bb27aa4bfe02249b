// The backward kernel's tuning: one line per head-dim bucket, and everything that follows from it.
#pragma once

#include "core/types.h"

namespace flashmsa::bwd {

// What a kernel can do to weights beside the softmax. General: whatever the call asks for, decided at run time.
struct Plain {
  static constexpr const char* kName = "";
  static constexpr bool kGeneral = false, kDropout = false, kPacked = false, kBand = false;
};
// Dense, causal, windows: band.h.
struct Band {
  static constexpr const char* kName = "_band";
  static constexpr bool kGeneral = false, kDropout = false, kPacked = false, kBand = true;
};
// Documents, by tiles that begin where one does: packed.h.
struct Packed {
  static constexpr const char* kName = "_packed";
  static constexpr bool kGeneral = false, kDropout = false, kPacked = true, kBand = false;
};
struct Dropping {
  static constexpr const char* kName = "_dropout";
  static constexpr bool kGeneral = false, kDropout = true, kPacked = false, kBand = false;
};
struct General {
  static constexpr const char* kName = "_general";
  static constexpr bool kGeneral = true, kDropout = true, kPacked = false, kBand = false;
};

// Who accumulates what: each consumer warpgroup dK and dV of its own 64 keys; or one dV and the other dK of the same keys.
enum class Split { kByKeys, kByGradient };
constexpr int32_t keys_of_cta(Split split) { return split == Split::kByKeys ? 128 : 64; }

// What the kernels before and behind the main one have to know of it.
template <class ElementType, bool kPackedValue, bool kTermsValue, int32_t kHeadDimValue, Split kSplitValue,
          int32_t kClusterValue, int32_t kBlockQValue>
struct Tiling {
  using Element = ElementType;
  static constexpr bool kPacked = kPackedValue;
  static constexpr bool kTerms = kTermsValue;         // rows' numbers come by way of the tensor cores: terms.cuh
  static constexpr int32_t kHeadDim = kHeadDimValue;  // bucket: serves head_dim and head_dim_v up to this
  static constexpr int32_t kBlockQ = kBlockQValue;    // rows of a step
  static constexpr Split kSplit = kSplitValue;
  static constexpr int32_t kCluster = kClusterValue;  // CTAs that walk over the same queries
  static constexpr int32_t kCtaKeys = keys_of_cta(kSplit);
  static constexpr int32_t kBlockKv = kCtaKeys * kCluster;  // keys of a key tile
  static constexpr int32_t kPieces = kBlockQ / 64 * (kHeadDim / 64);  // of dQ in a step, 64 x 64
};

// Whether rows' numbers come as terms.
// PERF: at d64 .92 … .95 of the time. At d128 wgmma are serialised (C7512) but where dV is waited for before dS is made, which
// takes back what it gives.
template <class Extra>
constexpr bool takes_terms(int32_t head_dim) {
  return Extra::kBand && head_dim == 64;
}

template <class ElementType, class ExtraType, int32_t kHeadDimValue, Split kSplitValue, int32_t kClusterValue,
          int32_t kBlockQValue, int32_t kSubQValue, int32_t kStagesValue, int32_t kDsBuffersValue,
          int32_t kStagingsValue>
struct Config : Tiling<ElementType, ExtraType::kPacked, takes_terms<ExtraType>(kHeadDimValue), kHeadDimValue,
                       kSplitValue, kClusterValue, kBlockQValue> {
  using Tiles = Tiling<ElementType, ExtraType::kPacked, takes_terms<ExtraType>(kHeadDimValue), kHeadDimValue,
                       kSplitValue, kClusterValue, kBlockQValue>;
  using Extra = ExtraType;
  static constexpr int32_t kSubQ = kSubQValue;        // rows of a step that a warpgroup takes at once
  static constexpr int32_t kStages = kStagesValue;    // steps of Q and dO in flight
  static constexpr int32_t kDsBuffers = kDsBuffersValue;  // of dS on its way to dQ
  static constexpr int32_t kStagings = kStagingsValue;  // pieces of dQ on their way to memory; 0: from registers
  // Deterministic mode: steps whose turns end together, by one fence.
  static constexpr int32_t kTurns = kSplitValue == Split::kByKeys ? 2 : 1;
  // PERF: at head dim 64 a step's pieces of dQ leave together in the plain kernel too: piece by piece a call takes 6 to 11 %
  // longer, by the order in which the compiler puts the instructions then.
  static constexpr bool kHoldsPieces = kHeadDimValue == 64 && !ExtraType::kDropout;
  // setmaxnreg. dQ takes more where it leaves from registers.
  static constexpr int32_t kRegistersProducer = kStagings > 0 ? 72 : 88;
  static constexpr int32_t kRegistersConsumer = kStagings > 0 ? 216 : 208;
  static constexpr int32_t kConsumerWarpgroups = 2;
  // In which dS comes and goes. In clusters what a consumer warpgroup makes in both CTAs: neither warpgroup waits for the
  // other's half of dQ's product.
  // PERF: .95 … .97 of the time, with the next loads amid the product; with loads ahead of it 1.00 … 1.02.
  static constexpr int32_t kDsParts = kSplitValue == Split::kByKeys && kClusterValue > 1 ? kConsumerWarpgroups : 1;
  static constexpr int32_t kThreads = 128 * (kConsumerWarpgroups + 1);
  static constexpr int32_t kCtaPieces = Tiles::kPieces / Tiles::kCluster;  // of dQ in a step, that a CTA has
  // Rows' keys come through shared memory.
  static constexpr bool kRowsShared = kSplitValue == Split::kByKeys && !ExtraType::kBand;
  // Whether it has a deterministic form.
  static constexpr bool kOrders = !ExtraType::kPacked && !(ExtraType::kBand && kClusterValue > 1);
  // How a CTA finds its query tiles: it looks at the plan, or they are a range.
  static constexpr bool kLooks = !ExtraType::kPacked && !ExtraType::kBand;
};

// PERF: what was measured beside these and lost is in benchmarks/NOTES.md.
//                                head_dim  split           cluster  block_q  sub_q  stages  ds  stagings
template <class Element, class Extra>
using Config64 = Config<Element, Extra, 64, Split::kByKeys, 1, 128, Extra::kGeneral ? 32 : 128, 3, 1, 2>;
template <class Element, class Extra>
using Config128 = Config<Element, Extra, 128, Split::kByKeys, Extra::kBand ? 2 : 1, 64, Extra::kGeneral ? 32 : 64, 3, 1,
                         Extra::kBand ? 1 : 2>;
template <class Element, class Extra>
using Config256 = Config<Element, Extra, 256, Split::kByGradient, 2, 64, Extra::kGeneral ? 32 : 64, 2, 1, 0>;

}  // namespace flashmsa::bwd
