// Dot products of registers alone: what no product of matrices can exceed. benchmarks/cpu_peaks.py runs them.

#include <stdint.h>

#define EACH(name, sum) name " %%zmm30, %%zmm31, %%zmm" #sum "\n"
#define FOUR(name, a, b, c, d) EACH(name, a) EACH(name, b) EACH(name, c) EACH(name, d)

// 16 sums hide the latency of two instructions a cycle. Their names are in the text, so that none is kept in memory.
#define REGISTER_LOOP(name, instruction)                                                                               \
    extern "C" void name(int64_t rounds) {                                                                             \
        asm volatile("vzeroall\n"                                                                                      \
                     "vpxord %%zmm30, %%zmm30, %%zmm30\n"                                                              \
                     "vpxord %%zmm31, %%zmm31, %%zmm31\n"                                                              \
                     "1:\n"                                                                                            \
                     FOUR(instruction, 0, 1, 2, 3) FOUR(instruction, 4, 5, 6, 7)                                       \
                     FOUR(instruction, 8, 9, 10, 11) FOUR(instruction, 12, 13, 14, 15)                                 \
                     "dec %0\n"                                                                                        \
                     "jnz 1b\n"                                                                                        \
                     : "+r"(rounds) : : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",          \
                       "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");                          \
    }

REGISTER_LOOP(int8, "vpdpbusd")
REGISTER_LOOP(bfloat16, "vdpbf16ps")
