// ldmatrix, stmatrix and number conversion; what the epilogue makes of accumulators.
#include "attn/epilogue.cuh"
#include "gpu_test.cuh"
#include "sm90/fragment.h"
#include "sm90/matrix.cuh"
#include "sm90/swizzle.h"

namespace flashmsa::test {
namespace {

using sm90::Accumulator;
using sm90::Matrix16x16;
using sm90::OperandA;
using sm90::SwizzledTile;

// ---- ldmatrix, stmatrix -------------------------------------------------------------------------------------------------

using Tile64x128 = SwizzledTile<64, 128>;
constexpr int kSteps = Tile64x128::kColumns / 16;

// One warpgroup: registers of thread t, step k, at (t * kSteps + k) * 4.
template <bool kLoad>
__global__ void matrix_kernel(uint4* tile, uint32_t* registers) {
  auto& shared = shared_as<TilePlan<Tile64x128>>();
  block_copy(shared.tile, tile, Tile64x128::kBytes);
  __syncthreads();
  const int32_t lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
  for (int k = 0; k < kSteps; ++k) {
    uint32_t* mine = registers + (threadIdx.x * kSteps + k) * 4;
    const uint32_t address = shared_address(shared.tile) + Tile64x128::chunk_offset(warp_row + Matrix16x16::row(lane),
                                                                                    2 * k + Matrix16x16::half(lane));
    if constexpr (kLoad) {
      uint32_t r[4];
      sm90::ldmatrix_x4(r, address);
      for (int i = 0; i < 4; ++i) mine[i] = r[i];
    } else {
      sm90::stmatrix_x4(address, mine[0], mine[1], mine[2], mine[3]);
    }
  }
  __syncthreads();
  block_copy(tile, shared.tile, Tile64x128::kBytes);
}

// Registers hold what OperandA says of the tile's elements, whichever way the data went.
void expect_operands(const std::vector<uint16_t>& tile, const std::vector<uint32_t>& registers) {
  for (int thread = 0; thread < 128; ++thread) {
    for (int k = 0; k < kSteps; ++k) {
      for (int r = 0; r < 4; ++r) {
        for (int half = 0; half < 2; ++half) {
          const int row = OperandA::row(thread, r), column = 16 * k + OperandA::column(thread, r, half);
          const uint32_t word = registers[(thread * kSteps + k) * 4 + r];
          EXPECT(static_cast<uint16_t>(word >> 16 * half) == tile[Tile64x128::offset(row, column) / 2],
                 "thread %d, step %d, register %d, half %d", thread, k, r, half);
        }
      }
    }
  }
}

GPU_TEST(ldmatrix) {
  const std::vector<uint16_t> values = random_patterns(random, Tile64x128::kBytes / 2);
  DeviceArray<uint16_t> tile(values);
  DeviceArray<uint32_t> registers(128 * kSteps * 4);
  launch(matrix_kernel<true>, 1, 128, sizeof(TilePlan<Tile64x128>), tile.as<uint4>(), registers.data());
  expect_operands(values, registers.read());
  EXPECT(tile.read() == values, "the tile changed");
}

GPU_TEST(stmatrix) {
  std::vector<uint32_t> values(128 * kSteps * 4);
  for (uint32_t& x : values) x = static_cast<uint32_t>(random.bits());
  DeviceArray<uint16_t> tile(Tile64x128::kBytes / 2);
  DeviceArray<uint32_t> registers(values);
  launch(matrix_kernel<false>, 1, 128, sizeof(TilePlan<Tile64x128>), tile.as<uint4>(), registers.data());
  expect_operands(tile.read(), values);
}

// ---- pack2 ----------------------------------------------------------------------------------------------------------------

template <class Element>
__global__ void pack_kernel(const float* low, const float* high, uint32_t* packed, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) packed[i] = sm90::pack2<Element>(low[i], high[i]);
}

// Every value of the format, the middles between neighbours and the floats on both sides of them; then random bits.
template <class Element>
std::vector<float> rounding_cases(Random& random) {
  std::vector<float> cases = {
      0.0f, -0.0f, kInfinity, -kInfinity, kNaN, -kNaN, as_float(0x7F800001), as_float(0xFFC12345)};
  for (int bits = 0; bits < kInfinityBits<Element>; bits += random.between(1, 3)) {
    const double here = decode<Element>(static_cast<uint16_t>(bits));
    // The largest finite number's neighbour stands where the format would go on.
    const double above = bits + 1 < kInfinityBits<Element>
                             ? decode<Element>(static_cast<uint16_t>(bits + 1))
                             : 2 * here - decode<Element>(static_cast<uint16_t>(bits - 1));
    const float middle = static_cast<float>((here + above) / 2);
    for (const float x :
         {static_cast<float>(here), middle, std::nextafter(middle, 0.0f), std::nextafter(middle, kInfinity)}) {
      cases.push_back(random.coin() ? -x : x);
    }
  }
  for (int i = 0; i < 20000; ++i) cases.push_back(as_float(static_cast<uint32_t>(random.bits())));
  return cases;
}

template <class Element>
void check_pack2(Random& random) {
  const std::vector<float> low = rounding_cases<Element>(random);
  std::vector<float> high = low;
  std::rotate(high.begin(), high.begin() + random.between(1, 1000), high.end());
  const int count = static_cast<int>(low.size());
  DeviceArray<float> device_low(low), device_high(high);
  DeviceArray<uint32_t> packed(low.size());
  launch(pack_kernel<Element>, ceil_div(count, 256), 256, 0, device_low.data(), device_high.data(), packed.data(),
         count);
  const std::vector<uint32_t> words = packed.read();
  for (int i = 0; i < count; ++i) {
    for (int half = 0; half < 2; ++half) {
      const float x = half == 0 ? low[i] : high[i];
      const auto found = static_cast<uint16_t>(words[i] >> 16 * half);
      if (std::isnan(x)) {
        EXPECT(std::isnan(decode<Element>(found)), "NaN %08x became %04x", std::bit_cast<uint32_t>(x), found);
      } else {
        EXPECT(found == encode<Element>(x), "%a in half %d: %04x, not %04x", x, half, found, encode<Element>(x));
      }
    }
  }
}

GPU_TEST(pack2_bf16) { check_pack2<__nv_bfloat16>(random); }
GPU_TEST(pack2_fp16) { check_pack2<__half>(random); }

// ---- Approximate functions --------------------------------------------------------------------------------------------------

enum class Function { kExp2, kLog2, kReciprocal };

template <Function kFunction>
__global__ void function_kernel(const float* x, float* y, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  if constexpr (kFunction == Function::kExp2) y[i] = sm90::exp2_approx(x[i]);
  if constexpr (kFunction == Function::kLog2) y[i] = sm90::log2_approx(x[i]);
  if constexpr (kFunction == Function::kReciprocal) y[i] = sm90::reciprocal_approx(x[i]);
}

template <Function kFunction>
std::vector<float> device_function(const std::vector<float>& x) {
  const int count = static_cast<int>(x.size());
  DeviceArray<float> device_x(x), device_y(x.size());
  launch(function_kernel<kFunction>, ceil_div(count, 256), 256, 0, device_x.data(), device_y.data(), count);
  return device_y.read();
}

// Equal, to the sign of 0; any NaN is as good as another.
template <Function kFunction>
void expect_values(const std::vector<float>& x, const std::vector<float>& wanted) {
  const std::vector<float> y = device_function<kFunction>(x);
  for (size_t i = 0; i < x.size(); ++i) {
    const bool good =
        std::isnan(wanted[i]) ? std::isnan(y[i]) : y[i] == wanted[i] && std::signbit(y[i]) == std::signbit(wanted[i]);
    EXPECT(good, "of %a: %a, not %a", x[i], y[i], wanted[i]);
  }
}

// The unit in fp32's last place at a normal number.
double ulp(double x) { return std::ldexp(1.0, std::ilogb(x) - 23); }

// Positive, with exponents evenly in [low, high).
std::vector<float> random_magnitudes(Random& random, int count, int low, int high) {
  std::vector<float> x(count);
  for (float& value : x) value = static_cast<float>(std::ldexp(1 + random.uniform(), random.between(low, high - 1)));
  return x;
}

GPU_TEST(exp2_approx) {
  std::vector<float> x;
  for (int i = 0; i < 300000; ++i) x.push_back(static_cast<float>(253.9 * random.uniform() - 126));
  for (const float small : random_magnitudes(random, 100000, -30, 1)) x.push_back(random.coin() ? small : -small);
  for (int i = -125; i < 128; ++i) x.push_back(static_cast<float>(i));
  const std::vector<float> y = device_function<Function::kExp2>(x);
  for (size_t i = 0; i < x.size(); ++i) {
    const double wanted = std::exp2(static_cast<double>(x[i]));
    EXPECT(std::fabs(y[i] - wanted) <= 2 * ulp(wanted), "2^%a: %a, not %a", x[i], y[i], wanted);
  }
}

GPU_TEST(exp2_approx_special_values) {
  expect_values<Function::kExp2>(
      {-kInfinity, kInfinity, 0.0f, -0.0f, 1e-40f, -1e-40f, 128.0f, 1e30f, -150.0f, -1e30f, -127.5f, kNaN, -kNaN},
      {0.0f, kInfinity, 1.0f, 1.0f, 1.0f, 1.0f, kInfinity, kInfinity, 0.0f, 0.0f, 0.0f, kNaN, kNaN});
}

GPU_TEST(reciprocal_approx) {
  std::vector<float> x = random_magnitudes(random, 300000, -125, 125);
  for (float& value : x) value = random.between(0, 7) == 0 ? -value : value;
  for (int i = 1; i < 5000; ++i) x.push_back(static_cast<float>(i));
  const std::vector<float> y = device_function<Function::kReciprocal>(x);
  for (size_t i = 0; i < x.size(); ++i) {
    const double wanted = 1.0 / x[i];
    EXPECT(std::fabs(y[i] - wanted) <= ulp(wanted), "1 / %a: %a, not %a", x[i], y[i], wanted);
  }
  expect_values<Function::kReciprocal>({kInfinity, -kInfinity, 0.0f, -0.0f, kNaN},
                                       {0.0f, -0.0f, kInfinity, -kInfinity, kNaN});
}

GPU_TEST(log2_approx) {
  std::vector<float> x = random_magnitudes(random, 300000, -126, 127);
  for (const float near_one : random_magnitudes(random, 100000, -1, 1)) x.push_back(near_one);
  for (int i = 1; i < 5000; ++i) x.push_back(static_cast<float>(i));
  const std::vector<float> y = device_function<Function::kLog2>(x);
  for (size_t i = 0; i < x.size(); ++i) {
    const double wanted = std::log2(static_cast<double>(x[i]));
    const double allowed = 0x1p-22 * (x[i] > 0.5f && x[i] < 2.0f ? 1.0 : std::fabs(wanted));
    EXPECT(std::fabs(y[i] - wanted) <= allowed, "log2 %a: %a, not %a", x[i], y[i], wanted);
  }
  expect_values<Function::kLog2>({kInfinity, 0.0f, -0.0f, -1.0f, kNaN},
                                 {kInfinity, -kInfinity, -kInfinity, kNaN, kNaN});
}

// ---- Epilogue -----------------------------------------------------------------------------------------------------------------

constexpr int kCount = 64;

__global__ void nonfinite_kernel(const float* o, int32_t* flags) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  float mine[kCount];
#pragma unroll
  for (int e = 0; e < kCount; ++e) mine[e] = o[i * kCount + e];
  flags[i] = attn::any_nonfinite(mine);
}

