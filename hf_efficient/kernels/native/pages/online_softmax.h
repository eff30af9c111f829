// Softmax over keys that come tile by tile (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867), in powers
// of two.

#pragma once
#include "vectors.h"
#include <cmath>

constexpr float LOG2_E = 1.44269504088896340736f, LN_2 = 0.693147180559945309417f;
constexpr float LOWEST = -3.4e38f;  // the highest score where none was seen: finite, so that differences are no NaN

// 2 ** x within 2 units in the last place, 0 for -inf.
static INLINE Floats exp2(Floats x) {
    const __m512 bounded = _mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);  // in this order a NaN stays
    const __m512 whole = _mm512_roundscale_ps(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Floats f = (Floats)bounded - (Floats)whole;
    Floats power = f * 1.5353362e-4f + 1.3398874e-3f;  // a minimax polynomial on [-1/2, 1/2]
    power = power * f + 9.6184373e-3f;
    power = power * f + 5.5503324e-2f;
    power = power * f + 2.4022648e-1f;
    power = power * f + 6.9314720e-1f;
    power = power * f + 1.0f;
    return (Floats)_mm512_scalef_ps((__m512)power, whole);
}

// cap * tanh(x / cap)
static INLINE Floats soft_capped(Floats x, float cap) {
    const Floats e = exp2(x * (2 * LOG2_E / cap));  // tanh(y) = 1 - 2 / (e ** 2y + 1)
    return cap - 2 * cap / (e + 1.0f);
}

static INLINE float highest(Floats x) { return _mm512_reduce_max_ps((__m512)x); }
static INLINE float sum(Floats x) { return _mm512_reduce_add_ps((__m512)x); }

// Of one row of queries: the highest score so far in powers of two, and the sum of 2 ** (score - top).
struct Softmax {
    float top = LOWEST, total = 0;

    // Makes weights of the scores of `blocks` times 16 keys; returns what earlier sums must be multiplied with.
    INLINE float add(Floats *scores, int64_t blocks) {
        Floats high = scores[0];
        for (int64_t b = 1; b < blocks; b++) high = (Floats)_mm512_max_ps((__m512)high, (__m512)scores[b]);
        const float before = top;
        top = std::max(top, highest(high));
        Floats all = {};
        for (int64_t b = 0; b < blocks; b++) {
            scores[b] = exp2(scores[b] - top);
            all += scores[b];
        }
        const float correction = top == before ? 1.0f : exp2f(before - top);
        total = total * correction + sum(all);
        return correction;
    }
};
