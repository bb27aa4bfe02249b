// Includes FLASHMSA_CPU_BODY, a header written with the three macros that attend_block.h explains, once for each
// instruction set.
#if defined(__x86_64__) && defined(__GNUC__)
#define FLASHMSA_CPU_X86 1
#endif

#define FLASHMSA_CPU_ISA baseline
#define FLASHMSA_CPU_TARGET
#define FLASHMSA_CPU_VECTOR 16
#include FLASHMSA_CPU_BODY
#undef FLASHMSA_CPU_ISA
#undef FLASHMSA_CPU_TARGET
#undef FLASHMSA_CPU_VECTOR

#if FLASHMSA_CPU_X86
#define FLASHMSA_CPU_ISA avx2
#define FLASHMSA_CPU_TARGET __attribute__((target("avx2,fma")))
#define FLASHMSA_CPU_VECTOR 32
#include FLASHMSA_CPU_BODY
#undef FLASHMSA_CPU_ISA
#undef FLASHMSA_CPU_TARGET
#undef FLASHMSA_CPU_VECTOR

#define FLASHMSA_CPU_ISA avx512
#define FLASHMSA_CPU_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#define FLASHMSA_CPU_VECTOR 64
#include FLASHMSA_CPU_BODY
#undef FLASHMSA_CPU_ISA
#undef FLASHMSA_CPU_TARGET
#undef FLASHMSA_CPU_VECTOR
#endif