// One bad element makes its warp say yes, and no other.
GPU_TEST(any_nonfinite) {
  constexpr int kBlocks = 200;
  std::vector<float> o(kBlocks * 128 * kCount);
  for (float& x : o) x = static_cast<float>(random.normal()) * random.pick({1.0f, 0.0f, -0.0f, 1e-42f, 2e37f, -2e37f});
  std::vector<bool> bad(kBlocks * 4, false);
  for (int block = 0; block < kBlocks; block += 2) {
    const int thread = random.between(0, 127), e = random.between(0, kCount - 1);
    o[(block * 128 + thread) * kCount + e] = random.pick({kNaN, -kNaN, kInfinity, -kInfinity});
    bad[block * 4 + thread / 32] = true;
  }
  DeviceArray<float> device(o);
  DeviceArray<int32_t> flags(kBlocks * 128);
  launch(nonfinite_kernel, kBlocks, 128, 0, device.data(), flags.data());
  const std::vector<int32_t> found = flags.read();
  for (size_t i = 0; i < found.size(); ++i) EXPECT(found[i] == bad[i / 32], "warp %zu, lane %zu", i / 32, i % 32);
}

__global__ void scale_kernel(const float* o, const float* factors, float* scaled) {
  float mine[kCount];
#pragma unroll
  for (int e = 0; e < kCount; ++e) mine[e] = o[threadIdx.x * kCount + e];
  const int32_t row = Accumulator::first_row(threadIdx.x);
  const float factor[2] = {factors[row], factors[row + 8]};
  attn::scale_rows(mine, factor);
#pragma unroll
  for (int e = 0; e < kCount; ++e) scaled[threadIdx.x * kCount + e] = mine[e];
}

