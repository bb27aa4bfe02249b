// The consumers: each warpgroup owns 64 rows of a tile and turns key blocks into O.
#pragma once

#include "attn/dropout.cuh"
#include "attn/epilogue.cuh"
#include "attn/masking.cuh"
#include "attn/places.cuh"
#include "attn/slow_rows.cuh"
#include "attn/softmax.cuh"
#include "fwd/indexed.cuh"
#include "fwd/shared.cuh"
#include "mask/block_sparse.h"
#include "sm90/registers.cuh"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

namespace flashmsa::fwd {

template <class Mask, class Config, class Score>
struct Consumer {
  using S = Shared<Mask, Config>;
  using Element = typename Config::Element;
  using Params = KernelParams<Mask>;
  static constexpr int kScores = Config::kBlockKv / 2;   // S: 64 rows x block_kv over 128 threads
  static constexpr int kOutputs = Config::kHeadDimV / 2;  // O: 64 rows x head_dim_v
  static constexpr int kQSteps = Config::kHeadDim / 16;
  static constexpr int kKeySteps = Config::kBlockKv / 16;
  using ScoreMma = sm90::Wgmma<Config::kBlockKv, Element>;
  using OutputMma = sm90::Wgmma<Config::kHeadDimV, Element>;
  using QOperand = sm90::KMajor<typename S::QTile>;
  using KOperand = sm90::KMajor<typename S::KTile>;
  using VOperand = sm90::MnMajor<typename S::VTile>;

  const Params& params;
  S& shared;
  const int32_t warpgroup;  // 0 .. kConsumerWarpgroups - 1
  int32_t part;             // of the tile at hand: which 64 rows
  uint64_t q_descriptor, k_descriptor, v_descriptor;  // of stage 0
  const PlaceOperands<Config>* places;  // kPlaces
  uint64_t slope_descriptor;  // kPlaces: of the tile at hand, for rows amid the keys
  uint32_t round = 0;       // the tile at hand
  uint32_t q_uses = 0;      // kDealsParts: tiles so far of which this warpgroup had rows with keys
  bool staged = false;      // kDealsParts: the tile before was one
  uint32_t key_blocks = 0;  // K tiles taken so far; within a tile V runs one behind

  // ALiBi by a k-step of its own, see attn/places.cuh.
  static constexpr bool kPlaces = kPlaceStep<Mask, Config, Score>;
  using Shift = std::conditional_t<kPlaces, attn::BlockShift, attn::NoShift>;

  // Whether the softmax goes by the sums of P (attn/softmax.cuh, try_exponentiate), for which S has to stay in registers,
  // and whether its multiply-adds are spread among the exponentials.
  // PERF: d128 4 %, with ALiBi 3 … 5 %, lists 2 … 3 %, small tiles 0 … 10 % (not spread 5 instead of 8 %), d96 3 … 5 %; d64 with
  // ALiBi 1 … 8 % (not spread 0), without -1 %; bands 1 % more spread. Others in benchmarks/NOTES.md.
  static constexpr bool kSpreads = Config::kHeadDim == 64 || Config::kCtasPerSm > 1 || std::is_same_v<Mask, mask::Band>;
  static constexpr bool kTriesExponents = (Score::kPlain || kPlaces) && !Score::kDropout && !kScattered<Mask> &&
                                          ((Config::kHeadDim == 64 && kPlaces) || Config::kHeadDim == 96 ||
                                           (Config::kHeadDim == 128 && Config::kRegistersConsumer > 200));
  bool k_is_there = false;  // kTriesExponents: K of the block to come, when it was asked for last

  // S, and Q that makes it.
  struct Scores {
    float s[kScores];
    uint32_t q[Config::kQInRegisters ? kQSteps : 1][4];
  };

  // What lives for one tile. NOTE: a local of the tile loop, without initial values: otherwise the accumulators stay live
  // from tile to tile, through the slow path too, and spill.
  struct Output {
    float o[kOutputs];
    uint32_t p[kKeySteps][4];
    attn::OnlineSoftmax softmax;
  };

  __device__ __forceinline__ Consumer(const Params& params, S& shared, int32_t warpgroup,
                                      const PlaceOperands<Config>* places = nullptr)
      : params(params), shared(shared), warpgroup(warpgroup), part(warpgroup), places(places) {
    const auto address = [](const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); };
    q_descriptor =
        QOperand::descriptor(address(shared.q[0]) + warpgroup * sm90::kWarpgroupRows * sm90::kSwizzleRowBytes);
    k_descriptor = KOperand::descriptor(address(shared.k));
    v_descriptor = VOperand::descriptor(address(shared.v));
  }

  __device__ __forceinline__ int32_t thread() const { return threadIdx.x % sm90::kWarpgroupThreads; }
  __device__ __forceinline__ int32_t lane() const { return threadIdx.x % 32; }
  // This warp's first row within the tile.
  __device__ __forceinline__ int32_t warp_row() const {
    return part * sm90::kWarpgroupRows + thread() / 32 * sm90::kWarpRows;
  }

  // Where it lies in the buffer that O goes through.
  __device__ __forceinline__ int32_t staged_row() const {
    return warpgroup * sm90::kWarpgroupRows + thread() / 32 * sm90::kWarpRows;
  }
  __device__ __forceinline__ char* staging() const {
    if constexpr (Config::kDealsParts) {
      return shared.q[S::QRing::stage(q_uses)];
    } else {
      return shared.o;
    }
  }

  // The same of the tensor.
  __device__ __forceinline__ int32_t first_row() const { return work().first_row() + warp_row(); }

  // A value that is the same in all lanes, made known as such. PERF: what decides loops and ring positions must be, or
  // descriptors leave the uniform registers and every wgmma waits for two moves (d128 dense: -12 %).
  static __device__ __forceinline__ int32_t uniform(int32_t x) { return __shfl_sync(~0u, x, 0); }
  static __device__ __forceinline__ mask::Side uniform(mask::Side side) {
    return static_cast<mask::Side>(uniform(static_cast<int32_t>(side)));
  }

  // One arrival a warp: every lane has passed the wait that ends its reads.
  __device__ __forceinline__ void release(sm90::Barrier& barrier) {
    if (lane() == 0) barrier.arrive();
  }

  // The tile at hand. NOTE: read again where it is needed rather than kept in registers through the main loop.
  __device__ __forceinline__ const TileWork<Mask, Config>& work() const { return work(round); }

  __device__ __forceinline__ const TileWork<Mask, Config>& work(uint32_t round) const {
    return shared.work[S::WorkRing::stage(round)];
  }

  // SYNC: all threads arrive, because all have read the slot.
  __device__ __forceinline__ void finish_work() { shared.empty_work[S::WorkRing::stage(round)].arrive(); }

