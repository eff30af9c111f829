// y [rows, columns] = x [rows, width] @ w [columns, width]^T + bias for few rows, all float, row after row.

#pragma once
#include "dense.h"

// y[i][j] (strides ld) <- x[i] . w[j] + bias[j] for M rows of x and `count` of w, at most SUMS / M
template <int M>
static INLINE void float_tile(const float *x, const float *w, const float *bias, int64_t width, int64_t count, float *y,
                              int64_t ld, int sent) {
    constexpr int N = SUMS / M, AT_ONCE = std::min(N, std::max(1, SUMS_IN_REGISTERS / M));
    Floats all[SUMS];
#pragma GCC unroll 1
    for (int first = 0; first < N; first += AT_ONCE) {
        Floats sums[M * AT_ONCE] = {};
        auto add = [&](int64_t k, int64_t terms) __attribute__((always_inline)) {
            Floats values[M];
#pragma GCC unroll 8
            for (int i = 0; i < M; i++) values[i] = load_some(x + i * width + k, terms);
#pragma GCC unroll 16
            for (int j = 0; j < AT_ONCE; j++) {
                const float *from = w + std::min<int64_t>(first + j, count - 1) * width + k;
                if (sent >> (first + j) % 4 & 1) __builtin_prefetch(from + SUMS * width, 0, 2);  // as in dense.h
                const Floats weights = load_some(from, terms);
#pragma GCC unroll 8
                for (int i = 0; i < M; i++) {
                    Floats &to = sums[i * AT_ONCE + j];
                    to = multiply_add(weights, values[i], to);
                }
            }
        };
        int64_t k = 0;
        for (; k + LANES <= width; k += LANES) add(k, LANES);
        if (k < width) add(k, width - k);
#pragma GCC unroll 8
        for (int i = 0; i < M; i++)
#pragma GCC unroll 16
            for (int j = 0; j < AT_ONCE; j++) all[i * N + first + j] = sums[i * AT_ONCE + j];
    }
    float results[SUMS];
    const Floats summed = sums_of_lanes(all);
    memcpy(results, &summed, sizeof results);
    for (int i = 0; i < M; i++)
        for (int64_t j = 0; j < count; j++) y[i * ld + j] = results[i * N + j] + (bias ? bias[j] : 0.0f);
}

// y [rows, columns] <- x [rows, width] @ w [columns, width]^T + bias [columns] or null
static void dense_floats(const float *x, const float *w, const float *bias, float *y, int64_t rows, int64_t columns,
                         int64_t width) {
    parallel(ceil_div(columns, SUMS), [&](int64_t tile, int64_t end) {
        for (; tile < end; tile++)
            for (int64_t row = 0, left = rows; left > 0;) {
                auto some = [&](auto m) __attribute__((always_inline)) {
                    constexpr int M = decltype(m)::value, N = SUMS / M;
                    const int64_t last = std::min(columns, (tile + 1) * SUMS);
                    const int sent = sent_beside(row, M, rows);
                    for (int64_t j = tile * SUMS; j < last; j += N)
                        float_tile<M>(x + row * width, w + j * width, bias ? bias + j : nullptr, width,
                                      std::min<int64_t>(N, last - j), y + row * columns + j, columns, sent);
                    row += M, left -= M;
                };
                if (left >= 4) some(std::integral_constant<int, 4>());
                else if (left >= 2) some(std::integral_constant<int, 2>());
                else some(std::integral_constant<int, 1>());
            }
    });
}
