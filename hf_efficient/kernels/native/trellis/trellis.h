// Weights coded along a trellis of HALF_BITS / 2 bits (a compiler flag): W[n][k] = value * scale of row n. Each column
// is a stream of bits; a vector holds 16 of them of each of 32 columns. kernels/linear/trellis_codes.py says which
// values they stand for, kernels/linear/native_trellis.py packs them.

#pragma once
#include <utility>

#include "output.h"
#include "products.h"
#include "shorts.h"

constexpr int BAND = 32;          // rows that take whole words
constexpr int WORDS = HALF_BITS;  // of a band
constexpr int SEGMENT = 32;       // steps that the cache holds; of 256, sums in 32 bits hold a lane: 2 by 126 by 32,767

struct TrellisWeight {       // mirrored in kernels/linear/native_trellis.py
    const uint16_t *packed;  // [bands, steps, WORDS, 32]
    const float *scale;      // [bands * 32]
    const int32_t *next;     // [bands]: where the stream goes on, at the end of a sequence at its beginning
    int64_t out_features, in_features;
};

// f(0) to f(COUNT - 1), with constants as arguments
template <class F, int... I> static INLINE void each(F f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>()), ...);
}
template <int COUNT, class F> static INLINE void each(F f) { each(f, std::make_integer_sequence<int, COUNT>()); }

struct Trellis : TrellisWeight {
    static constexpr int COLUMNS = 32;  // of a step
    int64_t blocks, steps, width;       // blocks of 16 rows; width: columns with the padding

    Trellis() = default;
    explicit Trellis(const TrellisWeight &weight) : TrellisWeight(weight) {
        blocks = ceil_div(out_features, LANES);
        steps = ceil_div(in_features, COLUMNS);
        width = steps * COLUMNS;
    }
    INLINE const uint16_t *words(int64_t band, int64_t step) const {
        return packed + (band * steps + step) * WORDS * COLUMNS;
    }
};

// Calls f(constant row, values of 32 columns, MIDDLE too much) for COUNT rows of a band from row FIRST on. words and
// next: of this band and of the one where its stream goes on.
template <int FIRST, int COUNT, class F> static INLINE void decode(const uint16_t *words, const uint16_t *next, F f) {
    constexpr int BEGIN = FIRST * HALF_BITS / 2 / 16;
    constexpr int END = ((FIRST + COUNT - 1) * HALF_BITS / 2 + STATE_BITS - 1) / 16 + 1;
    Shorts loaded[END - BEGIN];
    each<END - BEGIN>([&](auto i) __attribute__((always_inline)) {
        constexpr int word = BEGIN + i;
        loaded[i] = Shorts::load(word < WORDS ? words + word * 32 : next + (word - WORDS) * 32);
    });
    each<COUNT>([&](auto i) __attribute__((always_inline)) {
        constexpr int bit = (FIRST + i) * HALF_BITS / 2, word = bit / 16 - BEGIN;
        constexpr int more = word + 1 < END - BEGIN ? word + 1 : word;
        f(i, values(states<bit % 16>(loaded[word], loaded[more])));
    });
}

// Rows of x, rounded to 16 bits with a scale a row.
struct RoundedRows {
    const int16_t *x;    // [rows, width]
    const float *scale;  // [rows]
    const Ints *starts;  // [rows, segments]: takes back what the values have too much
};

constexpr int AT_ONCE = REGISTERS < 32 ? 4 : 16;  // sums in registers
constexpr int AHEAD = 256 * 32;  // words on their way from memory: hardware does not foresee both blocks' order

// totals[m][row] lane by lane, of rows FIRST to END of a band, for M rows of x: what steps of a segment add. FETCHES:
// whether these rows come first
template <int M, int FIRST, int END, bool FETCHES>
static INLINE void add_segment(const Trellis &w, int64_t band, const RoundedRows &rows, int64_t row, int64_t segment,
                               int64_t segments, Floats (*totals)[2][LANES]) {
    constexpr int COUNT = AT_ONCE / M > 0 ? AT_ONCE / M : 1;
    const int64_t first = segment * SEGMENT, end = std::min(w.steps, first + SEGMENT);
    const uint16_t *words = w.words(band, first), *next = w.words(w.next[band], first);
    Ints sum[M][COUNT];
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 16
        for (int i = 0; i < COUNT; i++) sum[m][i] = rows.starts[(row + m) * segments + segment];
    for (int64_t step = first; step < end; step++) {
        if constexpr (FETCHES)
#pragma GCC unroll 16
            for (int i = 0; i < WORDS; i++) __builtin_prefetch(words + AHEAD + i * 32);
        Shorts x[M];
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) x[m] = Shorts::load(rows.x + (row + m) * w.width + step * 32);
        decode<FIRST, COUNT>(words, next, [&](auto i, Shorts found) __attribute__((always_inline)) {
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) sum[m][i] = plus_pairs(sum[m][i], found, x[m]);
        });
        words += WORDS * 32, next += WORDS * 32;
    }
    for (int m = 0; m < M; m++)
        for (int i = 0; i < COUNT; i++) totals[m][FIRST / LANES][FIRST % LANES + i] += to_floats(sum[m][i]);
    if constexpr (FIRST + COUNT < END)
        add_segment<M, FIRST + COUNT, END, false>(w, band, rows, row, segment, segments, totals);
}