  // Lets key blocks pass that none of this warpgroup's rows sees.
  // SYNC: waits until they are full, so that its arrival cannot fall into an earlier phase of the ring.
  __device__ __forceinline__ void skip_blocks(int32_t count) {
#pragma unroll 1
    for (; count > 0; --count, ++key_blocks) {
      const uint32_t stage = S::KvRing::stage(key_blocks);
      shared.full_k[stage].wait(S::KvRing::full_parity(key_blocks));
      release(shared.empty_k[stage]);
      shared.full_v[stage].wait(S::KvRing::full_parity(key_blocks));
      release(shared.empty_v[stage]);
    }
  }

  // Which use of the ring of Q the tile at hand is.
  __device__ __forceinline__ uint32_t q_use() const { return Config::kDealsParts ? q_uses : round; }

  __device__ __forceinline__ sm90::Barrier& q_barrier(sm90::Barrier* barriers, uint32_t use) const {
    return barriers[S::part_barrier(S::QRing::stage(use), warpgroup)];
  }

  __device__ __forceinline__ void wait_q(uint32_t use) {
    q_barrier(shared.full_q, use).wait(S::QRing::full_parity(use));
    if constexpr (!Config::kQInRegisters) cross_to_wgmma();
  }

  // Q of tile `round` into registers.
  __device__ __forceinline__ void load_q(Scores& x, uint32_t round) {
    const uint32_t stage = S::QRing::stage(round);
    const uint32_t tile = static_cast<uint32_t>(__cvta_generic_to_shared(shared.q[stage]));
#pragma unroll
    for (int k = 0; k < kQSteps; ++k) {
      sm90::ldmatrix_x4(x.q[k], tile + S::QTile::chunk_offset(warp_row() + sm90::Matrix16x16::row(lane()),
                                                              2 * k + sm90::Matrix16x16::half(lane())));
    }
  }

  // Gives back what load_q() read.
  // PERF: when the tile before is stored: then nobody waits for it. Directly behind the reads it cost 100 cycles a tile, since the
  // last P V hides little (d128 4x4096 .3 %, 16x1024 1 %).
  __device__ __forceinline__ void finish_q(const Scores& x) {
    // SYNC: the arrival would not wait for what is read.
    sm90::wait_ldmatrix(x.q);
    release_q();
  }

  // Tile `round`, as far as it can be prepared while the last P V of the tile before is in flight. False: there is none.
  // SYNC: the producer gets there whatever blocks of the tile before are still to be let pass: see producer.cuh.
  __device__ __forceinline__ bool open_tile(Scores& x, uint32_t round, Span& mine) {
    const uint32_t slot = S::WorkRing::stage(round);
    shared.full_work[slot].wait(S::WorkRing::full_parity(round));
    if (uniform(shared.work[slot].entry.row_block) < 0) return false;
    mine = shared.work[slot].span(shared.work[slot].part_of(warpgroup));
    if constexpr (Config::kQInRegisters) {
      wait_q(round);
      load_q(x, round);
    }
    return true;
  }

  __device__ __forceinline__ void release_q() { release(q_barrier(shared.empty_q, round)); }

  // Whether this lane stores the warp's boxes, and waits for them: the same one each time.
  // PERF: where parts are dealt one that the compiler knows as one: short documents .5 %.
  __device__ __forceinline__ bool stores() const { return Config::kDealsParts ? sm90::elect() : lane() == 0; }

  // kDealsParts: gives back Q of the tile before, by way of which O has left.
  __device__ __forceinline__ void release_staging() {
    if (!staged) return;
    // SYNC: lanes have read the rows of a box that was not stored as one.
    __syncwarp();
    if (stores()) {
      sm90::wait_stores_read();
      q_barrier(shared.empty_q, q_uses - 1).arrive();
    }
  }

  // Whether descriptors are found ahead of the wait that may be left out, V's from K's.
  // PERF: over pages they would come by a vector register or be worked out anew from the address, and the first wgmmas wait for
  // them. The compiler does as well in the forward kernels, which otherwise reuse fewer operands (164 to 147).
  static constexpr bool kLocatesAhead = kTriesExponents && kPaged<Mask>;

  // Of the K stage at hand.
  __device__ __forceinline__ uint64_t k_tile() const {
    return k_descriptor + sm90::descriptor_step(S::KvRing::stage(key_blocks) * S::KTile::kBytes);
  }

  __device__ __forceinline__ uint64_t v_tile(uint32_t stage) const {
    uint64_t first = v_descriptor;
    if constexpr (kLocatesAhead) {
      const uint32_t behind_k = static_cast<uint32_t>(&shared.v[0][0] - &shared.k[0][0]);
      first = k_descriptor + (VOperand::descriptor(behind_k) - KOperand::descriptor(0));
    }
    return first + sm90::descriptor_step(stage * S::VTile::kBytes);
  }

