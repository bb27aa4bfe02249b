// Attention of one block of query rows on one thread, by online softmax over the key tiles of its plan:
//
//   O = sum_j exp(s_ij - top_i) v_j / sum_j exp(s_ij - top_i),   s_ij = scale * q_i.k_j,   lse_i = top_i + log sum
//
// With a soft cap s becomes softcap * tanh(s / softcap), with ALiBi then s - slope * |p_i - j|; a sink adds one term to the
// sum. What each row may see of a tile is a word of 64 bits, whatever the mask. Dropout takes weights out of O, not out of the
// sum.
//
// Compiled once per instruction set, so it has no include guard: each_isa.h defines the three macros below before each
// inclusion. Vector types and not plain loops, because the sums must stay in registers and compilers disagree on that.
//   FLASHMSA_CPU_ISA      namespace of this copy
//   FLASHMSA_CPU_TARGET   attribute that selects the instruction set. NOTE: on every function, since a vector operation
//                         is lowered by the function it is written in, before inlining.
//   FLASHMSA_CPU_VECTOR   bytes of a vector register
//
// What a row may not see it never reads: logits of other keys are replaced, and their values are not
// multiplied by a zero weight (0 * NaN is NaN) but left out. So no NaN or infinity crosses from key to row.

namespace flashmsa::cpu::FLASHMSA_CPU_ISA {

typedef float VectorF32 __attribute__((vector_size(FLASHMSA_CPU_VECTOR), may_alias));
typedef double VectorF64 __attribute__((vector_size(FLASHMSA_CPU_VECTOR), may_alias));
typedef uint32_t VectorU32 __attribute__((vector_size(FLASHMSA_CPU_VECTOR), may_alias));

template <class Acc>
struct VectorOf;
template <>
struct VectorOf<float> {
  using Type = VectorF32;
};
template <>
struct VectorOf<double> {
  using Type = VectorF64;
};
template <class Acc>
using Vector = typename VectorOf<Acc>::Type;

template <class Acc>
inline constexpr int32_t kLanes = FLASHMSA_CPU_VECTOR / static_cast<int32_t>(sizeof(Acc));

// Register blocks. Logits: 2 vectors of rows x kKeysAtOnce keys; values: kRowsAtOnce rows x kColumnVectors vectors.
// Either way at least 8 sums, to cover the latency of two fused multiply-adds per cycle, in 16 or 32 registers.
inline constexpr int32_t kKeysAtOnce = FLASHMSA_CPU_VECTOR == 64 ? 8 : 4;
inline constexpr int32_t kRowsAtOnce = 4;
inline constexpr int32_t kColumnVectors = FLASHMSA_CPU_VECTOR == 64 ? 4 : 2;
static_assert(kKeysAtOnce <= kSlack && FLASHMSA_CPU_VECTOR <= kLine);

// Every sum (over columns for a logit, over keys for the weights and the values) is made of short sums of this many
// terms. One long chain rounds more than the blocked sums of matrix libraries do, more than twice on short rows.
inline constexpr int32_t kTermsAtOnce = 16;

template <class Acc>
inline constexpr Acc kMinusInfinity = -std::numeric_limits<Acc>::infinity();

// The vector at an aligned address.
template <class Acc>
FLASHMSA_CPU_TARGET inline Vector<Acc>& at(Acc* p) {
  return *reinterpret_cast<Vector<Acc>*>(p);
}
template <class Acc>
FLASHMSA_CPU_TARGET inline const Vector<Acc>& at(const Acc* p) {
  return *reinterpret_cast<const Vector<Acc>*>(p);
}

// x = e^x for x <= 0, to 1e-7 relative. -inf and whatever ends below the smallest normal number give 0, NaN gives NaN.
FLASHMSA_CPU_TARGET inline void exp_nonpositive(VectorF32& x) {
  constexpr float kLowest = -87.3365f;  // ln 2^-126
  constexpr float kRound = 0x1.8p23f;  // adding it leaves an integer in the low bits of the sum
  const VectorF32 y = x < kLowest ? VectorF32{} + kLowest : x;
  // e^y = 2^n e^r with n whole and |r| <= ln(2) / 2; ln 2 in two parts, the first exact in a product with n.
  const VectorF32 rounded = y * 1.44269504f + kRound;
  const VectorF32 n = rounded - kRound;
  const VectorF32 r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
  VectorF32 series = r * (1.f / 5040) + 1.f / 720;  // (e^r - 1 - r) / r^2, its next term is below 2^-27
  series = series * r + 1.f / 120;
  series = series * r + 1.f / 24;
  series = series * r + 1.f / 6;
  series = series * r + 1.f / 2;
  const VectorF32 power = (VectorF32)(((VectorU32)rounded + 127u) << 23);
  const VectorF32 result = (series * r * r + r + 1.f) * power;
  x = x < kLowest ? VectorF32{} : result;
}

FLASHMSA_CPU_TARGET inline void exp_nonpositive(VectorF64& x) {
  for (int32_t lane = 0; lane < kLanes<double>; ++lane) x[lane] = std::exp(x[lane]);
}

// tanh(x) to 1e-7 relative: below 1/2 a series, beyond (1 - e) / (1 + e) with e = e^(-2|x|), where no digit is lost.
FLASHMSA_CPU_TARGET inline void hyperbolic_tangent(VectorF32& x) {
  const VectorF32 magnitude = x < 0.f ? -x : x;
  VectorF32 e = magnitude * -2.f;
  exp_nonpositive(e);
  const VectorF32 large = (1.f - e) / (1.f + e);
  // tanh(x) / x as a polynomial in x^2, fitted for the least largest relative error, 1.5e-8.
  const VectorF32 t = x * x;
  VectorF32 series = t * 0.01724149f - 0.05304549f;
  series = series * t + 0.13325879f;
  series = series * t - 0.33333144f;
  const VectorF32 small = series * t * x + x;
  x = magnitude < 0.5f ? small : x < 0.f ? -large : large;
}

FLASHMSA_CPU_TARGET inline void hyperbolic_tangent(VectorF64& x) {
  for (int32_t lane = 0; lane < kLanes<double>; ++lane) x[lane] = std::tanh(x[lane]);
}

// to[c][row] = the columns of the block's rows; rows that do not exist are 0.
template <class T, class Acc>
FLASHMSA_CPU_TARGET inline void load_columns(Rows<const T> source, int32_t rows, int32_t columns, Acc* to) {
  std::fill_n(to, columns * kBlockQ, Acc(0));
  for (int32_t row = 0; row < rows; ++row) {
    const T* from = source.data + row * source.stride;
    for (int32_t c = 0; c < columns; ++c) to[c * kBlockQ + row] = widen(from[c]);
  }
}

template <class T, class Acc>
FLASHMSA_CPU_TARGET inline void load_rows(Rows<const T> from, int64_t first, int32_t count, int32_t columns, Acc* to,
                                          int32_t to_stride) {
  for (int32_t row = 0; row < count; ++row) {
    const T* __restrict source = from.data + (first + row) * from.stride;
    Acc* __restrict target = to + row * to_stride;
    for (int32_t c = 0; c < columns; ++c) target[c] = widen(source[c]);
  }
}

// s[key][row] = scale * k.q for kVectors vectors of rows and the keys [begin, end), rounded up to kKeysAtOnce; `stride`
// lies between two keys.
template <int32_t kVectors, class Acc>
FLASHMSA_CPU_TARGET inline void logits(const Acc* q, const Acc* k, Acc* s, int32_t head_dim, int32_t stride, Acc scale,
                                       int32_t begin, int32_t end) {
  for (int32_t key = begin; key < end; key += kKeysAtOnce) {
    const Acc* keys = k + key * stride;
    for (int32_t first = 0; first < head_dim; first += kTermsAtOnce) {
      Vector<Acc> sum[kKeysAtOnce][kVectors] = {};
      for (int32_t c = first; c < min_of(first + kTermsAtOnce, head_dim); ++c) {
        Vector<Acc> column[kVectors];
#pragma GCC unroll 8
        for (int32_t x = 0; x < kVectors; ++x) column[x] = at(q + c * kBlockQ + x * kLanes<Acc>);
#pragma GCC unroll 8
        for (int32_t j = 0; j < kKeysAtOnce; ++j) {
#pragma GCC unroll 8
          for (int32_t x = 0; x < kVectors; ++x) sum[j][x] += column[x] * keys[j * stride + c];
        }
      }
#pragma GCC unroll 8
      for (int32_t j = 0; j < kKeysAtOnce; ++j) {
#pragma GCC unroll 8
        for (int32_t x = 0; x < kVectors; ++x) {
          Vector<Acc>& logit = at(s + (key + j) * kBlockQ + x * kLanes<Acc>);
          logit = first == 0 ? sum[j][x] * scale : logit + sum[j][x] * scale;
        }
      }
    }
  }
}

// Soft cap, then ALiBi, on the logits of a vector of rows. `place` is the rows' positions, keys and rows counted alike.
template <class T, class Acc>
FLASHMSA_CPU_TARGET inline void modify(const BlockTask<T>& task, Acc* s, mask::Interval keys, const Acc* place) {
  for (int32_t key = keys.begin; key < keys.end; ++key) {
    Vector<Acc> logit = at(s + key * kBlockQ);
    if (task.softcap > 0) {
      logit /= task.softcap;
      hyperbolic_tangent(logit);
      logit *= task.softcap;
    }
    if (task.has_alibi) {
      const Vector<Acc> ahead = at(place) - static_cast<Acc>(key);
      logit -= task.slope * (ahead < Acc(0) ? -ahead : ahead);
    }
    at(s + key * kBlockQ) = logit;
  }
}

// Replaces the logits of `keys` that a row may not see by -inf, whatever they came to.
template <class Acc>
FLASHMSA_CPU_TARGET inline void hide(Acc* s, const uint64_t* visible, int32_t rows, mask::Interval keys) {
  for (int32_t row = 0; row < rows; ++row) {
    for (uint64_t hidden = key_bits(keys, 0) & ~visible[row]; hidden != 0; hidden &= hidden - 1) {
      s[std::countr_zero(hidden) * kBlockQ + row] = kMinusInfinity<Acc>;
    }
  }
}

// Turns a vector of rows' logits into weights exp(s - top), raises top, adds to sum, and sets decay to what older
// weights must be multiplied by.
template <class Acc>
FLASHMSA_CPU_TARGET inline void softmax(Acc* s, mask::Interval keys, Acc* top, Acc* sum, Acc* decay) {
  Vector<Acc> highest = at(top);
  for (int32_t key = keys.begin; key < keys.end; ++key) {
    const Vector<Acc> logit = at(s + key * kBlockQ);
    highest = logit > highest ? logit : highest;  // skips NaN; the weights below do not
  }
  // NOTE: a row that has met only -inf subtracts 0, so that its weights are e^-inf = 0 and not e^NaN.
  const Vector<Acc> shift = highest == kMinusInfinity<Acc> ? Vector<Acc>{} : highest;
  Vector<Acc> factor = at(top) - shift;
  exp_nonpositive(factor);
  Vector<Acc> total = {};
  for (int32_t first = keys.begin; first < keys.end; first += kTermsAtOnce) {
    Vector<Acc> part = {};
    for (int32_t key = first; key < min_of(first + kTermsAtOnce, keys.end); ++key) {
      Vector<Acc> weight = at(s + key * kBlockQ) - shift;
      exp_nonpositive(weight);
      at(s + key * kBlockQ) = weight;
      part += weight;
    }
    total += part;
  }
  at(top) = highest;
  at(sum) = at(sum) * factor + total;
  at(decay) = factor;
}

// The weights that dropout does not keep become 0. NOTE: and still count as visible: a NaN among values is not dropped.
template <class Acc>
FLASHMSA_CPU_TARGET inline void drop(Acc* p, const uint64_t* kept, const uint64_t* visible, int32_t rows) {
  for (int32_t row = 0; row < rows; ++row) {
    for (uint64_t dropped = visible[row] & ~kept[row]; dropped != 0; dropped &= dropped - 1) {
      p[std::countr_zero(dropped) * kBlockQ + row] = 0;
    }
  }
}

template <class Acc>
FLASHMSA_CPU_TARGET inline void rescale(Acc* o, const Acc* decay, int32_t rows, int32_t columns) {
  for (int32_t row = 0; row < rows; ++row) {
    if (decay[row] == Acc(1)) continue;
    for (int32_t c = 0; c < columns; c += kLanes<Acc>) at(o + row * columns + c) *= decay[row];
  }
}

// sum[row][c] += p[row] * v[c] of one key.
template <int32_t kRows, int32_t kVectors, class Acc>
FLASHMSA_CPU_TARGET inline void add_key(Vector<Acc> (&sum)[kRows][kVectors], const Acc* p, const Acc* v) {
  Vector<Acc> value[kVectors];
#pragma GCC unroll 8
  for (int32_t x = 0; x < kVectors; ++x) value[x] = at(v + x * kLanes<Acc>);
#pragma GCC unroll 8
  for (int32_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int32_t x = 0; x < kVectors; ++x) sum[r][x] += value[x] * p[r];
  }
}

