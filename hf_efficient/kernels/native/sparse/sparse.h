// Pruned bfloat16 weights: the kept values in the order in which they are read (bands of 4 rows, in a band steps of 32
// columns, in a step row after row), and a bit for each weight. kernels/linear/native_sparse.py packs them.

#pragma once
#include "dense.h"
#include "output.h"
#include "products.h"

constexpr int BAND = 4;              // rows
constexpr int BANDS = LANES / BAND;  // of a block
constexpr int AT_ONCE = REGISTERS < 32 ? 1 : 4;  // rows of x that share one expansion
// values between what is read and what is prefetched, measured on Zen 5
constexpr int AHEAD = REGISTERS < 32 ? 16384 : 4096;

struct SparseWeight {  // mirrored in kernels/linear/native_sparse.py
    const uint16_t *values;
    const uint32_t *masks;  // [bands, steps, BAND]: bit i of a word is column i of a step
    const int64_t *starts;  // [bands + 1]: where a band begins among the values
    int64_t out_features, in_features;
    int64_t two_of_four;  // whether each 4 columns keep 2, with no padding
};

struct Sparse : SparseWeight {
    static constexpr int COLUMNS = 32;  // of a step
    int64_t blocks, steps, width;       // blocks of 16 rows; width: columns with the padding

    Sparse() = default;
    explicit Sparse(const SparseWeight &weight) : SparseWeight(weight) {
        blocks = ceil_div(out_features, LANES);
        steps = ceil_div(in_features, COLUMNS);
        width = steps * COLUMNS;
    }
    INLINE const uint32_t *band_masks(int64_t band) const { return masks + band * steps * BAND; }
    // whether a load of a whole vector in this band may reach behind the last value
    INLINE bool is_near_end(int64_t band) const { return starts[band + 1] + COLUMNS > starts[blocks * BANDS]; }
};

// 32 columns of a row: bfloat16 in order, or floats.
struct Step {
#if BF16_DOT
    PairBits bits;
#else
    Floats first, last;  // 16 columns each
#endif
};

static INLINE Step step_of(const uint16_t *x) {
#if BF16_DOT
    return {pairs_at(x)};
#else
    return {widen(((const Halves *)x)[0]), widen(((const Halves *)x)[1])};
#endif
}

static INLINE Floats dot(Floats sum, const Step &a, const Step &b) {
#if BF16_DOT
    return pair_dot(sum, a.bits, b.bits);
#else
    return multiply_add(a.last, b.last, multiply_add(a.first, b.first, sum));
#endif
}

// Where values are found.
enum Reading {
    ANYWHERE,
    NEAR_END,     // nothing behind them may be read
    TWO_OF_FOUR,  // each 4 columns keep 2; nothing else is read
};

// The stored values of a row's step at their columns; `from` moves on.
template <Reading READING> static INLINE Step expanded(const uint16_t *&from, uint32_t mask) {
    const uint16_t *values = from;
#if BF16_DOT
    const int count = __builtin_popcount(mask);
    from += count;
    return {expanded_pairs<READING == NEAR_END>(values, mask, count)};
#else
    if constexpr (READING == TWO_OF_FOUR) {
        from += Sparse::COLUMNS / 2;
        return {expanded_two_of_four(values, mask & 0xffff), expanded_two_of_four(values + 8, mask >> 16)};
    }
    const int count = __builtin_popcount(mask);
    uint16_t copy[48];
    if (READING == NEAR_END) memcpy(copy, from, 2 * count), values = copy;
    from += count;
    return {expanded(values, mask & 0xffff), expanded(values + __builtin_popcount(mask & 0xffff), mask >> 16)};
#endif
}

// sums[m][j] <- x[m] . w[BAND * band + j] lane by lane, for M rows of x
template <int M, Reading READING>
static INLINE void few_rows(const Sparse &w, int64_t band, const uint16_t *x, Floats (*sums)[LANES]) {
    const uint16_t *from = w.values + w.starts[band];
    const uint32_t *masks = w.band_masks(band);
    Floats sum[M][BAND] = {};
    for (int64_t step = 0; step < w.steps; step++, masks += BAND, x += w.COLUMNS) {
        Step at[M];
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) at[m] = step_of(x + m * w.width);
        __builtin_prefetch(masks + AHEAD / 16, 0, 2);
#pragma GCC unroll 4
        for (int j = 0; j < BAND; j++) {
            __builtin_prefetch(from + AHEAD, 0, 2);
            const Step weights = expanded<READING>(from, masks[j]);
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) sum[m][j] = dot(sum[m][j], weights, at[m]);
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int j = 0; j < BAND; j++) sums[m][j] = sum[m][j];
}

template <int M>
static void few_rows_of_block(const Sparse &w, int64_t block, const uint16_t *x, int64_t row, const Output &out) {
    Floats sums[M][LANES];
    for (int64_t i = 0; i < BANDS; i++) {
        const int64_t band = block * BANDS + i;
        Floats(*to)[LANES] = (Floats(*)[LANES])(sums[0] + BAND * i);
        if (!BF16_DOT && w.two_of_four) few_rows<M, TWO_OF_FOUR>(w, band, x + row * w.width, to);
        else if (w.is_near_end(band)) few_rows<M, NEAR_END>(w, band, x + row * w.width, to);
        else few_rows<M, ANYWHERE>(w, band, x + row * w.width, to);
    }
    for (int m = 0; m < M; m++) out.store(row + m, block * LANES, sums_of_lanes(sums[m]));
}

// Few rows of x [rows, width], for `count` weights of the same width.
static void few(const Sparse *w, const Output *out, int count, const uint16_t *x, int64_t rows) {
    for_blocks(w, count, 1, [&](int i, int64_t block) {
        int64_t row = 0;
        for (; rows - row >= AT_ONCE; row += AT_ONCE) few_rows_of_block<AT_ONCE>(w[i], block, x, row, out[i]);
        if (rows - row >= 2) few_rows_of_block<2>(w[i], block, x, row, out[i]), row += 2;
        if (rows - row) few_rows_of_block<1>(w[i], block, x, row, out[i]);
    });
}

// For many_rows.h.
static void dequantize_tile(const Sparse &w, int64_t block, int blocks, int64_t first, int64_t last, Floats *tile) {
    for (int b = 0; b < blocks; b++) {
        const uint16_t *from[BANDS];
        const uint32_t *masks[BANDS];
        for (int i = 0; i < BANDS; i++) {
            const int64_t band = (block + b) * BANDS + i;
            from[i] = w.values + w.starts[band];
            masks[i] = w.band_masks(band);
            for (const uint32_t *end = masks[i] + first * BAND; masks[i] < end; masks[i]++)
                from[i] += __builtin_popcount(*masks[i]);
        }
        for (int64_t step = first; step < last; step++) {
            // terms of columns (pairs of bfloat16, or floats), once they are transposed a row of w in each lane
            constexpr int SQUARES = sizeof(Step) / sizeof(Words);
            Words squares[SQUARES][LANES];
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++) {
                const Step columns = expanded<NEAR_END>(from[j / BAND], *masks[j / BAND]++);
#if BF16_DOT
                squares[0][j] = (Words)columns.bits;
#else
                squares[0][j] = (Words)columns.first, squares[SQUARES - 1][j] = (Words)columns.last;
#endif
            }
            Floats *to = tile + (step - first) * SQUARES * LANES * blocks + b;
            for (auto &square : squares) {
                transpose(square);
#pragma GCC unroll 16
                for (int term = 0; term < LANES; term++, to += blocks) *to = (Floats)square[term];
            }
        }
    }
}
