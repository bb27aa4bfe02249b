// wgmma in every shape and form in use, through the descriptors that the kernels use.
//
// Whole numbers come first: their sums are exact in fp32, so every bit must be right. Normal numbers follow, within the
// error that additions which cut off after fp32's last bit can make.
#include <type_traits>

#include "gpu_test.cuh"
#include "sm90/fragment.h"
#include "sm90/swizzle.h"
#include "sm90/tma.cuh"
#include "sm90/wgmma.cuh"

namespace flashmsa::test {
namespace {

using sm90::Accumulator;
using sm90::KMajor;
using sm90::MnMajor;
using sm90::OperandA;
using sm90::SwizzledTile;
using sm90::Wgmma;

// ---- Host matrices ------------------------------------------------------------------------------------------------------

struct Matrix {
  int rows, columns;
  std::vector<double> values;

  Matrix(int rows, int columns) : rows(rows), columns(columns), values(size_t(rows) * columns, 0.0) {}
  double& operator()(int r, int c) { return values[size_t(r) * columns + c]; }
  double operator()(int r, int c) const { return values[size_t(r) * columns + c]; }
};

enum class Numbers { kWhole, kNormal };

// Numbers that the format holds: -8 ... 8, or rounded normal ones.
template <class Element>
Matrix random_matrix(Random& random, int rows, int columns, Numbers numbers) {
  Matrix m(rows, columns);
  for (double& x : m.values) {
    x = numbers == Numbers::kWhole ? random.between(-8, 8) : decode<Element>(encode<Element>(random.normal()));
  }
  return m;
}

Matrix transpose(const Matrix& m) {
  Matrix t(m.columns, m.rows);
  for (int r = 0; r < m.rows; ++r) {
    for (int c = 0; c < m.columns; ++c) t(c, r) = m(r, c);
  }
  return t;
}

// c += a b over the columns [first, last) of a; b has a's columns as rows, and columns that c may lack. `size`: the same
// of magnitudes.
void multiply(const Matrix& a, const Matrix& b, int first, int last, Matrix& c, Matrix& size) {
  for (int i = 0; i < a.rows; ++i) {
    double* c_row = &c(i, 0);
    double* size_row = &size(i, 0);
    for (int k = first; k < last; ++k) {
      const double x = a(i, k);
      const double* b_row = &b.values[size_t(k) * b.columns];
      for (int j = 0; j < c.columns; ++j) {
        c_row[j] += x * b_row[j];
        size_row[j] += std::fabs(x * b_row[j]);
      }
    }
  }
}

template <class Element, class Tile>
std::vector<uint16_t> swizzled(const Matrix& m) {
  std::vector<uint16_t> bits(Tile::kBytes / 2);
  for (int r = 0; r < Tile::kRows; ++r) {
    for (int c = 0; c < Tile::kColumns; ++c) bits[Tile::offset(r, c) / 2] = encode<Element>(m(r, c));
  }
  return bits;
}

// A as its registers: [step][thread][4].
template <class Element>
std::vector<uint32_t> operand_registers(const Matrix& a) {
  std::vector<uint32_t> registers;
  for (int k = 0; k < a.columns / 16; ++k) {
    for (int thread = 0; thread < 128; ++thread) {
      for (int r = 0; r < 4; ++r) {
        uint32_t word = 0;
        for (int half = 0; half < 2; ++half) {
          const double x = a(OperandA::row(thread, r), 16 * k + OperandA::column(thread, r, half));
          word |= uint32_t{encode<Element>(x)} << 16 * half;
        }
        registers.push_back(word);
      }
    }
  }
  return registers;
}

// Accumulators of all warpgroups, [thread][element].
std::vector<float> to_accumulators(const Matrix& m) {
  const int elements = m.columns / 2;
  std::vector<float> values(m.values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const int thread = static_cast<int>(i) / elements, e = static_cast<int>(i) % elements;
    values[i] = static_cast<float>(
        m(thread / 128 * 64 + Accumulator::row(thread % 128, e), Accumulator::column(thread % 128, e)));
  }
  return values;
}

// ---- Kernels --------------------------------------------------------------------------------------------------------------

// A grid of kSteps + 1 blocks: block i multiplies k-step i alone, the last one all of them. d: [block][thread][element].
template <class A, class B>
struct MmaPlan {
  alignas(1024) char a[A::kBytes];
  alignas(1024) char b[B::kBytes];
};

template <int kCount>
__device__ __forceinline__ void load_accumulators(float (&d)[kCount], const float* c) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) d[e] = c[threadIdx.x * kCount + e];
}