GPU_TEST(scale_rows) {
  const std::vector<float> o = random_normals(random, 128 * kCount), factors = random_normals(random, 64);
  DeviceArray<float> device_o(o), device_factors(factors), scaled(o.size());
  launch(scale_kernel, 1, 128, 0, device_o.data(), device_factors.data(), scaled.data());
  const std::vector<float> found = scaled.read();
  for (int i = 0; i < 128 * kCount; ++i) {
    EXPECT(found[i] == o[i] * factors[Accumulator::row(i / kCount, i % kCount)], "thread %d, element %d", i / kCount,
           i % kCount);
  }
}

constexpr uint8_t kPoison = 0x5A;
constexpr int kWarpgroups = 2;

template <int kColumns>
using StagingTile = SwizzledTile<64 * (kWarpgroups + 1), kColumns>;

// Of kHeldColumns columns of accumulators, the kColumns from first_column on. The last 64 rows of the tile belong to nobody.
template <class Element, int kHeldColumns, int kColumns, int kFirstColumn>
__global__ void __launch_bounds__(128 * kWarpgroups) stage_kernel(const float* o, uint4* tile) {
  using Tile = StagingTile<kColumns>;
  constexpr int kHeld = kHeldColumns / 2;
  auto& shared = shared_as<TilePlan<Tile>>();
  for (uint32_t i = threadIdx.x; i < Tile::kBytes; i += blockDim.x) shared.tile[i] = kPoison;
  float mine[kHeld];
#pragma unroll
  for (int e = 0; e < kHeld; ++e) mine[e] = o[threadIdx.x * kHeld + e];
  __syncthreads();
  attn::stage_rows<Element, Tile, kColumns / 2>(mine, kFirstColumn / 2, shared_address(shared.tile),
                                                threadIdx.x / 32 * 16);
  __syncthreads();
  block_copy(tile, shared.tile, Tile::kBytes);
}

