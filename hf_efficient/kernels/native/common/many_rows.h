// Many rows of x, which arithmetic bounds: tiles of W as bfloat16, or as floats, that stay in the second-level cache.

#pragma once
#include "output.h"
#include "tile_product.h"

#if BF16_DOT
typedef uint32_t TileTerm;  // a pair of bfloat16
#else
typedef float TileTerm;
#endif
constexpr int NUMBERS = BF16_DOT ? 2 : 1;                                        // of a term
constexpr int TILE_COLUMNS = BF16_DOT ? 4096 : REGISTERS == 32 ? 2048 : 1024;  // of W: 512 KB, on AVX2 256 KB
constexpr int ROWS_A_UNIT = 1024;  // of x that stay in the third-level cache

// W: a weight with blocks, steps of COLUMNS columns, and a `dequantize_tile`: tile[term][blocks][16] <- terms of
// `blocks` blocks from `block` on, columns of steps [first, last). ld counts terms.
template <class W> static void many(const W &w, const TileTerm *x, int64_t ld, int64_t rows, const Output &out) {
    const int64_t tiles = ceil_div(w.blocks, TILE_BLOCKS);
    int64_t units = ceil_div(rows, ROWS_A_UNIT);  // of rows
    // Threads claim units: with few of them the last one would hold up the others.
    if (tiles * units < 8 * omp_get_max_threads()) units *= omp_get_max_threads();
    const int64_t unit_rows = ceil_div(ceil_div(rows, units), TILE_ROWS) * TILE_ROWS;
    units = ceil_div(rows, unit_rows);
    const int64_t steps_at_once = std::min<int64_t>(w.steps, TILE_COLUMNS / w.COLUMNS);
    parallel_by_claims(tiles * units, [&](Claims &claims) {
        static thread_local Buffer weights, outputs;
        const Tiles configured;
        Floats *tile = weights.get<Floats>(steps_at_once * (w.COLUMNS / NUMBERS) * TILE_BLOCKS);
        Floats(*sums)[TILE_BLOCKS] = (Floats(*)[TILE_BLOCKS])outputs.get<Floats>(unit_rows * TILE_BLOCKS);
        int64_t held = -1;
        for (int64_t unit = 0, end = 0; unit < end || claims.take(unit, end); unit++) {
            // units of one tile follow each other where all its columns fit, so that it is decoded once
            const bool fits = steps_at_once == w.steps;
            const int64_t n = unit / units, first = unit % units * unit_rows, count = std::min(unit_rows, rows - first);
            const int64_t block = n * TILE_BLOCKS;
            const int blocks = std::min<int64_t>(TILE_BLOCKS, w.blocks - block);
            for (int64_t step = 0; step < w.steps; step += steps_at_once) {
                const int64_t last = std::min(step + steps_at_once, w.steps);
                const int64_t terms = (last - step) * w.COLUMNS / NUMBERS;
                if (!fits || held != n) dequantize_tile(w, block, blocks, step, last, tile);
                held = n;
                const TileTerm *at = x + first * ld + step * (w.COLUMNS / NUMBERS);
                tile_rows(blocks, blocks, count, at, ld, tile, terms, step == 0, rows >= LEAST_AMX_ROWS, sums);
            }
            for (int64_t row = 0; row < count; row++)
                for (int b = 0; b < blocks; b++) out.store(first + row, (block + b) * LANES, sums[row][b]);
        }
    });
}
