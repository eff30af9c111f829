// Many rows of x rounded to int8: codes are unpacked once for all of them, into tiles of signed bytes that stay in the
// second-level cache. x is stored as unsigned bytes, and a sum begins with what that adds to it. In tiers without sums
// of 4 products of bytes (avx2, avx512 and those of ARM) int8_rows.h has many rows, too.

#pragma once
#include "int8_rows.h"

#if BYTE_DOT
// whose sums registers hold
constexpr int INT8_TILE_ROWS = REGISTERS < 32 ? 2 : 4, INT8_TILE_BLOCKS = REGISTERS < 32 ? 2 : 3;
constexpr int LEAST_INT8_TILE_ROWS = 12;                      // of x: unpacking pays

struct ByteTile {  // of `blocks` blocks of W
    int blocks;
    Words *weights;       // [vectors of a line, line by line][blocks]
    Floats *of_segments;  // [segments][3][blocks]: -128 times the sum of the weights, as Ints; scales; what whole
                          // numbers leave over of the zero points
};

// Codes less their zero points, where those are whole and differences fit; else less the middle of the grid.
static void unpack(const Matrix &w, int64_t block, const Rounded &x, const ByteTile &tile) {
    constexpr int VECTORS = Bytewise::VECTORS;
    const bool is_whole = w.zero && !w.zero_is_float && BITS < 8;
    for (int b = 0; b < tile.blocks; b++)
        for (int64_t segment = 0; segment < x.segments; segment++) {
            const Segment &of = x.of[segment];
            Floats *const number = tile.of_segments + segment * 3 * tile.blocks + b;
            const int64_t index = ((block + b) * w.groups + of.g) * LANES;
            number[tile.blocks] = w.scales(block + b, of.g);
            number[2 * tile.blocks] = MIDDLE_CODE - w.zeros(block + b, of.g);
            Words middle = Words{} + MIDDLE_CODE * 0x01010101u;
            if (is_whole) middle = widen_words(*(const Bytes *)((const uint8_t *)w.zero + index)) * 0x01010101u;
            Ints sums[2] = {};  // that do not wait for each other
            const int64_t first = of.first / w.COLUMNS, end = of.last / w.COLUMNS;
            const uint8_t *line = w.line(block + b, first);
            const int64_t ahead = w.line(1, 0) - w.line(0, 0);  // to the next block
            Words *to = tile.weights + first * VECTORS * tile.blocks + b;
            for (int64_t step = first; step < end; step++, line += Codes::LINES * 64) {
                for (int i = 0; i < Codes::LINES; i++) __builtin_prefetch(line + ahead + 64 * i, 0, 2);
                Words values[VECTORS];
                Bytewise::decode(line, values);
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++, to += tile.blocks) {
                    *to = minus_bytes(values[v], middle);
                    sums[v % 2] = plus_byte_dots(sums[v % 2], splat_bytes(0x80808080u), *to);
                }
            }
            *(Ints *)number = -(sums[0] + sums[1]);
        }
}

// HAS_REST: the weights are not codes less their zero points.
template <int M, int N, bool HAS_REST>
static void int8_tile(const ByteTile &tile, const Rounded &x, int64_t row, const Output &out, int64_t column) {
    Floats totals[M][N] = {};
    const Floats *numbers = tile.of_segments;
    const float *scale = x.scales + x.at(row, 0), *total = x.sums + x.at(row, 0);
    const int8_t *const codes_of_row = x.codes + row * x.width;
    const Segment *const last = x.of + x.segments;
    for (const Segment *of = x.of; of < last; of++, numbers += 3 * N, scale += TOGETHER, total += TOGETHER) {
        Ints sum[M][N];
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int b = 0; b < N; b++) sum[m][b] = ((const Ints *)numbers)[b];
        const Words *at = tile.weights + of->first / 4 * N;
        const int8_t *codes = codes_of_row + of->first, *const end = codes_of_row + of->last;
        for (; codes < end; codes += 4, at += N) {
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
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int b = 0; b < N; b++) {
                Floats products = to_floats(sum[m][b]);
                if (HAS_REST) products += numbers[2 * N + b] * total[m];
                totals[m][b] += products * (numbers[N + b] * scale[m]);
            }
    }
    const OutlierColumn *outlier = x.outliers + row / TOGETHER * TOGETHER * x.segments;
    for (const OutlierColumn *end = outlier + x.counts[row / TOGETHER]; outlier < end; outlier++) {
        const float *values = outlier->values + row % TOGETHER;
#pragma GCC unroll 4
        for (int b = 0; b < N; b++) {
            const Words byte = tile.weights[outlier->column / 4 * N + b] << (24 - outlier->column % 4 * 8);
            Floats weights = to_floats((Ints)byte >> 24);
            if (HAS_REST) weights += tile.of_segments[(outlier->segment * 3 + 2) * N + b];
            weights *= tile.of_segments[(outlier->segment * 3 + 1) * N + b];
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) totals[m][b] = multiply_add(weights, splat(values[m]), totals[m][b]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int b = 0; b < N; b++) out.store(row + m, column + b * LANES, totals[m][b]);
}

// next: `left` bytes of W, to be read after these products
template <int N, bool HAS_REST, int M = INT8_TILE_ROWS>
static void int8_tile_rows(const ByteTile &tile, const Rounded &x, int64_t row, int64_t rows, const uint8_t *next,
                           int64_t left, const Output &out, int64_t column) {
    const int64_t some = left / std::max<int64_t>(rows / M, 1);
    for (; rows >= M; rows -= M, row += M) {
        for (const uint8_t *end = next + some; next < end; next += 64) __builtin_prefetch(next, 0, 2);
        int8_tile<M, N, HAS_REST>(tile, x, row, out, column);
    }
    if constexpr (M > 1)
        if (rows) int8_tile_rows<N, HAS_REST, M / 2>(tile, x, row, rows, next, 0, out, column);
}

template <int N>
static void int8_tile_rows(const Matrix &w, int64_t block, const ByteTile &tile, const Rounded &x, int64_t rows,
                           const Output &out) {
    const uint8_t *next = w.line(block + N, 0), *end = w.line(std::min(block + 2 * N, w.blocks), 0);
    if (w.zero && (w.zero_is_float || BITS == 8))
        int8_tile_rows<N, true>(tile, x, 0, rows, next, std::max<int64_t>(end - next, 0), out, block * LANES);
    else int8_tile_rows<N, false>(tile, x, 0, rows, next, std::max<int64_t>(end - next, 0), out, block * LANES);
}

static void int8_tiles(const Matrix *w, const Output *out, int count, const Rounded &x, int64_t rows) {
    for_blocks(w, count, INT8_TILE_BLOCKS, [&](int i, int64_t block) {
        static thread_local Buffer weights, numbers;
        const int blocks = std::min<int64_t>(INT8_TILE_BLOCKS, w[i].blocks - block);
        const ByteTile tile = {blocks, weights.get<Words>(w[i].steps * Bytewise::VECTORS * blocks),
                               numbers.get<Floats>(3 * x.segments * blocks)};
        unpack(w[i], block, x, tile);
        if constexpr (INT8_TILE_BLOCKS > 2)
            if (blocks == 3) int8_tile_rows<3>(w[i], block, tile, x, rows, out[i]);
        if (blocks == 2) int8_tile_rows<2>(w[i], block, tile, x, rows, out[i]);
        if (blocks == 1) int8_tile_rows<1>(w[i], block, tile, x, rows, out[i]);
    }, true);
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
