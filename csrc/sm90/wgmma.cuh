// wgmma.mma_async: m64nNk16, 2-byte inputs, fp32 accumulators, for the shapes in use.
//
// The instruction's text needs every accumulator register by name. Operand strings are built by macros from decades of
// numbers, so a shape costs one line.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "sm90/swizzle.h"

namespace flashmsa::sm90 {

// ---- Descriptors of shared-memory operands (PTX ISA, "Matrix-descriptor") -------------------------------------------

enum class Layout : uint64_t { kPlain = 0, kSwizzle128B = uint64_t{1} << 62 };

// Both strides in bytes. The address is that of the first element; swizzled tiles are aligned to 1024 bytes.
template <Layout kLayout = Layout::kSwizzle128B>
__device__ __forceinline__ uint64_t make_descriptor(uint32_t shared_address, uint32_t leading_bytes,
                                                    uint32_t stride_bytes) {
  return static_cast<uint64_t>(kLayout) | (uint64_t{(stride_bytes & 0x3FFFF) >> 4} << 32) |
         (uint64_t{(leading_bytes & 0x3FFFF) >> 4} << 16) | ((shared_address & 0x3FFFF) >> 4);
}

// A descriptor moves through its tile by addition: its low bits are the address over 16.
__device__ __forceinline__ constexpr uint64_t descriptor_step(uint32_t bytes) { return bytes >> 4; }

// An operand whose contraction runs along the rows' 64-column groups: Q and K in S = Q K^T. Tile: of swizzle.h.
template <class Tile>
struct KMajor {
  static __device__ __forceinline__ uint64_t descriptor(uint32_t shared_address) {
    return make_descriptor(shared_address, 16, Tile::kAtomBytes);
  }
  // To columns [16 * k, 16 * k + 16).
  static __device__ __forceinline__ constexpr uint64_t step(int k) {
    return descriptor_step(k / 4 * Tile::kGroupBytes + k % 4 * 32);
  }
};

// An operand whose contraction runs down the rows: V in O = P V. Read transposed, as it lies.
template <class Tile>
struct MnMajor {
  static __device__ __forceinline__ uint64_t descriptor(uint32_t shared_address) {
    return make_descriptor(shared_address, Tile::kGroupBytes, Tile::kAtomBytes);
  }
  // To rows [16 * k, 16 * k + 16).
  static __device__ __forceinline__ constexpr uint64_t step(int k) { return descriptor_step(k * 2 * Tile::kAtomBytes); }
};

// ---- Ordering -----------------------------------------------------------------------------------------------------------

// wgmma.fence: orders register accesses before the following wgmma. NOTE: it stands directly before every group of wgmmas;
// elsewhere ptxas serialises them (C7519, C7520).
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Returns when at most kPending groups are still in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The same as wgmma_wait<0>, but not before `test` is known, which is the same in all lanes of a warp and may differ between warps.
// The compiler moves the other wait up among the arithmetic that makes `test`.
// NOTE: where the test holds the warp meets, as it has anyway. In machine code that is a NOP under the test's predicate, which the
// wait stays behind.
__device__ __forceinline__ void wgmma_wait_behind(bool test) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %0, 0;\n"
      "@p bar.warp.sync 0xffffffff;\n"
      "wgmma.wait_group.sync.aligned 0; }" ::"r"(static_cast<int>(test))
      : "memory");
}

// The same as wgmma_wait<0>, in words that the compiler does not take for the same: in the branches of a condition, each with
// a number of its own, they stay there, among what else a branch does.
// NOTE: PTX asks all warps of a warpgroup for one and the same wait. In machine code each is WARPGROUP.DEPBAR, a warp's wait for its
// own scoreboard, and the warps meet at the next WARPGROUP.ARRIVE. For a soft cap alone, where one wait for all branches costs 5 to
// 9 %.
template <int kBranch>
__device__ __forceinline__ void wgmma_wait_in_branch() {
  asm volatile("wgmma.wait_group.sync.aligned 0;  // branch %0" ::"n"(kBranch) : "memory");
}

