// One attention call for the CPU backend with its answer from the definition: tensors of any layout, soft cap, sinks, ALiBi,
// a float64 oracle, and the composed operators whose error sets the tolerance.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "check.h"
#include "core/params.h"
#include "cpu/convert.h"
#include "cpu/isa.h"
#include "mask_cases.h"

namespace flashmsa::test {

using cpu::BFloat16;
using cpu::Float16;

template <class T>
struct TypeInfo;
template <>
struct TypeInfo<Float16> {
  static constexpr const char* kName = "fp16";
  static constexpr DType kDType = DType::kF16;
  static constexpr int kMantissaBits = 10;
};
template <>
struct TypeInfo<BFloat16> {
  static constexpr const char* kName = "bf16";
  static constexpr DType kDType = DType::kBF16;
  static constexpr int kMantissaBits = 7;
};
template <>
struct TypeInfo<float> {
  static constexpr const char* kName = "fp32";
  static constexpr DType kDType = DType::kF32;
  static constexpr int kMantissaBits = 23;
};
template <>
struct TypeInfo<double> {
  static constexpr const char* kName = "fp64";
  static constexpr DType kDType = DType::kF64;
  static constexpr int kMantissaBits = 52;
};

// The oracle is wider than what it judges.
template <class T>
using Exact = std::conditional_t<std::is_same_v<T, double>, long double, double>;

template <class T>
T round_to(cpu::AccumulateType<T> x) {
  T out;
  cpu::narrow(x, out);
  return out;
}

enum class Layout {
  kHeadsFirst,  // (B, H, S, D) contiguous
  kSequenceFirst,  // (B, S, H, D) viewed as (B, H, S, D)
  kSlice,  // rows of a wider tensor, starting off alignment
  kExpandedHeads,  // stride 0 over heads
  kExpanded,  // stride 0 over heads and batches
};

template <class T>
struct Tensor {
  int32_t batch, heads, len, dim;
  int64_t stride_batch = 0, stride_head = 0, stride_seq = 0, first = 0;
  std::vector<T> storage;

  Tensor(int32_t batch_, int32_t heads_, int32_t len_, int32_t dim_, Layout layout = Layout::kHeadsFirst)
      : batch(batch_), heads(heads_), len(len_), dim(dim_) {
    int64_t row = dim;
    if (layout == Layout::kSlice) {
      row = 3 * dim + 5;
      first = 7;
    }
    stride_seq = layout == Layout::kSequenceFirst ? row * heads : row;
    stride_head = layout == Layout::kSequenceFirst ? row : row * len;
    stride_batch = row * heads * len;
    if (layout == Layout::kExpandedHeads || layout == Layout::kExpanded) {
      stride_head = 0;
      stride_batch = layout == Layout::kExpanded ? 0 : row * len;
    }
    storage.resize(first + row * heads * len * batch);
  }

  T& at(int32_t b, int32_t h, int32_t s, int32_t d) {
    return storage[first + b * stride_batch + h * stride_head + s * stride_seq + d];
  }
  const T& at_const(int32_t b, int32_t h, int32_t s, int32_t d) const {
    return storage[first + b * stride_batch + h * stride_head + s * stride_seq + d];
  }
  // Its value as the oracle reads it.
  double value(int32_t b, int32_t h, int32_t s, int32_t d) const { return cpu::widen(at_const(b, h, s, d)); }
  TensorRef ref() { return {storage.data() + first, stride_batch, stride_head, stride_seq, 0}; }

  void set_row(int32_t b, int32_t h, int32_t s, double x) {
    for (int32_t d = 0; d < dim; ++d) at(b, h, s, d) = round_to<T>(static_cast<cpu::AccumulateType<T>>(x));
  }
  void randomize(Random& random, double deviation = 1) {
    for (T& x : storage) x = round_to<T>(static_cast<cpu::AccumulateType<T>>(deviation * random.normal()));
  }
};

// What every element was before the call; no result looks like it.
template <class T>
T poison() {
  return round_to<T>(static_cast<cpu::AccumulateType<T>>(-12345.0));
}

template <class T>
struct Answer {
  std::vector<Exact<T>> out;  // (B, H, Sq, Dv)
  std::vector<Exact<T>> lse;  // (B, H, Sq)
};

template <class T>
struct AttentionCase {
  MaskCase mask;
  double scale;
  Tensor<T> q, k, v, out;
  std::vector<float> lse;
  double softcap = 0;
  std::vector<float> sinks;  // (heads) or none
  std::vector<float> alibi_slopes;  // (heads) or (batch, heads) or none