template <int kCount>
__device__ __forceinline__ void finish_accumulators(float (&d)[kCount], float* to) {
  sm90::wgmma_commit();
  sm90::wgmma_wait<0>();
  sm90::pin_registers(d);
#pragma unroll
  for (int e = 0; e < kCount; ++e) to[(blockIdx.x * blockDim.x + threadIdx.x) * kCount + e] = d[e];
}

// D (128 x N) = A B^T [+ C], two warpgroups, both operands K-major in shared memory.
template <class Element, int kN, int kK>
__global__ void __launch_bounds__(256, 1)
    ss_kernel(const uint4* a, const uint4* b, const float* c, bool accumulate, float* d) {
  using A = SwizzledTile<128, kK>;
  using B = SwizzledTile<kN, kK>;
  constexpr int kSteps = kK / 16;
  auto& shared = shared_as<MmaPlan<A, B>>();
  block_copy(shared.a, a, A::kBytes);
  block_copy(shared.b, b, B::kBytes);
  sm90::fence_async_proxy();
  __syncthreads();

  const int32_t warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const uint64_t a_tile = KMajor<A>::descriptor(shared_address(shared.a) + warpgroup * 64 * sm90::kSwizzleRowBytes);
  const uint64_t b_tile = KMajor<B>::descriptor(shared_address(shared.b));
  float x[kN / 2];
  load_accumulators(x, c);
  if (blockIdx.x < kSteps) {
    sm90::wgmma_fence();
    Wgmma<kN, Element>::ss(x, a_tile + KMajor<A>::step(blockIdx.x), b_tile + KMajor<B>::step(blockIdx.x), accumulate);
    finish_accumulators(x, d);
  } else {
    sm90::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      Wgmma<kN, Element>::ss(x, a_tile + KMajor<A>::step(k), b_tile + KMajor<B>::step(k), accumulate || k > 0);
    }
    finish_accumulators(x, d);
  }
}

// B of the register form: N x K and K-major, or as V lies, K x N with whole groups of 64 columns.
template <int kN, int kK, bool kTransB>
using RegisterFormB =
    SwizzledTile<kTransB ? kK : kN, kTransB ? ceil_div(kN, sm90::kSwizzleColumns) * sm90::kSwizzleColumns : kK>;

// D (64 x N) = A B [+ C], one warpgroup, A in registers.
template <class Element, int kN, int kK, bool kTransB>
__global__ void __launch_bounds__(128, 1)
    rs_kernel(const uint32_t* a, const uint4* b, const float* c, bool accumulate, float* d) {
  using B = RegisterFormB<kN, kK, kTransB>;
  using Operand = std::conditional_t<kTransB, MnMajor<B>, KMajor<B>>;
  constexpr int kSteps = kK / 16;
  auto& shared = shared_as<TilePlan<B>>();
  block_copy(shared.tile, b, B::kBytes);
  sm90::fence_async_proxy();
  __syncthreads();

  const uint64_t b_tile = Operand::descriptor(shared_address(shared.tile));
  const auto load_a = [&](uint32_t (&r)[4], int k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = a[(k * 128 + threadIdx.x) * 4 + i];
  };
  float x[kN / 2];
  load_accumulators(x, c);
  if (blockIdx.x < kSteps) {
    uint32_t one[4];
    load_a(one, blockIdx.x);
    sm90::wgmma_fence();
    Wgmma<kN, Element>::template rs<kTransB>(x, one, b_tile + Operand::step(blockIdx.x), accumulate);
    finish_accumulators(x, d);
  } else {
    uint32_t all[kSteps][4];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) load_a(all[k], k);
    sm90::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      Wgmma<kN, Element>::template rs<kTransB>(x, all[k], b_tile + Operand::step(k), accumulate || k > 0);
    }
    finish_accumulators(x, d);
  }
}

