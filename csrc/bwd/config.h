// The backward kernel's tuning: one line per head-dim bucket, and everything that follows from it.
#pragma once

#include "core/types.h"

namespace flashmsa::bwd {

template <class ElementType, int32_t kHeadDimValue, int32_t kBlockQValue, int32_t kBlockKvValue, int32_t kStagesValue,
          int32_t kStagingsValue, int32_t kRegistersProducerValue, int32_t kRegistersConsumerValue>
struct Config {
  using Element = ElementType;
  static constexpr int32_t kHeadDim = kHeadDimValue;  // bucket: serves head_dim and head_dim_v up to this
  static constexpr int32_t kBlockQ = kBlockQValue;    // rows of a step
  static constexpr int32_t kBlockKv = kBlockKvValue;  // keys of a CTA, 64 per consumer warpgroup
  static constexpr int32_t kStages = kStagesValue;    // steps of Q and dO in flight
  static constexpr int32_t kStagings = kStagingsValue;  // 64 x 64 pieces of dQ on their way to memory
  static constexpr int32_t kRegistersProducer = kRegistersProducerValue;  // setmaxnreg
  static constexpr int32_t kRegistersConsumer = kRegistersConsumerValue;
  static constexpr int32_t kConsumerWarpgroups = 2;
  static constexpr int32_t kThreads = 128 * (kConsumerWarpgroups + 1);
  static constexpr int32_t kPieces = kBlockQ / 64 * (kHeadDim / 64);  // of dQ in a step
};

// PERF: what was measured beside these and lost is in benchmarks/NOTES.md.
//                          head_dim  block_q  block_kv  stages  stagings  producer  consumer
template <class Element>
using Config64 = Config<Element, 64, 128, 128, 3, 2, 72, 216>;
template <class Element>
using Config128 = Config<Element, 128, 64, 128, 3, 2, 72, 216>;

}  // namespace flashmsa::bwd
