// The parts of the softmax that a thread does with its accumulators: masking, soft cap and ALiBi, online softmax, rows one by
// one.
#include "attn/masking.cuh"
#include "attn/score.cuh"
#include "attn/slow_rows.cuh"
#include "attn/softmax.cuh"
#include "gpu_test.cuh"
#include "mask/interval.h"
#include "sm90/fragment.h"

namespace flashmsa::test {
namespace {

using attn::OnlineSoftmax;
using mask::Interval;
using mask::TwoRuns;
using sm90::Accumulator;
using sm90::OperandA;

constexpr double kLn2 = 0.69314718055994530942;
constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// ---- apply_intervals ------------------------------------------------------------------------------------------------------

// Of 64 x (2 kCount) accumulators a block, [block][thread][element].
template <int kCount>
__device__ __forceinline__ void read_accumulators(float (&mine)[kCount], const float* s) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) mine[e] = s[(blockIdx.x * 128 + threadIdx.x) * kCount + e];
}

template <int kCount>
__device__ __forceinline__ void write_accumulators(const float (&mine)[kCount], float* s) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) s[(blockIdx.x * 128 + threadIdx.x) * kCount + e] = mine[e];
}

// Normal numbers, and some that are none.
std::vector<float> random_scores(Random& random, size_t count) {
  std::vector<float> s = random_normals(random, count);
  for (float& x : s) {
    if (random.between(0, 9) == 0) x = random.pick({kNaN, kInfinity, -kInfinity});
  }
  return s;
}

// Block i: 64 rows against the tile whose first key is first_keys[i].
template <class Row, int kCount>
__global__ void mask_kernel(float* s, const Row* rows, const int32_t* first_keys) {
  float mine[kCount];
  read_accumulators(mine, s);
  const Row* first = rows + blockIdx.x * 64 + Accumulator::first_row(threadIdx.x);
  const Row two[2] = {first[0], first[8]};
  attn::apply_intervals(mine, two, first_keys[blockIdx.x], threadIdx.x);
  write_accumulators(mine, s);
}

// Empty, whole, one key, an edge inside the tile, both, and far away; in any order.
Interval random_interval(Random& random, int32_t first_key, int32_t keys) {
  const int32_t length = first_key + keys + random.between(0, 200);
  const int32_t a = std::max(first_key + random.between(-5, keys + 5), 0);
  const int32_t b = std::max(first_key + random.between(-5, keys + 5), 0);
  switch (random.between(0, 6)) {
    case 0:
      return {a, a};
    case 1:
      return {0, length};
    case 2:
      return {a, a + 1};
    case 3:
      return {0, a};
    case 4:
      return {a, std::max(a, length)};
    case 5:
      return {first_key, first_key + keys};
    default:
      return {std::min(a, b), std::max(a, b)};
  }
}

void draw(Random& random, int32_t first_key, int32_t keys, Interval& row) {
  row = random_interval(random, first_key, keys);
}
// Apart, touching or one over the other.
void draw(Random& random, int32_t first_key, int32_t keys, TwoRuns& row) {
  row = {random_interval(random, first_key, keys), random_interval(random, first_key, keys)};
  if (random.between(0, 3) == 0) row.first.end = std::max(row.first.begin, row.main.begin);
}

bool sees(const Interval& row, int32_t key) { return row.begin <= key && key < row.end; }
bool sees(const TwoRuns& row, int32_t key) { return sees(row.first, key) || sees(row.main, key); }

std::string text(const Interval& row) { return "[" + std::to_string(row.begin) + ", " + std::to_string(row.end) + ")"; }
std::string text(const TwoRuns& row) { return text(row.first) + " and " + text(row.main); }

template <class Row, int kCount>
void check_apply_intervals(Random& random) {
  constexpr int kBlocks = 60, kKeys = 2 * kCount;
  const std::vector<float> s = random_scores(random, kBlocks * 128 * kCount);
  std::vector<Row> rows;
  std::vector<int32_t> first_keys;
  for (int block = 0; block < kBlocks; ++block) {
    first_keys.push_back(random.pick({0, kKeys, 7 * kKeys, (1 << 30) / kKeys * kKeys}));
    for (int row = 0; row < 64; ++row) draw(random, first_keys.back(), kKeys, rows.emplace_back());
  }
  DeviceArray<float> device(s);
  DeviceArray<Row> device_rows(rows);
  DeviceArray<int32_t> device_keys(first_keys);
  launch(mask_kernel<Row, kCount>, kBlocks, 128, 0, device.data(), device_rows.data(), device_keys.data());
  const std::vector<float> found = device.read();
  for (int i = 0; i < kBlocks * 128 * kCount; ++i) {
    const int block = i / kCount / 128, thread = i / kCount % 128, e = i % kCount;
    const Row& row = rows[block * 64 + Accumulator::row(thread, e)];
    const int32_t key = first_keys[block] + Accumulator::column(thread, e);
    const float wanted = sees(row, key) ? s[i] : -kInfinity;
    EXPECT(std::bit_cast<uint32_t>(found[i]) == std::bit_cast<uint32_t>(wanted), "key %d of %s: %g, not %g", key,
           text(row).c_str(), found[i], wanted);
  }
}

GPU_TEST(apply_intervals) {
  check_apply_intervals<Interval, 16>(random);
  check_apply_intervals<Interval, 32>(random);
  check_apply_intervals<Interval, 64>(random);
}

GPU_TEST(apply_two_runs) {
  check_apply_intervals<TwoRuns, 16>(random);
  check_apply_intervals<TwoRuns, 32>(random);
  check_apply_intervals<TwoRuns, 64>(random);
}

// ---- apply_bits -----------------------------------------------------------------------------------------------------------

// A word for 32 columns of a row: bits (blocks * 64, kCount / 16).
template <int kCount>
__global__ void bits_kernel(float* s, const int32_t* bits) {
  constexpr int kWords = kCount / 16;
  float mine[kCount];
  read_accumulators(mine, s);
  const int32_t* first = bits + (blockIdx.x * 64 + Accumulator::first_row(threadIdx.x)) * kWords;
  const int32_t* const two[2] = {first, first + 8 * kWords};
  attn::apply_bits(mine, two, threadIdx.x);
  write_accumulators(mine, s);
}

template <int kCount>
void check_apply_bits(Random& random) {
  constexpr int kBlocks = 20, kWords = kCount / 16;
  const std::vector<float> s = random_scores(random, kBlocks * 128 * kCount);
  std::vector<int32_t> bits(kBlocks * 64 * kWords);
  for (int32_t& x : bits) {
    const auto any = static_cast<uint32_t>(random.bits()), one = 1u << random.between(0, 31);
    x = static_cast<int32_t>(random.pick({0u, ~0u, any, any, one, ~one}));
  }
  DeviceArray<float> device(s);
  DeviceArray<int32_t> device_bits(bits);
  launch(bits_kernel<kCount>, kBlocks, 128, 0, device.data(), device_bits.data());
  const std::vector<float> found = device.read();
  for (int i = 0; i < kBlocks * 128 * kCount; ++i) {
    const int block = i / kCount / 128, thread = i / kCount % 128, e = i % kCount;
    const int row = Accumulator::row(thread, e), column = Accumulator::column(thread, e);
    const auto word = static_cast<uint32_t>(bits[(block * 64 + row) * kWords + column / 32]);
    const float wanted = (word >> column % 32 & 1) != 0 ? s[i] : -kInfinity;
    EXPECT(std::bit_cast<uint32_t>(found[i]) == std::bit_cast<uint32_t>(wanted),
           "row %d, column %d of %d, word %08x: %g, not %g", row, column, 2 * kCount, word, found[i], wanted);
  }
}

