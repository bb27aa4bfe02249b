// The rules of the result on the CPU backend: empty rows, extreme logits, NaN and infinity, sinks, soft cap, ALiBi,
// unchecked device data, strides beyond 32 bits.
#include <sys/mman.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "attention_case.h"

namespace flashmsa::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

MaskCase make_mask(MaskKind kind, int32_t len_q, int32_t len_kv, bool top_left = false) {
  MaskCase mask;
  mask.kind = kind;
  mask.len_q = len_q;
  mask.len_kv = len_kv;
  mask.top_left = top_left;
  return mask;
}

MaskCase documents(std::vector<int32_t> q_offsets, std::vector<int32_t> kv_offsets, int32_t len_q, int32_t len_kv,
                   bool causal) {
  MaskCase mask = make_mask(MaskKind::kDocument, len_q, len_kv);
  mask.causal = causal;
  mask.q_offsets = std::move(q_offsets);
  mask.kv_offsets = std::move(kv_offsets);
  return mask;
}

// Runs body(isa) after every run of the call.
template <class T, class Body>
void on_every_isa(AttentionCase<T>& call, const Body& body) {
  for (cpu::Isa isa : cpu::supported_isas()) {
    call.run(isa);
    body(isa);
  }
}

template <class T>
void check_row_is_value(AttentionCase<T>& call, int32_t row, int32_t key) {
  for (int32_t h = 0; h < call.q.heads; ++h) {
    for (int32_t d = 0; d < call.v.dim; ++d) {
      CHECK(call.out.value(0, h, row, d) == call.v.value(0, call.head_kv(h), key, d), "row %d is not value %d, %s", row,
            key, TypeInfo<T>::kName);
    }
  }
}

template <class T>
void check_row_is_empty(AttentionCase<T>& call, int32_t row) {
  for (int32_t h = 0; h < call.q.heads; ++h) {
    for (int32_t d = 0; d < call.v.dim; ++d) CHECK(call.out.value(0, h, row, d) == 0, "row %d", row);
    CHECK(call.lse[h * call.q.len + row] == -kInfinity, "row %d: %g", row, call.lse[h * call.q.len + row]);
  }
}

// More queries than keys: the first rows are empty; fewer: the first row sees the surplus, top-left it does not.
template <class T>
void check_alignment(Random& random) {
  AttentionCase<T> tall(make_mask(MaskKind::kCausal, 5, 2), 2, 1, 64, 64);
  tall.randomize(random);
  check_case(tall);
  on_every_isa(tall, [&](cpu::Isa) {
    for (int32_t row : {0, 1, 2}) check_row_is_empty(tall, row);
    check_row_is_value(tall, 3, 0);
  });
  for (bool top_left : {false, true}) {
    AttentionCase<T> wide(make_mask(MaskKind::kCausal, 2, 5, top_left), 1, 1, 64, 64);
    wide.randomize(random);
    check_case(wide);
    if (top_left) on_every_isa(wide, [&](cpu::Isa) { check_row_is_value(wide, 0, 0); });
  }
}

// All logits -60000 over 64 keys: an ordinary row.
template <class T>
void check_very_negative_logits(Random& random) {
  AttentionCase<T> call(make_mask(MaskKind::kDense, 3, 64), 1, 1, 64, 64);
  call.randomize(random);
  call.scale = -60000.0 / 64;
  std::fill(call.q.storage.begin(), call.q.storage.end(), round_to<T>(1));
  std::fill(call.k.storage.begin(), call.k.storage.end(), round_to<T>(1));
  check_case(call);
  on_every_isa(call, [&](cpu::Isa) {
    for (float lse : call.lse) CHECK(std::abs(lse - (-6e4 + std::log(64.0))) <= 0.004, "%g", lse);  // one ulp of 6e4
  });
}

// Every logit under -100, many keys hidden, grouped heads: no row may take a hidden key's exp(0) for its largest.
template <class T>
void check_hidden_maximum(Random& random) {
  AttentionCase<T> call(make_mask(MaskKind::kCausal, 88, 448), 14, 2, 64, 64);
  call.randomize(random);
  for (int32_t h = 0; h < 14; ++h) {
    for (int32_t i = 0; i < 88; ++i) call.q.at(0, h, i, 0) = round_to<T>(-40);
  }
  for (int32_t h = 0; h < 2; ++h) {
    for (int32_t j = 0; j < 448; ++j) call.k.at(0, h, j, 0) = round_to<T>(32 + j / 64);
  }
  check_case(call);
}