  // S = Q K^T of that stage, in flight as one group. kWithPlaces: less the penalties of rows on `side` of the keys, but for
  // what is the same for all of a block.
  template <bool kWithPlaces = false>
  __device__ __forceinline__ void issue_scores(Scores& x, uint64_t k_tile, mask::Side side = mask::Side::kAmid) {
    const uint64_t q_tile = q_descriptor + sm90::descriptor_step(S::QRing::stage(q_use()) * S::QTile::kBytes);
    sm90::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kQSteps; ++k) {
      if constexpr (Config::kQInRegisters) {
        ScoreMma::template rs<false>(x.s, x.q[k], k_tile + KOperand::step(k), k > 0);
      } else {
        ScoreMma::ss(x.s, q_tile + QOperand::step(k), k_tile + KOperand::step(k), k > 0);
      }
    }
    // NOTE: last, because each step rounds the sum so far.
    if constexpr (kWithPlaces) {
      ScoreMma::ss(x.s, slope_descriptor + PlaceOperands<Config>::side_step(side), places->key_descriptor(), true);
    }
    sm90::wgmma_commit();
  }

  __device__ __forceinline__ void wait_k() {
    shared.full_k[S::KvRing::stage(key_blocks)].wait(S::KvRing::full_parity(key_blocks));
    cross_to_wgmma();
  }

  // PERF: asked ahead, beside the exponentials, the answer is there when the block begins (d128: 0 … 1 %).
  __device__ __forceinline__ void look_for_k() {
    k_is_there = shared.full_k[S::KvRing::stage(key_blocks)].test(S::KvRing::full_parity(key_blocks));
  }

  // SYNC: what cp.async wrote, which the wait before has made visible to this thread, becomes visible to its wgmmas.
  __device__ __forceinline__ void cross_to_wgmma() {
    if constexpr (kIndexed<Mask>) sm90::fence_async_proxy();
  }

  // O += P V of the V stage at hand, in flight as one group.
  __device__ __forceinline__ void issue_output(Output& y) {
    const uint32_t stage = S::KvRing::stage(key_blocks - 1);
    shared.full_v[stage].wait(S::KvRing::full_parity(key_blocks - 1));
    cross_to_wgmma();
    const uint64_t values = v_tile(stage);
    sm90::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kKeySteps; ++k) {
      OutputMma::template rs<true>(y.o, y.p[k], values + VOperand::step(k), true);
    }
    sm90::wgmma_commit();
  }

  // After the wait for S(i): K(i) is free, the next block is i + 1.
  __device__ __forceinline__ void release_k() { release(shared.empty_k[S::KvRing::stage(key_blocks)]); }
  __device__ __forceinline__ void release_v() { release(shared.empty_v[S::KvRing::stage(key_blocks - 1)]); }

  // P V has been waited for: O is here, V is free, the next block is at hand.
  __device__ __forceinline__ void take_output(Output& y) {
    sm90::pin_registers(y.o);
    release_v();
    ++key_blocks;
  }

  // Which weights of a key block dropout keeps. PERF: drawn among the exponentials, where the registers suffice; else before,
  // while S is on its way, and kept as bits.
  static constexpr bool kDrawsLate = !Score::kGeneral && Config::kHeadDim <= 128;
  using Kept =
      std::conditional_t<Score::kDropout, std::conditional_t<kDrawsLate, attn::Drawing, attn::KeptBits<kScores>>,
                         attn::AllKept>;

  // What lives for one tile beside the numbers: its rows' keys, and with ALiBi their places.
  struct Rows {
    typename Mask::Row keys[2];
    int32_t position[Score::kAlibi ? 2 : 1];
    float slope;
    // Dropout in the caller's order.
    std::conditional_t<Score::kDropout && !Score::kGeneral, attn::RowPairCalls, attn::NoRowDraws> calls;
  };

  // Whether only partial blocks ask for them, and many tiles have none.
  // PERF: a composite row takes 500 cycles of a list's 13 blocks (10 % of 16384 keys: 2 %).
  static constexpr bool kOnlyPartialRows = Mask::kListed && Score::kPlain && !Score::kDropout;

  __device__ __forceinline__ Rows make_rows() const {
    const TileWork<Mask, Config>& tile = work();
    Rows rows;
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      // Rows past the tensor's end take its last row's interval: safe to ask for, and never stored.
      const int32_t row = min_of(first_row() + lane() / 4 + 8 * slot, tile.end_row(params) - 1);
      rows.keys[slot] = Mask::row(params.mask, tile.entry.block, row);
      if constexpr (Score::kAlibi) rows.position[slot] = Mask::position(params.mask, tile.entry.block, row);
    }
    if constexpr (Score::kAlibi) {
      rows.slope = 0.0f;
      if (!Score::kGeneral || params.alibi_slopes != nullptr) rows.slope = alibi_slope(tile);
    }
    if constexpr (Score::kDropout && !Score::kGeneral) {
      Dropout dropout = draws(tile).dropout;
      // PERF: known to be the same in all lanes they lie in uniform registers.
      dropout.key0 = uniform(dropout.key0);
      dropout.key1 = uniform(dropout.key1);
      dropout.slice = uniform(dropout.slice);
      dropout.offset = uniform(dropout.offset);
      rows.calls = attn::RowPairCalls(dropout, first_row() + lane() / 4);
      for (uint32_t& multiplier : rows.calls.multiplier) multiplier = uniform(multiplier);
    }
    return rows;
  }

  __device__ __forceinline__ attn::SequenceDraws<Score::kGeneral> draws(const TileWork<Mask, Config>& tile) const {
    return {params.dropout, tile.queries(), tile.kv_head};
  }

  // Which weights of a key block dropout keeps.
  __device__ __forceinline__ Kept draw(const KeyBlock& block, const Rows& rows) const {
    if constexpr (!Score::kDropout) {
      return {};
    } else if constexpr (kDrawsLate) {
      return {params.dropout, rows.calls, block.first_key};
    } else if constexpr (!Score::kGeneral) {
      return attn::draw_in_order<kScores>(params.dropout.least, rows.calls, block.first_key);
    } else {
      // NOTE: all that is needed is read again each time: the registers are in use.
      const attn::SequenceDraws<true> head = draws(work());
      const int32_t row = first_row() + lane() / 4;
      if (!params.dropout.in_order) return attn::draw_one_by_one<kScores>(head, row, block.first_key);
      return attn::draw_in_order<kScores>(params.dropout.least, attn::RowPairCalls(head.dropout, row), block.first_key);
    }
  }

  // In units of S.
  __device__ __forceinline__ float alibi_slope(const TileWork<Mask, Config>& tile) const {
    // PERF: known to be the same in all lanes it lies in a uniform register; three of the others stall beside the tensor core.
    return __shfl_sync(~0u, fwd::alibi_slope(params, tile), 0);
  }

  // The key block at hand. NOTE: before release_k(), which gives its slot back.
  // SYNC: lane 0 arrives there, and the other lanes have read before it. Where registers suffice it reads for all of them,
  // which racecheck can follow; it does not count what __syncwarp orders, and reports the other form, falsely.
  __device__ __forceinline__ KeyBlock key_block() const {
    const KeyBlock& slot = shared.key_block[S::KvRing::stage(key_blocks)];
    if constexpr (kOnlyPartialRows) {
      KeyBlock block = {};
      if (lane() == 0) block = slot;
      return {uniform(block.first_key), uniform(block.detail)};
    }
    const KeyBlock block = slot;
    __syncwarp();
    return block;
  }

  // Where the warpgroup's rows stand. NOTE: read again for each block, because registers are few.
  __device__ __forceinline__ mask::PositionSpan positions() const {
    return places->positions[S::WorkRing::stage(round)][warpgroup];
  }

  // From the end of a block at `side` of which the rows stand to their positions. Amid the keys nothing is left to add.
  __device__ __forceinline__ void set_distance(Shift& shift, int32_t first_key, const Rows& rows,
                                               mask::Side side) const {
#pragma unroll
    for (int slot = 0; slot < 2; ++slot) {
      const int32_t before = first_key - rows.position[slot];
      const int32_t distance = side == mask::Side::kBehind ? 1 - Config::kBlockKv - before : before;
      shift.distance[slot] = side == mask::Side::kAmid ? 0.0f : static_cast<float>(distance);
    }
  }

  // Softcap and ALiBi.
  __device__ __forceinline__ void modify_scores(Scores& x, const KeyBlock& block, const Rows& rows) {
    if constexpr (Score::kSoftcap) {
      if (!Score::kGeneral || params.cap.used()) attn::apply_softcap(x.s, params.cap);
    }
    if constexpr (kNeedsAllGroups<Mask, Score>) {
      if (params.alibi_slopes != nullptr) {
        attn::apply_alibi_to_groups(x.s, rows.slope, rows.position, shared.key_groups.of(block.detail), thread());
      }
    } else if constexpr (Score::kAlibi) {
      attn::apply_alibi(x.s, rows.slope, rows.position, block.first_key, thread());
    }
  }

  // Masks S where this warp's rows need it: in a partial block of the tile most warps see all keys or none.
  __device__ __forceinline__ void mask_scores(Scores& x, const KeyBlock& block, const Rows& rows) {
    if constexpr (kScattered<Mask>)
      return attn::apply_groups(x.s, rows.keys, shared.key_groups.of(block.detail), thread());
    const int32_t first_key = block.first_key;
    const int32_t end_key = first_key + Config::kBlockKv;
    const mask::Interval keys[2] = {mask::main_run(rows.keys[0]), mask::main_run(rows.keys[1])};
    const auto cuts = [&](int slot) { return keys[slot].begin > first_key || keys[slot].end < end_key; };
    if (__any_sync(~0u, cuts(0) || cuts(1))) {
      bool first_runs = false;
      if constexpr (std::is_same_v<typename Mask::Row, mask::TwoRuns>) {
        const auto meets = [&](const mask::TwoRuns& row) {
          return row.first.begin < min_of(row.first.end, end_key) && row.first.end > first_key;
        };
        first_runs = __any_sync(~0u, meets(rows.keys[0]) || meets(rows.keys[1]));
      }
      // PERF: most blocks meet no first run, and one test of an interval is a quarter of two.
      if (first_runs) {
        attn::apply_intervals(x.s, rows.keys, first_key, thread());
      } else if constexpr (kMasksByBits<Mask, Config>) {
        attn::apply_intervals_as_bits(x.s, keys, first_key, thread());
      } else {
        attn::apply_intervals(x.s, keys, first_key, thread());
      }
    }
    if constexpr (Mask::kListed) {
      if (block.detail != mask::kWholeCell) mask_cell(x, block);
    }
  }

  // What a mixed cell of a list hides.
  __device__ __forceinline__ void mask_cell(Scores& x, const KeyBlock& block) {
    static_assert(Config::kBlockQ == mask::kCell && mask::kCell % Config::kBlockKv == 0);
    // NOTE: by bits, because a list on the device may hold a negative cell.
    const int32_t first_column = block.first_key & (mask::kCell - 1);
    if (params.mask.list.bits != nullptr) {
      const int32_t row = warp_row() + lane() / 4;
      const int32_t* const words[2] = {Mask::row_bits(params.mask, block.detail, row) + first_column / 32,
                                       Mask::row_bits(params.mask, block.detail, row + 8) + first_column / 32};
      attn::apply_bits(x.s, words, thread());
    } else {
      const mask::Interval keys = Mask::half_keys(params.mask, block.detail, warpgroup);
      const mask::Interval rows[2] = {keys, keys};
      attn::apply_intervals(x.s, rows, first_column, thread());
    }
  }

  // Whether all of the warp's |S| lie below `end`, this thread's largest being `size` as bits; the same in all lanes.
  static __device__ __forceinline__ bool all_below(const int32_t (&size)[2], float end) {
    return !__any_sync(~0u, max_of(size[0], size[1]) >= __float_as_int(end));
  }

  // The softmax of any key block with a soft cap: masks it, moves the references, returns the factors that O takes.
  // kFirst: of a tile's first one, which is no exception and goes by the shorter exponent where that serves.
  template <bool kFirst>
  __device__ __forceinline__ void attend_capped(Scores& x, Output& y, const KeyBlock& block, const Rows& rows,
                                                const Kept& kept, const int32_t (&size)[2], bool masked,
                                                float (&factor)[2]) {
    const attn::CapExponents& exponents = params.cap_exponents;
    // PERF: 16x1024 3 %, 4x4096 .5 %; at 256 0.
    const bool by_quintic = kFirst && Config::kHeadDim == 128 && all_below(size, exponents.quintic.end);
    const bool by_polynomial = by_quintic || all_below(size, exponents.nonic.end);
    if (!by_polynomial) attn::apply_softcap_exactly(x.s, params.cap);
    if (masked) mask_scores(x, block, rows);
    const auto capped = [&](float maximum) {
      if (!by_polynomial || maximum == attn::kNegativeInfinity) return maximum;
      return attn::tanh_exact(maximum * params.cap.factor) * params.cap.inverse;
    };
    y.softmax.raise(x.s, params.scale_log2, params.inverse_scale_log2, factor, Shift(), capped);
    const auto exponentiate_by = [&](const auto& exponent) {
      y.softmax.exponentiate_in_place(exponent, x.s);
      y.softmax.template pack<Element>(x.s, y.p, kept);
    };
    // NOTE: not by the cubic one, which makes +inf of a hidden S.
    if (by_quintic) {
      exponentiate_by(exponents.quintic);
    } else if (by_polynomial) {
      exponentiate_by(exponents.nonic);
    } else {
      y.softmax.template exponentiate<Element>(x.s, y.p, params.scale_log2, kept);
    }
  }

  // Steps 3 and 4 of a block that moves no reference. kEarly: the exponentials come before the wait for P V.
  template <int kBranch, bool kEarly, class Exponent>
  __device__ __forceinline__ void finish_by(Scores& x, Output& y, const Exponent& exponent, const Kept& kept) {
    if constexpr (kEarly) {
      y.softmax.exponentiate_in_place(exponent, x.s);
      sm90::pin_registers(x.s);
    }
    end_output<kBranch>(y);
    if constexpr (!kEarly) y.softmax.exponentiate_in_place(exponent, x.s);
    y.softmax.template pack<Element>(x.s, y.p, kept);
  }

  // Step 3 as far as it is the same for all blocks. kBranch: of wgmma_wait_in_branch.
  template <int kBranch>
  __device__ __forceinline__ void end_output(Output& y) {
    sm90::wgmma_wait_in_branch<kBranch>();
    take_output(y);
  }

  // Steps 2 to 4 of a block with a soft cap, whose S is here: by the shortest exponent that serves all of the warp's S.
  // NOTE: a capped S is no larger than S. So where no |S| reaches its row's limit, none outgrows the reference.
  // PERF: the wait for P V first and the sums of P tested instead of S: d128 1.43 times the plain kernel's time, not 1.17.
  template <bool kMasked>
  __device__ __forceinline__ void finish_capped(Scores& x, Output& y, const KeyBlock& block, const Rows& rows,
                                                const Kept& kept) {
    const attn::CapExponents& exponents = params.cap_exponents;
    // PERF: early, d128 with the cubic exponent 1.115, late 1.175 times the plain kernel's time; with the quintic one 1.21 and
    // 1.185. At d64 early is 2 to 5 % faster with each.
    constexpr bool kAllEarly = Config::kHeadDim <= 64;
    int32_t size[2];
    y.softmax.largest(x.s, size);
    if constexpr (!kMasked) {
      const bool grows = size[0] >= y.softmax.limit[0] || size[1] >= y.softmax.limit[1];
      const bool past_cubic = max_of(size[0], size[1]) >= __float_as_int(exponents.cubic.end);
      if (!__any_sync(~0u, grows || past_cubic)) return finish_by<2, true>(x, y, exponents.cubic, kept);
      if (!__any_sync(~0u, grows) && all_below(size, exponents.nonic.end)) {
        if (all_below(size, exponents.quintic.end)) return finish_by<3, kAllEarly>(x, y, exponents.quintic, kept);
        return finish_by<4, kAllEarly>(x, y, exponents.nonic, kept);
      }
    }
    // NOTE: first, because the registers of P are wanted.
    end_output<0>(y);
    float factor[2];
    attend_capped<false>(x, y, block, rows, kept, size, kMasked, factor);
    attn::scale_rows(y.o, factor);
  }

  // Steps 3 and 4 of a block with the test behind the exponentials.
  __device__ __forceinline__ void finish_trying(Scores& x, Output& y, const Shift& shift) {
    sm90::wgmma_wait<0>();
    take_output(y);
    look_for_k();
    if (y.softmax.template try_exponentiate<Element, kSpreads>(x.s, y.p, params.scale_log2, shift)) return;
    float factor[2];
    y.softmax.raise(x.s, params.scale_log2, params.inverse_scale_log2, factor, shift);
    attn::scale_rows(y.o, factor);
    y.softmax.template exponentiate<Element>(x.s, y.p, params.scale_log2, attn::AllKept(), shift);
  }

  // The first key block, whose S is here: softmax, P. O is still empty.
  __device__ __forceinline__ void first_block(Scores& x, Output& y, const KeyBlock& block, const Rows& rows,
                                              bool masked, const Kept& kept, const Shift& shift) {
    float factor[2];
    y.softmax = attn::OnlineSoftmax();
    if constexpr (kCapInExponent<Score>) {
      int32_t size[2];
      y.softmax.largest(x.s, size);
      attend_capped<true>(x, y, block, rows, kept, size, masked, factor);
    } else {
      if (masked) mask_scores(x, block, rows);
      y.softmax.raise(x.s, params.scale_log2, params.inverse_scale_log2, factor, shift);
      y.softmax.template exponentiate<Element>(x.s, y.p, params.scale_log2, kept, shift);
    }
    // NOTE: only now: O would otherwise hold its registers through the softmax.
#pragma unroll
    for (int e = 0; e < kOutputs; ++e) y.o[e] = 0.0f;
  }

  // A key block in the middle, one step of the pipeline:
  //   1. S(i) = Q K(i)^T and, behind it, O += P(i-1) V(i-1) go to the tensor cores
  //   2. S(i) arrives: K(i) is free; mask it; does a row outgrow its reference?
  //   3. O arrives: V(i-1) and P are free; rescale O if so
  //   4. P(i) = 2^(S(i) - reference)
  // kTriesExponents: 3 without the test, 4, the test, and where it fails rescale O and 4 again.
  template <bool kMasked>
  __device__ __forceinline__ void next_block(Scores& x, Output& y, KeyBlock block, const Rows& rows, Shift& shift,
                                             mask::Side side = mask::Side::kAmid) {
    uint64_t keys;
    if constexpr (kLocatesAhead) keys = k_tile();
    if (!kTriesExponents || !k_is_there) wait_k();  // 1
    if constexpr (!kLocatesAhead) keys = k_tile();
    if constexpr (kNeedsKeyBlocks<Mask, Score> && (kMasked || !(kPlaces || kOnlyPartialRows))) block = key_block();
    if constexpr (kPlaces && kMasked) side = uniform(mask::side_of(positions(), block.first_key, Config::kBlockKv));
    if constexpr (kPlaces && !kMasked) {
      shift.distance[0] += Config::kBlockKv;
      shift.distance[1] += Config::kBlockKv;
    }
    issue_scores<kPlaces>(x, keys, side);
    // PERF: before P V, whose issue takes as long as the tensor core needs to get to its last step: P is in registers.
    const Kept kept = draw(block, rows);
    issue_output(y);

    sm90::wgmma_wait<1>();  // 2
    sm90::pin_registers(x.s);
    release_k();
    if constexpr (kCapInExponent<Score>) return finish_capped<kMasked>(x, y, block, rows, kept);
    if constexpr (kPlaces) {
      if (kMasked && side == mask::Side::kAmid) modify_scores(x, block, rows);
    } else if constexpr (!Score::kPlain) {
      modify_scores(x, block, rows);
    }
    if constexpr (kMasked) mask_scores(x, block, rows);
    if constexpr (kPlaces && kMasked) set_distance(shift, block.first_key, rows, side);
    if constexpr (kTriesExponents) return finish_trying(x, y, shift);
    const bool outgrown = y.softmax.outgrown(x.s, shift);

    // 3. PERF: where there is more to do than the test, and at d64 anyway, the compiler moves a wait up into what P V should
    // overlap (ALiBi by additions at d128: +26 %).
    if constexpr (!kMasked && (Score::kPlain || kPlaces) && Config::kHeadDim > 64) {
      sm90::wgmma_wait<0>();
    } else {
      sm90::wgmma_wait_behind(outgrown);
    }
    take_output(y);
    if (outgrown) {
      float factor[2];
      y.softmax.raise(x.s, params.scale_log2, params.inverse_scale_log2, factor, shift);
      attn::scale_rows(y.o, factor);
    }

    y.softmax.template exponentiate<Element>(x.s, y.p, params.scale_log2, kept, shift);  // 4
  }

  // What is left of a tile with ALiBi, from step `step` of `end` on: blocks that are looked at one by one, then those behind
  // which all rows stand, then those before which they stand, where a mask shows any.
  __device__ __forceinline__ void attend_places(Scores& x, Output& y, const Rows& rows, Shift& shift,
                                                const mask::SideOrder& order, int32_t step, int32_t end) {
#pragma unroll 1
    for (; step < order.amid_end; ++step) next_block<true>(x, y, KeyBlock{}, rows, shift);
    mask::Side side = mask::Side::kBehind;
    // The place of the block before the first: next_block moves on.
    int32_t first_key = order.behind_key - (step - 1) * Config::kBlockKv;
    int32_t stop = order.behind_end;
#pragma unroll 1
    while (true) {
      set_distance(shift, first_key, rows, side);
      const int32_t blocks = uniform(max_of(stop - step, 0));
      // PERF: counted as in attend().
      const uint32_t stop_block = uniform(key_blocks + blocks);
#pragma unroll 1
      for (int32_t left = blocks; Config::kQInRegisters ? key_blocks != stop_block : left > 0; --left) {
        next_block<false>(x, y, KeyBlock{}, rows, shift, side);
      }
      if (kSeesNonePast<Mask> || side == mask::Side::kBefore) return;
      step += blocks;
      side = mask::Side::kBefore;
      first_key = places->order[S::WorkRing::stage(round)].before_key + (step - 1) * Config::kBlockKv;
      stop = end;
    }
  }

  // The tile's order, of whose steps this warpgroup's end at `end`.
  __device__ __forceinline__ mask::SideOrder side_order(int32_t end) const {
    mask::SideOrder order = places->order[S::WorkRing::stage(round)];
    order.amid_end = uniform(min_of(order.amid_end, end));
    order.behind_end = uniform(min_of(order.behind_end, end));
    return order;
  }

  // Two warpgroups that begin a CTA together would stay in step for four blocks, with the tensor core idle during both
  // softmaxes. So the second one's first S waits for the first's, once a CTA.
  // PERF: d128 1x1024 18.5 -> 16.4 us. Where key tiles are shorter than row tiles (d192, d256) causal calls lose 2 … 12 %: the
  // first warpgroup lets a block pass there. With four warpgroups dense calls gain 1 % and causal ones lose 4 … 8 %.
  // SYNC: the first warpgroup gets to its first S without the second one: it lets one block pass at most, as 64 rows move an
  // interval's ends by no more than half of a key tile.
  static constexpr bool kTakesTurns =
      (Mask::kKind == MaskKind::kDense || Mask::kKind == MaskKind::kCausal || std::is_same_v<Mask, mask::Band>) &&
      Score::kPlain && !Score::kDropout && Config::kConsumerWarpgroups == 2 && Config::kBlockKv == Config::kBlockQ;
  static constexpr uint32_t kTurnBarrier = 4;

  __device__ __forceinline__ void begin_turn() const {
    if (kTakesTurns && round == 0 && warpgroup == 1) sm90::bar_sync(kTurnBarrier, 2 * sm90::kWarpgroupThreads);
  }
  __device__ __forceinline__ void end_turn() const {
    if (kTakesTurns && round == 0 && warpgroup == 0) sm90::bar_arrive(kTurnBarrier, 2 * sm90::kWarpgroupThreads);
  }

  // All key blocks of the tile: partial ones first, then full ones without a test. Leaves the last P V to do.
  __device__ __forceinline__ void attend(Scores& x, Output& y, const Span& mine) {
    wait_k();
    [[maybe_unused]] KeyBlock block = {};
    if constexpr (kNeedsKeyBlocks<Mask, Score>) block = key_block();
    mask::Side side = mask::Side::kAmid;
    if constexpr (kPlaces) {
      // PERF: not again in each block, where it would have to go to uniform registers.
      slope_descriptor =
          places->slope_descriptor() + PlaceOperands<Config>::slot_step(uniform(S::WorkRing::stage(round)));
      side = uniform(mask::side_of(positions(), block.first_key, Config::kBlockKv));
    }
    begin_turn();
    issue_scores<kPlaces>(x, k_tile(), side);
    end_turn();
    if constexpr (Config::kDealsParts) release_staging();

    // In the shadow of the first S: what the rows may see, and how many blocks need a test.
    // PERF: a copy, which the compiler makes better loops of (d128: 2 %), where the registers suffice.
    using Tiles = typename Mask::Tiles;
    constexpr bool kCopied = std::is_same_v<Tiles, mask::KeyTiles> && (!Mask::kPlanned || Config::kHeadDim > 64);
    std::conditional_t<kCopied, const Tiles, const Tiles&> tiles = work().entry.tiles;
    Rows rows = {};
    if constexpr (!kOnlyPartialRows) rows = make_rows();
    int32_t step = uniform(mine.front);
    const int32_t end = uniform(mine.front + mine.steps);
    const int32_t partial = uniform(min_of(tiles.partial_count(), end));
    if constexpr (kOnlyPartialRows) {
      if (partial > 0) rows = make_rows();
    }
    const auto origin = [&] { return Mask::origin(params.mask, work().entry.block); };
    const int32_t copied_origin = kCopied ? origin() : 0;
    [[maybe_unused]] const uint32_t step_0 = key_blocks - step;
    const auto block_of = [&](int32_t step) {
      if constexpr (kScattered<Mask>) return KeyBlock{0, static_cast<int32_t>(step_0 + step)};
      return KeyBlock{(kCopied ? copied_origin : origin()) + tiles.visit(step) * Config::kBlockKv, 0};
    };

    const Kept kept = draw(block, rows);
    Shift shift;
    mask::SideOrder order;
    if constexpr (kPlaces) {
      shift = {rows.slope, rows.slope * params.scale_log2, {0.0f, 0.0f}};
      set_distance(shift, block.first_key, rows, side);
      order = side_order(end);
    }

    sm90::wgmma_wait<0>();
    sm90::pin_registers(x.s);
    release_k();
    key_blocks = uniform(key_blocks + 1);
    if constexpr (!Config::kQInRegisters) round = uniform(round);
    if constexpr (Config::kDealsParts) q_uses = uniform(q_uses);
    if constexpr (!kNeedsKeyBlocks<Mask, Score>) block = block_of(step);
    if constexpr (!Score::kPlain && !kCapInExponent<Score>) {
      if (!kPlaces || side == mask::Side::kAmid) modify_scores(x, block, rows);
    }
    first_block(x, y, block, rows, step < partial, kept, shift);
    if constexpr (kPaged<Mask>) {
      if (step < partial) clear_unused(block);
    }
    k_is_there = false;
    ++step;
    if constexpr (kPlaces) {
      attend_places(x, y, rows, shift, order, step, end);
    } else {
#pragma unroll 1
      for (; step < partial; ++step) next_block<true>(x, y, block_of(step), rows, shift);
      // PERF: with Q in registers counted by the ring's position, which spares a move between register files a block (a
      // document over everything at d128: +2 %); otherwise by the step (at d64 the other costs 1 %).
      const uint32_t stop = uniform(key_blocks + (end - step));
#pragma unroll 1
      for (; Config::kQInRegisters ? key_blocks != stop : step < end; ++step) {
        next_block<false>(x, y, kNeedsAllGroups<Mask, Score> ? block_of(step) : KeyBlock{}, rows, shift);
      }
    }
  }

  // The tensor's row that a row of the tile's sequence is.
  __device__ __forceinline__ int32_t tensor_row(const TileWork<Mask, Config>& tile, int32_t row) const {
    if constexpr (kIndexed<Mask>) {
      return Mask::query(params.mask, tile.entry.block, row);
    } else {
      return tile.sequence_row() + row;
    }
  }

  // Where lse of the tensor's row `place(tile)` goes.
  template <class Place>
  __device__ __forceinline__ float& lse_at(const Place& place) const {
    const TileWork<Mask, Config>& tile = work();
    return params.lse[tile.batch * params.lse_stride_batch + tile.head * params.lse_stride_head +
                      tile.residue * params.lse_stride_residue + place(tile) * params.lse_stride_seq];
  }

  // Where lse of a row of the tile's sequence goes.
  __device__ __forceinline__ float& lse_of(int32_t row) const {
    return lse_at([&](const TileWork<Mask, Config>& tile) { return tensor_row(tile, row); });
  }

  // Of rows by index: lane l has the tensor's row that the warp's row l % 16 is.
  __device__ __forceinline__ int32_t own_place() const {
    if constexpr (!kIndexed<Mask>) return 0;
    return tensor_row(work(), min_of(first_row() + lane() % sm90::kWarpRows, params.len_q - 1));
  }

  // The sink of the tile's head in the exponent's units; -inf: none.
  __device__ __forceinline__ float sink() const {
    constexpr float kLog2E = 1.44269504088896341f;
    return params.sinks == nullptr ? attn::kNegativeInfinity : params.sinks[work().head] * kLog2E;
  }

  // Rows of V that are none, in the page where the length ends: zeros, because whatever lies there times P = 0 may be NaN.
  // Of the blocks that a warpgroup attends to they are in the first. Pages behind the length came as zeros.
  // SYNC: for this warpgroup alone; another one may write the same zeros.
  __device__ __forceinline__ void clear_unused(const KeyBlock& block) {
    using VTile = typename S::VTile;
    constexpr int32_t kChunks = Config::kHeadDimV / 8;
    int32_t first_key = block.first_key;
    const auto& place = work().entry.block;
    if constexpr (kScattered<Mask>) {
      first_key = shared.key_groups.of(block.detail)[Mask::first_row(params.mask, place) / 8];
    }
    const mask::Interval rows = Mask::unused_rows(params.mask, place, first_key);
    if (rows.begin >= min_of(rows.end, Config::kBlockKv)) return;
    const uint32_t stage = S::KvRing::stage(key_blocks - 1);
    shared.full_v[stage].wait(S::KvRing::full_parity(key_blocks - 1));
#pragma unroll 1
    for (int32_t i = rows.begin * kChunks + thread(); i < rows.end * kChunks; i += sm90::kWarpgroupThreads) {
      *reinterpret_cast<uint4*>(shared.v[stage] + VTile::chunk_offset(i / kChunks, i % kChunks)) = uint4{0, 0, 0, 0};
    }
    sm90::fence_async_proxy();
    sm90::bar_sync(1 + warpgroup, sm90::kWarpgroupThreads);
  }

  // Of the warp's staged rows those that the tile has, one by one: the box would reach into the next sequence.
  __device__ __forceinline__ void store_few(int32_t first_column) {
    using OTile = typename S::OTile;
    constexpr int32_t kChunks = Config::kOColumns / 8;
    const TileWork<Mask, Config>& tile = work();
    const int32_t first_row = this->first_row();
    const int32_t rows = tile.end_row(params) - first_row;
#pragma unroll 1
    for (int32_t i = lane(); i < rows * kChunks; i += 32) {
      const int32_t row = i / kChunks, column = first_column + i % kChunks * 8;
      if (column >= params.head_dim_v) continue;
      Element* out_row = attn::row_of<Element>(params.out_rows, tile.queries(), tile.sequence_row() + first_row + row);
      *reinterpret_cast<uint4*>(out_row + column) =
          *reinterpret_cast<const uint4*>(staging() + OTile::chunk_offset(staged_row() + row, i % kChunks));
    }
  }

  // Of the warp's staged rows those that the tile has, each to its own place.
  __device__ __forceinline__ void store_by_index(int32_t first_column, int32_t own_place) {
    using OTile = typename S::OTile;
    constexpr int32_t kChunks = Config::kOColumns / 8;
    static_assert(32 % kChunks == 0);
    const TileWork<Mask, Config>& tile = work();
    const int32_t rows = tile.end_row(params) - first_row();
    const int32_t column = first_column + lane() % kChunks * 8;
    Element* out = attn::row_of<Element>(params.out_rows, tile.queries(), 0) + column;
#pragma unroll
    for (int32_t first = 0; first < sm90::kWarpRows; first += 32 / kChunks) {
      const int32_t row = first + lane() / kChunks;
      const int32_t place = __shfl_sync(~0u, own_place, row);
      if (row < rows && column < params.head_dim_v) {
        *reinterpret_cast<uint4*>(out + place * params.out_rows.stride_seq) =
            *reinterpret_cast<const uint4*>(staging() + OTile::chunk_offset(staged_row() + row, lane() % kChunks));
      }
    }
  }

  // O by way of shared memory, normalised and rounded, 16 rows a warp; lse straight to memory.
  __device__ __forceinline__ void store(Output& y, [[maybe_unused]] int32_t own_place) {
    using OTile = typename S::OTile;
    constexpr int kPass = Config::kOColumns / 2;  // accumulators of one pass through the buffer
    const TileWork<Mask, Config>& tile = work();
    const int32_t first_row = this->first_row();
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(staging()));
    float inverse[2], lse[2];
    y.softmax.finish(inverse, lse, sink());
    if constexpr (Score::kDropout) {
      inverse[0] *= params.dropout.keep_scale;
      inverse[1] *= params.dropout.keep_scale;
    }
    attn::scale_rows(y.o, inverse);