GPU_TEST(apply_bits) {
  check_apply_bits<16>(random);
  check_apply_bits<32>(random);
  check_apply_bits<64>(random);
}

// ---- apply_softcap --------------------------------------------------------------------------------------------------------

template <int kCount>
__global__ void softcap_kernel(float* s, attn::CapParams cap) {
  float mine[kCount];
  read_accumulators(mine, s);
  attn::apply_softcap(mine, cap);
  write_accumulators(mine, s);
}

// Largest relative error of a capped S. The factor, its inverse and the products with them: 4 roundings of 2^-24. Beside:
//   up to |u| = 1/2   the polynomials, 6.5e-7, and 3 roundings of their evaluation
//   above             tanh = (1 - e) / (1 + e) changes by (1 - tanh^2) / (2 tanh) <= 0.86 of e's relative error, which is
//                     2^-22 of the exponential and |u| 2^-22 of its argument; the division, 2^-22; 2 roundings
// together 1.1e-6 and 9.1e-7.
constexpr double kCapError = 1.1e-6;

// S as the kernel sees it, in units where the cap's argument is u.
enum class Scores { kShort, kOneLarge, kAny, kNonfinite, kShortAndNaN };

template <int kCount>
void draw_warp(Random& random, Scores scores, const attn::CapParams& cap, int place, float* s) {
  for (int i = 0; i < 32 * kCount; ++i) {
    double u = 0.2499 * random.uniform();
    if (random.coin()) u = std::exp2(-30 * random.uniform()) * 0.2499;
    if (scores == Scores::kAny || scores == Scores::kNonfinite) u = std::exp2(20 * random.uniform() - 14);
    s[i] = static_cast<float>(random.coin() ? u : -u) * cap.inverse;
    if (random.between(0, 19) == 0) s[i] = random.pick({0.0f, -0.0f, std::nextafter(cap.short_end, 0.0f)});
    if (scores == Scores::kNonfinite && random.between(0, 9) == 0) s[i] = random.pick({kNaN, kInfinity, -kInfinity});
    if (scores == Scores::kShortAndNaN && random.between(0, 9) == 0) s[i] = random.pick({kNaN, -kNaN});
  }
  // One number in a warp decides for all. At 0.3 the short series is wrong by 9e-6, at 1 by far more.
  if (scores == Scores::kOneLarge) s[place] = cap.inverse * random.pick({0.3f, -0.3f, 1.0f, -1.0f, -30.0f});
}

template <int kCount>
void check_softcap(Random& random, double scale, double cap) {
  // Four warps a block; each element of a thread is the one large number of some warps.
  constexpr int kBlocks = kCount + 24;
  const double factor = scale / cap;
  const attn::CapParams params = attn::make_cap(scale, cap);
  std::vector<float> s(kBlocks * 128 * kCount);
  for (int warp = 0; warp < kBlocks * 4; ++warp) {
    const Scores scores =
        warp / 4 < kCount
            ? Scores::kOneLarge
            : random.pick({Scores::kShort, Scores::kAny, Scores::kAny, Scores::kNonfinite, Scores::kShortAndNaN});
    const int place = random.between(0, 31) * kCount + warp / 4 % kCount;
    draw_warp<kCount>(random, scores, params, place, &s[size_t(warp) * 32 * kCount]);
  }
  DeviceArray<float> device(s);
  launch(softcap_kernel<kCount>, kBlocks, 128, 0, device.data(), params);
  const std::vector<float> found = device.read();
  for (size_t i = 0; i < s.size(); ++i) {
    const double wanted = std::tanh(s[i] * factor) / factor;
    const bool good =
        std::isnan(wanted) ? std::isnan(found[i]) : std::fabs(found[i] - wanted) <= kCapError * std::fabs(wanted);
    EXPECT(good, "scale %g, cap %g, S = %.9g (tanh of %.9g): %.9g, not %.9g", scale, cap, s[i], s[i] * factor, found[i],
           wanted);
  }
}

GPU_TEST(apply_softcap) {
  for (const auto& [scale, cap] : {std::pair(0.125, 50.0), {0.354, 30.0}, {1.0, 0.5}, {5.0, 1e-3}, {0.0625, 1e6}}) {
    check_softcap<16>(random, scale, cap);
    check_softcap<32>(random, scale, cap);
    check_softcap<64>(random, scale, cap);
  }
}

// ---- The cap in the exponent ----------------------------------------------------------------------------------------------

// sizes: 2 floats a thread, the largest |S| of its two rows. exponents: what each of the three makes of S.
template <int kCount>
__global__ void cap_exponent_kernel(const float* s, float* sizes, float* exponents, attn::CapExponents cap) {
  float mine[kCount];
  read_accumulators(mine, s);
  int32_t size[2];
  attn::OnlineSoftmax::largest(mine, size);
  for (int slot = 0; slot < 2; ++slot) {
    sizes[(blockIdx.x * blockDim.x + threadIdx.x) * 2 + slot] = __int_as_float(size[slot]);
  }
  const size_t all = size_t(gridDim.x) * blockDim.x * kCount;
  float made[3][kCount];
  for (int e = 0; e < kCount; ++e) {
    made[0][e] = cap.cubic(mine[e], 0.0f);
    made[1][e] = cap.quintic(mine[e], 0.0f);
    made[2][e] = cap.nonic(mine[e], 0.0f);
  }
  for (int which = 0; which < 3; ++which) write_accumulators(made[which], exponents + which * all);
}

