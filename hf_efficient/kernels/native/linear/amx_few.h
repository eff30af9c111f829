// Few rows of x by AMX (tier amx): codes become bfloat16 (exactly) in tiles that stay in the first-level cache, and
// sums over a segment of a group are scaled as in few_rows.h. That takes a third of the instructions of tiles of scaled
// weights, which pay for more rows.

#pragma once
#include <vector>

#include "amx.h"
#include "few_rows.h"

#if AMX
constexpr int64_t MOST_AMX_FEW_ROWS = 2 * AMX_ROWS;  // one configuration of tiles
// Measured on an Emerald Rapids: with 4 to 8 rows 1.75 times as fast as few_rows.h, with one row slower.
constexpr int64_t LEAST_AMX_FEW_ROWS = BITS == 8 ? 4 : 2;
constexpr int AMX_STEP = 2 * AMX_TERMS;              // columns of a tile

struct AmxSegment {
    int64_t g, step, end;  // steps of the weight
};

// Whether that pays, and segments are whole tiles.
static bool amx_few_takes(const Matrix &w, int64_t rows) {
    if (!AMX_IS_GRANTED || rows < LEAST_AMX_FEW_ROWS || rows > MOST_AMX_FEW_ROWS) return false;
    return w.width % AMX_STEP == 0 && (w.group % AMX_STEP == 0 || w.groups == 1);
}

// BLOCKS blocks of W. Tiles are multiplied one segment after they are decoded, and sums scaled one more later: what
// has just been stored would have to be waited for.
template <int ROW_TILES, int BLOCKS>
static void amx_few_rows(const Matrix &w, int64_t block, const AmxSegment *segments, int64_t count, const uint32_t *x,
                         int64_t ld, const float *x_sums, int64_t rows, const Output &out) {
    constexpr int TILE = 64 * AMX_TERMS, STEPS = AMX_STEP / Codes::COLUMNS;  // bytes; steps of a tile
    constexpr int64_t MOST_TILES = SEGMENT / AMX_STEP * BLOCKS, SUMS = ROW_TILES * AMX_ROWS;
    static thread_local Buffer decoded, results;
    char *const tiles = (char *)decoded.get<char>(2 * MOST_TILES * TILE);
    Floats(*const sums)[BLOCKS] = (Floats(*)[BLOCKS])results.get<Floats>(3 * SUMS * BLOCKS);
    Floats(*const totals)[BLOCKS] = sums + 2 * SUMS;
    const bool correct = w.has_offsets();
    Tiles configured;
    configured.configure(std::min<int64_t>(rows, AMX_ROWS), std::max<int64_t>(rows - AMX_ROWS, 1));
    for (int64_t m = 0; m < rows; m++)
        for (int b = 0; b < BLOCKS; b++) totals[m][b] = Floats{};

    auto decode = [&](int64_t segment) __attribute__((always_inline)) {
        const AmxSegment &of = segments[segment];
        for (int b = 0; b < BLOCKS; b++) {
            const uint8_t *line = w.line(block + b, of.step), *ahead = w.line(block + b + BLOCKS, of.step);
            Floats *to = (Floats *)(tiles + segment % 2 * MOST_TILES * TILE + b * 64);
            for (int64_t step = of.step; step < of.end; step++) {
                Pairs pairs[Codes::PAIRS];
                w.codes.decode(line, pairs);
                for (int i = 0; i < Codes::LINES; i++, line += 64, ahead += 64) __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 16
                for (int j = 0; j < Codes::PAIRS; j++, to += BLOCKS) *to = (Floats)pairs[j].bits;
            }
        }
    };
    auto multiply = [&](int64_t segment) __attribute__((always_inline)) {
        const AmxSegment &of = segments[segment];
        NothingAhead ahead;
        const AmxBlocks from = AmxBlocks::side_by_side(tiles + segment % 2 * MOST_TILES * TILE, BLOCKS);
        amx_blocks<false, ROW_TILES>((const char *)(x + of.step * Codes::PAIRS), 4 * ld, from, BLOCKS,
                                     (of.end - of.step) / STEPS, true, (char *)(sums + segment % 2 * SUMS),
                                     sizeof(*sums), ahead);
    };
    auto add = [&](int64_t segment) __attribute__((always_inline)) {
        const Floats(*from)[BLOCKS] = sums + segment % 2 * SUMS;
        for (int b = 0; b < BLOCKS; b++) {
            const Floats scale = w.scales(block + b, segments[segment].g);
            if (!correct) {
                for (int64_t m = 0; m < rows; m++) totals[m][b] += scale * from[m][b];
                continue;
            }
            const Floats offset = w.offsets(block + b, segments[segment].g) * scale;
            for (int64_t m = 0; m < rows; m++)
                totals[m][b] += scale * from[m][b] + offset * x_sums[m * count + segment];
        }
    };
    for (int64_t segment = 0; segment < count + 2; segment++) {
        if (segment < count) decode(segment);
        if (segment > 0 && segment <= count) multiply(segment - 1);
        if (segment > 1) add(segment - 2);
    }
    for (int64_t m = 0; m < rows; m++)
        for (int b = 0; b < BLOCKS; b++) out.store(m, (block + b) * LANES, totals[m][b]);
}

// For `count` weights with the same groups.
static void amx_few(const Matrix *w, const Output *out, int count, const uint32_t *x, int64_t ld, int64_t rows) {
    static thread_local std::vector<AmxSegment> found;
    static thread_local Buffer input_sums;
    found.clear();
    for_segments(*w, [&](int64_t, int64_t g, int64_t step, int64_t end) { found.push_back({g, step, end}); });
    const AmxSegment *segments = found.data();
    const int64_t length = found.size();
    float *sums = input_sums.get<float>(rows * length);
    if (std::any_of(w, w + count, [](const Matrix &matrix) { return matrix.has_offsets(); })) {
        auto some = [&](int64_t row, int64_t end) {
            sum_segments(*w, x + row * ld, ld, end - row, sums + row * length, length);
        };
        if (rows * ld < ALONE) some(0, rows);
        else parallel(rows, some);
    }
    for_blocks(w, count, 2, [&](int i, int64_t block) {
        auto some = [&](auto row_tiles, auto blocks) {
            constexpr int ROW_TILES = decltype(row_tiles)::value, BLOCKS = decltype(blocks)::value;
            amx_few_rows<ROW_TILES, BLOCKS>(w[i], block, segments, length, x, ld, sums, rows, out[i]);
        };
        const std::integral_constant<int, 1> one;
        const std::integral_constant<int, 2> two;
        const bool is_pair = block + 2 <= w[i].blocks;
        if (rows > AMX_ROWS) is_pair ? some(two, two) : some(two, one);
        else is_pair ? some(one, two) : some(one, one);
    });
}
#endif