// o[row][c] += sum over the set bits of p[key][row] * v[key][c], for kRows rows and kVectors vectors of columns.
template <int32_t kRows, int32_t kVectors, class Acc>
FLASHMSA_CPU_TARGET inline void add_values(Acc* o, const Acc* p, const Acc* v, int32_t stride, uint64_t keys) {
  for (; keys != 0; keys = keys >> (kTermsAtOnce - 1) >> 1, p += kTermsAtOnce * kBlockQ, v += kTermsAtOnce * stride) {
    constexpr uint32_t kAll = (1u << kTermsAtOnce) - 1;
    uint32_t group = static_cast<uint32_t>(keys) & kAll;
    if (group == 0) continue;
    Vector<Acc> sum[kRows][kVectors] = {};
    if (group == kAll) {
      for (int32_t key = 0; key < kTermsAtOnce; ++key) add_key(sum, p + key * kBlockQ, v + key * stride);
    } else {
      for (; group != 0; group &= group - 1) {
        const int32_t key = std::countr_zero(group);
        add_key(sum, p + key * kBlockQ, v + key * stride);
      }
    }
#pragma GCC unroll 8
    for (int32_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int32_t x = 0; x < kVectors; ++x) at(o + r * stride + x * kLanes<Acc>) += sum[r][x];
    }
  }
}