// The bounds are those of tests/host/test_cap.cpp.
template <int kCount>
void check_cap_exponents(Random& random, double scale, double cap) {
  constexpr int kBlocks = 8;
  const attn::CapExponents params = attn::make_cap_exponents(scale, cap);
  const float ends[3] = {params.cubic.end, params.quintic.end, params.nonic.end};
  constexpr double kErrors[3] = {1.7e-6 + 7 * 0x1p-24, 1.2e-6 + 7 * 0x1p-24, 1.8e-6 + 7 * 0x1p-24};
  std::vector<float> s(kBlocks * 128 * kCount);
  for (float& x : s) x = static_cast<float>(random.coin() ? 1 : -1) * ends[random.between(0, 2)] * random.uniform();
  DeviceArray<float> device(s), sizes(std::vector<float>(kBlocks * 128 * 2)), made(std::vector<float>(3 * s.size()));
  launch(cap_exponent_kernel<kCount>, kBlocks, 128, 0, device.data(), sizes.data(), made.data(), params);
  const std::vector<float> found = made.read(), found_sizes = sizes.read();
  for (int thread = 0; thread < kBlocks * 128; ++thread) {
    float wanted[2] = {0, 0};
    for (int e = 0; e < kCount; ++e) {
      float& largest = wanted[Accumulator::row_slot(e)];
      largest = std::max(largest, std::fabs(s[size_t(thread) * kCount + e]));
    }
    EXPECT(found_sizes[2 * thread] == wanted[0] && found_sizes[2 * thread + 1] == wanted[1],
           "thread %d: %g %g, not %g %g", thread, found_sizes[2 * thread], found_sizes[2 * thread + 1], wanted[0],
           wanted[1]);
  }
  for (size_t i = 0; i < s.size(); ++i) {
    const double wanted = scale * 1.44269504088896341 * std::tanh(s[i] * (scale / cap)) * (cap / scale);
    for (int which = 0; which < 3; ++which) {
      if (std::fabs(s[i]) > ends[which]) continue;
      const double value = found[which * s.size() + i];
      EXPECT(std::fabs(value - wanted) <= kErrors[which] * std::fabs(wanted),
             "%d: scale %g, cap %g, S = %.9g: %.9g, not %.9g", which, scale, cap, s[i], value, wanted);
    }
  }
}

GPU_TEST(cap_exponents) {
  for (const auto& [scale, cap] : {std::pair(0.125, 50.0), {0.354, 30.0}, {1.0, 0.5}, {0.0625, 300.0}}) {
    check_cap_exponents<16>(random, scale, cap);
    check_cap_exponents<64>(random, scale, cap);
  }
}

// ---- apply_alibi ----------------------------------------------------------------------------------------------------------

// Block i: 64 rows at positions of their own, the tile whose first key is first_keys[i].
template <int kCount>
__global__ void alibi_kernel(float* s, const float* slopes, const int32_t* positions, const int32_t* first_keys) {
  float mine[kCount];
  read_accumulators(mine, s);
  const int32_t* first = positions + blockIdx.x * 64 + Accumulator::first_row(threadIdx.x);
  const int32_t two[2] = {first[0], first[8]};
  attn::apply_alibi(mine, slopes[blockIdx.x], two, first_keys[blockIdx.x], threadIdx.x);
  write_accumulators(mine, s);
}

// Distances up to 2^24 are exact, so that one multiply-add with one rounding is left; farther ones are rounded twice.
template <int kCount>
void check_alibi(Random& random) {
  constexpr int kBlocks = 40, kKeys = 2 * kCount;
  const std::vector<float> s = random_scores(random, kBlocks * 128 * kCount);
  std::vector<float> slopes;
  std::vector<int32_t> positions, first_keys;
  for (int block = 0; block < kBlocks; ++block) {
    const int32_t first_key = random.pick({0, kKeys, 77 * kKeys, (1 << 23) / kKeys * kKeys});
    first_keys.push_back(first_key);
    slopes.push_back(random.pick({0.0f, 0.5f, -0.25f, 8.0f, static_cast<float>(random.normal())}));
    for (int row = 0; row < 64; ++row) {
      const int32_t near = first_key + random.between(-10, kKeys + 10);
      positions.push_back(random.pick({near, near, random.between(-3000, 3000), first_key, 1 << 30, -(1 << 30)}));
    }
  }
  DeviceArray<float> device(s), device_slopes(slopes);
  DeviceArray<int32_t> device_positions(positions), device_keys(first_keys);
  launch(alibi_kernel<kCount>, kBlocks, 128, 0, device.data(), device_slopes.data(), device_positions.data(),
         device_keys.data());
  const std::vector<float> found = device.read();
  for (int i = 0; i < kBlocks * 128 * kCount; ++i) {
    const int block = i / kCount / 128, thread = i / kCount % 128, e = i % kCount;
    const int32_t position = positions[block * 64 + Accumulator::row(thread, e)];
    const int32_t key = first_keys[block] + Accumulator::column(thread, e);
    const int64_t distance = std::abs(int64_t{position} - key);
    const double penalty = double{slopes[block]} * static_cast<double>(distance), wanted = s[i] - penalty;
    const bool far = distance > 1 << 24;
    const double allowed = 0x1p-24 * (std::fabs(wanted) + (far ? 2 * std::fabs(penalty) : 0)) * (1 + 0x1p-20);
    const bool good = std::isfinite(s[i]) ? std::fabs(found[i] - wanted) <= allowed
                      : std::isnan(s[i])  ? std::isnan(found[i])
                                          : found[i] == s[i];
    EXPECT(good, "S = %.9g, slope %g, position %d, key %d: %.9g, not %.9g", s[i], slopes[block], position, key,
           found[i], wanted);
  }
}

GPU_TEST(apply_alibi) {
  check_alibi<16>(random);
  check_alibi<32>(random);
  check_alibi<64>(random);
}

// ---- OnlineSoftmax --------------------------------------------------------------------------------------------------------

constexpr int kCount = 64;  // 128 keys a block
constexpr int kKeys = 2 * kCount;
constexpr int kKeyBlocks = 6;

// A grid block is 64 rows; per key block and thread: P, the factors (1 where the reference stayed), whether it was raised.
struct SoftmaxOut {
  uint32_t* p;  // [block][key block][thread][kCount / 2]
  float* factor;  // [block][key block][thread][2]
  int32_t* raised;  // [block][key block][thread]
  float* inverse;  // [block][thread][2]
  float* lse;  // [block][thread][2]
};

// kTry: the test of the sums behind the exponentials, instead of the one of S before them. By fp16 with the multiply-adds spread.
template <class Element, bool kTry>
__global__ void __launch_bounds__(128)
    softmax_kernel(const float* s, const float* sinks, float scale_log2, float inverse_scale_log2, SoftmaxOut out) {
  OnlineSoftmax softmax;
#pragma unroll 1
  for (int block = 0; block < kKeyBlocks; ++block) {
    const int64_t i = (blockIdx.x * kKeyBlocks + block) * 128 + threadIdx.x;
    float x[kCount];
#pragma unroll
    for (int e = 0; e < kCount; ++e) x[e] = s[i * kCount + e];
    float factor[2] = {1.0f, 1.0f};
    uint32_t p[kCount / 8][4];
    bool raise = block == 0;
    constexpr bool kSpread = std::is_same_v<Element, __half>;
    if (!raise) raise = kTry ? !softmax.try_exponentiate<Element, kSpread>(x, p, scale_log2) : softmax.outgrown(x);
    if (raise) softmax.raise(x, scale_log2, inverse_scale_log2, factor);
    if (raise || !kTry) softmax.exponentiate<Element>(x, p, scale_log2);
    out.raised[i] = raise;
    for (int slot = 0; slot < 2; ++slot) out.factor[2 * i + slot] = factor[slot];
#pragma unroll
    for (int r = 0; r < kCount / 2; ++r) out.p[i * (kCount / 2) + r] = p[r / 4][r % 4];
  }
  float inverse[2], lse[2];
  softmax.finish(inverse, lse, sinks[blockIdx.x]);
  for (int slot = 0; slot < 2; ++slot) {
    out.inverse[2 * (blockIdx.x * 128 + threadIdx.x) + slot] = inverse[slot];
    out.lse[2 * (blockIdx.x * 128 + threadIdx.x) + slot] = lse[slot];
  }
}

