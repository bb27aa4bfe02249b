// The gradients that one block of query rows gives, on one thread. Over the key tiles of its plan, with logits s, their
// logarithmic sum lse and weights P = exp(s - lse) as the forward pass had them:
//
//   delta_i = sum_c dO_ic O_ic - dlse_i           dP = dO V^T           dS = P (dP - delta) s'
//   dQ = scale dS K           dK += scale dS^T Q           dV += P^T dO
//
// s' is the derivative of the soft cap. Dropout multiplies the P of dV, and dP, by 0 or by one over the rate of kept
// weights. dK and dV are sums over blocks: the caller scales and stores them.
//
// Compiled once per instruction set, like attend_block.h, whose parts it is made of. Here too a pair that is not visible
// adds nothing, whatever its query, key, value and gradient hold.

#include "cpu/attend_block.h"

namespace flashmsa::cpu::FLASHMSA_CPU_ISA {

// Whether a row had no key, or logits of -inf alone: then lse is the sink, or -inf, and the result 0. (Also said of a row
// whose weights the sink makes vanish in fp32 and whose result is 0.)
template <class T>
FLASHMSA_CPU_TARGET inline bool is_empty(const BlockTask<T>& task, int32_t row) {
  const float lse = task.lse.data[row * task.lse.stride];
  if (task.sink == nullptr || lse == kMinusInfinity<float>) return lse == kMinusInfinity<float>;
  if (lse != *task.sink) return false;
  const T* out = task.out.data + row * task.out.stride;
  for (int32_t c = 0; c < task.head_dim_v; ++c) {
    if (widen(out[c]) != 0) return false;
  }
  return true;
}

// lse of the block's rows; -inf, sink or not, where a row is empty or does not exist. What the forward pass kept in fp32
// is too coarse for fp64, whose sums are made again.
template <class T, class Acc>
FLASHMSA_CPU_TARGET inline void find_lse(const BlockTask<T>& task, BackwardScratch<Acc>& scratch) {
  Acc* lse = scratch.lse;
  std::fill_n(lse, kBlockQ, kMinusInfinity<Acc>);
  if constexpr (std::is_same_v<Acc, double>) {
    Scratch<Acc>& block = scratch.block;
    begin_rows(block);
    for (TileStep step : task.plan->steps) attend_tile(task, step, block);
    const Acc sink = task.sink == nullptr ? kMinusInfinity<Acc> : static_cast<Acc>(*task.sink);
    for (int32_t row = 0; row < task.rows; ++row) {
      const Acc top = block.top[row], sum = block.sum[row], highest = max_of(top, sink);
      if (sum == Acc(0)) continue;
      lse[row] = highest + std::log(sum * std::exp(top - highest) + std::exp(sink - highest));
    }
  } else {
    for (int32_t row = 0; row < task.rows; ++row) {
      if (!is_empty(task, row)) lse[row] = task.lse.data[row * task.lse.stride];
    }
  }
}

// rowsum(dO * O) of one row.
template <class T, class Acc>
FLASHMSA_CPU_TARGET inline Acc weigh_result(const T* out, const Acc* dout, int32_t columns) {
  Acc sum = 0;
  for (int32_t first = 0; first < columns; first += kTermsAtOnce) {
    Acc part = 0;
    for (int32_t c = first; c < min_of(first + kTermsAtOnce, columns); ++c) part += dout[c] * widen(out[c]);
    sum += part;
  }
  return sum;
}

// What the block's rows hold, their delta and lse, and which of them have gradients: empty ones have none.
template <class T, class Acc>
FLASHMSA_CPU_TARGET inline void begin_backward(const BackwardTask<T>& task, BackwardScratch<Acc>& scratch) {
  const BlockTask<T>& forward = task.forward;
  const int32_t padded_dim_v = scratch.block.padded_dim_v;
  load_columns(forward.q, forward.rows, forward.head_dim, static_cast<Acc*>(scratch.block.q));
  load_columns(task.dout, forward.rows, forward.head_dim_v, static_cast<Acc*>(scratch.dout_columns));
  find_lse(forward, scratch);
  load_rows(forward.q, 0, forward.rows, forward.head_dim, static_cast<Acc*>(scratch.q), scratch.padded_dim);
  load_rows(task.dout, 0, forward.rows, forward.head_dim_v, static_cast<Acc*>(scratch.dout), padded_dim_v);
  std::fill_n(static_cast<Acc*>(scratch.dq), kBlockQ * scratch.padded_dim, Acc(0));
  std::fill_n(static_cast<Acc*>(scratch.delta), kBlockQ, Acc(0));
  std::fill_n(scratch.live, kBlockQ, false);
  for (int32_t row = 0; row < forward.rows; ++row) {
    scratch.live[row] = scratch.lse[row] != kMinusInfinity<Acc>;
    Acc delta = 0;
    if (scratch.live[row]) {
      const T* out = forward.out.data + row * forward.out.stride;
      delta = weigh_result(out, static_cast<const Acc*>(scratch.dout + row * padded_dim_v), forward.head_dim_v);
    }
    if (task.dlse.data != nullptr) delta -= task.dlse.data[row * task.dlse.stride];
    scratch.delta[row] = delta;
    task.delta[row] = static_cast<float>(delta);
    if (task.sink_terms == nullptr) continue;
    // An empty row's lse is the sink.
    const double sink = *forward.sink;
    const double share = scratch.live[row] ? std::exp(sink - scratch.lse[row]) : 1.0;
    task.sink_terms[row] = sink == kMinusInfinity<double> ? 0.0 : share * delta;
  }
}

// The logits of a vector of rows become their weights P, and dP becomes dS. `kept` holds what dropout multiplies by, or is
// null; `place` as for modify().
template <class T, class Acc>
FLASHMSA_CPU_TARGET inline void differentiate(const BlockTask<T>& task, Acc* s, Acc* dp, const Acc* kept,
                                              mask::Interval keys, const Acc* lse, const Acc* delta, const Acc* place) {
  for (int32_t key = keys.begin; key < keys.end; ++key) {
    Vector<Acc> logit = at(s + key * kBlockQ);
    Vector<Acc> slope = Vector<Acc>{} + Acc(1);
    if (task.softcap > 0) {
      logit /= task.softcap;
      hyperbolic_tangent(logit);
      slope -= logit * logit;
      logit *= task.softcap;
    }
    if (task.has_alibi) {
      const Vector<Acc> ahead = at(place) - static_cast<Acc>(key);
      logit -= task.slope * (ahead < Acc(0) ? -ahead : ahead);
    }
    Vector<Acc> weight = logit - at(lse);
    exp_nonpositive(weight);
    Vector<Acc> gradient = at(dp + key * kBlockQ);
    if (kept != nullptr) {
      // NOTE: chosen, not multiplied: what else is NaN says so by itself, through delta.
      const Vector<Acc> factor = at(kept + key * kBlockQ);
      gradient = factor == Acc(0) ? Vector<Acc>{} : gradient * factor;
    }
    at(s + key * kBlockQ) = weight;
    at(dp + key * kBlockQ) = weight * (gradient - at(delta)) * slope;
  }
}

// to[row][key] = from[key][row], times kept[key][row] where that is given. kBlockQ is kBlockKv.
template <class Acc>
FLASHMSA_CPU_TARGET inline void transpose(const Acc* __restrict from, const Acc* __restrict kept, int32_t rows,
                                          int32_t keys, Acc* __restrict to) {
  for (int32_t row = 0; row < rows; ++row) {
    for (int32_t key = 0; key < keys; ++key) {
      const Acc weight = from[key * kBlockQ + row];
      const Acc factor = kept == nullptr ? Acc(1) : kept[key * kBlockQ + row];
      to[row * kBlockKv + key] = factor == Acc(0) ? Acc(0) : weight * factor;
    }
  }
}

// by_key[k] = the rows whose bit k is set.
inline void transpose_bits(const uint64_t* by_row, int32_t rows, uint64_t* by_key) {
  static_assert(kBlockQ == 64 && kBlockKv == 64);
  std::fill_n(by_key, kBlockKv, uint64_t{0});
  for (int32_t row = 0; row < rows; ++row) {
    for (uint64_t keys = by_row[row]; keys != 0; keys &= keys - 1) {
      by_key[std::countr_zero(keys)] |= uint64_t{1} << row;
    }
  }
}

// Adds to the `count` keys' rows of dk and dv what the block's rows give them.
template <class Acc>
FLASHMSA_CPU_TARGET inline void add_to_keys(BackwardScratch<Acc>& scratch, const Acc* kept, int32_t rows, int32_t count,
                                            Acc* dk, Acc* dv) {
  Acc* transposed = scratch.transposed;
  const int32_t padded_dim = scratch.padded_dim, padded_dim_v = scratch.block.padded_dim_v;
  uint64_t by_key[kBlockKv];
  transpose_bits(scratch.block.visible, rows, by_key);
  transpose(static_cast<const Acc*>(scratch.dp), static_cast<const Acc*>(nullptr), rows, count, transposed);
  for (int32_t key = 0; key < count; key += kRowsAtOnce) {
    accumulate(dk + key * padded_dim, static_cast<const Acc*>(transposed + key), static_cast<Acc*>(scratch.q),
               padded_dim, by_key + key);
  }
  transpose(static_cast<const Acc*>(scratch.block.p), kept, rows, count, transposed);
  for (int32_t key = 0; key < count; key += kRowsAtOnce) {
    accumulate(dv + key * padded_dim_v, static_cast<const Acc*>(transposed + key), static_cast<Acc*>(scratch.dout),
               padded_dim_v, by_key + key);
  }
}

// What dropout multiplies the weights of a tile by, as kept[key][row]; null without dropout.
template <class T, class Acc>
FLASHMSA_CPU_TARGET inline const Acc* find_kept_factors(const BlockTask<T>& task, int64_t first, int32_t count,
                                                        BackwardScratch<Acc>& scratch) {
  if (!task.dropout.used()) return nullptr;
  uint64_t* kept = scratch.block.kept;
  find_kept(task.dropout, task.rows, first, count, kept);
  Acc* factors = scratch.kept;
  const Acc factor = task.dropout.head.template keep_scale<Acc>();
  for (int32_t key = 0; key < count; ++key) {
    for (int32_t row = 0; row < kBlockQ; ++row) factors[key * kBlockQ + row] = kept[row] >> key & 1 ? factor : Acc(0);
  }
  return factors;
}

// P and dS of the visible keys of a group of rows that begins at `row`.
template <int32_t kVectors, class T, class Acc>
FLASHMSA_CPU_TARGET inline void group_gradients(const BlockTask<T>& task, int32_t row, mask::Interval keys,
                                                const Acc* kept, BackwardScratch<Acc>& scratch) {
  Acc* s = scratch.block.p + row;
  Acc* dp = scratch.dp + row;
  logits<kVectors>(static_cast<const Acc*>(scratch.block.q + row), static_cast<const Acc*>(scratch.k), s, task.head_dim,
                   scratch.padded_dim, task.scale, keys.begin, keys.end);
  logits<kVectors>(static_cast<const Acc*>(scratch.dout_columns + row), static_cast<const Acc*>(scratch.v), dp,
                   task.head_dim_v, task.head_dim_v, Acc(1), keys.begin, keys.end);
  for (int32_t r = 0; r < kVectors * kLanes<Acc>; r += kLanes<Acc>) {
    differentiate(task, s + r, dp + r, kept == nullptr ? kept : kept + row + r, keys,
                  static_cast<const Acc*>(scratch.lse + row + r), static_cast<const Acc*>(scratch.delta + row + r),
                  static_cast<const Acc*>(scratch.block.place + row + r));
  }
}

// One key tile for all rows of the block.
template <class T, class Acc>
FLASHMSA_CPU_TARGET void backward_tile(const BackwardTask<T>& backward, TileStep step, BackwardScratch<Acc>& scratch) {
  const BlockTask<T>& task = backward.forward;
  Scratch<Acc>& block = scratch.block;
  find_visible(*task.plan, step, step.first_key, block);
  uint64_t any = 0;
  for (int32_t row = 0; row < kBlockQ; ++row) {
    if (!scratch.live[row]) block.visible[row] = 0;
    any |= block.visible[row];
  }
  if (any == 0) return;
  const int32_t skipped = std::countr_zero(any);
  const int32_t count = kBlockKv - std::countl_zero(any) - skipped;
  const int64_t first = step.first_key + skipped;
  for (int32_t row = 0; row < kBlockQ; ++row) block.visible[row] >>= skipped;
  load_rows(task.k, first, count, task.head_dim, static_cast<Acc*>(scratch.k), scratch.padded_dim);
  load_rows(task.v, first, count, task.head_dim_v, static_cast<Acc*>(scratch.v), task.head_dim_v);
  const Acc* kept = find_kept_factors(task, first, count, scratch);
  if (task.has_alibi) {
    for (int32_t row = 0; row < kBlockQ; ++row) block.place[row] = static_cast<Acc>(task.plan->position[row] - first);
  }

  constexpr int32_t kRowGroup = 2 * kLanes<Acc>;
  for (int32_t row = 0; row < task.rows; row += kRowGroup) {
    uint64_t some = 0;
    for (int32_t r = row; r < row + kRowGroup; ++r) some |= block.visible[r];
    if (some == 0) continue;
    const mask::Interval keys = {std::countr_zero(some), kBlockKv - std::countl_zero(some)};
    if (task.rows - row > kLanes<Acc>) {
      group_gradients<2>(task, row, keys, kept, scratch);
    } else {
      group_gradients<1>(task, row, keys, kept, scratch);
    }
  }
  for (int32_t row = 0; row < task.rows; row += kRowsAtOnce) {
    accumulate(scratch.dq + row * scratch.padded_dim, static_cast<const Acc*>(scratch.dp + row),
               static_cast<const Acc*>(scratch.k), scratch.padded_dim, block.visible + row);
  }
  add_to_keys(scratch, kept, task.rows, count, backward.dk + first * scratch.padded_dim,
              backward.dv + first * block.padded_dim_v);
}

// dst[row][c] = factor * source[row][c].
template <class T, class Acc>
FLASHMSA_CPU_TARGET void store_scaled(const Acc* source, int64_t stride, Acc factor, int32_t rows, int32_t columns,
                                      Rows<T> to) {
  for (int32_t row = 0; row < rows; ++row) {
    for (int32_t c = 0; c < columns; ++c) narrow(source[row * stride + c] * factor, to.data[row * to.stride + c]);
  }
}

template <class T, class Acc>
FLASHMSA_CPU_TARGET void backward_block(const BackwardTask<T>& task, BackwardScratch<Acc>& scratch) {
  begin_backward(task, scratch);
  for (TileStep step : task.forward.plan->steps) backward_tile(task, step, scratch);
  store_scaled(static_cast<const Acc*>(scratch.dq), scratch.padded_dim, task.forward.scale, task.forward.rows,
               task.forward.head_dim, task.dq);
}

}  // namespace flashmsa::cpu::FLASHMSA_CPU_ISA
