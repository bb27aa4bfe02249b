// ALiBi's k-step: both its operands as a kernel makes them, and the softmax over blocks of which a part of the penalty is
// left out.
#include "attn/places.cuh"
#include "gpu_test.cuh"
#include "sm90/fragment.h"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

namespace flashmsa::test {
namespace {

using mask::Side;
using sm90::Accumulator;

constexpr int kSlots = 4, kWarpgroups = 2;
constexpr int kKeys = 128;
constexpr int kElements = kKeys / 2;  // S of a thread
using Operands = attn::PlaceOperands<kKeys, kSlots, kWarpgroups>;

// Block i takes slopes[i] in slot i % kSlots, between other slopes. s: [block][thread][element], S before and behind.
template <class Element>
__global__ void __launch_bounds__(128 * kWarpgroups, 1) places_kernel(float* s, const float* slopes, Side side) {
  auto& places = shared_as<Operands>();
  places.fill<Element>();
  __syncthreads();
  const uint32_t slot = blockIdx.x % kSlots;
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < kSlots; ++i) places.set_slope<Element>(i, i == slot ? slopes[blockIdx.x] : 12345.0f);
  }
  sm90::fence_async_proxy();
  __syncthreads();

  const uint64_t slope = places.slope_descriptor() + Operands::slot_step(slot) + Operands::side_step(side);
  float x[kElements];
  float* mine = s + (blockIdx.x * blockDim.x + threadIdx.x) * kElements;
#pragma unroll
  for (int e = 0; e < kElements; ++e) x[e] = mine[e];
  sm90::wgmma_fence();
  sm90::Wgmma<kKeys, Element>::ss(x, slope, places.key_descriptor(), true);
  sm90::wgmma_commit();
  sm90::wgmma_wait<0>();
  sm90::pin_registers(x);
#pragma unroll
  for (int e = 0; e < kElements; ++e) mine[e] = x[e];
}

// Slopes of every size that the step takes, and of both signs; some need all of the three pieces.
std::vector<float> some_slopes(Random& random, int count) {
  std::vector<float> slopes = {0.0f, attn::kLargestPlaceSlope, -attn::kLargestPlaceSlope,
                               1.0f, 0x1.fffffep-1f,           -1.0f / 3};
  while (static_cast<int>(slopes.size()) < count) {
    slopes.push_back(static_cast<float>(std::exp2(random.uniform() * 35 - 20) * (random.coin() ? 1 : -1)));
  }
  return slopes;
}

// S + slope * place, with the error of an addition that cuts off behind fp32's last bit. fp16's smallest pieces are
// multiples of 2^-36.
template <class Element>
void check_places(Random& random, Side side) {
  constexpr int kBlocks = 40;
  const std::vector<float> slopes = some_slopes(random, kBlocks);
  std::vector<float> s = random_normals(random, kBlocks * 128 * kWarpgroups * kElements);
  for (float& x : s) x *= static_cast<float>(std::exp2(random.between(-6, 6)));
  s[0] = kInfinity;
  s[1] = kNaN;
  DeviceArray<float> device(s), device_slopes(slopes);
  launch(places_kernel<Element>, kBlocks, 128 * kWarpgroups, sizeof(Operands), device.data(), device_slopes.data(),
         side);
  const std::vector<float> found = device.read();
  for (size_t i = 0; i < s.size(); ++i) {
    const int block = static_cast<int>(i / kElements / (128 * kWarpgroups));
    const int thread = static_cast<int>(i / kElements % 128), e = static_cast<int>(i % kElements);
    const int key = Accumulator::column(thread, e);
    const int place = side == Side::kBehind ? key - (kKeys - 1) : side == Side::kBefore ? -key : 0;
    const double added = double{slopes[block]} * place, wanted = s[i] + added;
    const double allowed = side == Side::kAmid ? 0.0 : 0x1p-21 * (std::fabs(s[i]) + std::fabs(added)) + 0x1p-29;
    const bool good = std::isfinite(s[i]) ? std::fabs(found[i] - wanted) <= allowed
                      : std::isnan(s[i])  ? std::isnan(found[i])
                                          : found[i] == s[i];
    EXPECT(good, "side %d, S = %.9g, slope %.9g, thread %d, key %d: %.9g, not %.9g", int(side), s[i], slopes[block],
           thread, key, found[i], wanted);
  }
}

template <class Element>
void check_sides(Random& random) {
  for (const Side side : {Side::kAmid, Side::kBefore, Side::kBehind}) check_places<Element>(random, side);
}

GPU_TEST(places_bf16) { check_sides<__nv_bfloat16>(random); }
GPU_TEST(places_fp16) { check_sides<__half>(random); }

// ---- OnlineSoftmax over shifted blocks --------------------------------------------------------------------------------

constexpr int kKeyBlocks = 5;

