// Rows of x times a tile of vectors, blocked in registers: sums[m][b] += sum over k of x[m][k] * tile[k][b].

#pragma once
#include "amx_product.h"

constexpr int TILE_ROWS = 6;  // of x, by 4 blocks: 24 accumulators
constexpr int TILE_BLOCKS = 4;
constexpr int AMX_STEPS = 64;  // pairs of columns; products of weights have as many, those of attention do not

// A step of the sum: one pair of bfloat16 (T uint32_t), or one float.
static INLINE Floats tile_dot(Floats sum, Floats values, float x) { return dot(sum, values, x); }
#if BF16_DOT
static INLINE Floats tile_dot(Floats sum, Floats pairs, uint32_t x) { return dot(sum, Pairs{(__m512i)pairs}, x); }
#endif

template <int M, int BLOCKS, class T>
static INLINE void tile_product(const T *x, int64_t ld, const Floats *tile, int64_t steps, bool begin,
                                Floats (*sums)[TILE_BLOCKS]) {
    Floats sum[M][BLOCKS];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int b = 0; b < BLOCKS; b++) sum[m][b] = begin ? Floats{} : sums[m][b];
    for (int64_t k = 0; k < steps; k++, tile += BLOCKS)
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int b = 0; b < BLOCKS; b++) sum[m][b] = tile_dot(sum[m][b], tile[b], x[m * ld + k]);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int b = 0; b < BLOCKS; b++) sums[m][b] = sum[m][b];
}

// tile: [steps][BLOCKS], x: [rows][ld]
template <int BLOCKS, class T, int M = TILE_ROWS>
static void tile_rows(int64_t rows, const T *x, int64_t ld, const Floats *tile, int64_t steps, bool begin,
                      Floats (*sums)[TILE_BLOCKS]) {
    for (; rows >= M; rows -= M, x += M * ld, sums += M) tile_product<M, BLOCKS>(x, ld, tile, steps, begin, sums);
    if constexpr (M > 1)
        if (rows) tile_rows<BLOCKS, T, M - 1>(rows, x, ld, tile, steps, begin, sums);
}

// The same for any number of blocks up to TILE_BLOCKS.
template <class T>
static void tile_rows(int64_t blocks, int64_t rows, const T *x, int64_t ld, const Floats *tile, int64_t steps,
                      bool begin, Floats (*sums)[TILE_BLOCKS]) {
#if HAS_AMX
    if constexpr (std::is_same<T, uint32_t>::value) {
        // by the sizes of a whole product, so that bits do not depend on how threads share its rows
        const bool is_large = steps >= AMX_STEPS || (rows >= AMX_SIDE && steps >= AMX_SIDE);
        if (is_large && amx_is_allowed()) {
            const int64_t even = steps / AMX_SIDE * AMX_SIDE;
            amx_rows(blocks, rows, x, ld, tile, even, begin, sums[0], sizeof(*sums));
            if (even == steps) return;
            x += even, tile += even * blocks, steps -= even, begin = false;
        }
    }
#endif
    if (blocks == 4) tile_rows<4>(rows, x, ld, tile, steps, begin, sums);
    if (blocks == 3) tile_rows<3>(rows, x, ld, tile, steps, begin, sums);
    if (blocks == 2) tile_rows<2>(rows, x, ld, tile, steps, begin, sums);
    if (blocks == 1) tile_rows<1>(rows, x, ld, tile, steps, begin, sums);
}
