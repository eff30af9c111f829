// Products with weights that are no codes.

#pragma once
#include "elementwise.h"

constexpr int ROWS_AT_ONCE = 4;  // of the weight, and of x: 16 sums in registers

static INLINE float sum_of(Floats values) {
#if BF16_DOT
    return _mm512_reduce_add_ps((__m512)values);
#else
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += values[i];
    return sum;
#endif
}

// y[i][j] (strides of y) <- x[i] . w[j] + bias[j] for `n` rows of w and M of x
template <int M> static INLINE void dense_tile(const uint16_t *x, const uint16_t *w, int64_t width, int n, float *y) {
    Floats sums[ROWS_AT_ONCE][M] = {};
    int64_t k = 0;
#if BF16_DOT
    for (; k + 2 * LANES <= width; k += 2 * LANES) {
        __m512bh values[M];
        for (int i = 0; i < M; i++) values[i] = (__m512bh)_mm512_loadu_si512(x + i * width + k);
        for (int j = 0; j < ROWS_AT_ONCE; j++) {
            const uint16_t *from = w + std::min(j, n - 1) * width + k;
            __builtin_prefetch(from + 4096);
            const __m512bh weights = (__m512bh)_mm512_loadu_si512(from);
            for (int i = 0; i < M; i++) sums[j][i] = (Floats)_mm512_dpbf16_ps((__m512)sums[j][i], weights, values[i]);
        }
    }
#endif
    for (int j = 0; j < n; j++)
        for (int i = 0; i < M; i++) {
            float sum = sum_of(sums[j][i]);
            for (int64_t rest = k; rest < width; rest++)
                sum += bfloat16_value(x[i * width + rest]) * bfloat16_value(w[j * width + rest]);
            y[i * ROWS_AT_ONCE + j] = sum;
        }
}

// y [rows, columns] <- x [rows, width] @ w [columns, width]^T + bias [columns] or null, all bfloat16
static void dense(const uint16_t *x, const uint16_t *w, const uint16_t *bias, uint16_t *y, int64_t rows, int64_t columns, int64_t width) {
    parallel(ceil_div(columns, ROWS_AT_ONCE), [&](int64_t tile, int64_t end) {
        for (; tile < end; tile++) {
            const int64_t first = tile * ROWS_AT_ONCE;
            const int n = std::min<int64_t>(ROWS_AT_ONCE, columns - first);
            for (int64_t row = 0; row < rows; row += ROWS_AT_ONCE) {
                float results[ROWS_AT_ONCE * ROWS_AT_ONCE];
                const uint16_t *from = x + row * width, *weights = w + first * width;
                const int m = std::min<int64_t>(ROWS_AT_ONCE, rows - row);
                if (m == 1) dense_tile<1>(from, weights, width, n, results);
                else if (m == 2) dense_tile<2>(from, weights, width, n, results);
                else if (m == 3) dense_tile<3>(from, weights, width, n, results);
                else dense_tile<4>(from, weights, width, n, results);
                for (int i = 0; i < m; i++)
                    for (int j = 0; j < n; j++) {
                        float value = results[i * ROWS_AT_ONCE + j];
                        if (bias) value += bfloat16_value(bias[first + j]);
                        const Halves half = narrow(splat(value));
                        y[(row + i) * columns + first + j] = half[0];
                    }
            }
        }
    });
}