// One row as the threads that share it saw it.
struct SoftmaxRow {
  double sink;
  std::vector<double> s;  // [key]
  std::vector<double> p;  // [key], rounded
  std::vector<std::vector<float>> factor;  // [key block][thread of four]
  std::vector<bool> raised;  // [key block]
  std::vector<float> inverse, lse;  // [thread of four]
};

template <class Element, bool kTry = false>
class SoftmaxRun {
 public:
  // rows: [row][key]; 64 rows a grid block, which has a sink (-inf: none) in the exponent's units.
  SoftmaxRun(const std::vector<std::vector<float>>& rows, float scale_log2, std::vector<float> sinks = {})
      : rows_(rows), sinks_(std::move(sinks)) {
    const int blocks = static_cast<int>(rows.size()) / 64;
    sinks_.resize(blocks, -kInfinity);
    const int per_block = kKeyBlocks * 128;
    std::vector<float> s(size_t(blocks) * per_block * kCount);
    for (size_t i = 0; i < s.size(); ++i) s[i] = rows[row_of(i / kCount, i % kCount)][key_of(i / kCount, i % kCount)];
    DeviceArray<float> device(s), factor(blocks * per_block * 2), inverse(blocks * 256), lse(blocks * 256);
    const DeviceArray<float> device_sinks(sinks_);
    DeviceArray<uint32_t> p(s.size() / 2);
    DeviceArray<int32_t> raised(blocks * per_block);
    launch(softmax_kernel<Element, kTry>, blocks, 128, 0, device.data(), device_sinks.data(), scale_log2,
           1.0f / scale_log2, SoftmaxOut{p.data(), factor.data(), raised.data(), inverse.data(), lse.data()});
    p_ = p.read();
    factor_ = factor.read();
    raised_ = raised.read();
    inverse_ = inverse.read();
    lse_ = lse.read();
  }

  SoftmaxRow row(int row) const {
    SoftmaxRow result;
    const int slot = row % 16 / 8, first_thread = row % 64 / 16 * 32 + row % 8 * 4;
    for (const float x : rows_[row]) result.s.push_back(x);
    result.sink = sinks_[row / 64];
    result.p.resize(kKeyBlocks * kKeys);
    for (int block = 0; block < kKeyBlocks; ++block) {
      result.factor.emplace_back();
      for (int thread = first_thread; thread < first_thread + 4; ++thread) {
        const size_t i = (size_t(row / 64) * kKeyBlocks + block) * 128 + thread;
        result.factor.back().push_back(factor_[2 * i + slot]);
        if (thread == first_thread) result.raised.push_back(raised_[i] != 0);
        EXPECT((raised_[i] != 0) == (raised_[i - thread % 32] != 0), "row %d: the warp disagrees", row);
        for (int x = 0; x < kCount; ++x) {  // half x % 2 of register x / 2
          if (OperandA::row(thread, x / 2 % 4) != row % 64) continue;
          const int key = block * kKeys + x / 8 * 16 + OperandA::column(thread, x / 2 % 4, x % 2);
          result.p[key] = decode<Element>(static_cast<uint16_t>(p_[i * (kCount / 2) + x / 2] >> 16 * (x % 2)));
        }
      }
    }
    for (int thread = first_thread; thread < first_thread + 4; ++thread) {
      result.inverse.push_back(inverse_[2 * (row / 64 * 128 + thread) + slot]);
      result.lse.push_back(lse_[2 * (row / 64 * 128 + thread) + slot]);
    }
    return result;
  }

 private:
  // Of the thread's element e in call `i` (grid block, key block, thread).
  static int row_of(size_t i, int e) {
    return static_cast<int>(i / 128 / kKeyBlocks) * 64 + Accumulator::row(i % 128, e);
  }
  static int key_of(size_t i, int e) {
    return static_cast<int>(i / 128 % kKeyBlocks) * kKeys + Accumulator::column(i % 128, e);
  }

  std::vector<std::vector<float>> rows_;
  std::vector<float> sinks_;
  std::vector<uint32_t> p_;
  std::vector<float> factor_, inverse_, lse_;
  std::vector<int32_t> raised_;
};

// The row's weights and lse in float64 (base 2: S * scale_log2 is exact there), with one more term 2^sink of the sum.
struct ExactRow {
  std::vector<double> weight;
  double lse = kMinusInfinity;
};

ExactRow exact_softmax(const std::vector<double>& s, double scale_log2, double sink) {
  ExactRow exact;
  double maximum = sink;
  for (const double x : s) maximum = std::max(maximum, x * scale_log2);
  exact.weight.assign(s.size(), 0.0);
  if (maximum == kMinusInfinity) return exact;
  double sum = std::exp2(sink - maximum);
  for (size_t j = 0; j < s.size(); ++j) sum += exact.weight[j] = std::exp2(s[j] * scale_log2 - maximum);
  for (double& w : exact.weight) w /= sum;
  exact.lse = (maximum + std::log2(sum)) * kLn2;
  return exact;
}

// A weight is its P times the factors of later key blocks times 1 / l. Its error: P is rounded to the format, on the scale
// of the final reference or a finer one (l >= 1); the rest is fp32, a hundred sums at most. A sink above the reference is
// one more factor, 2^-d with d <= 126 where anything is left: its argument's rounding makes 126 ln 2 2^-24 = 5.3e-6.
template <class Element>
void expect_row(const char* kind, int index, const SoftmaxRow& row, double scale_log2,
                double largest_p = std::exp2(attn::kLazyGrowth)) {
  const ExactRow exact = exact_softmax(row.s, scale_log2, row.sink);
  const double fp32 = 1e-5 + (row.sink == kMinusInfinity ? 0.0 : 6e-6);
  for (int thread = 1; thread < 4; ++thread) {
    EXPECT(row.lse[thread] == row.lse[0] && row.inverse[thread] == row.inverse[0], "%s, row %d: threads differ", kind,
           index);
  }
  if (exact.lse == kMinusInfinity) {
    EXPECT(row.lse[0] == -kInfinity && row.inverse[0] == 0.0f, "%s, row %d: lse %g, 1 / l %g", kind, index, row.lse[0],
           row.inverse[0]);
  } else {
    EXPECT(std::fabs(row.lse[0] - exact.lse) <= 1e-5 * std::max(1.0, std::fabs(exact.lse)),
           "%s, row %d: lse %.9g, not %.9g", kind, index, row.lse[0], exact.lse);
  }
  if (std::all_of(row.s.begin(), row.s.end(), [](double x) { return x == kMinusInfinity; })) {
    EXPECT(row.inverse[0] == 0.0f, "%s, row %d: 1 / l %g without a key", kind, index, row.inverse[0]);
  }
  // P stays below 2^8, or the largest sum. The bound on S that says so is wrong by three roundings of fp32.
  double largest = 0;
  for (const double x : row.s) largest = std::max(largest, std::isinf(x) ? 0.0 : std::fabs(x * scale_log2));
  const double p_bound = largest_p * std::exp2(largest * 0x1p-21) * (1 + kRoundoff<Element> + 1e-5);
  double later = row.inverse[0];
  for (int block = kKeyBlocks - 1; block >= 0; --block) {
    for (int key = block * kKeys; key < (block + 1) * kKeys; ++key) {
      const double weight = row.p[key] * later, wanted = exact.weight[key];
      EXPECT(row.p[key] <= p_bound, "%s, row %d, key %d: P = %g outgrew the reference", kind, index, key, row.p[key]);
      EXPECT(std::fabs(weight - wanted) <= (kRoundoff<Element> + fp32) * wanted + smallest<Element>() + 0x1p-100,
             "%s, row %d, key %d: weight %.9g, not %.9g", kind, index, key, weight, wanted);
    }
    for (const float factor : row.factor[block]) {
      EXPECT(factor == row.factor[block][0] && factor <= 1.0f, "%s, row %d, key block %d: factor %g", kind, index,
             block, factor);
    }
    later *= row.factor[block][0];
  }
}