// S = Q K^T and O = P V as two groups in flight: S is read while O is under way.
template <class Element>
__global__ void __launch_bounds__(128, 1)
    two_groups_kernel(const uint4* q, const uint4* k, const uint32_t* p, const uint4* v, float* s, float* o) {
  using Q = SwizzledTile<64, 64>;
  using KV = SwizzledTile<128, 64>;
  struct Plan {
    alignas(1024) char q[Q::kBytes];
    alignas(1024) char k[KV::kBytes];
    alignas(1024) char v[KV::kBytes];
  };
  auto& shared = shared_as<Plan>();
  block_copy(shared.q, q, Q::kBytes);
  block_copy(shared.k, k, KV::kBytes);
  block_copy(shared.v, v, KV::kBytes);
  sm90::fence_async_proxy();
  __syncthreads();

  const uint64_t q_tile = KMajor<Q>::descriptor(shared_address(shared.q));
  const uint64_t k_tile = KMajor<KV>::descriptor(shared_address(shared.k));
  const uint64_t v_tile = MnMajor<KV>::descriptor(shared_address(shared.v));
  uint32_t operand[8][4];
#pragma unroll
  for (int i = 0; i < 32; ++i) operand[i / 4][i % 4] = p[(i / 4 * 128 + threadIdx.x) * 4 + i % 4];
  float x[64], y[32];
  sm90::wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i)
    Wgmma<128, Element>::ss(x, q_tile + KMajor<Q>::step(i), k_tile + KMajor<KV>::step(i), i > 0);
  sm90::wgmma_commit();
  sm90::wgmma_fence();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    Wgmma<64, Element>::template rs<true>(y, operand[i], v_tile + MnMajor<KV>::step(i), i > 0);
  }
  sm90::wgmma_commit();
  sm90::wgmma_wait<1>();
  sm90::pin_registers(x);
#pragma unroll
  for (int e = 0; e < 64; ++e) s[threadIdx.x * 64 + e] = x[e];
  sm90::wgmma_wait<0>();
  sm90::pin_registers(y);
#pragma unroll
  for (int e = 0; e < 32; ++e) o[threadIdx.x * 32 + e] = y[e];
}

// ---- Tests ------------------------------------------------------------------------------------------------------------------

// One result, [thread][element], against the columns [first, last) of a times b, plus c.
void expect_product(const char* form, const Matrix& a, const Matrix& b, int first, int last, const Matrix& c,
                    Numbers numbers, const float* found) {
  Matrix wanted = c, size(c.rows, c.columns);
  for (size_t i = 0; i < size.values.size(); ++i) size.values[i] = std::fabs(c.values[i]);
  multiply(a, b, first, last, wanted, size);
  const double error = numbers == Numbers::kWhole ? 0.0 : (last - first + 1) * 0x1p-23;
  const int elements = c.columns / 2;
  for (int i = 0; i < c.rows * c.columns; ++i) {
    const int thread = i / elements, e = i % elements;
    const int row = thread / 128 * 64 + Accumulator::row(thread % 128, e);
    const int column = Accumulator::column(thread % 128, e);
    EXPECT(std::fabs(found[i] - wanted(row, column)) <= error * size(row, column),
           "%s N %d, %s numbers, k %d ... %d, (%d, %d): %.9g, not %.9g", form, c.columns,
           numbers == Numbers::kWhole ? "whole" : "normal", first, last - 1, row, column, found[i],
           wanted(row, column));
  }
}

// Every block of a grid: the k-steps one by one, then all.
void expect_grid(const char* form, const Matrix& a, const Matrix& b, const Matrix& c, Numbers numbers,
                 const std::vector<float>& found) {
  const int steps = a.columns / 16;
  for (int block = 0; block <= steps; ++block) {
    const int first = block < steps ? 16 * block : 0, last = block < steps ? first + 16 : a.columns;
    expect_product(form, a, b, first, last, c, numbers, &found[block * c.values.size()]);
  }
}

// Calls body(numbers, accumulate, c, c on the device): the old D, or NaN where it is to be ignored.
template <class Body>
void for_each_start(Random& random, int rows, int columns, const Body& body) {
  for (const Numbers numbers : {Numbers::kWhole, Numbers::kNormal}) {
    for (const bool accumulate : {false, true}) {
      Matrix c(rows, columns);
      DeviceArray<float> device(c.values.size());
      if (accumulate) {
        for (double& x : c.values)
          x = numbers == Numbers::kWhole ? random.between(-1000, 1000) : float(random.normal());
        FLASHMSA_CHECK_CUDA(cudaMemcpy(device.data(), to_accumulators(c).data(), c.values.size() * sizeof(float),
                                       cudaMemcpyHostToDevice));
      }
      body(numbers, accumulate, c, device.data());
    }
  }
}

constexpr int kSsK = 256;  // four groups of 64 columns
constexpr int kRsK = 128;