// One logit 1e4 above the rest: the row is that key's value.
template <class T>
void check_one_winner(Random& random) {
  for (int32_t winner : {0, 70, 199}) {
    AttentionCase<T> call(make_mask(MaskKind::kDense, 2, 200), 1, 1, 16, 24);
    call.randomize(random);
    std::fill(call.q.storage.begin(), call.q.storage.end(), round_to<T>(0));
    std::fill(call.k.storage.begin(), call.k.storage.end(), round_to<T>(0));
    for (int32_t i : {0, 1}) call.q.at(0, 0, i, 3) = round_to<T>(200);
    call.k.at(0, 0, winner, 3) = round_to<T>(200);
    on_every_isa(call, [&](cpu::Isa) {
      for (int32_t i : {0, 1}) check_row_is_value(call, i, winner);
    });
  }
}

// Scale 0 gives the mean of the visible values and log(count), a negative one acts like a negated q; hidden stays hidden.
template <class T>
void check_scales(Random& random) {
  for (double scale : {0.0, -0.125, 3.0}) {
    for (MaskKind kind : {MaskKind::kDense, MaskKind::kCausal}) {
      AttentionCase<T> call(make_mask(kind, 130, 100), 2, 2, 32, 32);
      call.randomize(random);
      call.scale = scale;
      check_case(call);
    }
  }
  AttentionCase<T> causal(make_mask(MaskKind::kCausal, 100, 100), 1, 1, 8, 8);
  causal.randomize(random);
  causal.scale = 0;
  on_every_isa(causal, [&](cpu::Isa) {
    for (int32_t i = 0; i < 100; ++i) CHECK(std::abs(causal.lse[i] - std::log(i + 1.0)) <= 1e-5, "row %d", i);
  });
}

// Visible logits of -inf weigh 0; a row of nothing else is empty.
template <class T>
void check_infinite_logits(Random& random) {
  AttentionCase<T> call(make_mask(MaskKind::kCausal, 150, 150), 1, 1, 8, 16);
  call.randomize(random);
  for (int32_t i = 0; i < 150; ++i) call.q.at(0, 0, i, 0) = round_to<T>(1);
  for (int32_t j = 0; j < 150; ++j) {
    if (j < 80 || j % 3 == 0) call.k.at(0, 0, j, 0) = round_to<T>(static_cast<cpu::AccumulateType<T>>(-kInfinity));
  }
  check_case(call);
  on_every_isa(call, [&](cpu::Isa) {
    for (int32_t i = 0; i < 80; ++i) check_row_is_empty(call, i);
    check_row_is_value(call, 80, 80);
  });
}

// NaN and infinities in random rows of q, k and v: exactly the rows that may see them change, as the definition says.
template <class T>
void check_poisoned_inputs(Random& random, int32_t trials) {
  for (int32_t trial = 0; trial < trials; ++trial) {
    const int32_t len_q = random.between(1, 180);
    const int32_t len_kv = random.pick({len_q, random.between(1, 180)});
    AttentionCase<T> call(random_mask(random, 2, len_q, len_kv, 2), 2, 1, 8 * random.between(1, 4),
                          8 * random.between(1, 6));
    call.randomize(random);
    if (random.between(0, 3) == 0) call.randomize_options(random);
    for (int32_t n = random.between(1, 6); n > 0; --n) {
      Tensor<T>& tensor = *random.pick({&call.q, &call.k, &call.v});
      const int32_t row = random.pick({0, tensor.len - 1, random.between(0, tensor.len - 1)});
      const auto value = static_cast<cpu::AccumulateType<T>>(random.pick({kNaN, kInfinity, -kInfinity}));
      tensor.at(random.between(0, 1), 0, row, random.between(0, tensor.dim - 1)) = round_to<T>(value);
    }
    check_case(call);
  }
}

// The first `keys` keys are good, the rest is whatever an unused slot holds. Only documents up to them are there.
template <class T>
void check_poisoned_tail(Random& random) {
  for (bool causal : {false, true}) {
    AttentionCase<T> call(documents({0, 50, 50, 130}, {0, 33, 70, 131}, 230, 231, causal), 2, 1, 40, 72);
    call.randomize(random);
    for (int32_t i = 130; i < 230; ++i) {
      for (int32_t h : {0, 1}) call.q.set_row(0, h, i, kNaN);
    }
    for (int32_t j = 131; j < 231; ++j) {
      call.k.set_row(0, 0, j, kNaN);
      call.v.set_row(0, 0, j, j % 2 == 0 ? kInfinity : kNaN);
    }
    check_case(call);
    on_every_isa(call, [&](cpu::Isa) {
      for (int32_t i = 130; i < 230; ++i) check_row_is_empty(call, i);
    });
  }
}