template <int32_t kRows, class Acc>
FLASHMSA_CPU_TARGET inline void add_columns(Acc* o, const Acc* p, const Acc* v, int32_t stride, uint64_t keys) {
  if (keys == 0) return;
  constexpr int32_t kStep = kColumnVectors * kLanes<Acc>;
  int32_t c = 0;
  for (; c + kStep <= stride; c += kStep) add_values<kRows, kColumnVectors>(o + c, p, v + c, stride, keys);
  for (; c < stride; c += kLanes<Acc>) add_values<kRows, 1>(o + c, p, v + c, stride, keys);
}

// O += P V for kRowsAtOnce rows: the keys that all of them see together, the others row by row.
template <class Acc>
FLASHMSA_CPU_TARGET inline void accumulate(Acc* o, const Acc* p, const Acc* v, int32_t stride,
                                           const uint64_t* visible) {
  uint64_t common = visible[0];
  for (int32_t r = 1; r < kRowsAtOnce; ++r) common &= visible[r];
  add_columns<kRowsAtOnce>(o, p, v, stride, common);
  for (int32_t r = 0; r < kRowsAtOnce; ++r) add_columns<1>(o + r * stride, p + r, v, stride, visible[r] & ~common);
}

// The keys of a tile that each row may see, as bits; returns those that any row may.
template <class Acc>
FLASHMSA_CPU_TARGET inline uint64_t find_visible(const BlockPlan& plan, TileStep step, int64_t first_key,
                                                 Scratch<Acc>& scratch) {
  uint64_t any = 0;
  for (int32_t row = 0; row < kBlockQ; ++row) {
    uint64_t keys = key_bits(plan.main[row], first_key);
    if (plan.two_runs) keys |= key_bits(plan.first[row], first_key);
    if (step.bits != nullptr) {
      const int32_t* words = step.bits + row * kWordStep;
      keys &= uint64_t{static_cast<uint32_t>(words[0])} | uint64_t{static_cast<uint32_t>(words[1])} << 32;
    }
    scratch.visible[row] = keys;
    any |= keys;
  }
  return any;
}

