// Few rows of x, which memory bandwidth bounds: codes become bfloat16 (exactly) in registers, and products are summed
// in float over a segment of a group. The scale multiplies the sum; the zero point costs one sum of x for each segment.

#pragma once
#include "codes.h"
#include "output.h"

constexpr int SUMS_AT_ONCE = REGISTERS / 2;
constexpr int ROWS_AT_ONCE = std::min(8, SUMS_AT_ONCE);  // rows of x that share one decoding
// Blocks of W that share one load of x. 32 columns of 3 bits fill the registers.
constexpr int BLOCKS_AT_ONCE = BITS == 3 || REGISTERS < 32 ? 1 : 2;

// Calls body(the number of rows, the first row) for groups of rows that share one decoding.
template <class F> static INLINE void for_row_groups(int64_t rows, F body) {
    int64_t row = 0;
    if (ROWS_AT_ONCE == 8)
        for (; row + 8 <= rows; row += 8) body(std::integral_constant<int, ROWS_AT_ONCE>(), row);
    for (; row + 4 <= rows; row += 4) body(std::integral_constant<int, 4>(), row);
    if (rows - row >= 2) body(std::integral_constant<int, 2>(), row), row += 2;
    if (rows > row) body(std::integral_constant<int, 1>(), row);
}

// x [rows, ld] with the numbers of a column side by side for each group of rows: then one register addresses all of
// them, where compilers load an address for each. T has 4 bytes.
template <class T> static const T *columns_together(const T *x, int64_t ld, int64_t rows) {
    static thread_local Buffer buffer;
    if (rows == 1) return x;
    T *const all = buffer.get<T>(rows * ld + LANES);
    for_row_groups(rows, [&](auto count, int64_t row) {
        constexpr int M = decltype(count)::value;
        const T *from = x + row * ld;
        T *to = all + row * ld;
        if (M == 1) {
            memcpy(to, from, ld * sizeof(T));
            return;
        }
        for (int64_t k = 0; k < ld; k += LANES) {
            const int64_t some = std::min<int64_t>(LANES, ld - k);
            Words square[LANES] = {};
            for (int m = 0; m < M; m++) square[m] = (Words)load_some((const float *)(from + m * ld + k), some);
            transpose(square);
            for (int64_t i = 0; i < some; i++, to += M) store_some((float *)to, M, (Floats)square[i]);
        }
    });
    return all;
}

// totals[m][b] of BLOCKS neighbouring blocks for M rows of x, which stand as `columns_together` makes them. T is
// uint32_t (pairs of bfloat16) or float; sums are [M][ld_sums].
template <int M, int BLOCKS, class T>
static INLINE void few_rows(const Matrix &w, int64_t block, const T *x, const float *sums, int64_t ld_sums,
                            Floats (*totals)[BLOCKS]) {
    constexpr bool PAIRED = std::is_same<T, uint32_t>::value;
    constexpr int TERMS = PAIRED ? Codes::PAIRS : Codes::COLUMNS;  // of a line, for one row of x
    constexpr int CHAINS = std::min(4, SUMS_AT_ONCE / (M * BLOCKS));  // sums that do not wait for each other
    constexpr int LINES = CHAINS > TERMS ? CHAINS / TERMS : 1;     // at once
    const int64_t stride = w.line(1, 0) - w.line(0, 0);
    for (int m = 0; m < M; m++)
        for (int b = 0; b < BLOCKS; b++) totals[m][b] = Floats{};
    const bool correct = w.has_offsets();
    for_segments(w, [&](int64_t segment, int64_t g, int64_t step, int64_t end) __attribute__((always_inline)) {
        Floats sum[M][BLOCKS][CHAINS] = {};
        const uint8_t *line = w.line(block, step);
        const T *at = x + step * TERMS * M;
        auto add = [&](int chain) __attribute__((always_inline)) {
            Codes::As<T> values[BLOCKS];
#pragma GCC unroll 2
            for (int b = 0; b < BLOCKS; b++) {
                // The same line of the next blocks, to the second-level cache: for short rows up to 1.7 times as fast
                // as a fixed distance. With few registers codes are read more slowly, and the fixed one is faster.
                const int64_t ahead = REGISTERS < 32 ? 1 << 14 : (b + BLOCKS) * stride;
                for (int i = 0; i < Codes::LINES; i++) __builtin_prefetch(line + ahead + 64 * i, 0, 2);
                values[b].decode(w.codes, line + b * stride);
            }
#pragma GCC unroll 32
            for (int j = 0; j < TERMS; j++)
#pragma GCC unroll 8
                for (int m = 0; m < M; m++)
#pragma GCC unroll 2
                    for (int b = 0; b < BLOCKS; b++) {
                        Floats &to = sum[m][b][(chain + j) % CHAINS];
                        to = dot(to, values[b][j], at[j * M + m]);
                    }
            at += TERMS * M;
            line += Codes::LINES * 64;
        };
        for (; step + LINES <= end; step += LINES)
#pragma GCC unroll 4
            for (int i = 0; i < LINES; i++) add(i * TERMS);
        if constexpr (LINES > 1)
            for (; step < end; step++) add(0);
#pragma GCC unroll 2
        for (int b = 0; b < BLOCKS; b++) {
            const Floats scale = w.scales(block + b, g), offset = correct ? w.offsets(block + b, g) : Floats{};
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                Floats all = sum[m][b][0];
#pragma GCC unroll 4
                for (int chain = 1; chain < CHAINS; chain++) all += sum[m][b][chain];
                if (correct) all += offset * sums[m * ld_sums + segment];
                totals[m][b] += scale * all;
            }
        }
    });
}

