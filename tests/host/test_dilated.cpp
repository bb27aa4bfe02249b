// Dilated windows by residue class: every pair of the calls that a dilated one is split into, against the definition.
#include <algorithm>
#include <cmath>
#include <vector>

#include "mask/composite.h"
#include "mask/dilated.h"
#include "mask_cases.h"

namespace flashmsa::test {
namespace {

// Tensors whose rows are told by their address, a step of `kStep` elements each.
constexpr int64_t kStep = 3;

TensorRef rows(std::vector<float>& storage, int32_t len) {
  storage.resize(std::max(len, 1) * kStep);
  return {storage.data(), 0, 0, kStep, 0};
}

// The row of the whole tensor that row `i` of a class is; -1: no row.
int32_t row_of(const TensorRef& part, const std::vector<float>& storage, int32_t residue, int32_t i, int32_t len) {
  const int64_t at =
      static_cast<float*>(part.data) - storage.data() + residue * part.stride_residue + i * part.stride_seq;
  const bool good = at >= 0 && at % kStep == 0 && at / kStep < len;
  return good ? static_cast<int32_t>(at / kStep) : -1;
}

void check(const MaskCase& mask) {
  std::vector<float> q, k, v, out, lse(std::max(mask.len_q, 1));
  AttentionParams p;
  mask.fill(p);
  p.heads_kv = 1;
  p.dtype = DType::kF32;
  p.q = rows(q, mask.len_q);
  p.k = rows(k, mask.len_kv);
  p.v = rows(v, mask.len_kv);
  p.out = rows(out, mask.len_q);
  p.lse = lse.data();
  p.alibi_step = 0.5;
  const std::vector<AttentionParams> parts = mask::split_by_residue(p);
  CHECK(parts.size() <= 4, "%zu parts of %s", parts.size(), mask.text().c_str());
  std::vector<int32_t> seen(mask.len_q, 0);
  for (const AttentionParams& part : parts) {
    const auto params = mask::Composite::make_params(part);
    const auto block = mask::Composite::block(params, 0, 0, 0, part.len_q - 1);
    for (int32_t n = 0; n < part.residues * part.len_q; ++n) {
      const int32_t residue = n / part.len_q, row = n % part.len_q;
      const int32_t i = row_of(part.q, q, residue, row, mask.len_q);
      if (!CHECK(i >= 0 && row_of(part.out, out, residue, row, mask.len_q) == i, "row %d of %s", i,
                 mask.text().c_str())) {
        return;
      }
      const float* lse_at = part.lse + residue * part.lse_stride_residue + row * part.lse_stride_seq;
      CHECK(lse_at == lse.data() + i, "lse of row %d, %s", i, mask.text().c_str());
      ++seen[i];
      const mask::TwoRuns keys = mask::Composite::row(params, block, row);
      const int32_t place = mask::Composite::position(params, block, row);
      std::vector<char> visible(mask.len_kv, 0);
      for (int32_t key = 0; key < part.len_kv; ++key) {
        const int32_t j = row_of(part.k, k, residue, key, mask.len_kv);
        if (!CHECK(j >= 0 && row_of(part.v, v, residue, key, mask.len_kv) == j, "key %d of %s", j,
                   mask.text().c_str())) {
          return;
        }
        if (!mask::contains(keys, key)) continue;
        visible[j] = 1;
        CHECK(part.alibi_step * std::abs(place - key) == 0.5 * std::abs(mask.position(0, i) - j), "row %d key %d of %s",
              i, j, mask.text().c_str());
      }
      for (int32_t j = 0; j < mask.len_kv; ++j) {
        CHECK((visible[j] != 0) == mask.allowed(0, 0, i, j), "row %d key %d of %s", i, j, mask.text().c_str());
      }
    }
  }
  for (int32_t i = 0; i < mask.len_q; ++i) CHECK(seen[i] == 1, "row %d %d times, %s", i, seen[i], mask.text().c_str());
}

int run() {
  MaskCase mask;
  mask.kind = MaskKind::kDilated;
  for (mask.len_q = 0; mask.len_q <= 11; ++mask.len_q) {
    for (mask.len_kv = 0; mask.len_kv <= 11; ++mask.len_kv) {
      for (int32_t dilation : {1, 2, 3, 4, 5, 7, 11, 12, 30, INT32_MAX}) {
        for (int32_t left : {0, 1, 2, 5, INT32_MAX - 1, INT32_MAX}) {
          for (int32_t right : {0, 1, 3, INT32_MAX - 1, INT32_MAX}) {
            for (bool top_left : {false, true}) {
              mask.dilation = dilation;
              mask.left = left;
              mask.right = right;
              mask.top_left = top_left;
              check(mask);
            }
          }
        }
      }
    }
  }
  Random random(77);
  for (int32_t trial = 0; trial < 300; ++trial) {
    mask.len_q = random.between(1, 90);
    mask.len_kv = random.between(0, 90);
    mask.dilation = random.between(1, 40);
    mask.left = random.between(0, 12);
    mask.right = random.between(0, 12);
    mask.top_left = random.coin();
    check(mask);
  }
  return report("test_dilated");
}

}  // namespace
}  // namespace flashmsa::test

int main() { return flashmsa::test::run(); }