// Keeps the compiler from moving reads of accumulators above the wait that completes them.
template <int kCount>
__device__ __forceinline__ void pin_registers(float (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

// ---- The instruction ------------------------------------------------------------------------------------------------------

// Wgmma<N, Element>::ss  D (64 x N) = A B [+ D], A and B from shared memory, K-major; kTransA, kTransB: MN-major
// Wgmma<N, Element>::rs  D (64 x N) = A B [+ D], A from registers, B from shared memory; kTransB: B is MN-major
// `accumulate` false ignores D's old value.
template <int kN, class Element>
struct Wgmma;

// clang-format off
#define FMSA_TEXT10(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define FMSA_TEXT0_9 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,"
#define FMSA_TEXT16 FMSA_TEXT0_9 "%10,%11,%12,%13,%14,%15"
#define FMSA_TEXT32 FMSA_TEXT0_9 FMSA_TEXT10(1) FMSA_TEXT10(2) "%30,%31"
#define FMSA_TEXT48 FMSA_TEXT0_9 FMSA_TEXT10(1) FMSA_TEXT10(2) FMSA_TEXT10(3) "%40,%41,%42,%43,%44,%45,%46,%47"
#define FMSA_TEXT56 FMSA_TEXT0_9 FMSA_TEXT10(1) FMSA_TEXT10(2) FMSA_TEXT10(3) FMSA_TEXT10(4) "%50,%51,%52,%53,%54,%55"
#define FMSA_TEXT64 FMSA_TEXT0_9 FMSA_TEXT10(1) FMSA_TEXT10(2) FMSA_TEXT10(3) FMSA_TEXT10(4) FMSA_TEXT10(5) \
                    "%60,%61,%62,%63"
#define FMSA_TEXT96 FMSA_TEXT0_9 FMSA_TEXT10(1) FMSA_TEXT10(2) FMSA_TEXT10(3) FMSA_TEXT10(4) FMSA_TEXT10(5) \
                    FMSA_TEXT10(6) FMSA_TEXT10(7) FMSA_TEXT10(8) "%90,%91,%92,%93,%94,%95"
#define FMSA_TEXT128 FMSA_TEXT0_9 FMSA_TEXT10(1) FMSA_TEXT10(2) FMSA_TEXT10(3) FMSA_TEXT10(4) FMSA_TEXT10(5) \
                     FMSA_TEXT10(6) FMSA_TEXT10(7) FMSA_TEXT10(8) FMSA_TEXT10(9) FMSA_TEXT10(10) FMSA_TEXT10(11) \
                     "%120,%121,%122,%123,%124,%125,%126,%127"
#define FMSA_REGS8(i) "+f"(d[i]), "+f"(d[i+1]), "+f"(d[i+2]), "+f"(d[i+3]), "+f"(d[i+4]), "+f"(d[i+5]), "+f"(d[i+6]), "+f"(d[i+7])
#define FMSA_REGS32(i) FMSA_REGS8(i), FMSA_REGS8(i+8), FMSA_REGS8(i+16), FMSA_REGS8(i+24)
#define FMSA_DREGS16 FMSA_REGS8(0), FMSA_REGS8(8)
#define FMSA_DREGS32 FMSA_REGS32(0)
#define FMSA_DREGS48 FMSA_REGS32(0), FMSA_REGS8(32), FMSA_REGS8(40)
#define FMSA_DREGS56 FMSA_DREGS48, FMSA_REGS8(48)
#define FMSA_DREGS64 FMSA_REGS32(0), FMSA_REGS32(32)
#define FMSA_DREGS96 FMSA_REGS32(0), FMSA_REGS32(32), FMSA_REGS32(64)
#define FMSA_DREGS128 FMSA_REGS32(0), FMSA_REGS32(32), FMSA_REGS32(64), FMSA_REGS32(96)

// COUNT accumulators; A0..A5 are the operand numbers behind them, COUNT .. COUNT + 5.
#define FMSA_WGMMA(N, ELEMENT, TYPE, COUNT, A0, A1, A2, A3, A4, A5)                                                       \
  template <>                                                                                                             \
  struct Wgmma<N, ELEMENT> {                                                                                              \
    template <bool kTransA = false, bool kTransB = false>                                                                 \
    static __device__ __forceinline__ void ss(float (&d)[COUNT], uint64_t a, uint64_t b, bool accumulate) {               \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #A2 ", 0;\n"                                                        \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                                        \
                   " {" FMSA_TEXT##COUNT "}, %" #A0 ", %" #A1 ", p, 1, 1, %" #A3 ", %" #A4 "; }"                          \
                   : FMSA_DREGS##COUNT : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(kTransA)), "n"(int(kTransB)) : "memory"); \
    }                                                                                                                     \
    template <bool kTransB>                                                                                               \
    static __device__ __forceinline__ void rs(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b, bool accumulate) {   \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #A5 ", 0;\n"                                                        \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                                        \
                   " {" FMSA_TEXT##COUNT "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #A4 ", p, 1, 1, %" FMSA_NEXT_##COUNT "; }" \
                   : FMSA_DREGS##COUNT                                                                                    \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(kTransB)) : "memory"); \
    }                                                                                                                     \
  };
#define FMSA_NEXT_16 "22"
#define FMSA_NEXT_32 "38"
#define FMSA_NEXT_48 "54"
#define FMSA_NEXT_56 "62"
#define FMSA_NEXT_64 "70"
#define FMSA_NEXT_96 "102"
#define FMSA_NEXT_128 "134"

FMSA_WGMMA(32, __nv_bfloat16, "bf16", 16, 16, 17, 18, 19, 20, 21)
FMSA_WGMMA(32, __half, "f16", 16, 16, 17, 18, 19, 20, 21)
FMSA_WGMMA(64, __nv_bfloat16, "bf16", 32, 32, 33, 34, 35, 36, 37)
FMSA_WGMMA(64, __half, "f16", 32, 32, 33, 34, 35, 36, 37)
FMSA_WGMMA(96, __nv_bfloat16, "bf16", 48, 48, 49, 50, 51, 52, 53)
FMSA_WGMMA(96, __half, "f16", 48, 48, 49, 50, 51, 52, 53)
FMSA_WGMMA(112, __nv_bfloat16, "bf16", 56, 56, 57, 58, 59, 60, 61)
FMSA_WGMMA(112, __half, "f16", 56, 56, 57, 58, 59, 60, 61)
FMSA_WGMMA(128, __nv_bfloat16, "bf16", 64, 64, 65, 66, 67, 68, 69)
FMSA_WGMMA(128, __half, "f16", 64, 64, 65, 66, 67, 68, 69)
FMSA_WGMMA(192, __nv_bfloat16, "bf16", 96, 96, 97, 98, 99, 100, 101)
FMSA_WGMMA(192, __half, "f16", 96, 96, 97, 98, 99, 100, 101)
FMSA_WGMMA(256, __nv_bfloat16, "bf16", 128, 128, 129, 130, 131, 132, 133)
FMSA_WGMMA(256, __half, "f16", 128, 128, 129, 130, 131, 132, 133)

#undef FMSA_TEXT10
#undef FMSA_TEXT0_9
#undef FMSA_TEXT16
#undef FMSA_TEXT32
#undef FMSA_TEXT48
#undef FMSA_TEXT56
#undef FMSA_TEXT64
#undef FMSA_TEXT96
#undef FMSA_TEXT128
#undef FMSA_REGS8
#undef FMSA_REGS32
#undef FMSA_DREGS16
#undef FMSA_DREGS32
#undef FMSA_DREGS48
#undef FMSA_DREGS56
#undef FMSA_DREGS64
#undef FMSA_DREGS96
#undef FMSA_DREGS128
#undef FMSA_WGMMA
#undef FMSA_NEXT_16
#undef FMSA_NEXT_32
#undef FMSA_NEXT_48
#undef FMSA_NEXT_56
#undef FMSA_NEXT_64
#undef FMSA_NEXT_96
#undef FMSA_NEXT_128
// clang-format on

}  // namespace flashmsa::sm90
