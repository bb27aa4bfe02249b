// The forward kernel's tuning: one line per pair of head-dim buckets, and everything that follows from it.
#pragma once

#include "core/types.h"

namespace flashmsa::fwd {

template <class ElementType, int32_t kHeadDimValue, int32_t kHeadDimVValue, int32_t kBlockQValue, int32_t kBlockKvValue,
          int32_t kStagesValue, bool kQInRegistersValue, int32_t kQStagesValue, int32_t kOColumnsValue,
          int32_t kRegistersProducerValue, int32_t kRegistersConsumerValue, int32_t kCtasPerSmValue = 1>
struct Config {
  using Element = ElementType;
  static constexpr int32_t kHeadDim = kHeadDimValue;    // bucket: serves head_dim up to this
  static constexpr int32_t kHeadDimV = kHeadDimVValue;  // the same of head_dim_v
  static constexpr int32_t kBlockQ = kBlockQValue;    // rows of a tile, 64 per consumer warpgroup
  static constexpr int32_t kBlockKv = kBlockKvValue;  // keys of a tile
  static constexpr int32_t kStages = kStagesValue;    // tiles of K, and of V, in flight
  // Q is loaded to registers once a tile, instead of read from shared memory by every wgmma.
  static constexpr bool kQInRegisters = kQInRegistersValue;
  static constexpr int32_t kQStages = kQStagesValue;      // tiles of Q
  // Tiles that often have fewer rows than they could: their parts of 64 rows are dealt to the warpgroups in turn, from tile to
  // tile. Each warpgroup then has tiles of Q of its own, by way of which O leaves too.
  static constexpr bool kDealsParts = kOColumnsValue == 0;
  // Columns of O staged at a time, in a buffer of its own; 0 in the table: all, in that of Q.
  static constexpr int32_t kOColumns = kDealsParts ? kHeadDimV : kOColumnsValue;
  static constexpr int32_t kRegistersProducer = kRegistersProducerValue;  // setmaxnreg
  static constexpr int32_t kRegistersConsumer = kRegistersConsumerValue;
  static constexpr int32_t kCtasPerSm = kCtasPerSmValue;
  static constexpr int32_t kConsumerWarpgroups = kBlockQ / 64;
  static constexpr int32_t kThreads = 128 * (kConsumerWarpgroups + 1);
  static_assert(!kDealsParts || (!kQInRegisters && kQStages > 1 && kHeadDim == kHeadDimV));
  // SYNC: the warpgroups share the registers of the launch, which has them in eights a thread; where these are not
  // enough one of them waits for ever.
  static_assert(128 * (kRegistersProducer + kRegistersConsumer * kConsumerWarpgroups) <=
                65536 / (kThreads * kCtasPerSm) / 8 * 8 * kThreads);
};

// PERF: what was measured beside these and lost is in benchmarks/NOTES.md.
//                          head_dim  _v  block_q  block_kv  stages  q_regs  q_stages  o_columns  producer  consumer
template <class Element>
using Config64 = Config<Element, 64, 64, 256, 64, 4, false, 1, 64, 32, 112>;
template <class Element>
using Config128 = Config<Element, 128, 128, 128, 128, 2, true, 1, 128, 40, 232>;
// Documents: small tiles of keys, because the ends of tiles weigh more than their middles.
// PERF: over Config128 (before its softmax went by sums) 16 documents in 16384 tokens 1.07 … 1.12, causal 1.04 … 1.09, one 1.04,
// causal 1.02.
// Short ones: their last row tile often has rows for one warpgroup or two, so parts are dealt.
template <class Element>
using DocumentConfig128 = Config<Element, 128, 128, 192, 64, 4, false, 1, 64, 32, 160>;
template <class Element>
using ShortDocumentConfig128 = Config<Element, 128, 128, 192, 64, 4, false, 2, 0, 40, 152>;
// At 64 of composite masks and with options: kernels that need more registers than four warpgroups leave. And of documents,
// whose rows fill shorter tiles better.
template <class Element>
using CompositeConfig64 = Config<Element, 64, 64, 192, 128, 2, false, 2, 64, 32, 160>;
// Block-sparse masks: a cell's rows.
template <class Element>
using ListConfig64 = Config<Element, 64, 64, 128, 128, 2, false, 2, 64, 40, 232>;
template <class Element>
using Config256 = Config<Element, 256, 256, 128, 64, 2, false, 1, 128, 40, 232>;

// Of calls with so few rows that larger tiles would leave SMs idle: several small CTAs share an SM. See few_rows.h.
template <class Element>
using SmallConfig64 = Config<Element, 64, 64, 64, 64, 2, false, 2, 64, 32, 128, 3>;
template <class Element>
using SmallConfig128 = Config<Element, 128, 128, 64, 64, 2, true, 1, 128, 32, 216, 2>;

// Between these, for masks that are intervals, without options: all else is served by the next wider config.
template <class Element>
using Config96 = Config<Element, 96, 96, 192, 112, 2, false, 1, 128, 32, 160>;
// CompositeConfig…: of composite masks. At 96 their kernel needs more registers.
template <class Element>
using CompositeConfig96 = Config<Element, 96, 96, 192, 96, 2, false, 2, 64, 32, 160>;
template <class Element>
using Config192 = Config<Element, 192, 192, 128, 64, 2, false, 1, 192, 40, 232>;
// Prefill of multi-head latent attention: values are shorter than keys.
template <class Element>
using Config192x128 = Config<Element, 192, 128, 128, 96, 2, false, 1, 128, 40, 232>;
template <class Element>
using CompositeConfig192x128 = Config<Element, 192, 128, 128, 128, 2, false, 1, 64, 40, 232>;

// Keys on pages: whoever loads needs more registers.
template <class Element>
using PageConfig64 = Config<Element, 64, 64, 128, 128, 2, false, 2, 64, 56, 224>;

// Rows by index: the same. PERF: buckets are short, so the ends of tiles weigh more than their middles: small tiles of keys,
// the next tile's Q early, three warpgroups.
template <class Element>
using IndexConfig64 = Config<Element, 64, 64, 192, 64, 4, false, 2, 64, 56, 152>;
template <class Element>
using IndexConfig128 = Config<Element, 128, 128, 192, 64, 3, false, 2, 64, 56, 152>;
template <class Element>
using IndexConfig256 = Config256<Element>;

// With ALiBi beside a soft cap, or over a list: kernels that need more registers.
template <class Element>
using ScoreConfig64 = ListConfig64<Element>;
template <class Element>
using ScoreConfig128 = Config128<Element>;
template <class Element>
using ScoreConfig256 = Config<Element, 256, 256, 128, 32, 4, false, 1, 128, 40, 232>;

// With dropout; General: and with whatever else a call wants.
template <class Element>
using DropConfig64 = ListConfig64<Element>;
template <class Element>
using DropConfig128 = Config<Element, 128, 128, 128, 128, 2, false, 2, 128, 40, 232>;
template <class Element>
using DropConfig256 = Config256<Element>;
template <class Element>
using GeneralConfig64 = ListConfig64<Element>;
template <class Element>
using GeneralConfig128 = Config<Element, 128, 128, 128, 64, 4, true, 1, 128, 40, 232>;
template <class Element>
using GeneralConfig256 = ScoreConfig256<Element>;

}  // namespace flashmsa::fwd
