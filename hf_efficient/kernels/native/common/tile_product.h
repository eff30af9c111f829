// Rows of x times a tile of vectors, blocked in registers: sums[m][b] += sum over k of x[m][k] * tile[k][b].

#pragma once
#include "amx.h"
#include "vectors.h"

constexpr int TILE_ROWS = 6;  // of x
constexpr int TILE_BLOCKS = 4;

constexpr int TILE_SUMS = REGISTERS * 3 / 4;  // accumulators in registers

// A step of the sum: one pair of bfloat16 (T uint32_t), or one float.
static INLINE Floats tile_dot(Floats sum, Floats values, float x) { return dot(sum, values, x); }
#if BF16_DOT
static INLINE Floats tile_dot(Floats sum, Floats pairs, uint32_t x) { return dot(sum, Pairs{(PairBits)pairs}, x); }
#endif

// For N of BLOCKS blocks.
template <int M, int BLOCKS, int N, class T>
static INLINE void tile_product(const T *x, int64_t ld, const Floats *tile, int64_t steps, bool begin,
                                Floats (*sums)[TILE_BLOCKS]) {
    Floats sum[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int b = 0; b < N; b++) sum[m][b] = begin ? Floats{} : sums[m][b];
    for (int64_t k = 0; k < steps; k++, tile += BLOCKS)
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int b = 0; b < N; b++) sum[m][b] = tile_dot(sum[m][b], tile[b], x[m * ld + k]);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int b = 0; b < N; b++) sums[m][b] = sum[m][b];
}

// As many blocks at once as registers hold sums of.
template <int M, int BLOCKS, int LEFT, class T>
static INLINE void tile_products(const T *x, int64_t ld, const Floats *tile, int64_t steps, bool begin,
                                 Floats (*sums)[TILE_BLOCKS]) {
    constexpr int FIT = TILE_SUMS / M, N = std::min(LEFT, FIT >= 4 ? 4 : FIT >= 2 ? 2 : 1);
    tile_product<M, BLOCKS, N>(x, ld, tile, steps, begin, sums);
    if constexpr (LEFT > N)
        tile_products<M, BLOCKS, LEFT - N>(x, ld, tile + N, steps, begin, (Floats(*)[TILE_BLOCKS])(sums[0] + N));
}

// tile: [steps][BLOCKS], of which the first N are multiplied, x: [rows][ld]
template <int BLOCKS, int N, class T, int M = TILE_ROWS>
static void tile_rows(int64_t rows, const T *x, int64_t ld, const Floats *tile, int64_t steps, bool begin,
                      Floats (*sums)[TILE_BLOCKS]) {
    for (; rows >= M; rows -= M, x += M * ld, sums += M)
        tile_products<M, BLOCKS, N>(x, ld, tile, steps, begin, sums);
    if constexpr (M > 1)
        if (rows) tile_rows<BLOCKS, N, T, M - 1>(rows, x, ld, tile, steps, begin, sums);
}

// The same for the first `some` of any number of blocks up to TILE_BLOCKS. amx: whether by AMX where there is one.
// Callers tell it by the rows of a whole product, so that bits do not depend on how threads share them.
template <class T>
static void tile_rows(int64_t blocks, int64_t some, int64_t rows, const T *x, int64_t ld, const Floats *tile,
                      int64_t steps, bool begin, bool amx, Floats (*sums)[TILE_BLOCKS]) {
#if AMX
    if constexpr (std::is_same<T, uint32_t>::value)
        if (amx && AMX_IS_GRANTED) {
            const int64_t chunks = steps / AMX_TERMS, done = chunks * AMX_TERMS;
            amx_rows<false>(some, rows, x, 4 * ld, AmxBlocks::side_by_side(tile, blocks), chunks, begin, sums,
                            sizeof(*sums));
            if (done == steps) return;
            x += done, tile += done * blocks, steps -= done, begin = false;
        }
#endif
    if (blocks == 4) {
        if (some == 4) tile_rows<4, 4>(rows, x, ld, tile, steps, begin, sums);
        if (some == 3) tile_rows<4, 3>(rows, x, ld, tile, steps, begin, sums);
        if (some == 2) tile_rows<4, 2>(rows, x, ld, tile, steps, begin, sums);
        if (some == 1) tile_rows<4, 1>(rows, x, ld, tile, steps, begin, sums);
    }
    if (blocks == 3) tile_rows<3, 3>(rows, x, ld, tile, steps, begin, sums);
    if (blocks == 2) tile_rows<2, 2>(rows, x, ld, tile, steps, begin, sums);
    if (blocks == 1) tile_rows<1, 1>(rows, x, ld, tile, steps, begin, sums);
}