#pragma unroll
    for (int pass = 0; pass < ceil_div(kOutputs, kPass); ++pass) {
      // SYNC: the store before, of this tile or of the last, has read the buffer.
      if (!kIndexed<Mask> && !Config::kDealsParts && lane() == 0) sm90::wait_stores_read();
      __syncwarp();
      attn::stage_rows<Element, OTile, kPass>(y.o, pass * kPass, address, staged_row());
      if constexpr (kIndexed<Mask>) {
        __syncwarp();
        store_by_index(pass * Config::kOColumns, own_place);
        continue;
      }
      sm90::fence_async_proxy();
      __syncwarp();
      if constexpr (kOwnRows<Mask>) {
        if (first_row + sm90::kWarpRows > tile.end_row(params)) {
          store_few(pass * Config::kOColumns);
          continue;
        }
      }
      if (stores() && first_row < tile.end_row(params)) {
        sm90::store_rows<OTile, kMapRank<Mask>>(params.out, staging() + staged_row() * sm90::kSwizzleRowBytes,
                                                pass * Config::kOColumns, tile.sequence_row() + first_row,
                                                tile.queries());
      }
    }
    if constexpr (kIndexed<Mask>) {
#pragma unroll
      for (int slot = 0; slot < 2; ++slot) {
        const int32_t row = lane() / 4 + 8 * slot;
        const int32_t place = __shfl_sync(~0u, own_place, row);
        if (params.lse != nullptr && lane() % 4 == 0 && first_row + row < tile.end_row(params)) {
          lse_at([&](const TileWork<Mask, Config>&) { return place; }) = lse[slot];
        }
      }
    } else if (params.lse != nullptr && lane() % 4 == 0) {
#pragma unroll
      for (int slot = 0; slot < 2; ++slot) {
        const int32_t row = first_row + lane() / 4 + 8 * slot;
        if (row < tile.end_row(params)) lse_of(row) = lse[slot];
      }
    }
  }

  // Where K and V of the tile's keys lie.
  __device__ __forceinline__ auto key_rows(const TileWork<Mask, Config>& tile) const {
    if constexpr (kPaged<Mask>) {
      return Mask::template key_rows<Element>(params.mask, tile.entry.block, tile.kv_head);
    } else {
      const attn::StridedRows<Element> rows = {attn::row_of<Element>(params.k_rows, tile.keys(), 0),
                                               attn::row_of<Element>(params.v_rows, tile.keys(), 0),
                                               params.k_rows.stride_seq, params.v_rows.stride_seq};
      if constexpr (kIndexed<Mask>) {
        return IndexedRows<Mask, Element>{params.mask, tile.entry.block, rows};
      } else {
        return rows;
      }
    }
  }

  // All keys that a row may see, run by run.
  template <class SlowRow>
  __device__ __forceinline__ void attend_slowly(SlowRow& slow, const TileWork<Mask, Config>& tile, int32_t row) {
    const typename Mask::Row keys = Mask::row(params.mask, tile.entry.block, row);
    const mask::Interval runs[2] = {mask::main_run(keys), mask::first_run(keys)};
    if constexpr (Mask::kListed) {
      const int32_t count = tile.entry.block.whole + tile.entry.block.mixed;
#pragma unroll 1
      for (int32_t e = tile.entry.block.entry; e < tile.entry.block.entry + count; ++e) {
        const int32_t first_key = params.mask.list.cells[e] * mask::kCell;
        const int32_t detail =
            e < tile.entry.block.entry + tile.entry.block.whole ? mask::kWholeCell : params.mask.list.detail[e];
        const mask::Interval half = Mask::half_keys(params.mask, detail, warpgroup);
        const int32_t* bits = Mask::row_bits(params.mask, detail, row % mask::kCell);
#pragma unroll
        for (int run = 0; run < 2; ++run) {
          slow.attend({max_of(runs[run].begin, first_key + half.begin), min_of(runs[run].end, first_key + half.end)},
                      bits, first_key);
        }
      }
    } else if constexpr (kScattered<Mask>) {
      Mask::visit_pages(params.mask, tile.entry.block, [&](mask::Interval page) {
#pragma unroll
        for (int run = 0; run < 2; ++run) {
          slow.attend({max_of(runs[run].begin, page.begin), min_of(runs[run].end, page.end)});
        }
      });
    } else {
#pragma unroll
      for (int run = 0; run < 2; ++run) slow.attend(runs[run]);
    }
  }

  __device__ __forceinline__ auto row_draws(const TileWork<Mask, Config>& tile, int32_t row) const {
    if constexpr (Score::kDropout) {
      return attn::RowDraws<Score::kGeneral>(draws(tile), row);
    } else {
      return attn::NoRowDraws{};
    }
  }

  // This warp's rows again, key by key; see attn/slow_rows.cuh.
  __device__ __forceinline__ void store_slowly() {
    const TileWork<Mask, Config>& tile = work();
    const int32_t first_row = this->first_row();
    const int32_t end_row = min_of(first_row + sm90::kWarpRows, tile.end_row(params));
#pragma unroll 1
    for (int32_t row = first_row; row < end_row; ++row) {
      const int32_t tensor_row = this->tensor_row(tile, row);
      attn::SlowRow<Element, Score, decltype(key_rows(tile))> slow = {
          attn::row_of<Element>(params.q_rows, tile.queries(), tensor_row),
          key_rows(tile),
          params.head_dim,
          params.head_dim_v,
          params.scale_log2,
          params.cap,
          0.0f,
          0,
          row_draws(tile, row)};
      if constexpr (Score::kAlibi) {
        if (!Score::kGeneral || params.alibi_slopes != nullptr) slow.alibi_slope = alibi_slope(tile);
        slow.position = Mask::position(params.mask, tile.entry.block, row);
      }
      attend_slowly(slow, tile, row);
      const float lse = slow.store(attn::row_of<Element>(params.out_rows, tile.queries(), tensor_row), sink());
      if (params.lse != nullptr && lane() == 0) lse_of(row) = lse;
    }
  }

  // Rows that see no key: zeros and -inf, or the sink.
  __device__ __forceinline__ void store_empty() {
    const TileWork<Mask, Config>& tile = work();
    const int32_t first_row = this->first_row();
    const int32_t end_row = min_of(first_row + sm90::kWarpRows, tile.end_row(params));
    bool has_sink = params.sinks != nullptr;
    if constexpr (kPaged<Mask>) has_sink = has_sink && tile.entry.block.owned;
#pragma unroll 1
    for (int32_t row = first_row; row < end_row; ++row) {
      Element* out_row = attn::row_of<Element>(params.out_rows, tile.queries(), tensor_row(tile, row));
      if (lane() * 8 < params.head_dim_v) *reinterpret_cast<uint4*>(out_row + lane() * 8) = uint4{0, 0, 0, 0};
      if (params.lse != nullptr && lane() == 0)
        lse_of(row) = has_sink ? params.sinks[tile.head] : attn::kNegativeInfinity;
    }
  }

  // One tile after another:
  //   1. S of the first key block, softmax, the other key blocks
  //   2. the last P V; in its shadow the next tile is opened
  //   3. O and lse to memory
  // PERF: storing a tile behind the next one's first S (its wgmma in flight across the epilogue) lost 2 … 15 %.
  __device__ __forceinline__ void run() {
    Scores x;
    Span mine;
    bool more = open_tile(x, 0, mine);
    while (uniform(more)) {
      Output y;
      Span next = {};
      int32_t own_place = 0;
      if constexpr (Config::kDealsParts) part = uniform(work().part_of(warpgroup));
      const int32_t planned_steps = uniform(mine.steps), planned_back = uniform(mine.back);
      if constexpr (Config::kQInRegisters) {
        finish_q(x);
      } else if (!Config::kDealsParts || planned_steps > 0) {
        wait_q(q_use());
      }
      // SYNC: before blocks are let pass, which takes both warpgroups where there are more of them than stages.
      if (planned_steps == 0) {
        begin_turn();
        end_turn();
      }
      skip_blocks(mine.front);
      if (planned_steps > 0) {
        attend(x, y, mine);  // 1
        if constexpr (!Config::kQInRegisters && !Config::kDealsParts) release_q();

        issue_output(y);  // 2
        more = open_tile(x, round + 1, next);
        own_place = this->own_place();
        sm90::wgmma_wait<0>();
        sm90::pin_registers(y.o);
        release_v();
      } else {
        if constexpr (Config::kDealsParts) {
          release_staging();
        } else if constexpr (!Config::kQInRegisters) {
          release_q();
        }
        more = open_tile(x, round + 1, next);
      }
      // NOTE: where the loop leaves no registers for them, they are read again.
      const int32_t steps = kPlaces ? uniform(work().span(warpgroup).steps) : planned_steps;
      skip_blocks(kPlaces ? uniform(work().span(warpgroup).back) : planned_back);

      // SYNC: O overwrites Q, which the last S of all four warps has read.
      if (Config::kDealsParts && steps > 0) sm90::bar_sync(1 + warpgroup, sm90::kWarpgroupThreads);
      if (steps == 0) {  // 3
        store_empty();
      } else if (work().entry.tiles.partial_count() > 0 && attn::any_nonfinite(y.o)) {
        // Only a partial block multiplies V of keys that a row may not see.
        store_slowly();
      } else {
        store(y, own_place);
      }
      finish_work();
      if constexpr (Config::kDealsParts) {
        staged = steps > 0;
        q_uses += staged;
      }
      mine = next;
      ++round;
    }
    if (stores()) sm90::wait_stores();
  }
};

}  // namespace flashmsa::fwd