// ---- Kinds of rows: S of a key. `unit` is one step of the exponent. ----

struct RowKind {
  const char* name;
  float (*value)(Random& random, int key, float unit);
};

float any(Random& random, float unit) { return unit * 3 * static_cast<float>(random.normal()); }

const RowKind kFiniteKinds[] = {
    {"normal", [](Random& random, int, float unit) { return any(random, unit); }},
    {"all -inf", [](Random&, int, float) { return -kInfinity; }},
    {"-inf at first", [](Random& random, int key, float unit) { return key < 300 ? -kInfinity : any(random, unit); }},
    {"-inf at last", [](Random& random, int key, float unit) { return key > 100 ? -kInfinity : any(random, unit); }},
    {"mostly -inf",
     [](Random& random, int, float unit) { return random.between(0, 40) == 0 ? any(random, unit) : -kInfinity; }},
    {"growing slowly",
     [](Random& random, int key, float unit) { return any(random, unit) + 3 * unit * (key / kKeys); }},
    {"growing within", [](Random&, int key, float unit) { return 7.9f * unit * key / (kKeyBlocks * kKeys); }},
    {"growing fast",
     [](Random& random, int key, float unit) { return any(random, unit) + 150 * unit * (key / kKeys); }},
    {"from far below",
     [](Random& random, int key, float unit) { return any(random, unit) - 300 * unit * (kKeyBlocks - key / kKeys); }},
    {"falling", [](Random& random, int key, float unit) { return any(random, unit) - 100 * unit * (key / kKeys); }},
    {"about -120", [](Random& random, int, float unit) { return any(random, unit) - 120 * unit; }},
    {"all -6e4", [](Random&, int, float) { return -6e4f; }},
    {"all 6e4", [](Random&, int, float) { return 6e4f; }},
    {"all 0", [](Random&, int, float) { return 0.0f; }},
    {"all -0", [](Random&, int, float) { return -0.0f; }},
    {"-0 after -inf", [](Random&, int key, float) { return key < 2 * kKeys ? -kInfinity : -0.0f; }},
    {"one 1e4 above",
     [](Random& random, int key, float unit) { return any(random, unit) + (key == 517 ? 1e4f : 0.0f); }},
    {"1e4 up and down", [](Random& random, int, float) { return 1e4f * static_cast<float>(random.normal()); }},
    {"denormal", [](Random& random, int, float) { return 1e-40f * static_cast<float>(random.normal()); }},
};

// Rows of 64: one kind a grid block, then all kinds mixed, as each kind makes its warp raise at other times.
template <class Element, bool kTry = false>
void check_softmax(Random& random, float scale_log2, const std::vector<float>& some_sinks = {-kInfinity}) {
  std::vector<std::vector<float>> rows;
  std::vector<const RowKind*> kinds;
  const int count = static_cast<int>(std::size(kFiniteKinds));
  for (int row = 0; row < 64 * (count + 3); ++row) {
    kinds.push_back(&kFiniteKinds[row / 64 < count ? row / 64 : random.between(0, count - 1)]);
    std::vector<float> s;
    for (int key = 0; key < kKeyBlocks * kKeys; ++key) s.push_back(kinds.back()->value(random, key, 1 / scale_log2));
    rows.push_back(std::move(s));
  }
  std::vector<float> sinks(rows.size() / 64);
  for (float& x : sinks) x = some_sinks[random.between(0, static_cast<int64_t>(some_sinks.size()) - 1)];
  const SoftmaxRun<Element, kTry> run(rows, scale_log2, sinks);
  for (size_t row = 0; row < rows.size(); ++row) {
    expect_row<Element>(kinds[row]->name, static_cast<int>(row), run.row(static_cast<int>(row)), scale_log2,
                        kTry ? attn::kLargestSum : std::exp2(attn::kLazyGrowth));
  }
}

// Scales of head dims 8, 64 and 256, and one far from them.
GPU_TEST(softmax_bf16) {
  for (const float scale : {0.354f, 0.125f, 0.0625f, 5.0f}) check_softmax<__nv_bfloat16>(random, scale * 1.4427f);
}
GPU_TEST(softmax_fp16) {
  for (const float scale : {0.354f, 0.125f, 0.0625f, 5.0f}) check_softmax<__half>(random, scale * 1.4427f);
}

GPU_TEST(softmax_by_sums_bf16) {
  for (const float scale : {0.0884f, 0.125f, 5.0f}) check_softmax<__nv_bfloat16, true>(random, scale * 1.4427f);
}
GPU_TEST(softmax_by_sums_fp16) {
  for (const float scale : {0.0884f, 0.125f, 5.0f}) check_softmax<__half, true>(random, scale * 1.4427f);
}

// Sinks far below all keys, among them, far above; and blocks without one. Rows without keys are of each kind too.
GPU_TEST(softmax_sink) {
  for (const float sink : {-1e4f, -300.0f, -20.0f, 0.0f, 3.0f, 40.0f, 1e4f}) {
    check_softmax<__nv_bfloat16>(random, 0.18f, {sink});
  }
  for (const float scale : {0.354f, 0.0625f}) {
    check_softmax<__half>(random, scale * 1.4427f, {-kInfinity, -20.0f, -1.5f, 0.0f, 5.0f, 130.0f});
  }
}

// A sink that is NaN spoils every row, also one without keys.
GPU_TEST(softmax_sink_nan) {
  const std::vector<float> none(kKeyBlocks * kKeys, -kInfinity), some(kKeyBlocks * kKeys, 1.0f);
  std::vector<std::vector<float>> rows;
  for (int row = 0; row < 64; ++row) rows.push_back(row % 2 == 0 ? none : some);
  const SoftmaxRun<__half> run(rows, 0.18f, {kNaN});
  for (int row = 0; row < 64; ++row) {
    const SoftmaxRow found = run.row(row);
    // A row without keys is 0 whatever its sink, and its lse the sink.
    const bool zero = row % 2 == 0;
    EXPECT((zero ? found.inverse[0] == 0 : std::isnan(found.inverse[0])) && std::isnan(found.lse[0]),
           "row %d: 1 / l %g, lse %g", row, found.inverse[0], found.lse[0]);
  }
}