template <int BLOCKS, class T>
static void few_rows_of_blocks(const Matrix &w, int64_t block, const T *x, int64_t ld, const float *sums,
                               int64_t ld_sums, int64_t rows, const Output &out) {
    Floats totals[ROWS_AT_ONCE][BLOCKS];
    for_row_groups(rows, [&](auto count, int64_t row) {
        constexpr int M = decltype(count)::value;
        few_rows<M, BLOCKS>(w, block, x + row * ld, sums + row * ld_sums, ld_sums, totals);
        for (int m = 0; m < M; m++)
            for (int b = 0; b < BLOCKS; b++) out.store(row + m, (block + b) * LANES, totals[m][b]);
    });
}

// The sums of x over each segment: [rows][ld_sums].
template <class T>
static void sum_segments(const Matrix &w, const T *x, int64_t ld, int64_t rows, float *sums, int64_t ld_sums) {
    constexpr bool PAIRED = std::is_same<T, uint32_t>::value;
    constexpr int LENGTH = Codes::COLUMNS / (PAIRED ? 2 : 1);
    for (int64_t row = 0; row < rows; row++)
        for_segments(w, [&](int64_t segment, int64_t, int64_t step, int64_t end) {
            float low[LENGTH] = {}, high[LENGTH] = {};
            for (const T *at = x + row * ld + step * LENGTH; step < end; step++, at += LENGTH)
                for (int i = 0; i < LENGTH; i++) {
                    if constexpr (PAIRED) {
                        low[i] += bfloat16_value(at[i]), high[i] += bfloat16_value(at[i] >> 16);
                    } else {
                        low[i] += at[i];
                    }
                }
            float sum = 0;
            for (int i = 0; i < LENGTH; i++) sum += low[i] + high[i];
            sums[row * ld_sums + segment] = sum;
        });
}

// x [count], of whole lines, by the factors of the decoded values.
static const float *divided(const float *x, int64_t count) {
    static thread_local Buffer buffer;
    float *copy = buffer.get<float>(count + LANES), factors[LANES];
    for (int i = 0; i < LANES; i++) factors[i] = 1 / Codes::factor(i);
    for (int64_t i = 0; i < count; i += LANES)
        *(Floats *)(copy + i) = load_some(x + i, count - i) * *(const Floats *)factors;
    return copy;
}

// For `count` weights with the same groups.
template <class T>
static void few(const Matrix *w, const Output *out, int count, const T *x, int64_t ld, int64_t rows) {
    int64_t segments = 0;
    for_segments(*w, [&](int64_t, int64_t, int64_t, int64_t) { segments++; });
    static thread_local Buffer input_sums;
    float *sums = input_sums.get<float>(rows * segments);
    if (std::any_of(w, w + count, [](const Matrix &matrix) { return matrix.has_offsets(); }))
        sum_segments(*w, x, ld, rows, sums, segments);
    if constexpr (!Codes::LOOKS_UP) x = divided(x, rows * ld);
    x = columns_together(x, ld, rows);
    for_blocks(w, count, BLOCKS_AT_ONCE, [&](int i, int64_t block) {
        if (block + BLOCKS_AT_ONCE <= w[i].blocks)
            few_rows_of_blocks<BLOCKS_AT_ONCE>(w[i], block, x, ld, sums, segments, rows, out[i]);
        else few_rows_of_blocks<1>(w[i], block, x, ld, sums, segments, rows, out[i]);
    });
}