template <class Element, int kN>
std::vector<float> run_ss(const Matrix& a, const Matrix& b, const float* c, bool accumulate) {
  using A = SwizzledTile<128, kSsK>;
  using B = SwizzledTile<kN, kSsK>;
  constexpr int kBlocks = kSsK / 16 + 1;
  DeviceArray<uint16_t> device_a(swizzled<Element, A>(a)), device_b(swizzled<Element, B>(b));
  DeviceArray<float> d(kBlocks * 128 * kN);
  launch(ss_kernel<Element, kN, kSsK>, kBlocks, 256, sizeof(MmaPlan<A, B>), device_a.as<const uint4>(),
         device_b.as<const uint4>(), c, accumulate, d.data());
  return d.read();
}

template <class Element, int kN>
void check_ss(Random& random) {
  for_each_start(random, 128, kN, [&](Numbers numbers, bool accumulate, const Matrix& c, const float* device_c) {
    const Matrix a = random_matrix<Element>(random, 128, kSsK, numbers);
    const Matrix b = random_matrix<Element>(random, kN, kSsK, numbers);
    expect_grid(accumulate ? "ss, accumulate" : "ss", a, transpose(b), c, numbers,
                run_ss<Element, kN>(a, b, device_c, accumulate));
  });
}

template <class Element, int kN, bool kTransB, int kK = kRsK>
void check_rs(Random& random) {
  using B = RegisterFormB<kN, kK, kTransB>;
  constexpr int kBlocks = kK / 16 + 1;
  for_each_start(random, 64, kN, [&](Numbers numbers, bool accumulate, const Matrix& c, const float* device_c) {
    const Matrix a = random_matrix<Element>(random, 64, kK, numbers);
    const Matrix b = random_matrix<Element>(random, B::kRows, B::kColumns, numbers);
    DeviceArray<uint32_t> device_a(operand_registers<Element>(a));
    DeviceArray<uint16_t> device_b(swizzled<Element, B>(b));
    DeviceArray<float> d(kBlocks * 64 * kN);
    launch(rs_kernel<Element, kN, kK, kTransB>, kBlocks, 128, sizeof(TilePlan<B>), device_a.data(),
           device_b.template as<const uint4>(), device_c, accumulate, d.data());
    expect_grid(accumulate ? "rs, accumulate" : "rs", a, kTransB ? b : transpose(b), c, numbers, d.read());
  });
}

// Each element is the number of its place, 256 * row + column.
GPU_TEST(accumulator_fragment) {
  Matrix a(128, kSsK), b(256, kSsK), none(128, 256);
  for (int row = 0; row < 128; ++row) a(row, 0) = row, a(row, 1) = 1;
  for (int column = 0; column < 256; ++column) b(column, 0) = 256, b(column, 1) = column;
  DeviceArray<float> c(to_accumulators(none));
  const std::vector<float> d = run_ss<__nv_bfloat16, 256>(a, b, c.data(), false);
  for (int thread = 0; thread < 256; ++thread) {
    for (int e = 0; e < 128; ++e) {
      const int row = thread / 128 * 64 + Accumulator::row(thread % 128, e);
      EXPECT(d[thread * 128 + e] == 256 * row + Accumulator::column(thread % 128, e), "thread %d, element %d: %g",
             thread, e, d[thread * 128 + e]);
    }
  }
}

GPU_TEST(wgmma_ss_n32_bf16) { check_ss<__nv_bfloat16, 32>(random); }
GPU_TEST(wgmma_ss_n64_bf16) { check_ss<__nv_bfloat16, 64>(random); }
GPU_TEST(wgmma_ss_n96_bf16) { check_ss<__nv_bfloat16, 96>(random); }
GPU_TEST(wgmma_ss_n112_bf16) { check_ss<__nv_bfloat16, 112>(random); }
GPU_TEST(wgmma_ss_n128_bf16) { check_ss<__nv_bfloat16, 128>(random); }
GPU_TEST(wgmma_ss_n256_bf16) { check_ss<__nv_bfloat16, 256>(random); }
GPU_TEST(wgmma_ss_n32_fp16) { check_ss<__half, 32>(random); }
GPU_TEST(wgmma_ss_n64_fp16) { check_ss<__half, 64>(random); }
GPU_TEST(wgmma_ss_n96_fp16) { check_ss<__half, 96>(random); }
GPU_TEST(wgmma_ss_n112_fp16) { check_ss<__half, 112>(random); }
GPU_TEST(wgmma_ss_n128_fp16) { check_ss<__half, 128>(random); }
GPU_TEST(wgmma_ss_n256_fp16) { check_ss<__half, 256>(random); }