// The reference stays where the maximum grows by less than 2^8, and follows where it grows by more.
GPU_TEST(softmax_raises_late) {
  constexpr float kScaleLog2 = 0.18f;
  std::vector<std::vector<float>> rows(128, std::vector<float>(kKeyBlocks * kKeys));
  for (int row = 0; row < 128; ++row) {
    for (int key = 0; key < kKeyBlocks * kKeys; ++key) {
      rows[row][key] = static_cast<float>(random.uniform() - 3) / kScaleLog2;  // maximum about -2
    }
    rows[row][5] = 0.0f;  // the first reference
    rows[row][2 * kKeys + random.between(0, kKeys - 1)] = 7.9f / kScaleLog2;
    if (row == 64 + 21) rows[row][3 * kKeys + random.between(0, kKeys - 1)] = 8.1f / kScaleLog2;
  }
  const SoftmaxRun<__nv_bfloat16> run(rows, kScaleLog2);
  for (int row = 0; row < 128; ++row) {
    const SoftmaxRow found = run.row(row);
    expect_row<__nv_bfloat16>("late", row, found, kScaleLog2);
    for (int block = 0; block < kKeyBlocks; ++block) {
      const bool wanted = block == 0 || (block == 3 && row / 16 == (64 + 21) / 16);  // the whole warp follows
      EXPECT(found.raised[block] == wanted, "row %d, key block %d: raised %d", row, block, int(found.raised[block]));
    }
  }
}

// By sums: it stays where a thread's P of a block, 64 of them for two rows, add up to less than 2^12.
GPU_TEST(softmax_by_sums_raises_late) {
  constexpr float kScaleLog2 = 0.18f;
  std::vector<std::vector<float>> rows(128, std::vector<float>(kKeyBlocks * kKeys));
  for (int row = 0; row < 128; ++row) {
    for (int key = 0; key < kKeyBlocks * kKeys; ++key) {
      rows[row][key] = static_cast<float>(random.uniform() - 3) / kScaleLog2;
    }
    rows[row][5] = 0.0f;
    rows[row][2 * kKeys + random.between(0, kKeys - 1)] = 11.9f / kScaleLog2;
    // Many below the limit, whose sum is above it: keys 0, 1, 8, 9, … are one thread's.
    if (row == 17) {
      for (int key = 0; key < kKeys; key += 8) rows[row][3 * kKeys + key] = 8.5f / kScaleLog2;
    }
    if (row == 64 + 21) rows[row][4 * kKeys + random.between(0, kKeys - 1)] = 12.1f / kScaleLog2;
  }
  const SoftmaxRun<__nv_bfloat16, true> run(rows, kScaleLog2);
  for (int row = 0; row < 128; ++row) {
    const SoftmaxRow found = run.row(row);
    expect_row<__nv_bfloat16>("late", row, found, kScaleLog2, attn::kLargestSum);
    for (int block = 0; block < kKeyBlocks; ++block) {
      const bool wanted = block == 0 || (block == 3 && row / 16 == 1) || (block == 4 && row / 16 == (64 + 21) / 16);
      EXPECT(found.raised[block] == wanted, "row %d, key block %d: raised %d", row, block, int(found.raised[block]));
    }
  }
}

// A NaN, or an inf that makes inf - inf, spoils its own row: l and lse are NaN. Its warp's other rows stay right.
template <bool kTry>
void check_nonfinite(Random& random) {
  constexpr float kScaleLog2 = 0.18f;
  std::vector<std::vector<float>> rows;
  for (int row = 0; row < 64 * 4; ++row) {
    std::vector<float> s;
    for (int key = 0; key < kKeyBlocks * kKeys; ++key)
      s.push_back(kFiniteKinds[row / 64 * 2].value(random, key, 1 / kScaleLog2));
    if (row % 3 == 0) s[random.between(0, kKeyBlocks * kKeys - 1)] = random.pick({kNaN, -kNaN, kInfinity});
    rows.push_back(std::move(s));
  }
  const SoftmaxRun<__half, kTry> run(rows, kScaleLog2);
  for (int row = 0; row < 64 * 4; ++row) {
    const SoftmaxRow found = run.row(row);
    if (row % 3 == 0) {
      EXPECT(std::isnan(found.inverse[0]) && std::isnan(found.lse[0]), "row %d: 1 / l %g, lse %g", row,
             found.inverse[0], found.lse[0]);
    } else {
      expect_row<__half>("beside NaN", row, found, kScaleLog2, attn::kLargestSum);
    }
  }
}
GPU_TEST(softmax_nonfinite) { check_nonfinite<false>(random); }
GPU_TEST(softmax_by_sums_nonfinite) { check_nonfinite<true>(random); }

// ---- SlowRow --------------------------------------------------------------------------------------------------------------

// What one row sees, and what else makes its softmax.
struct SlowKeys {
  TwoRuns runs = {};
  bool listed = false;  // cell by cell, and only keys whose bit is set
  int32_t bits[2][4] = {};  // of two cells of 128 keys
  float sink = attn::kNegativeInfinity;
  float slope = 0.0f;  // in units of S
  int32_t position = 0;

  bool sees(int32_t key) const {
    if (!test::sees(runs, key)) return false;
    return !listed || (static_cast<uint32_t>(bits[key / 128][key % 128 / 32]) >> key % 32 & 1) != 0;
  }
};

struct SlowArgs {
  TensorRef q, k, v, out;
  int32_t head_dim, head_dim_v;
  float scale_log2;
  attn::CapParams cap;
  const SlowKeys* keys;  // (rows)
  float* lse;  // (rows, 32)
};

// A block is one warp and does one row.
template <class Element, class Score>
__global__ void __launch_bounds__(32) slow_kernel(const __grid_constant__ SlowArgs args) {
  constexpr sm90::Sequence kHead = {1, 1};
  const int32_t row = blockIdx.x;
  const SlowKeys& mine = args.keys[row];
  attn::SlowRow<Element, Score> slow = {attn::row_of<Element>(args.q, kHead, row),
                                        attn::row_of<Element>(args.k, kHead, 0),
                                        attn::row_of<Element>(args.v, kHead, 0),
                                        args.k.stride_seq,
                                        args.v.stride_seq,
                                        args.head_dim,
                                        args.head_dim_v,
                                        args.scale_log2,
                                        args.cap,
                                        mine.slope,
                                        mine.position};
  const Interval runs[2] = {mask::main_run(mine.runs), mask::first_run(mine.runs)};
#pragma unroll 1
  for (int run = 0; run < 2; ++run) {
    if (!mine.listed) {
      slow.attend(runs[run]);
      continue;
    }
    for (int32_t cell = 0; cell < 2; ++cell) {
      slow.attend({max_of(runs[run].begin, 128 * cell), min_of(runs[run].end, 128 * cell + 128)}, mine.bits[cell],
                  128 * cell);
    }
  }
  args.lse[row * 32 + threadIdx.x] = slow.store(attn::row_of<Element>(args.out, kHead, row), mine.sink);
}

