// Few queries over many keys: the call over a cache that takes the place of an attention call gives its result.
#include <vector>

#include "attention_case.h"
#include "binding/few_queries.h"
#include "cpu/paged.h"

namespace flashmsa::test {
namespace {

using binding::as_cache;
using binding::has_few_queries;

const cpu::Isa kIsa = cpu::supported_isas().back();  // the one that runs
const cpu::ParallelFor kSerial = [](int64_t count, int64_t, const auto& body) { body(0, count); };

MaskCase of_lengths(MaskKind kind, int32_t batch, int32_t len_q, int32_t len_kv) {
  MaskCase mask;
  mask.kind = kind;
  mask.batch = batch;
  mask.len_q = len_q;
  mask.len_kv = len_kv;
  return mask;
}

// Masks and options at random: where the call is one of few queries, the cache gives its answer. Returns how many were.
template <class T>
int32_t check_random(Random& random, int32_t trials) {
  int32_t taken = 0;
  for (int32_t trial = 0; trial < trials; ++trial) {
    const int32_t len_q = random.between(1, 20), len_kv = 1024 + random.between(-20, 300);
    const int32_t heads_kv = random.between(1, 2), heads = heads_kv * random.between(1, 4);
    const auto layout = [&] {
      return random.pick(
          {Layout::kHeadsFirst, Layout::kSequenceFirst, Layout::kSlice, Layout::kExpandedHeads, Layout::kExpanded});
    };
    AttentionCase<T> call(random_mask(random, random.between(1, 2), len_q, len_kv, heads), heads, heads_kv,
                          8 * random.between(1, 4), 8 * random.between(1, 4), layout(), layout(),
                          random.pick({Layout::kHeadsFirst, Layout::kSequenceFirst, Layout::kSlice}));
    call.randomize(random);
    if (random.coin()) call.randomize_options(random);
    const AttentionParams params = call.params();
    if (!has_few_queries(params)) continue;
    ++taken;
    std::fill(call.out.storage.begin(), call.out.storage.end(), poison<T>());
    std::fill(call.lse.begin(), call.lse.end(), -12345.f);
    cpu::paged_attention(as_cache(params), kSerial);
    const Answer<T> answer = call.oracle();
    check_out(call, answer, call.composed(), kIsa);
    check_lse(call, answer, kIsa);
  }
  return taken;
}

// What decode does not know, and what it is no better at.
void check_refusals() {
  AttentionCase<float> call(of_lengths(MaskKind::kCausal, 2, 4, 1024), 8, 2, 16, 16);
  const AttentionParams good = call.params();
  CHECK(has_few_queries(good), "4 queries x 4 heads over 1024 keys");
  const auto refused = [&](const char* what, const auto& change) {
    AttentionParams p = good;
    change(p);
    CHECK(!has_few_queries(p), "%s", what);
  };
  const float slope = 1;
  const int32_t offsets[] = {0, 4};
  refused("64 rows over few keys", [](AttentionParams& p) { p.len_q = 16; });
  refused("too many rows", [](AttentionParams& p) { p.len_q = 65, p.len_kv = 1 << 20; });
  refused("heads that fill the SMs", [](AttentionParams& p) { p.heads_q = p.heads_kv = 66; });
  refused("one key less", [](AttentionParams& p) { p.len_kv = 1023; });
  refused("dropout", [](AttentionParams& p) { p.dropout_p = 0.1; });
  refused("residues", [](AttentionParams& p) { p.residues = 2; });
  refused("documents", [&](AttentionParams& p) { p.mask.kind = MaskKind::kDocument, p.mask.q_offsets = offsets; });
  refused("documents in a composite",
          [&](AttentionParams& p) { p.mask.kind = MaskKind::kComposite, p.mask.q_offsets = offsets; });
  refused("given runs", [&](AttentionParams& p) { p.mask.kind = MaskKind::kComposite, p.mask.row_begin = offsets; });
  refused("blocks", [](AttentionParams& p) { p.mask.kind = MaskKind::kBlockSparse; });
  refused("positions from the start", [&](AttentionParams& p) { p.alibi_slopes = &slope, p.mask.top_left = true; });
  refused("strided positions", [&](AttentionParams& p) { p.alibi_slopes = &slope, p.alibi_step = 2; });
  refused("keys beyond 32 bits", [](AttentionParams& p) { p.batch = 1 << 12, p.len_kv = 1 << 20; });
  AttentionParams many = good;
  many.len_q = 64, many.len_kv = 32768;
  CHECK(has_few_queries(many), "256 rows over many keys");
  AttentionParams top_left = good;
  top_left.mask.top_left = true;
  CHECK(has_few_queries(top_left), "from the start, without ALiBi");
}

}  // namespace
}  // namespace flashmsa::test

int main() {
  using namespace flashmsa;
  test::Random random(11);
  const int32_t taken = test::check_random<float>(random, 200) + test::check_random<cpu::BFloat16>(random, 100);
  CHECK(taken > 40, "only %d calls of few queries among the random ones", taken);
  test::check_refusals();
  return test::report("test_few_queries");
}
