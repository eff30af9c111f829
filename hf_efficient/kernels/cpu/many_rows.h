// Many rows of x, bound by arithmetic: tiles of W as bfloat16 that stay in the second-level cache.

#pragma once
#include "codes.h"
#include "output.h"
#include "tile_product.h"

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
                tile_rows(blocks, count, at, ld, (const Floats *)tile, pairs, step == 0, sums);
            }
            for (int64_t row = 0; row < count; row++)
                for (int b = 0; b < blocks; b++) out.store(first + row, (block + b) * LANES, sums[row][b]);
        }
    });
}
#endif