  AttentionCase(const MaskCase& mask_, int32_t heads_q, int32_t heads_kv, int32_t dim, int32_t dim_v,
                Layout layout_q = Layout::kHeadsFirst, Layout layout_kv = Layout::kHeadsFirst,
                Layout layout_out = Layout::kHeadsFirst)
      : mask(mask_),
        scale(1 / std::sqrt(static_cast<double>(dim))),
        q(mask.batch, heads_q, mask.len_q, dim, layout_q),
        k(mask.batch, heads_kv, mask.len_kv, dim, layout_kv),
        v(mask.batch, heads_kv, mask.len_kv, dim_v, layout_kv),
        out(mask.batch, heads_q, mask.len_q, dim_v, layout_out),
        lse(static_cast<size_t>(mask.batch) * heads_q * mask.len_q) {
    mask.heads = heads_q;
  }

  // Any of soft cap, sinks and ALiBi.
  void randomize_options(Random& random) {
    if (random.coin()) softcap = random.pick({0.5, 3.0, 30.0});
    if (random.coin()) {
      for (int32_t h = 0; h < q.heads; ++h) sinks.push_back(static_cast<float>(2 * random.normal()));
    }
    if (random.coin()) return;
    for (int32_t n = q.heads * (random.coin() ? q.batch : 1); n > 0; --n) {
      alibi_slopes.push_back(static_cast<float>(std::ldexp(1.0, -random.between(0, 8))));
    }
  }

  void randomize(Random& random) {
    q.randomize(random);
    k.randomize(random);
    v.randomize(random);
  }

  int32_t head_kv(int32_t h) const { return h / (q.heads / k.heads); }

  AttentionParams params() {
    AttentionParams p;
    mask.fill(p);
    p.heads_q = q.heads;
    p.heads_kv = k.heads;
    p.head_dim = q.dim;
    p.head_dim_v = v.dim;
    p.dtype = TypeInfo<T>::kDType;
    p.q = q.ref();
    p.k = k.ref();
    p.v = v.ref();
    p.out = out.ref();
    p.lse = lse.data();
    p.lse_stride_batch = int64_t{q.heads} * q.len;
    p.lse_stride_head = q.len;
    p.scale = scale;
    p.softcap = softcap;
    p.sinks = sinks.empty() ? nullptr : sinks.data();
    p.alibi_slopes = alibi_slopes.empty() ? nullptr : alibi_slopes.data();
    p.alibi_stride_batch = alibi_by_batch() ? q.heads : 0;
    return p;
  }

  bool alibi_by_batch() const { return alibi_slopes.size() > static_cast<size_t>(q.heads); }

  // What ALiBi takes from the logit of a pair.
  double penalty(int32_t b, int32_t h, int32_t i, int32_t j) const {
    if (alibi_slopes.empty()) return 0;
    const double slope = alibi_slopes[(alibi_by_batch() ? b * q.heads : 0) + h];
    return slope * static_cast<double>(std::abs(mask.position(b, i) - j));
  }

  // The sink of a head; -inf: none.
  double sink(int32_t h) const { return sinks.empty() ? -std::numeric_limits<double>::infinity() : sinks[h]; }

  std::string text(cpu::Isa isa) const {
    return std::string(TypeInfo<T>::kName) + " " + cpu::name(isa) + " batch " + std::to_string(mask.batch) + " heads " +
           std::to_string(q.heads) + "/" + std::to_string(k.heads) + " dims " + std::to_string(q.dim) + "/" +
           std::to_string(v.dim) + " softcap " + std::to_string(softcap) + (sinks.empty() ? "" : " sinks") +
           (alibi_slopes.empty() ? "" : " alibi") + " " + mask.text();
  }