// `blocks` of a band from block `block` on. Each segment is read from memory once, and by the other block from the
// first level of the cache.
template <int M>
static void few_rows(const Trellis &w, int64_t block, int blocks, const RoundedRows &rows, int64_t row,
                     int64_t segments, const Output &out) {
    Floats totals[M][2][LANES] = {};
    const int64_t band = block / 2;
    for (int64_t segment = 0; segment < segments; segment++) {
        if (block % 2 == 0) add_segment<M, 0, LANES, true>(w, band, rows, row, segment, segments, totals);
        if (blocks == 2) add_segment<M, LANES, BAND, false>(w, band, rows, row, segment, segments, totals);
        else if (block % 2) add_segment<M, LANES, BAND, true>(w, band, rows, row, segment, segments, totals);
    }
    for (; blocks; blocks--, block++) {
        const Floats scale = *(const Floats *)(w.scale + block * LANES);
        for (int m = 0; m < M; m++) {
            const Floats sums = sums_of_lanes(totals[m][block % 2]);
            out.store(row + m, block * LANES, sums * scale * rows.scale[row + m]);
        }
    }
}

// x [rows, columns] of bfloat16, for a weight of `width` columns.
static RoundedRows rounded(const uint16_t *x, int64_t rows, int64_t columns, int64_t width, int64_t segments) {
    static thread_local Buffer buffers[3];
    int16_t *to = buffers[0].get<int16_t>(rows * width);
    float *scale = buffers[1].get<float>(rows);
    Ints *starts = buffers[2].get<Ints>(rows * segments);
    for (int64_t row = 0; row < rows; row++, x += columns) {
        Floats most{}, none{};  // none: zeros, or NaN in the place of what is not finite
        for (int64_t i = 0; i < columns; i += LANES) {
            const Floats part = widen(load_some(x + i, columns - i));
            most = maximum(most, absolute(part)), none += part * 0.0f;
        }
        const float largest = highest(most);
        scale[row] = largest / 32767 + sum(none);
        const float lift = largest < 0x1p-64f ? 0x1p64f : 1;  // else the inverse of small numbers is infinite
        const float inverse = largest > 0 ? 32767 / (largest * lift) : 0;
        int16_t *values = to + row * width;
        for (int64_t i = 0; i < width; i += LANES)
            store_shorts(values + i, nearest(widen(load_some(x + i, columns - i)) * lift * inverse));
        for (int64_t segment = 0; segment < segments; segment++) {
            Ints start{};
            const int64_t end = std::min(width / 32, (segment + 1) * SEGMENT);
            for (int64_t step = segment * SEGMENT; step < end; step++)
                start = plus_pairs(start, Shorts::splat(-MIDDLE), Shorts::load(values + 32 * step));
            starts[row * segments + segment] = start;
        }
    }
    return {to, scale, starts};
}

// Few rows of x, for `count` weights of the same width.
static void few(const Trellis *w, const Output *out, int count, const uint16_t *x, int64_t rows) {
    const int64_t segments = ceil_div(w->steps, SEGMENT);
    const RoundedRows to = rounded(x, rows, w->in_features, w->width, segments);
    int64_t blocks = 0;
    for (int i = 0; i < count; i++) blocks += w[i].blocks;
    const int together = blocks < 8 * omp_get_max_threads() ? 1 : 2;  // whole bands, where each thread gets some
    for_blocks(w, count, together, [&](int i, int64_t block) {
        const int here = (int)std::min<int64_t>(together, w[i].blocks - block);
        int64_t row = 0;
        for (; rows - row >= 4; row += 4) few_rows<4>(w[i], block, here, to, row, segments, out[i]);
        if (rows - row >= 2) few_rows<2>(w[i], block, here, to, row, segments, out[i]), row += 2;
        if (rows - row) few_rows<1>(w[i], block, here, to, row, segments, out[i]);
    });
}

// The values of a half of a band times their scales: 32 columns a row, as floats.
template <int HALF, class F> static INLINE void scaled_rows(const Trellis &w, int64_t band, int64_t step, F f) {
    const float *scale = w.scale + band * BAND + 16 * HALF;
    decode<16 * HALF, LANES>(w.words(band, step), w.words(w.next[band], step),
                             [&](auto i, Shorts found) __attribute__((always_inline)) {
                                 f(i, to_floats(first_half(found) - MIDDLE) * scale[i],
                                   to_floats(second_half(found) - MIDDLE) * scale[i]);
                             });
}

// For many_rows.h.
static void dequantize_tile(const Trellis &w, int64_t block, int blocks, int64_t first, int64_t last, Floats *tile) {
    // terms of columns (pairs of bfloat16, or floats), once they are transposed a row of w in each lane
    constexpr int SQUARES = BF16_DOT ? 1 : 2;
    for (int b = 0; b < blocks; b++)
        for (int64_t step = first; step < last; step++) {
            Words squares[SQUARES][LANES];
            auto put = [&](auto i, Floats low, Floats high) __attribute__((always_inline)) {
#if BF16_DOT
                squares[0][i] = (Words)narrow_both(low, high);
#else
                squares[0][i] = (Words)low, squares[1][i] = (Words)high;
#endif
            };
            if ((block + b) % 2) scaled_rows<1>(w, (block + b) / 2, step, put);
            else scaled_rows<0>(w, (block + b) / 2, step, put);
            Floats *to = tile + (step - first) * SQUARES * LANES * blocks + b;
            for (auto &square : squares) {
                transpose(square);
#pragma GCC unroll 16
                for (int term = 0; term < LANES; term++, to += blocks) *to = (Floats)square[term];
            }
        }
}