template <class Element, int kHeldColumns, int kColumns, int kFirstColumn>
void check_stage_rows(Random& random) {
  using Tile = StagingTile<kColumns>;
  constexpr int kHeld = kHeldColumns / 2;
  const std::vector<float> o = random_normals(random, 128 * kWarpgroups * kHeld);
  DeviceArray<float> device(o);
  DeviceArray<uint16_t> tile(Tile::kBytes / 2);
  launch(stage_kernel<Element, kHeldColumns, kColumns, kFirstColumn>, 1, 128 * kWarpgroups, sizeof(TilePlan<Tile>),
         device.data(), tile.template as<uint4>());
  std::vector<uint16_t> wanted(Tile::kBytes / 2, kPoison * 0x101);
  for (int i = 0; i < 128 * kWarpgroups * kHeld; ++i) {
    const int thread = i / kHeld, e = i % kHeld;
    const int row = thread / 128 * 64 + Accumulator::row(thread % 128, e);
    const int column = Accumulator::column(thread % 128, e) - kFirstColumn;
    if (column >= 0 && column < kColumns) wanted[Tile::offset(row, column) / 2] = encode<Element>(o[i]);
  }
  const std::vector<uint16_t> found = tile.read();
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT(found[i] == wanted[i], "%d of %d columns from %d: byte %zu of the tile: %04x, not %04x", kColumns,
           kHeldColumns, kFirstColumn, 2 * i, found[i], wanted[i]);
  }
}

template <class Element>
void check_stage_rows_of_all_widths(Random& random) {
  check_stage_rows<Element, 64, 64, 0>(random);
  check_stage_rows<Element, 128, 128, 0>(random);
  check_stage_rows<Element, 256, 128, 0>(random);
  check_stage_rows<Element, 256, 128, 128>(random);
  check_stage_rows<Element, 256, 64, 192>(random);
  // Fewer columns than the tile has.
  check_stage_rows<Element, 96, 128, 0>(random);
  check_stage_rows<Element, 96, 64, 64>(random);
  check_stage_rows<Element, 192, 64, 128>(random);
}

GPU_TEST(stage_rows_bf16) { check_stage_rows_of_all_widths<__nv_bfloat16>(random); }
GPU_TEST(stage_rows_fp16) { check_stage_rows_of_all_widths<__half>(random); }

}  // namespace
}  // namespace flashmsa::test

int main(int argc, char** argv) { return flashmsa::test::run_tests(argc, argv); }
