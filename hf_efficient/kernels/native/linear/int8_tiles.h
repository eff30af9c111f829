// Many rows of x rounded to int8: codes are unpacked once for all of them, into tiles of signed bytes that stay in the
// second-level cache. x is stored as unsigned bytes, and a sum begins with what that adds to it.

#pragma once
#include "int8_rows.h"

#if BYTE_DOT
constexpr int INT8_TILE_ROWS = 4, INT8_TILE_BLOCKS = 3;  // whose sums and totals registers hold
constexpr int LEAST_INT8_TILE_ROWS = 12;                 // of x: unpacking pays
constexpr int ROWS_AN_INT8_UNIT = 256;                   // of x, which threads share

struct ByteTile {  // of `blocks` blocks of W
    int blocks;
    Words *weights;  // [vectors of a line, line by line][blocks]
    Ints *begin;     // [segments][blocks]: -128 times the sum of the segment's weights
};

// Codes less their zero points, where those are whole and differences fit; else less the middle of the grid.
static void unpack(const Matrix &w, int64_t block, const ByteTile &tile) {
    constexpr int VECTORS = Bytewise::VECTORS;
    const bool is_whole = w.zero && !w.zero_is_float && BITS < 8;
    for (int b = 0; b < tile.blocks; b++)
        for_segments<SPAN>(w, [&](int64_t segment, int64_t g, int64_t step, int64_t end) {
            Words middle = Words{} + MIDDLE_CODE * 0x01010101u;
            const int64_t index = ((block + b) * w.groups + g) * LANES;
            if (is_whole) middle = widen_words(*(const Bytes *)((const uint8_t *)w.zero + index)) * 0x01010101u;
            Ints sums[2] = {};  // that do not wait for each other
            const uint8_t *line = w.line(block + b, step);
            const int64_t ahead = w.line(1, 0) - w.line(0, 0);  // to the next block
            for (; step < end; step++, line += Codes::LINES * 64) {
                for (int i = 0; i < Codes::LINES; i++) __builtin_prefetch(line + ahead + 64 * i, 0, 2);
                Words values[VECTORS];
                Bytewise::decode(line, values);
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++) {
                    const Words weights = minus_bytes(values[v], middle);
                    tile.weights[(step * VECTORS + v) * tile.blocks + b] = weights;
                    sums[v % 2] = plus_byte_dots(sums[v % 2], splat_bytes(0x80808080u), weights);
                }
            }
            tile.begin[segment * tile.blocks + b] = -(sums[0] + sums[1]);
        });
}

template <int M, int N>
static void int8_tile(const Matrix &w, int64_t block, const ByteTile &tile, const Rounded &x, int64_t row,
                      const Output &out) {
    constexpr int VECTORS = Bytewise::VECTORS;
    const float *scales = x.scales + row * x.segments, *sums = x.sums + row * x.segments;
    const bool has_rest = w.zero && (w.zero_is_float || BITS == 8);
    Floats totals[M][N] = {};
    for_segments<SPAN>(w, [&](int64_t segment, int64_t g, int64_t step, int64_t end) __attribute__((always_inline)) {
        Ints sum[M][N];
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int b = 0; b < N; b++) sum[m][b] = tile.begin[segment * N + b];
        const Words *at = tile.weights + step * VECTORS * N;
        const int8_t *codes = x.codes + row * x.width + step * w.COLUMNS;
        for (int64_t left = (end - step) * VECTORS; left; left--, at += N, codes += 4) {
            Words weights[N];
#pragma GCC unroll 4
            for (int b = 0; b < N; b++) weights[b] = at[b];
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                uint32_t four;
                memcpy(&four, codes + m * x.width, 4);
                const Words bytes = splat_bytes(four);
#pragma GCC unroll 4
                for (int b = 0; b < N; b++) sum[m][b] = plus_byte_dots(sum[m][b], bytes, weights[b]);
            }
        }
#pragma GCC unroll 4
        for (int b = 0; b < N; b++) {
            const Floats scale = w.scales(block + b, g);
            const Floats rest = has_rest ? MIDDLE_CODE - w.zeros(block + b, g) : Floats{};
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                Floats products = to_floats(sum[m][b]);
                if (has_rest) products += rest * sums[m * x.segments + segment];
                totals[m][b] += products * (scale * scales[m * x.segments + segment]);
            }
        }
    });
    add_outliers(w, block, x, row, has_rest, totals, [&](int b, int column) __attribute__((always_inline)) {
        return to_floats((Ints)(tile.weights[column / 4 * N + b] << (24 - column % 4 * 8)) >> 24);
    });
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int b = 0; b < N; b++) out.store(row + m, (block + b) * LANES, totals[m][b]);
}

template <int N, int M = INT8_TILE_ROWS>
static void int8_tile_rows(const Matrix &w, int64_t block, const ByteTile &tile, const Rounded &x, int64_t row,
                           int64_t end, const Output &out) {
    for (; row + M <= end; row += M) int8_tile<M, N>(w, block, tile, x, row, out);
    if constexpr (M > 1)
        if (row < end) int8_tile_rows<N, M - 1>(w, block, tile, x, row, end, out);
}

static void int8_tiles(const Matrix *w, const Output *out, int count, const Rounded &x, int64_t rows) {
    const int64_t units = ceil_div(rows, ROWS_AN_INT8_UNIT);
    const int64_t unit_rows = ceil_div(ceil_div(rows, units), INT8_TILE_ROWS) * INT8_TILE_ROWS;
    for_blocks(w, count, INT8_TILE_BLOCKS, [&](int i, int64_t block) {
        static thread_local Buffer weights, begin;
        const int blocks = std::min<int64_t>(INT8_TILE_BLOCKS, w[i].blocks - block);
        const ByteTile tile = {blocks, weights.get<Words>(w[i].steps * Bytewise::VECTORS * blocks),
                               begin.get<Ints>(x.segments * blocks)};
        unpack(w[i], block, tile);
        for (int64_t row = 0; row < rows; row += unit_rows) {
            const int64_t end = std::min(row + unit_rows, rows);
            if (blocks == 3) int8_tile_rows<3>(w[i], block, tile, x, row, end, out[i]);
            if (blocks == 2) int8_tile_rows<2>(w[i], block, tile, x, row, end, out[i]);
            if (blocks == 1) int8_tile_rows<1>(w[i], block, tile, x, row, end, out[i]);
        }
    });
}
#endif

// For `count` weights with the same groups.
static void int8(const Matrix *w, const Output *out, int count, const uint16_t *values, int64_t rows) {
#if BYTE_DOT
    if (rows >= LEAST_INT8_TILE_ROWS) return int8_tiles(w, out, count, rounded(*w, values, rows, 128), rows);
#endif
    const Rounded x = rounded(*w, values, rows, 0);
    for_blocks(w, count, BLOCKS_A_UNIT, [&](int i, int64_t block) {
        if (block + BLOCKS_A_UNIT <= w[i].blocks) int8_rows_of_blocks<BLOCKS_A_UNIT>(w[i], block, x, rows, out[i]);
        else int8_rows_of_blocks<1>(w[i], block, x, rows, out[i]);
    });
}
