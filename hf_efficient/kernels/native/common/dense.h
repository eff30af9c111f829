// Products with dense bfloat16 weights.

#pragma once
#include "elementwise.h"

constexpr int SUMS = 16;  // at once, rows of x times rows of the weight

// The sum of the lanes of each of 16 vectors.
static INLINE Floats sums_of_lanes(const Floats (&values)[SUMS]) {
#if BF16_DOT
    __m512 twos[8], fours[4], pairs[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const __m512 a = (__m512)values[2 * i], b = (__m512)values[2 * i + 1];
        twos[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {  // each quarter holds what it gives to 4 sums
        const __m512d a = (__m512d)twos[2 * i], b = (__m512d)twos[2 * i + 1];
        fours[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
    }
    constexpr int EVEN = 0x88, ODD = 0xdd;  // quarters 0 and 2 of both operands, or 1 and 3
    for (int i = 0; i < 2; i++) {
        const __m512 a = fours[2 * i], b = fours[2 * i + 1];
        pairs[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, EVEN), _mm512_shuffle_f32x4(a, b, ODD));
    }
    return (Floats)_mm512_add_ps(_mm512_shuffle_f32x4(pairs[0], pairs[1], EVEN),
                                 _mm512_shuffle_f32x4(pairs[0], pairs[1], ODD));
#else
    Floats sums = {};
    for (int i = 0; i < SUMS; i++)
        for (int lane = 0; lane < LANES; lane++) sums[i] += values[i][lane];
    return sums;
#endif
}

// y[i][j] (strides ld) <- x[i] . w[j] + bias[j] for M rows of x and `count` of w, at most SUMS / M
template <int M, int AHEAD>
static INLINE void dense_tile(const uint16_t *x, const uint16_t *w, const uint16_t *bias, int64_t width, int64_t count,
                              uint16_t *y, int64_t ld) {
    constexpr int N = SUMS / M;
    Floats sums[SUMS] = {};
#if BF16_DOT
    for (int64_t k = 0; k < width; k += 2 * LANES) {
        const __mmask32 inside = bits_below(width - k);
        __m512bh values[M];
#pragma GCC unroll 8
        for (int i = 0; i < M; i++) values[i] = (__m512bh)_mm512_maskz_loadu_epi16(inside, x + i * width + k);
#pragma GCC unroll 16
        for (int j = 0; j < N; j++) {
            const uint16_t *from = w + std::min<int64_t>(j, count - 1) * width + k;
            __builtin_prefetch(from + AHEAD, 0, 0);
            const __m512bh weights = (__m512bh)_mm512_maskz_loadu_epi16(inside, from);
#pragma GCC unroll 8
            for (int i = 0; i < M; i++)
                sums[i * N + j] = (Floats)_mm512_dpbf16_ps((__m512)sums[i * N + j], weights, values[i]);
        }
    }
#else
    for (int i = 0; i < M; i++)
        for (int j = 0; j < count; j++)
            for (int64_t k = 0; k < width; k++)
                sums[i * N + j][0] += bfloat16_value(x[i * width + k]) * bfloat16_value(w[j * width + k]);
#endif
    Floats results = sums_of_lanes(sums);
    if (bias)
        for (int i = 0; i < SUMS; i++) results[i] += bfloat16_value(bias[std::min<int64_t>(i % N, count - 1)]);
    const Halves halves = narrow(results);
    uint16_t stored[SUMS];
    memcpy(stored, &halves, sizeof stored);
    for (int i = 0; i < M; i++) memcpy(y + i * ld, stored + i * N, 2 * count);
}

// y [rows, columns] <- x [rows, width] @ w [columns, width]^T + bias [columns] or null, all bfloat16
template <class Ahead>
static INLINE void dense_ahead(Ahead ahead, const uint16_t *x, const uint16_t *w, const uint16_t *bias, uint16_t *y,
                               int64_t rows, int64_t columns, int64_t width) {
    parallel(ceil_div(columns, SUMS), [&](int64_t tile, int64_t end) {
        for (; tile < end; tile++)
            for (int64_t row = 0, left = rows; left > 0;) {
                auto some = [&](auto m) __attribute__((always_inline)) {
                    constexpr int M = decltype(m)::value, N = SUMS / M;
                    const int64_t last = std::min(columns, (tile + 1) * SUMS);
                    for (int64_t j = tile * SUMS; j < last; j += N)
                        dense_tile<M, decltype(ahead)::value>(x + row * width, w + j * width, bias ? bias + j : nullptr,
                                                              width, std::min<int64_t>(N, last - j),
                                                              y + row * columns + j, columns);
                    row += M, left -= M;
                };
                if (left >= 8) some(std::integral_constant<int, 8>());
                else if (left >= 4) some(std::integral_constant<int, 4>());
                else if (left >= 2) some(std::integral_constant<int, 2>());
                else some(std::integral_constant<int, 1>());
            }
    });
}

// The distances of prefetching, in elements, are measured: larger where the rows of x take several passes.
static void dense(const uint16_t *x, const uint16_t *w, const uint16_t *bias, uint16_t *y, int64_t rows,
                  int64_t columns, int64_t width) {
    auto run = [&](auto ahead) __attribute__((always_inline)) {
        dense_ahead(ahead, x, w, bias, y, rows, columns, width);
    };
    if (rows <= 4) run(std::integral_constant<int, 2048>());
    else if (rows <= 8) run(std::integral_constant<int, 2560>());
    else run(std::integral_constant<int, 8192>());
}