// Head 1 of batch 1, rows apart by more than their columns; all that is not of this head is NaN.
template <class Element>
struct HeadRows {
  int32_t length, columns;
  int64_t stride;
  std::vector<uint16_t> bits;

  HeadRows(Random& random, int32_t length, int32_t columns)
      : length(length), columns(columns), stride(columns + 8), bits(4 * length * stride, 0xFFFF) {
    for (int32_t row = 0; row < length; ++row) {
      for (int32_t column = 0; column < columns; ++column) at(row, column) = encode<Element>(random.normal());
    }
  }
  uint16_t& at(int32_t row, int32_t column) { return bits[(3 * length + row) * stride + column]; }
  double value(int32_t row, int32_t column) const {
    return decode<Element>(bits[(3 * length + row) * stride + column]);
  }
  TensorRef ref(uint16_t* data) const { return {data, 2 * length * stride, length * stride, stride}; }
};

template <class Element>
struct SlowCase {
  static constexpr int32_t kRows = 96, kLength = 150;
  static constexpr double kCap = 2.0;  // some logits are well below, some above
  HeadRows<Element> q, k, v;
  std::vector<SlowKeys> keys;
  float scale_log2;

  double scale() const { return scale_log2 * kLn2; }

  // Nothing is finite in keys 20 ... 22 of K, 60 ... 63 of V in some columns, 100 of both. Keys 130 on have -inf logits for
  // rows that multiply them by more than 0: q's first column is positive.
  SlowCase(Random& random, int32_t head_dim, int32_t head_dim_v)
      : q(random, kRows, head_dim),
        k(random, kLength, head_dim),
        v(random, kLength, head_dim_v),
        scale_log2(static_cast<float>(1.4427 / std::sqrt(head_dim))) {
    const auto bad = [&] { return encode<Element>(random.pick({kNaN, kInfinity, -kInfinity})); };
    for (const int32_t key : {20, 21, 22, 100}) k.at(key, random.between(0, head_dim - 1)) = encode<Element>(kNaN);
    for (const int32_t key : {60, 61, 62, 63, 100}) v.at(key, random.between(0, head_dim_v - 1)) = bad();
    for (int32_t key = 130; key < kLength; ++key) k.at(key, 0) = encode<Element>(-kInfinity);
    for (int32_t row = 0; row < kRows; ++row) {
      q.at(row, 0) &= 0x7FFF;
      if (q.at(row, 0) == 0) q.at(row, 0) = encode<Element>(1.0);
    }
    // Empty, one key, between the bad ones, over some of them, all keys, only -inf logits.
    for (const Interval& run : std::initializer_list<Interval>{{0, 0},
                                                               {20, 20},
                                                               {kLength, kLength},
                                                               {0, 1},
                                                               {60, 61},
                                                               {100, 101},
                                                               {23, 60},
                                                               {0, 20},
                                                               {64, 100},
                                                               {101, 130},
                                                               {23, 64},
                                                               {0, 23},
                                                               {23, 101},
                                                               {0, kLength},
                                                               {130, kLength},
                                                               {120, kLength},
                                                               {131, 132},
                                                               {23, 55},
                                                               {23, 56}}) {
      keys.push_back({{{run.begin, run.begin}, run}});
    }
    // A first run beside the bad keys, up to them, into the main run, without one.
    for (const TwoRuns& runs : std::initializer_list<TwoRuns>{{{0, 20}, {23, 60}},
                                                              {{0, 4}, {64, 100}},
                                                              {{3, 50}, {23, 58}},
                                                              {{64, 99}, {64, 100}},
                                                              {{5, 17}, {0, 0}},
                                                              {{5, 17}, {140, 140}},
                                                              {{0, 0}, {101, 130}},
                                                              {{0, 1}, {130, kLength}}}) {
      keys.push_back({runs});
    }
    while (keys.size() < kRows) {
      int32_t ends[4];
      for (int32_t& x : ends) x = random.between(0, kLength);
      std::sort(ends, ends + 4);
      const bool touching = random.between(0, 3) == 0;
      keys.push_back({{{ends[0], ends[touching ? 2 : 1]}, {ends[touching ? 1 : 2], ends[3]}}});
    }
    for (size_t row = 0; row < keys.size(); ++row) {
      SlowKeys& mine = keys[row];
      mine.sink = random.pick({-kInfinity, -kInfinity, -20.0f, 0.0f, 3.0f, 40.0f});
      mine.slope = static_cast<float>(random.pick({0.0, 0.05, 0.3, -0.05}) / scale());
      mine.position = random.between(-50, 200);
      mine.listed = row >= 40 && random.coin();
      const double density = random.pick({0.0, 0.03, 0.5, 1.0});
      for (int32_t key = 0; key < 256; ++key) {
        // Bits past the length are set: its interval hides them.
        if (key < kLength && random.uniform() >= density) continue;
        uint32_t word = static_cast<uint32_t>(mine.bits[key / 128][key % 128 / 32]);
        word |= 1u << key % 32;
        mine.bits[key / 128][key % 128 / 32] = static_cast<int32_t>(word);
      }
    }
  }
};

// What one row comes to in float64, and how large what fp32 rounds is.
struct SlowResult {
  std::vector<int32_t> keys;
  std::vector<double> s;
  bool spoilt = false;
  double error = 0;  // of a weight, relative
};

// An error of a logit is at most one of e^it, above and below the fraction: twice that of a weight. fp32 makes one of d + 2
// roundings of q k's terms; of kCapError of the capped logit; of ALiBi, the product with the scale and the difference to
// the reference 4 roundings of either term. n weights and n products are added; a sink's factor is 2^-d with d <= 126.
template <class Score, class Element>
SlowResult slow_result(const SlowCase<Element>& c, int32_t row) {
  const SlowKeys& mine = c.keys[row];
  const int32_t d = c.q.columns;
  const double factor = c.scale() / c.kCap;
  SlowResult result;
  double logit_error = 0;
  for (int32_t key = 0; key < c.kLength; ++key) {
    if (!mine.sees(key)) continue;
    double s = 0, size = 0;
    for (int32_t column = 0; column < d; ++column) {
      s += c.q.value(row, column) * c.k.value(key, column);
      size += std::fabs(c.q.value(row, column) * c.k.value(key, column));
    }
    double error = 0x1p-24 * (d + 2) * size;
    if (Score::kSoftcap) {
      if (std::isinf(size)) error = 0;  // tanh of infinity
      s = std::tanh(s * factor) / factor;
      error += kCapError * std::fabs(s);
    }
    const double penalty = Score::kAlibi ? double{mine.slope} * std::abs(mine.position - key) : 0.0;
    if (!Score::kPlain) error += 4 * 0x1p-24 * (std::fabs(s) + std::fabs(penalty));
    s -= penalty;
    result.keys.push_back(key);
    result.s.push_back(s);
    result.spoilt = result.spoilt || std::isnan(s);
    if (std::isfinite(error)) logit_error = std::max(logit_error, error * c.scale());
  }
  const double sink_roundings = mine.sink == attn::kNegativeInfinity ? 0 : 126 * kLn2 + 8;
  result.error = 2 * logit_error + 0x1p-24 * (static_cast<double>(result.keys.size()) + 8 + sink_roundings);
  return result;
}