// One key tile for all rows of the block.
template <class T, class Acc>
FLASHMSA_CPU_TARGET void attend_tile(const BlockTask<T>& task, TileStep step, Scratch<Acc>& scratch) {
  const BlockPlan& plan = *task.plan;
  const int64_t tile_key = step.first_key;
  const uint64_t any = find_visible(plan, step, tile_key, scratch);
  if (any == 0) return;
  // Of the tile, from the first key that the block may see to the last.
  const int32_t skipped = std::countr_zero(any);
  const int32_t count = kBlockKv - std::countl_zero(any) - skipped;
  const int64_t first = tile_key + skipped;
  for (int32_t row = 0; row < kBlockQ; ++row) scratch.visible[row] >>= skipped;
  load_rows(task.k, first, count, task.head_dim, static_cast<Acc*>(scratch.k), task.head_dim);
  load_rows(task.v, first, count, task.head_dim_v, static_cast<Acc*>(scratch.v), scratch.padded_dim_v);
  if (task.dropout.used()) find_kept(task.dropout, task.rows, first, count, scratch.kept);
  if (task.has_alibi) {
    for (int32_t row = 0; row < kBlockQ; ++row) scratch.place[row] = static_cast<Acc>(plan.position[row] - first);
  }

  constexpr int32_t kRowGroup = 2 * kLanes<Acc>;
  static_assert(kBlockQ % kRowGroup == 0 && kRowGroup % kRowsAtOnce == 0);
  for (int32_t row = 0; row < task.rows; row += kRowGroup) {
    const int32_t vectors = task.rows - row > kLanes<Acc> ? 2 : 1;
    const int32_t rows = vectors * kLanes<Acc>;
    const uint64_t* visible = scratch.visible + row;
    uint64_t some = 0, all = ~uint64_t{0};
    for (int32_t r = 0; r < rows; ++r) {
      some |= visible[r];
      all &= visible[r];
    }
    if (some == 0) continue;
    const mask::Interval keys = {std::countr_zero(some), kBlockKv - std::countl_zero(some)};

    // S = scale Q K^T
    const Acc* q = scratch.q + row;
    Acc* s = scratch.p + row;
    if (vectors == 2) {
      logits<2>(q, static_cast<Acc*>(scratch.k), s, task.head_dim, task.head_dim, task.scale, keys.begin, keys.end);
    } else {
      logits<1>(q, static_cast<Acc*>(scratch.k), s, task.head_dim, task.head_dim, task.scale, keys.begin, keys.end);
    }
    if (task.softcap > 0 || task.has_alibi) {
      for (int32_t r = 0; r < rows; r += kLanes<Acc>) {
        modify(task, s + r, keys, static_cast<const Acc*>(scratch.place + row + r));
      }
    }
    if (all != key_bits(keys, 0)) hide(s, visible, rows, keys);

    // P = exp(S - top)
    for (int32_t r = 0; r < rows; r += kLanes<Acc>) {
      softmax(s + r, keys, scratch.top + row + r, scratch.sum + row + r, scratch.decay + row + r);
    }

    if (task.dropout.used()) drop(s, scratch.kept + row, visible, rows);

    // O = O exp(old top - top) + P V
    Acc* o = scratch.o + row * scratch.padded_dim_v;
    rescale(o, static_cast<Acc*>(scratch.decay + row), rows, scratch.padded_dim_v);
    for (int32_t r = 0; r < min_of(rows, task.rows - row); r += kRowsAtOnce) {
      accumulate(o + r * scratch.padded_dim_v, static_cast<const Acc*>(s + r), static_cast<Acc*>(scratch.v),
                 scratch.padded_dim_v, visible + r);
    }
  }
}