  // The definition, row by row, over the allowed keys alone.
  Answer<T> oracle() const {
    Answer<T> answer;
    for_each_row([&](int32_t b, int32_t h, int32_t i) {
      const std::vector<int32_t> keys = visible_keys(b, h, i);
      std::vector<Exact<T>> logit;
      Exact<T> top = sink(h);
      for (int32_t j : keys) {
        Exact<T> dot = 0;
        for (int32_t d = 0; d < q.dim; ++d) dot += Exact<T>(q.value(b, h, i, d)) * k.value(b, head_kv(h), j, d);
        dot *= static_cast<Exact<T>>(scale);
        if (softcap > 0) dot = softcap * std::tanh(dot / softcap);
        logit.push_back(dot - static_cast<Exact<T>>(penalty(b, h, i, j)));
        top = std::max(top, logit.back());
      }
      // Without keys, or with logits of -inf alone, a row is 0 whatever its values, and its lse the sink.
      const bool empty = std::all_of(logit.begin(), logit.end(), [](Exact<T> x) { return std::isinf(x) && x < 0; });
      if (empty) {
        answer.out.insert(answer.out.end(), v.dim, 0);
        answer.lse.push_back(sink(h));
        return;
      }
      const Exact<T> shift = std::isinf(top) && top < 0 ? 0 : top;
      Exact<T> sum = std::exp(sink(h) - shift);
      std::vector<Exact<T>> row(v.dim, 0);
      for (size_t n = 0; n < keys.size(); ++n) {
        const Exact<T> p = std::exp(logit[n] - shift);
        sum += p;
        for (int32_t d = 0; d < v.dim; ++d) row[d] += p * v.value(b, head_kv(h), keys[n], d);
      }
      for (Exact<T> x : row) answer.out.push_back(sum == 0 ? 0 : x / sum);
      answer.lse.push_back(sum == 0 ? -std::numeric_limits<Exact<T>>::infinity() : shift + std::log(sum));
    });
    return answer;
  }

  // matmul, scale, cap, bias, softmax, matmul as separate operators, each rounding its result to T. Sums in the compute type.
  std::vector<double> composed() const {
    using Acc = cpu::AccumulateType<T>;
    std::vector<double> result;
    const auto round = [](Acc x) { return cpu::widen(round_to<T>(x)); };
    for_each_row([&](int32_t b, int32_t h, int32_t i) {
      const std::vector<int32_t> keys = visible_keys(b, h, i);
      std::vector<Acc> p;
      Acc top = static_cast<Acc>(sink(h));
      for (int32_t j : keys) {
        Acc dot = 0;
        for (int32_t d = 0; d < q.dim; ++d) {
          dot += static_cast<Acc>(q.value(b, h, i, d)) * static_cast<Acc>(k.value(b, head_kv(h), j, d));
        }
        Acc logit = round(round(dot) * static_cast<Acc>(scale));
        if (softcap > 0) {
          const Acc cap = static_cast<Acc>(softcap);
          logit = round(cap * round(std::tanh(round(logit / cap))));
        }
        if (!alibi_slopes.empty()) logit = round(logit - round(static_cast<Acc>(penalty(b, h, i, j))));
        p.push_back(logit);
        top = std::max(top, p.back());
      }
      Acc sum = sinks.empty() ? 0 : std::exp(static_cast<Acc>(sink(h)) - top);
      for (Acc& x : p) sum += x = std::exp(x - top);
      std::vector<Acc> row(v.dim, 0);
      for (size_t n = 0; n < keys.size(); ++n) {
        const Acc weight = round(p[n] / sum);
        for (int32_t d = 0; d < v.dim; ++d) row[d] += weight * static_cast<Acc>(v.value(b, head_kv(h), keys[n], d));
      }
      for (Acc x : row) result.push_back(round(x));
    });
    return result;
  }

  std::vector<int32_t> visible_keys(int32_t b, int32_t h, int32_t i) const {
    std::vector<int32_t> keys;
    for (int32_t j = 0; j < mask.len_kv; ++j) {
      if (mask.allowed(b, h, i, j)) keys.push_back(j);
    }
    return keys;
  }

  template <class Body>
  void for_each_row(const Body& body) const {
    for (int32_t b = 0; b < mask.batch; ++b) {
      for (int32_t h = 0; h < q.heads; ++h) {
        for (int32_t i = 0; i < mask.len_q; ++i) body(b, h, i);
      }
    }
  }

  // out as (B, H, Sq, Dv).
  std::vector<double> result() const {
    std::vector<double> values;
    for_each_row([&](int32_t b, int32_t h, int32_t i) {
      for (int32_t d = 0; d < out.dim; ++d) values.push_back(out.value(b, h, i, d));
    });
    return values;
  }