// A grid block is 64 rows, each with a distance of its own from every key block. lse and the row's sum of P / l: [thread][2].
__global__ void __launch_bounds__(128) shifted_kernel(const float* s, const float* distances, const float* slopes,
                                                      float scale_log2, float* lse, float* sum) {
  attn::OnlineSoftmax softmax;
  const int32_t row = blockIdx.x * 64 + Accumulator::first_row(threadIdx.x);
  float weights[2] = {0.0f, 0.0f};
#pragma unroll 1
  for (int block = 0; block < kKeyBlocks; ++block) {
    float x[kElements];
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      x[e] = s[((blockIdx.x * kKeyBlocks + block) * 128 + threadIdx.x) * kElements + e];
    }
    const float slope = slopes[blockIdx.x];
    const attn::BlockShift shift = {
        slope, slope * scale_log2, {distances[row * kKeyBlocks + block], distances[(row + 8) * kKeyBlocks + block]}};
    float factor[2] = {1.0f, 1.0f};
    if (block == 0 || softmax.outgrown(x, shift)) softmax.raise(x, scale_log2, 1.0f / scale_log2, factor, shift);
    uint32_t p[kElements / 8][4];
    softmax.exponentiate<__half>(x, p, scale_log2, attn::AllKept(), shift);
    for (int slot = 0; slot < 2; ++slot) weights[slot] *= factor[slot];
#pragma unroll
    for (int r = 0; r < kElements / 2; ++r) {
      const float2 pair = attn::unpack2(p[r / 4][r % 4], __half());
      weights[r % 2] += pair.x + pair.y;
    }
  }
  float inverse[2], natural[2];
  softmax.finish(inverse, natural, attn::kNegativeInfinity);
  for (int slot = 0; slot < 2; ++slot) {
    weights[slot] += __shfl_xor_sync(~0u, weights[slot], 1);
    weights[slot] += __shfl_xor_sync(~0u, weights[slot], 2);
    lse[2 * (blockIdx.x * 128 + threadIdx.x) + slot] = natural[slot];
    sum[2 * (blockIdx.x * 128 + threadIdx.x) + slot] = weights[slot] * inverse[slot];
  }
}

// lse is that of S - slope * distance, and P, of which none may leave fp16's range, adds up to l. `base`: how far all S lie
// from 0, in units of the exponent. Where S and its shift cancel, the shift's last bit is left.
void check_shifted(Random& random, float scale_log2, float base) {
  constexpr int kBlocks = 24;
  std::vector<float> slopes, distances;
  std::vector<float> s = random_normals(random, kBlocks * kKeyBlocks * 128 * kElements);
  for (float& x : s) {
    x = (base + 3 * x) / scale_log2;
    if (random.between(0, 200) == 0) x = -kInfinity;
  }
  for (int block = 0; block < kBlocks; ++block) {
    slopes.push_back(random.pick({0.0f, 0.01f, -0.01f, 0.5f, -0.5f, 3.0f, -3.0f}) / scale_log2);
  }
  for (int i = 0; i < kBlocks * 64 * kKeyBlocks; ++i) {
    distances.push_back(static_cast<float>(random.pick<int64_t>({0, random.between(0, 40), random.between(0, 1000)})));
  }
  DeviceArray<float> device(s), device_distances(distances), device_slopes(slopes), lse(kBlocks * 256),
      sum(kBlocks * 256);
  launch(shifted_kernel, kBlocks, 128, 0, device.data(), device_distances.data(), device_slopes.data(), scale_log2,
         lse.data(), sum.data());
  const std::vector<float> found = lse.read(), total = sum.read();
  std::vector<double> exact(kBlocks * 64, 0.0), top(kBlocks * 64, -std::numeric_limits<double>::infinity());
  const auto each = [&](const auto& body) {
    for (size_t i = 0; i < s.size(); ++i) {
      const int thread = static_cast<int>(i / kElements % 128),
                key_block = static_cast<int>(i / kElements / 128 % kKeyBlocks);
      const int block = static_cast<int>(i / kElements / 128 / kKeyBlocks);
      const int row = block * 64 + Accumulator::row(thread, static_cast<int>(i % kElements));
      body(row, (s[i] - double{slopes[block]} * distances[row * kKeyBlocks + key_block]) * scale_log2);
    }
  };
  each([&](int row, double x) { top[row] = std::max(top[row], x); });
  each([&](int row, double x) { exact[row] += std::exp2(x - top[row]); });
  for (int i = 0; i < kBlocks * 256; ++i) {
    const int row = i / 256 * 64 + Accumulator::first_row(i / 2 % 128) + 8 * (i % 2);
    const double wanted = (top[row] + std::log2(exact[row])) * 0.69314718055994530942;
    const double allowed = 1e-5 * std::max(1.0, std::fabs(wanted)) + 0x1p-24 * std::fabs(base);
    EXPECT(std::fabs(found[i] - wanted) <= allowed, "base %g, slope %g, row %d: lse %.9g, not %.9g", base,
           slopes[i / 256], row, found[i], wanted);
    EXPECT(std::fabs(total[i] - 1.0f) <= 0x1p-10f, "base %g, slope %g, row %d: the weights' sum is %.9g", base,
           slopes[i / 256], row, total[i]);
  }
}

// Bounds of both signs: far below 0 a block's S outgrows its reference only by way of its shift.
GPU_TEST(softmax_of_shifted_blocks) {
  for (const float scale_log2 : {0.127f, 0.18f, 2.0f}) {
    for (const float base : {0.0f, -40.0f, 40.0f, -3000.0f}) check_shifted(random, scale_log2, base);
  }
}

}  // namespace
}  // namespace flashmsa::test

int main(int argc, char** argv) { return flashmsa::test::run_tests(argc, argv); }