GPU_TEST(wgmma_rs_k_major_n32_bf16) { check_rs<__nv_bfloat16, 32, false>(random); }
GPU_TEST(wgmma_rs_k_major_n64_bf16) { check_rs<__nv_bfloat16, 64, false>(random); }
GPU_TEST(wgmma_rs_k_major_n128_bf16) { check_rs<__nv_bfloat16, 128, false>(random); }
GPU_TEST(wgmma_rs_k_major_n256_bf16) { check_rs<__nv_bfloat16, 256, false>(random); }
GPU_TEST(wgmma_rs_k_major_n32_fp16) { check_rs<__half, 32, false>(random); }
GPU_TEST(wgmma_rs_k_major_n64_fp16) { check_rs<__half, 64, false>(random); }
GPU_TEST(wgmma_rs_k_major_n128_fp16) { check_rs<__half, 128, false>(random); }
GPU_TEST(wgmma_rs_k_major_n256_fp16) { check_rs<__half, 256, false>(random); }

// Of N = 96 a group and a half.
GPU_TEST(wgmma_rs_mn_major_n64_bf16) { check_rs<__nv_bfloat16, 64, true>(random); }
GPU_TEST(wgmma_rs_mn_major_n96_bf16) { check_rs<__nv_bfloat16, 96, true>(random); }
GPU_TEST(wgmma_rs_mn_major_n128_bf16) { check_rs<__nv_bfloat16, 128, true>(random); }
GPU_TEST(wgmma_rs_mn_major_n192_bf16) { check_rs<__nv_bfloat16, 192, true>(random); }
GPU_TEST(wgmma_rs_mn_major_n256_bf16) { check_rs<__nv_bfloat16, 256, true>(random); }
GPU_TEST(wgmma_rs_mn_major_n64_fp16) { check_rs<__half, 64, true>(random); }
GPU_TEST(wgmma_rs_mn_major_n96_fp16) { check_rs<__half, 96, true>(random); }
GPU_TEST(wgmma_rs_mn_major_n128_fp16) { check_rs<__half, 128, true>(random); }
GPU_TEST(wgmma_rs_mn_major_n192_fp16) { check_rs<__half, 192, true>(random); }
GPU_TEST(wgmma_rs_mn_major_n256_fp16) { check_rs<__half, 256, true>(random); }
// V of 32 keys: the groups of columns lie closer together.
GPU_TEST(wgmma_rs_mn_major_n256_k32_bf16) { check_rs<__nv_bfloat16, 256, true, 32>(random); }
GPU_TEST(wgmma_rs_mn_major_n256_k32_fp16) { check_rs<__half, 256, true, 32>(random); }

template <class Element>
void check_two_groups(Random& random) {
  using KV = SwizzledTile<128, 64>;
  const auto draw = [&](int rows, int columns) {
    return random_matrix<Element>(random, rows, columns, Numbers::kWhole);
  };
  const Matrix q = draw(64, 64), k = draw(128, 64), p = draw(64, 128), v = draw(128, 64);
  DeviceArray<uint16_t> device_q(swizzled<Element, SwizzledTile<64, 64>>(q)), device_k(swizzled<Element, KV>(k));
  DeviceArray<uint16_t> device_v(swizzled<Element, KV>(v));
  DeviceArray<uint32_t> device_p(operand_registers<Element>(p));
  DeviceArray<float> s(64 * 128), o(64 * 64);
  launch(two_groups_kernel<Element>, 1, 128, SwizzledTile<64, 64>::kBytes + 2 * KV::kBytes, device_q.as<const uint4>(),
         device_k.as<const uint4>(), device_p.data(), device_v.as<const uint4>(), s.data(), o.data());
  expect_product("S of two groups", q, transpose(k), 0, 64, Matrix(64, 128), Numbers::kWhole, s.read().data());
  expect_product("O of two groups", p, v, 0, 128, Matrix(64, 64), Numbers::kWhole, o.read().data());
}

GPU_TEST(wgmma_two_groups_bf16) { check_two_groups<__nv_bfloat16>(random); }
GPU_TEST(wgmma_two_groups_fp16) { check_two_groups<__half>(random); }

}  // namespace
}  // namespace flashmsa::test

int main(int argc, char** argv) { return flashmsa::test::run_tests(argc, argv); }