// O = O / sum and lse = top + log(sum), a sink counted; a row that has seen no key, or only logits of -inf, gives 0 and
// -inf, or the sink.
template <class T, class Acc>
FLASHMSA_CPU_TARGET inline void store_rows(const BlockTask<T>& task, Scratch<Acc>& scratch) {
  for (int32_t row = 0; row < task.rows; ++row) {
    Acc top = scratch.top[row], sum = scratch.sum[row], factor = task.dropout.head.template keep_scale<Acc>();
    // NOTE: before the sink, which makes the sum of a row without keys 1, or NaN where it is infinite or NaN itself.
    const bool empty = sum == Acc(0);
    const Acc sink = task.sink == nullptr ? kMinusInfinity<Acc> : static_cast<Acc>(*task.sink);
    if (sink != kMinusInfinity<Acc>) {
      const Acc highest = max_of(top, sink);
      const Acc decay = std::exp(top - highest);
      factor *= decay;
      sum = sum * decay + std::exp(sink - highest);
      top = highest;
    }
    const Acc* from = scratch.o + row * scratch.padded_dim_v;
    T* to = task.out.data + row * task.out.stride;
    for (int32_t c = 0; c < task.head_dim_v; ++c) narrow(empty ? Acc(0) : from[c] * factor / sum, to[c]);
    if (task.lse.data != nullptr) {
      task.lse.data[row * task.lse.stride] = static_cast<float>(empty ? sink : top + std::log(sum));
    }
  }
}

template <class Acc>
FLASHMSA_CPU_TARGET inline void begin_rows(Scratch<Acc>& scratch) {
  std::fill_n(static_cast<Acc*>(scratch.top), kBlockQ, kMinusInfinity<Acc>);
  std::fill_n(static_cast<Acc*>(scratch.sum), kBlockQ, Acc(0));
  std::fill_n(static_cast<Acc*>(scratch.o), kBlockQ * scratch.padded_dim_v, Acc(0));
}

template <class T, class Acc>
FLASHMSA_CPU_TARGET void attend_block(const BlockTask<T>& task, Scratch<Acc>& scratch) {
  load_columns(task.q, task.rows, task.head_dim, static_cast<Acc*>(scratch.q));
  begin_rows(scratch);
  for (TileStep step : task.plan->steps) attend_tile(task, step, scratch);
  store_rows(task, scratch);
}

}  // namespace flashmsa::cpu::FLASHMSA_CPU_ISA