// Documents of one token: exactly its value, whatever poison lies on either side.
template <class T>
void check_single_token_documents(Random& random) {
  std::vector<int32_t> offsets(131);
  for (int32_t d = 0; d < 131; ++d) offsets[d] = d;
  for (bool causal : {false, true}) {
    AttentionCase<T> call(documents(offsets, offsets, 130, 130, causal), 1, 1, 8, 40);
    call.randomize(random);
    for (int32_t j = 1; j < 130; j += 2) {
      call.k.set_row(0, 0, j, kNaN);
      call.v.set_row(0, 0, j, kNaN);
    }
    on_every_isa(call, [&](cpu::Isa) {
      for (int32_t i = 0; i < 130; i += 2) check_row_is_value(call, i, i);
      for (int32_t i = 1; i < 130; i += 2) CHECK(std::isnan(call.out.value(0, 0, i, 0)), "row %d", i);
    });
  }
}

// Offsets, prefixes and lists that nobody checked: nothing read or written out of bounds (a sanitizer watches), every element written.
template <class T>
void check_garbage(Random& random, int32_t trials) {
  for (int32_t trial = 0; trial < trials; ++trial) {
    AttentionCase<T> call(garbage_mask(random, 2, random.between(1, 200), random.between(0, 200)), 2, 1, 8, 8);
    call.randomize(random);
    on_every_isa(call, [&](cpu::Isa isa) {
      for (double x : call.result()) {
        if (!CHECK(std::isfinite(x) && x != -12345, "%g: %s", x, call.text(isa).c_str())) return;
      }
    });
  }
}

// Rows, heads and batches more than 2^31 elements apart, in memory that is reserved but for the rows in use.
void check_huge_strides(Random& random) {
  using T = BFloat16;
  AttentionCase<T> call(make_mask(MaskKind::kCausal, 3, 3), 2, 2, 16, 16);
  call.mask.batch = 2;
  call = AttentionCase<T>(call.mask, 2, 2, 16, 16);
  call.randomize(random);
  const int64_t row = (int64_t{1} << 30) + 16, head = 3 * row + 48, batch = 2 * head + 80;
  const size_t bytes = 2 * batch * sizeof(T);
  const auto reserve = [&] {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? nullptr : static_cast<T*>(at);
  };
  AttentionParams params = call.params();
  TensorRef* const refs[] = {&params.q, &params.k, &params.v, &params.out};
  Tensor<T>* const tensors[] = {&call.q, &call.k, &call.v, &call.out};
  const auto for_each_element = [&](Tensor<T>& tensor, T* far, const auto& body) {
    for (int32_t b = 0; b < 2; ++b) {
      for (int32_t h = 0; h < 2; ++h) {
        for (int32_t s = 0; s < 3; ++s) {
          for (int32_t d = 0; d < 16; ++d) body(tensor.at(b, h, s, d), far[b * batch + h * head + s * row + d]);
        }
      }
    }
  };
  T* far[4] = {};
  bool reserved = true;
  for (int t = 0; t < 4; ++t) {
    far[t] = reserve();
    reserved = CHECK(far[t] != nullptr, "no address space of %zu bytes", bytes) && reserved;
    if (far[t] != nullptr) for_each_element(*tensors[t], far[t], [](T& near, T& copy) { copy = near; });
    *refs[t] = {far[t], batch, head, row, 0};
  }
  for (cpu::Isa isa : cpu::supported_isas()) {
    if (!reserved) break;
    cpu::attention_forward(params, [](int64_t count, int64_t, const auto& body) { body(0, count); }, isa);
    for_each_element(call.out, far[3], [](T& near, T& copy) { near = copy; });
    check_out(call, call.oracle(), call.composed(), isa);
    check_lse(call, call.oracle(), isa);
  }
  for (T* at : far) {
    if (at != nullptr) munmap(at, bytes);
  }
}

// A sink is one more term in the sum: rows without a key give 0 and the sink; a sink of -inf is none.
template <class T>
void check_sinks(Random& random) {
  AttentionCase<T> call(make_mask(MaskKind::kCausal, 90, 30), 3, 1, 16, 16);
  call.randomize(random);
  call.sinks = {1.5f, -3.f, static_cast<float>(-kInfinity)};
  check_case(call);
  on_every_isa(call, [&](cpu::Isa) {
    for (int32_t h = 0; h < 3; ++h) {
      for (int32_t i = 0; i < 60; ++i) {
        CHECK(call.lse[h * 90 + i] == call.sinks[h], "head %d row %d: %g", h, i, call.lse[h * 90 + i]);
        CHECK(call.out.value(0, h, i, 5) == 0, "head %d row %d", h, i);
      }
    }
  });
  // One that outweighs every logit, and one that none of them feels.
  AttentionCase<T> extreme(make_mask(MaskKind::kDense, 5, 40), 2, 2, 8, 8);
  extreme.randomize(random);
  extreme.sinks = {300.f, -300.f};
  check_case(extreme);
}

