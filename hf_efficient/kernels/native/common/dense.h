// y [rows, columns] = x [rows, width] @ w [columns, width]^T + bias, all bfloat16, row after row, summed in float.
// dense_amx.h has the same by AMX, dense_tiles.h for many rows.

#pragma once
#include "elementwise.h"
#include "output.h"

constexpr int SUMS = 16;  // at once, rows of x times rows of the weight

// Sums that registers hold beside what they are made of.
constexpr int SUMS_IN_REGISTERS = REGISTERS < 32 ? 4 : 16;

// Calls body(k, count, chain) for all k that are multiples of 32 below `width`, the last time maybe with fewer numbers.
// Neighbouring calls have different chains, below CHAINS.
template <int CHAINS, class F> static INLINE void for_terms(int64_t width, F body) {
    constexpr int64_t ALL = 2 * LANES;
    int64_t k = 0;
    for (; k + CHAINS * ALL <= width; k += CHAINS * ALL)
#pragma GCC unroll 4
        for (int chain = 0; chain < CHAINS; chain++) body(k + chain * ALL, ALL, chain);
    if constexpr (CHAINS > 1)
        for (; k + ALL <= width; k += ALL) body(k, ALL, 0);
    if (k < width) body(k, width - k, 0);
}

// Rows of w that are asked for beside `count` rows of x from `row` on: bit j for the rows j, j + 4, j + 8, ... All rows
// of x share this, so that memory sends without a pause. With fewer than 8, each of them asks for everything: then
// memory sends up to a seventh more a second, by measurement.
static INLINE int sent_beside(int64_t row, int64_t count, int64_t rows) {
    int sent = 0;
    for (int j = 0; j < 4; j++) sent |= (rows < 8 || (row <= rows * j / 4 && rows * j / 4 < row + count)) << j;
    return sent;
}

// y[i][j] (strides ld) <- x[i] . w[j] + bias[j] for M rows of x and `count` of w, at most SUMS / M. What is read SUMS
// rows later is on its way to the second level: the first has few buffers for lines that memory has not sent.
// sent: what `sent_beside` says.
template <int M>
static INLINE void dense_tile(const uint16_t *x, const uint16_t *w, const uint16_t *bias, int64_t width, int64_t count,
                              uint16_t *y, int64_t ld, int sent) {
    // Where registers are few, one row of x is multiplied by one of w at a time: memory is faster at a single stream.
    constexpr int CHAINS = M == 1 && SUMS_IN_REGISTERS == 4 ? 2 : 1;  // sums that do not wait for each other
    constexpr int N = SUMS / M, AT_ONCE = CHAINS > 1 ? 1 : std::min(N, std::max(1, SUMS_IN_REGISTERS / M));
    Floats all[SUMS];
#pragma GCC unroll 1
    for (int first = 0; first < N; first += AT_ONCE) {
        Floats sums[M * AT_ONCE * CHAINS] = {};
        for_terms<CHAINS>(width, [&](int64_t k, int64_t count_of_terms, int chain) __attribute__((always_inline)) {
            Terms values[M];
#pragma GCC unroll 8
            for (int i = 0; i < M; i++) values[i] = load_terms(x + i * width + k, count_of_terms);
#pragma GCC unroll 16
            for (int j = 0; j < AT_ONCE; j++) {
                const uint16_t *from = w + std::min<int64_t>(first + j, count - 1) * width + k;
                if (sent >> (first + j) % 4 & 1) __builtin_prefetch(from + SUMS * width, 0, 2);
                const Terms weights = load_terms(from, count_of_terms);
#pragma GCC unroll 8
                for (int i = 0; i < M; i++) {
                    Floats &to = sums[(i * AT_ONCE + j) * CHAINS + chain];
                    to = dot(to, weights, values[i]);
                }
            }
        });
#pragma GCC unroll 8
        for (int i = 0; i < M; i++)
#pragma GCC unroll 16
            for (int j = 0; j < AT_ONCE; j++) {
                const Floats *of_both = sums + (i * AT_ONCE + j) * CHAINS;
                all[i * N + first + j] = CHAINS > 1 ? of_both[0] + of_both[CHAINS - 1] : of_both[0];
            }
    }
    Floats results = sums_of_lanes(all);
    if (bias) {
        float biases[SUMS];
        for (int i = 0; i < SUMS; i++) biases[i] = bfloat16_value(bias[std::min<int64_t>(i % N, count - 1)]);
        results += *(const Floats *)biases;
    }
    const Halves halves = narrow(results);
    uint16_t stored[SUMS];
    memcpy(stored, &halves, sizeof stored);
    for (int i = 0; i < M; i++) memcpy(y + i * ld, stored + i * N, 2 * count);
}

// y [rows, columns] <- x [rows, width] @ w [columns, width]^T + bias [columns] or null, all bfloat16
static void dense_rows(const uint16_t *x, const uint16_t *w, const uint16_t *bias, uint16_t *y, int64_t rows,
                       int64_t columns, int64_t width) {
    parallel(ceil_div(columns, SUMS), [&](int64_t tile, int64_t end) {
        for (; tile < end; tile++)
            for (int64_t row = 0, left = rows; left > 0;) {
                auto some = [&](auto m) __attribute__((always_inline)) {
                    constexpr int M = decltype(m)::value, N = SUMS / M;
                    const int64_t last = std::min(columns, (tile + 1) * SUMS);
                    const int sent = sent_beside(row, M, rows);
                    for (int64_t j = tile * SUMS; j < last; j += N)
                        dense_tile<M>(x + row * width, w + j * width, bias ? bias + j : nullptr, width,
                                      std::min<int64_t>(N, last - j), y + row * columns + j, columns, sent);
                    row += M, left -= M;
                };
                if (left >= 4) some(std::integral_constant<int, 4>());
                else if (left >= 2) some(std::integral_constant<int, 2>());
                else some(std::integral_constant<int, 1>());
            }
    });
}

// tile[pair of columns * distance] <- that pair of the first 16 of `count` rows of x, zeros for others. width: columns,
// of whole squares of 16 pairs.
static INLINE void lay_out(const uint16_t *x, int64_t count, int64_t width, int64_t distance, Floats *tile) {
    for (int64_t pair = 0; pair < width / 2; pair += LANES) {
        Words square[LANES];
        for (int64_t i = 0; i < LANES; i++)
            square[i] = i < count ? *(const Words *)(x + i * width + 2 * pair) : Words{};
        transpose(square);
        for (int64_t i = 0; i < LANES; i++) tile[(pair + i) * distance] = (Floats)square[i];
    }
}

// Rows [row, row + 16) of y, columns [column, column + count), from sums[c * distance], of a column each.
static INLINE void store_transposed(const Output &out, const Words *sums, int64_t distance, int64_t count,
                                    int64_t column, int64_t row, int64_t rows) {
    for (int64_t c = 0; c < count; c += LANES) {
        Words square[LANES];
        for (int64_t i = 0; i < LANES; i++) square[i] = c + i < count ? sums[(c + i) * distance] : Words{};
        transpose(square);
        for (int64_t i = 0; i < std::min<int64_t>(LANES, rows - row); i++)
            out.store(row + i, column + c, (Floats)square[i]);
    }
}