  // Runs the backend on poisoned results, serially, and checks that it wrote its rows of `out` and nothing else.
  void run(cpu::Isa isa) {
    std::fill(out.storage.begin(), out.storage.end(), poison<T>());
    std::fill(lse.begin(), lse.end(), -12345.f);
    cpu::attention_forward(params(), [](int64_t count, int64_t, const auto& body) { body(0, count); }, isa);
    std::vector<char> inside(out.storage.size(), 0);
    for_each_row([&](int32_t b, int32_t h, int32_t i) {
      for (int32_t d = 0; d < out.dim; ++d) inside[&out.at_const(b, h, i, d) - out.storage.data()] = 1;
    });
    const T before = poison<T>();
    for (size_t x = 0; x < inside.size(); ++x) {
      const bool untouched = std::memcmp(&out.storage[x], &before, sizeof(T)) == 0;
      if (untouched == (inside[x] == 0)) continue;
      CHECK(untouched == (inside[x] == 0), "element %zu of out: %s", x, text(isa).c_str());
      return;
    }
  }
};

// lse to 1e-5 * max(1, |lse|); infinite and NaN exactly where the answer is.
template <class T>
void check_lse(const AttentionCase<T>& call, const Answer<T>& answer, cpu::Isa isa) {
  for (size_t x = 0; x < call.lse.size(); ++x) {
    const double got = call.lse[x];
    const double want = static_cast<double>(answer.lse[x]);
    const bool ok = std::isfinite(want) ? std::abs(got - want) <= 1e-5 * std::max(1.0, std::abs(want))
                                        : got == want || (std::isnan(got) && std::isnan(want));
    if (!CHECK(ok, "row %zu is %.9g, not %.9g: %s", x, got, want, call.text(isa).c_str())) return;
  }
}

// RMS and largest error at most twice those of the composed operators plus one unit in the last place of the largest
// value; NaN and infinity exactly where the answer has them.
template <class T>
void check_out(const AttentionCase<T>& call, const Answer<T>& answer, const std::vector<double>& composed,
               cpu::Isa isa) {
  const std::vector<double> got = call.result();
  double largest = 0, square = 0, max = 0, composed_square = 0, composed_max = 0;
  for (size_t x = 0; x < got.size(); ++x) {
    const Exact<T> want = answer.out[x];
    if (!std::isfinite(want)) {
      const bool ok = got[x] == static_cast<double>(want) || (std::isnan(got[x]) && std::isnan(want));
      if (!CHECK(ok, "element %zu is %g, not %g: %s", x, got[x], static_cast<double>(want), call.text(isa).c_str()))
        return;
      continue;
    }
    if (!CHECK(std::isfinite(got[x]), "element %zu is %g, not %g: %s", x, got[x], static_cast<double>(want),
               call.text(isa).c_str())) {
      return;
    }
    const double error = static_cast<double>(std::abs(got[x] - want));
    // A row without a key is 0, which the composed operators do not know.
    const double composed_error = std::isfinite(composed[x]) ? static_cast<double>(std::abs(composed[x] - want)) : 0;
    largest = std::max(largest, static_cast<double>(std::abs(want)));
    max = std::max(max, error);
    composed_max = std::max(composed_max, composed_error);
    square += error * error;
    composed_square += composed_error * composed_error;
  }
  if (got.empty()) return;
  const double ulp = largest == 0 ? 0 : std::ldexp(1.0, std::ilogb(largest) - TypeInfo<T>::kMantissaBits);
  const double rms = std::sqrt(square / got.size()), composed_rms = std::sqrt(composed_square / got.size());
  CHECK(max <= 2 * composed_max + ulp, "%g against %g, ulp %g: %s", max, composed_max, ulp, call.text(isa).c_str());
  CHECK(rms <= 2 * composed_rms + ulp, "%g against %g, ulp %g: %s", rms, composed_rms, ulp, call.text(isa).c_str());
}

// Runs the case by every instruction set of this processor and compares it with the definition.
template <class T>
void check_case(AttentionCase<T>& call) {
  const Answer<T> answer = call.oracle();
  const std::vector<double> composed = call.composed();
  for (cpu::Isa isa : cpu::supported_isas()) {
    call.run(isa);
    check_out(call, answer, composed, isa);
    check_lse(call, answer, isa);
  }
}

}  // namespace flashmsa::test
