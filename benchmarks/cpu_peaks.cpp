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

#ifdef __AMX_TILE__
#include <sys/syscall.h>
#include <unistd.h>

// Tiles of 16 rows of 64 bytes: four sums, two tiles of one matrix and two of the other, as products of matrices have.
static void with_tiles(int64_t rounds, void (*loop)(int64_t)) {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    alignas(64) uint8_t config[64] = {1};
    for (int i = 0; i < 8; i++) config[16 + 2 * i] = 64, config[48 + i] = 16;
    syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
    asm volatile("ldtilecfg %0" ::"m"(config));
    loop(rounds);
    asm volatile("tilerelease");
}

#define TILE_LOOP(name, instruction)                                                                                   \
    static void name##_loop(int64_t rounds) {                                                                          \
        asm volatile("1:\n"                                                                                            \
                     instruction " %%tmm6, %%tmm4, %%tmm0\n" instruction " %%tmm7, %%tmm4, %%tmm1\n"                   \
                     instruction " %%tmm6, %%tmm5, %%tmm2\n" instruction " %%tmm7, %%tmm5, %%tmm3\n"                   \
                     "dec %0\n"                                                                                        \
                     "jnz 1b\n"                                                                                        \
                     : "+r"(rounds) : : "cc");                                                                         \
    }                                                                                                                  \
    extern "C" void name(int64_t rounds) { with_tiles(rounds, name##_loop); }

TILE_LOOP(amx_int8, "tdpbssd")
TILE_LOOP(amx_bfloat16, "tdpbf16ps")
#endif
