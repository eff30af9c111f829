// Many rows of x, bound by arithmetic: tiles of W as bfloat16 that stay in the second-level cache, and a product of tiles
// blocked in registers.

#pragma once
#include "codes.h"
#include "output.h"

constexpr int TILE_ROWS = 6;  // of x, by 4 blocks of W: 24 accumulators
constexpr int TILE_BLOCKS = 4;
constexpr int TILE_COLUMNS = 4096;  // of W: 512 KB
constexpr int ROWS_A_UNIT = 1024;   // of x that stay in the third-level cache

#if BF16_DOT
// tile[pair][BLOCKS][16] <- bfloat16 pairs of BLOCKS blocks of W, columns of steps [first, last)
static void dequantize_tile(const Matrix &w, int64_t block, int blocks, int64_t first, int64_t last, __m512i *tile) {
    alignas(64) uint16_t order[32];
    for (int i = 0; i < 16; i++) order[2 * i] = i, order[2 * i + 1] = 16 + i;
    const __m512i interleave = _mm512_load_si512(order);
    for (int b = 0; b < blocks; b++)
        for_segments(w, [&](int64_t, int64_t g, int64_t step, int64_t end) __attribute__((always_inline)) {
            const Floats scale = w.scales(block + b, g), offset = w.offsets(block + b, g);
            for (step = std::max(step, first), end = std::min(end, last); step < end; step++) {
                Floats values[Codes::COLUMNS];
                w.codes.decode(w.line(block + b, step), values);
                __m512i *to = tile + (step - first) * Codes::PAIRS * blocks + b;
#pragma GCC unroll 16
                for (int j = 0; j < Codes::PAIRS; j++) {
                    const Floats even = (values[2 * j] + offset) * scale, odd = (values[2 * j + 1] + offset) * scale;
                    to[j * blocks] = _mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
                }
            }
        });
}

template <int M, int BLOCKS>
static INLINE void tile_product(const uint32_t *x, int64_t ld, const __m512i *tile, int64_t pairs, bool begin, Floats (*sums)[TILE_BLOCKS]) {
    Floats sum[M][BLOCKS];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int b = 0; b < BLOCKS; b++) sum[m][b] = begin ? Floats{} : sums[m][b];
    for (int64_t k = 0; k < pairs; k++, tile += BLOCKS)
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int b = 0; b < BLOCKS; b++) sum[m][b] = dot(sum[m][b], Pairs{tile[b]}, x[m * ld + k]);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int b = 0; b < BLOCKS; b++) sums[m][b] = sum[m][b];
}

template <int BLOCKS, int M = TILE_ROWS>
static void tile_rows(int64_t rows, const uint32_t *x, int64_t ld, const __m512i *tile, int64_t pairs, bool begin, Floats (*sums)[TILE_BLOCKS]) {
    for (; rows >= M; rows -= M, x += M * ld, sums += M) tile_product<M, BLOCKS>(x, ld, tile, pairs, begin, sums);
    if constexpr (M > 1)
        if (rows) tile_rows<BLOCKS, M - 1>(rows, x, ld, tile, pairs, begin, sums);
}

static void many(const Matrix &w, const uint32_t *x, int64_t ld, int64_t rows, const Output &out) {
    const int64_t tiles = ceil_div(w.blocks, TILE_BLOCKS);
    int64_t units = ceil_div(rows, ROWS_A_UNIT);  // of rows
    if (tiles * units % omp_get_max_threads()) units *= omp_get_max_threads();
    const int64_t unit_rows = ceil_div(ceil_div(rows, units), TILE_ROWS) * TILE_ROWS;
    units = ceil_div(rows, unit_rows);
    const int64_t steps_at_once = std::min<int64_t>(w.steps, TILE_COLUMNS / w.COLUMNS);
    parallel(tiles * units, [&](int64_t unit, int64_t end) {
        static thread_local Buffer weights, outputs;
        __m512i *tile = weights.get<__m512i>(steps_at_once * (w.COLUMNS / 2) * TILE_BLOCKS);
        Floats(*sums)[TILE_BLOCKS] = (Floats(*)[TILE_BLOCKS])outputs.get<Floats>(unit_rows * TILE_BLOCKS);
        int64_t held = -1;
        for (; unit < end; unit++) {
            // units of one tile follow each other where all its columns fit, so that it is decoded once
            const bool fits = steps_at_once == w.steps;
            const int64_t n = unit / units, first = unit % units * unit_rows, count = std::min(unit_rows, rows - first);
            const int64_t block = n * TILE_BLOCKS;
            const int blocks = std::min<int64_t>(TILE_BLOCKS, w.blocks - block);
            for (int64_t step = 0; step < w.steps; step += steps_at_once) {
                const int64_t last = std::min(step + steps_at_once, w.steps), pairs = (last - step) * w.COLUMNS / 2;
                if (!fits || held != n) dequantize_tile(w, block, blocks, step, last, tile);
                held = n;
                const uint32_t *at = x + first * ld + step * (w.COLUMNS / 2);
                if (blocks == 4) tile_rows<4>(count, at, ld, tile, pairs, step == 0, sums);
                if (blocks == 3) tile_rows<3>(count, at, ld, tile, pairs, step == 0, sums);
                if (blocks == 2) tile_rows<2>(count, at, ld, tile, pairs, step == 0, sums);
                if (blocks == 1) tile_rows<1>(count, at, ld, tile, pairs, step == 0, sums);
            }
            for (int64_t row = 0; row < count; row++)
                for (int b = 0; b < blocks; b++) out.store(first + row, (block + b) * LANES, sums[row][b]);
        }
    });
}
#endif