template <class Score, class Element>
void expect_slow_row(const SlowCase<Element>& c, int32_t row, const std::vector<uint16_t>& out, float lse) {
  const SlowKeys& mine = c.keys[row];
  const int32_t d = c.q.columns, d_v = c.v.columns;
  const SlowResult result = slow_result<Score>(c, row);
  const ExactRow exact = exact_softmax(result.s, c.scale_log2, mine.sink);
  const std::string what = "row " + std::to_string(row) + ", keys " + text(mine.runs) + (mine.listed ? ", bits" : "") +
                           ", sink " + std::to_string(mine.sink);
  if (result.spoilt) {
    EXPECT(std::isnan(lse), "%s: lse %g, not NaN", what.c_str(), lse);
  } else if (exact.lse == kMinusInfinity) {
    EXPECT(lse == -kInfinity, "%s: lse %g, not -inf", what.c_str(), lse);
  } else {
    EXPECT(std::fabs(lse - exact.lse) <= 1e-5 * std::max(1.0, std::fabs(exact.lse)), "%s: lse %.9g, not %.9g",
           what.c_str(), lse, exact.lse);
  }
  for (int32_t column = 0; column < d_v; ++column) {
    double wanted = result.spoilt ? kNaN : 0.0, size = 0;
    for (size_t n = 0; n < result.keys.size(); ++n) {
      const double product = exact.weight[n] * c.v.value(result.keys[n], column);
      wanted += product;
      size += std::fabs(product);
    }
    const double found = decode<Element>(out[row * (d_v + 8) + column]);
    const double allowed = result.error * size + kRoundoff<Element> * std::fabs(wanted) * 1.001 + smallest<Element>();
    const bool good = std::isnan(wanted)   ? std::isnan(found)
                      : std::isinf(wanted) ? found == wanted
                                           : std::fabs(found - wanted) <= allowed;
    EXPECT(good, "%s, head dims %d and %d, column %d: %.9g, not %.9g +- %.3g", what.c_str(), d, d_v, column, found,
           wanted, allowed);
  }
  for (int32_t column = d_v; column < d_v + 8; ++column) {
    EXPECT(out[row * (d_v + 8) + column] == 0xFFFF, "row %d: wrote past its columns, at %d", row, column);
  }
}

template <class Element, class Score>
void check_slow_row(Random& random, int32_t head_dim, int32_t head_dim_v) {
  const SlowCase<Element> c(random, head_dim, head_dim_v);
  const DeviceArray<uint16_t> q(c.q.bits), k(c.k.bits), v(c.v.bits);
  const int64_t stride = head_dim_v + 8, rows = c.kRows * stride;
  const DeviceArray<uint16_t> out(4 * rows);
  const DeviceArray<SlowKeys> keys(c.keys);
  const DeviceArray<float> lse(c.kRows * 32);
  launch(
      slow_kernel<Element, Score>, c.kRows, 32, 0,
      SlowArgs{c.q.ref(q.data()), c.k.ref(k.data()), c.v.ref(v.data()), TensorRef{out.data(), 2 * rows, rows, stride},
               head_dim, head_dim_v, c.scale_log2, attn::make_cap(c.scale(), c.kCap), keys.data(), lse.data()});
  const std::vector<uint16_t> all = out.read();
  const std::vector<float> all_lse = lse.read();
  for (int64_t i = 0; i < 3 * rows; ++i)
    EXPECT(all[i] == 0xFFFF, "wrote to another head, at %lld", static_cast<long long>(i));
  const std::vector<uint16_t> mine(all.begin() + 3 * rows, all.end());
  for (int32_t row = 0; row < c.kRows; ++row) {
    const float first = all_lse[row * 32];
    for (int lane = 1; lane < 32; ++lane) {
      const float x = all_lse[row * 32 + lane];
      EXPECT(x == first || (std::isnan(x) && std::isnan(first)), "row %d: lse %g in lane 0, %g in lane %d", row, first,
             x, lane);
    }
    expect_slow_row<Score>(c, row, mine, all_lse[row * 32]);
  }
}

template <class Element, class Score>
void check_slow_rows(Random& random) {
  for (const int32_t head_dim : {8, 40, 64, 72, 128, 256}) check_slow_row<Element, Score>(random, head_dim, head_dim);
  check_slow_row<Element, Score>(random, 192, 128);
  check_slow_row<Element, Score>(random, 64, 256);
}

GPU_TEST(slow_row_bf16) { check_slow_rows<__nv_bfloat16, attn::PlainScore>(random); }
GPU_TEST(slow_row_fp16) { check_slow_rows<__half, attn::PlainScore>(random); }
GPU_TEST(slow_row_softcap_bf16) { check_slow_rows<__nv_bfloat16, attn::Score<true, false>>(random); }
GPU_TEST(slow_row_softcap_fp16) { check_slow_rows<__half, attn::Score<true, false>>(random); }
GPU_TEST(slow_row_alibi_bf16) { check_slow_rows<__nv_bfloat16, attn::Score<false, true>>(random); }
GPU_TEST(slow_row_alibi_fp16) { check_slow_rows<__half, attn::Score<false, true>>(random); }
GPU_TEST(slow_row_softcap_alibi_bf16) { check_slow_rows<__nv_bfloat16, attn::Score<true, true>>(random); }
GPU_TEST(slow_row_softcap_alibi_fp16) { check_slow_rows<__half, attn::Score<true, true>>(random); }

// ---- row_of -----------------------------------------------------------------------------------------------------------------

__global__ void row_of_kernel(TensorRef tensor, sm90::Sequence sequence, int32_t row, int64_t* offset) {
  *offset = attn::row_of<__half>(tensor, sequence, row) - static_cast<__half*>(tensor.data);
}

// Offsets of more than 2^31 elements, though every factor fits 32 bits.
GPU_TEST(row_of_far_rows) {
  DeviceArray<int64_t> offset(1);
  for (int i = 0; i < 20; ++i) {
    const sm90::Sequence sequence = {random.between(0, 1000), random.between(0, 1000), random.between(0, 1000)};
    const int32_t row = random.between(0, 1 << 24);
    const TensorRef tensor = {offset.data(), random.between(0, 1 << 30), random.between(0, 1 << 30),
                              random.between(0, 1 << 16), random.between(0, 1 << 30)};
    launch(row_of_kernel, 1, 1, 0, tensor, sequence, row, offset.data());
    const int64_t wanted = sequence.batch * tensor.stride_batch + sequence.head * tensor.stride_head +
                           sequence.residue * tensor.stride_residue + row * tensor.stride_seq;
    EXPECT(offset.read()[0] == wanted, "%lld, not %lld", static_cast<long long>(offset.read()[0]),
           static_cast<long long>(wanted));
  }
}

}  // namespace
}  // namespace flashmsa::test

int main(int argc, char** argv) { return flashmsa::test::run_tests(argc, argv); }
