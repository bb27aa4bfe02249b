// The CPU backend against the definition: random shapes, masks, layouts and dtypes on every instruction set.
#include <algorithm>
#include <array>
#include <thread>
#include <vector>

#include "attention_case.h"

namespace flashmsa::test {
namespace {

MaskCase dense(int32_t batch, int32_t len_q, int32_t len_kv) {
  MaskCase mask;
  mask.batch = batch;
  mask.len_q = len_q;
  mask.len_kv = len_kv;
  return mask;
}

template <class T>
void check_random(Random& random, int32_t trials) {
  for (int32_t trial = 0; trial < trials; ++trial) {
    const int32_t len_q = random.pick({random.between(1, 20), random.between(1, 200)});
    const int32_t len_kv = random.pick({len_q, random.between(1, 20), random.between(1, 200)});
    const int32_t heads_kv = random.between(1, 3);
    const auto layout = [&] {
      return random.pick(
          {Layout::kHeadsFirst, Layout::kSequenceFirst, Layout::kSlice, Layout::kExpandedHeads, Layout::kExpanded});
    };
    const Layout layout_out = random.pick({Layout::kHeadsFirst, Layout::kSequenceFirst, Layout::kSlice});
    const int32_t heads = heads_kv * random.between(1, 3);
    AttentionCase<T> call(random_mask(random, random.between(1, 2), len_q, len_kv, heads), heads, heads_kv,
                          8 * random.between(1, 12), 8 * random.between(1, 12), layout(), layout(), layout_out);
    call.randomize(random);
    if (random.coin()) call.randomize_options(random);
    check_case(call);
  }
}

// Every head dim there is, q·k and values of different ones.
template <class T>
void check_head_dims(Random& random) {
  for (int32_t dim = 8; dim <= 256; dim += 8) {
    AttentionCase<T> call(dense(1, 17, 70), 1, 1, dim, dim == 192 ? 128 : 264 - dim);
    call.randomize(random);
    check_case(call);
  }
}

// Query head h uses kv head h / (Hq / Hkv): with one key, its value says which head it came from.
template <class T>
void check_head_groups(Random& random) {
  AttentionCase<T> call(dense(2, 3, 1), 6, 2, 16, 8);
  call.randomize(random);
  for (int32_t b = 0; b < 2; ++b) {
    for (int32_t h = 0; h < 2; ++h) call.v.set_row(b, h, 0, 10 * b + h + 1);
  }
  for (cpu::Isa isa : cpu::supported_isas()) {
    call.run(isa);
    call.for_each_row([&](int32_t b, int32_t h, int32_t i) {
      CHECK(call.out.value(b, h, i, 7) == 10 * b + h / 3 + 1, "batch %d head %d: %g", b, h, call.out.value(b, h, i, 7));
    });
  }
}

// No queries, no batch, no keys. Without keys every row is empty, and k and v may be null.
template <class T>
void check_no_elements() {
  for (bool causal : {false, true}) {
    for (auto [batch, len_q, len_kv] : {std::array{0, 5, 5}, std::array{2, 0, 5}, std::array{2, 70, 0}}) {
      MaskCase mask = dense(batch, len_q, len_kv);
      if (causal) mask.kind = MaskKind::kCausal;
      AttentionCase<T> call(mask, 4, 2, 64, 40);
      for (cpu::Isa isa : cpu::supported_isas()) {
        call.run(isa);
        for (double x : call.result()) CHECK(x == 0, "%g", x);
        for (float x : call.lse) CHECK(x == -std::numeric_limits<float>::infinity(), "%g", x);
      }
    }
  }
}

// Ranges in any order and number, and threads: bitwise the serial result.
void check_schedules(Random& random) {
  MaskCase mask = dense(2, 300, 300);
  mask.kind = MaskKind::kCausal;
  AttentionCase<float> call(mask, 3, 1, 32, 32);
  call.randomize(random);
  const cpu::Isa isa = cpu::supported_isas().back();
  call.run(isa);
  const std::vector<double> serial = call.result();
  const std::vector<float> serial_lse = call.lse;

  const cpu::ParallelFor backwards = [](int64_t count, int64_t, const auto& body) {
    for (int64_t end = count; end > 0; end -= 7) body(std::max<int64_t>(0, end - 7), end);
  };
  const cpu::ParallelFor threads = [](int64_t count, int64_t, const auto& body) {
    std::vector<std::thread> workers;
    for (int64_t t = 0; t < 4; ++t) workers.emplace_back([=, &body] { body(count * t / 4, count * (t + 1) / 4); });
    for (std::thread& worker : workers) worker.join();
  };
  for (const cpu::ParallelFor& parallel_for : {backwards, threads}) {
    std::fill(call.out.storage.begin(), call.out.storage.end(), poison<float>());
    cpu::attention_forward(call.params(), parallel_for);
    CHECK(call.result() == serial, "another schedule changes out");
    CHECK(call.lse == serial_lse, "another schedule changes lse");
  }
}

template <class T>
int run_type(uint64_t seed, int32_t trials) {
  Random random(seed);
  check_random<T>(random, trials);
  check_head_dims<T>(random);
  check_head_groups<T>(random);
  check_no_elements<T>();
  return 0;
}

}  // namespace
}  // namespace flashmsa::test

int main() {
  using namespace flashmsa;
  test::run_type<float>(1, 80);
  test::run_type<cpu::BFloat16>(2, 60);
  test::run_type<cpu::Float16>(3, 50);
  test::run_type<double>(4, 50);
  test::Random random(5);
  test::check_schedules(random);
  return test::report("test_cpu_forward");
}