// Logits of any size stay within the cap, and infinite ones are at it.
template <class T>
void check_softcap(Random& random) {
  for (double magnitude : {1e-3, 0.4, 3.0, 300.0, kInfinity}) {
    AttentionCase<T> call(make_mask(MaskKind::kCausal, 20, 70), 1, 1, 8, 8);
    call.randomize(random);
    call.softcap = 2;
    call.scale = 1;
    std::fill(call.q.storage.begin(), call.q.storage.end(), round_to<T>(0));
    for (int32_t i = 0; i < 20; ++i) call.q.at(0, 0, i, 0) = round_to<T>(i % 2 == 0 ? 1 : -1);
    for (int32_t j = 0; j < 70; ++j) {
      call.k.at(0, 0, j, 0) = round_to<T>(static_cast<cpu::AccumulateType<T>>(j % 3 == 0 ? -magnitude : magnitude));
    }
    check_case(call);
  }
}

// Distances at a document's own positions and in a dilated window's steps; far keys.
template <class T>
void check_alibi(Random& random) {
  for (bool top_left : {false, true}) {
    MaskCase mask = documents({0, 40, 41, 90}, {0, 70, 70, 120}, 90, 120, false);
    mask.kind = MaskKind::kComposite;
    mask.local.right[0] = 0;
    mask.positions_local = true;
    mask.positions_top_left = top_left;
    MaskCase dilated = make_mask(MaskKind::kDilated, 70, 90, top_left);
    dilated.dilation = 7;
    dilated.left = 5;
    dilated.right = 2;
    for (const MaskCase& each : {mask, dilated}) {
      AttentionCase<T> call(each, 2, 1, 16, 8);
      call.randomize(random);
      call.alibi_slopes = {0.25f, 0.0625f};
      check_case(call);
    }
  }
}

// lse as (batch, length, heads) with room between.
void check_lse_strides(Random& random) {
  AttentionCase<float> call(make_mask(MaskKind::kDilated, 71, 90), 3, 1, 8, 8);
  call.mask.batch = 2;
  call.mask.dilation = 4;
  call.mask.left = 3;
  call = AttentionCase<float>(call.mask, 3, 1, 8, 8);
  call.randomize(random);
  const cpu::Isa isa = cpu::supported_isas().back();
  call.run(isa);
  std::vector<float> lse(2 * 71 * 5, -12345.f);
  AttentionParams params = call.params();
  params.lse = lse.data() + 1;
  params.lse_stride_batch = 71 * 5;
  params.lse_stride_head = 1;
  params.lse_stride_seq = 5;
  cpu::attention_forward(params, [](int64_t count, int64_t, const auto& body) { body(0, count); }, isa);
  for (int32_t x = 0; x < 2 * 71 * 5; ++x) {
    const int32_t b = x / (71 * 5), i = x / 5 % 71, h = x % 5 - 1;
    const float want = 0 <= h && h < 3 ? call.lse[(b * 3 + h) * 71 + i] : -12345.f;
    CHECK(lse[x] == want, "batch %d row %d place %d: %g, not %g", b, i, x % 5, lse[x], want);
  }
}

template <class T>
void check_rules(uint64_t seed) {
  Random random(seed);
  check_alignment<T>(random);
  check_very_negative_logits<T>(random);
  check_hidden_maximum<T>(random);
  check_one_winner<T>(random);
  check_scales<T>(random);
  check_infinite_logits<T>(random);
  check_poisoned_inputs<T>(random, 60);
  check_poisoned_tail<T>(random);
  check_single_token_documents<T>(random);
  check_garbage<T>(random, 80);
  check_sinks<T>(random);
  check_softcap<T>(random);
  check_alibi<T>(random);
}

}  // namespace
}  // namespace flashmsa::test

int main() {
  using namespace flashmsa;
  test::check_rules<float>(11);
  test::check_rules<cpu::BFloat16>(12);
  test::check_rules<cpu::Float16>(13);
  test::check_rules<double>(14);
  test::Random random(15);
  test::check_huge_strides(random);
  test::check_lse_strides(random);
  return test::report("test_cpu_rules");
}
