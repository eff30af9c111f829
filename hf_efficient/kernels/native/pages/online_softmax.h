// Softmax over keys that come tile by tile (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867), in powers
// of two.

#pragma once
#include "vectors.h"
#include <cmath>

constexpr float LOG2_E = 1.44269504088896340736f, LN_2 = 0.693147180559945309417f;
constexpr float LOWEST = -3.4e38f;  // the highest score where none was seen: finite, so that differences are no NaN

// 2 ** x within 2 units in the last place, 0 for -inf.
static INLINE Floats exp2(Floats x) {
    const Floats bounded = maximum(splat(-200.0f), x);  // in this order a NaN stays
    const Floats whole = nearest_whole(bounded), f = bounded - whole;
    Floats power = f * 1.5353362e-4f + 1.3398874e-3f;  // a minimax polynomial on [-1/2, 1/2]
    power = power * f + 9.6184373e-3f;
    power = power * f + 5.5503324e-2f;
    power = power * f + 2.4022648e-1f;
    power = power * f + 6.9314720e-1f;
    power = power * f + 1.0f;
    return scaled(power, whole);
}

// cap * tanh(x / cap)
static INLINE Floats soft_capped(Floats x, float cap) {
    const Floats e = exp2(x * (2 * LOG2_E / cap));  // tanh(y) = 1 - 2 / (e ** 2y + 1)
    return cap - 2 * cap / (e + 1.0f);
}

// Of one row of queries: the highest score so far in powers of two, and the sum of 2 ** (score - top).
struct Softmax {
    float top = LOWEST, total = 0;

    // Makes weights of the scores of `blocks` times 16 keys, and adds them to `totals`, lane by lane; returns what
    // earlier sums must be multiplied with, as these are.
    INLINE float add(Floats *scores, int64_t blocks, Floats &totals) {
        Floats high = scores[0];
#pragma GCC unroll 4
        for (int64_t b = 1; b < blocks; b++) high = maximum(high, scores[b]);
        const float before = top;
        top = std::max(top, highest(high));
        Floats all = {};
#pragma GCC unroll 4
        for (int64_t b = 0; b < blocks; b++) {
            scores[b] = exp2(scores[b] - top);
            all += scores[b];
        }
        // the first scores correct nothing; exp2f is slow where it underflows
        const float correction = top == before ? 1.0f : before == LOWEST ? 0.0f : exp2f(before - top);
        totals = multiply_add(totals, splat(correction), all);
        return correction;
    }
};
