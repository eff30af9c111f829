// The products of dense.h for LEAST_LAID_OUT rows of x or more, except in tier amx. Where the CPU multiplies bfloat16
// (tiers bf16 and neon_bf16) x is laid out in pairs of columns; elsewhere W is widened to tiles of floats.

#pragma once
#include "dense_amx.h"
#include "many_rows.h"
#include "products.h"

#if BF16_DOT && !AMX
// As `dense_amx` does, x is laid out in pairs, and W is read as it lies: a vector holds a pair of columns of 16 rows of
// x, which meets the same pair of a row of W.

constexpr int64_t PANEL = 48;  // rows of W that a thread takes at once
constexpr int64_t MOST_BLOCKS = REGISTERS < 32 ? 1 : TILE_BLOCKS;  // of 16 rows of x that share a load of W

// sums[m][b] <- M rows of w [M][ld pairs] times tile [ld pairs][N], which holds N blocks of 16 rows of x
template <int M, int N>
static INLINE void panel_product(const uint32_t *w, int64_t ld, const Floats *tile, Floats (*sums)[TILE_BLOCKS]) {
    const char *next = (const char *)(w + M * ld);  // the rows behind them, which follow in memory
    Floats sum[M][N] = {};
    for (int64_t k = 0; k < ld; k++, tile += N, next += M * sizeof(*w)) {
        __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 24
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int b = 0; b < N; b++) sum[m][b] = tile_dot(sum[m][b], tile[b], w[m * ld + k]);
    }
#pragma GCC unroll 24
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int b = 0; b < N; b++) sums[m][b] = sum[m][b];
}

// The same for `count` rows of w, as many at once as registers hold sums of.
template <int N, int M = std::max(1, TILE_SUMS / N)>
static void panel_products(int64_t count, const uint32_t *w, int64_t ld, const Floats *tile,
                           Floats (*sums)[TILE_BLOCKS]) {
    for (; count >= M; count -= M, w += M * ld, sums += M) panel_product<M, N>(w, ld, tile, sums);
    if constexpr (M > 1)
        if (count) panel_products<N, M / 2>(count, w, ld, tile, sums);
}

// width: an even number of columns
static void dense_tiles(const uint16_t *x, const uint16_t *w, const uint16_t *bias, uint16_t *y, int64_t rows,
                        int64_t columns, int64_t width) {
    const Output out = {y, bias, columns, false};
    const int64_t blocks = ceil_div(rows, LANES), groups = ceil_div(blocks, MOST_BLOCKS), pairs = width / 2;
    auto first_of = [=](int64_t group) { return blocks * group / groups; };
    parallel_by_claims(ceil_div(columns, PANEL), [&](Claims &claims) {
        static thread_local Buffer laid_out, results;
        // Every thread lays out all of x: that takes less time than to wait for others.
        Floats *all = laid_out.get<Floats>(blocks * pairs);
        for (int64_t group = 0; group < groups; group++)
            for (int64_t block = first_of(group); block < first_of(group + 1); block++)
                lay_out(x + block * LANES * width, rows - block * LANES, width, first_of(group + 1) - first_of(group),
                        all + first_of(group) * (pairs - 1) + block);
        Floats(*sums)[TILE_BLOCKS] = (Floats(*)[TILE_BLOCKS])results.get<Floats>(PANEL * TILE_BLOCKS);
        for (int64_t panel = 0, end = 0; panel < end || claims.take(panel, end); panel++) {
            const int64_t column = panel * PANEL, count = std::min(PANEL, columns - column);
            const uint32_t *from = (const uint32_t *)w + column * pairs;
            for (int64_t group = 0; group < groups; group++) {
                const int64_t first = first_of(group), n = first_of(group + 1) - first;
                const Floats *tile = all + first * pairs;
                if (n == 4) panel_products<4>(count, from, pairs, tile, sums);
                if (n == 3) panel_products<3>(count, from, pairs, tile, sums);
                if (n == 2) panel_products<2>(count, from, pairs, tile, sums);
                if (n == 1) panel_products<1>(count, from, pairs, tile, sums);
                for (int64_t b = 0; b < n; b++)
                    store_transposed(out, (const Words *)sums[0] + b, TILE_BLOCKS, count, column,
                                     (first + b) * LANES, rows);
            }
        }
    });
}
#elif !BF16_DOT
// Without products of bfloat16 both are widened to floats, W into the tiles of many_rows.h.
struct DenseWeight {
    static constexpr int COLUMNS = 2 * LANES;  // of a step
    const uint16_t *w;                         // [rows, columns]
    int64_t rows, columns, blocks, steps;      // columns: an even number
};

static void dequantize_tile(const DenseWeight &w, int64_t block, int blocks, int64_t first, int64_t last,
                            Floats *tile) {
    for (int b = 0; b < blocks; b++) {
        const int64_t row = (block + b) * LANES, count = std::min<int64_t>(LANES, w.rows - row);
        for (int64_t step = first; step < last; step++) {
            const int64_t column = step * w.COLUMNS;
            Words pairs[LANES];
            for (int64_t i = 0; i < LANES; i++)
                pairs[i] = i < count ? load_pairs(w.w + (row + i) * w.columns + column, w.columns - column) : Words{};
            transpose(pairs);
            Floats *to = tile + (column - first * w.COLUMNS) * blocks + b;
            for (int64_t i = 0; i < LANES; i++, to += 2 * blocks) {
                const Terms both = terms_of(pairs[i]);
                to[0] = both.even, to[blocks] = both.odd;
            }
        }
    }
}

static void dense_tiles(const uint16_t *x, const uint16_t *w, const uint16_t *bias, uint16_t *y, int64_t rows,
                        int64_t columns, int64_t width) {
    const DenseWeight weight = {w, columns, width, ceil_div(columns, LANES), ceil_div(width, DenseWeight::COLUMNS)};
    const int64_t ld = weight.steps * weight.COLUMNS;
    many(weight, padded<uint16_t, float>(x, rows, width, ld), ld, rows, Output{y, bias, columns, false});
}
#endif

// Rows of x. Fewer do not pay for it (measured), and more at once would take memory.
constexpr int64_t LEAST_LAID_OUT = BF16_DOT ? 24 : 64, MOST_LAID_OUT = 512;

// `count` products of one x: those of `dense`, or by tiles where that takes less time, which add the terms of a sum in
// another order.
static void dense_products(const uint16_t *x, const DenseProduct *products, int count, int64_t rows, int64_t width) {
#if !AMX
    if (rows >= LEAST_LAID_OUT && (!BF16_DOT || width % (2 * LANES) == 0)) {
        for (int i = 0; i < count; i++)
            for (int64_t row = 0; row < rows; row += MOST_LAID_OUT)
                dense_tiles(x + row * width, products[i].w, products[i].bias, products[i].y + row * products[i].columns,
                            std::min(MOST_LAID_OUT, rows - row), products[i].columns, width);
        return;
    }
#endif
    dense(x, products, count, rows, width);
}
