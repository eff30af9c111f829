// Softmax over keys that come tile by tile (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867), in powers
// of two.

#pragma once
#include "vectors.h"
#include <cmath>

constexpr float LOG2_E = 1.44269504088896340736f, LN_2 = 0.693147180559945309417f;
constexpr float LOWEST = -3.4e38f;  // the highest score where none was seen: finite, so that differences are no NaN

// 2 ** x for x up to 127, by a minimax polynomial on [-1/2, 1/2]. 0 below 2 ** -125: processors by Intel take forty
// times as long where a lane of a result is subnormal. COARSE: within 2.6e-6 of its value, for weights that are rounded
// to bfloat16; else within 2 units in the last place.
template <bool COARSE = false> static INLINE Floats exp2(Floats x) {
    constexpr float LEAST = -125;
    const Floats bounded = maximum(splat(LEAST), x);  // in this order a NaN stays
    const Floats whole = nearest_whole(bounded), f = bounded - whole;
    Floats power;
    if constexpr (COARSE) {
        power = f * 9.570068894e-3f + 5.591780852e-2f;
        power = power * f + 2.402474506e-1f;
        power = power * f + 6.931218213e-1f;
        power = power * f + 9.999992616e-1f;
    } else {
        power = f * 1.5353362e-4f + 1.3398874e-3f;
        power = power * f + 9.6184373e-3f;
        power = power * f + 5.5503324e-2f;
        power = power * f + 2.4022648e-1f;
        power = power * f + 6.9314720e-1f;
        power = power * f + 1.0f;
    }
    return select(x < LEAST, Floats{}, scaled(power, whole));
}

// cap * tanh(x / cap)
static INLINE Floats soft_capped(Floats x, float cap) {
    // tanh(y) = 1 - 2 / (e ** 2y + 1), which is 1 long before y = 44
    const Floats e = exp2(minimum(splat(2 * 44 * LOG2_E), x * (2 * LOG2_E / cap)));
    return cap - 2 * cap / (e + 1.0f);
}

// Of one row of queries: the highest score so far in powers of two, and the sum of 2 ** (score - top).
struct Softmax {
    float top = LOWEST, total = 0;
};

// Takes new scores of a row into account, or of 16 rows: `high` has the highest of each lane. top: the highest of a row
// so far. correction: what earlier sums of weights are multiplied with, as those were 2 ** (score - an earlier top).
static INLINE void raise(Softmax &row, Floats high, float &top, float &correction) {
    top = std::max(row.top, highest(high));
    correction = row.top == top ? 1.0f : exp2(splat(row.top - top))[0];
    row.top = top;
}
static INLINE void raise(Softmax (&rows)[LANES], const Floats (&high)[LANES], float (&tops)[LANES],
                         float (&corrections)[LANES]) {
    Words square[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) square[i] = (Words)high[i];
    transpose(square);
    Floats top = (Floats)square[0];
#pragma GCC unroll 16
    for (int i = 1; i < LANES; i++) top = maximum(top, (Floats)square[i]);
    alignas(64) float before[LANES];
    for (int i = 0; i < LANES; i++) before[i] = rows[i].top;
    const Floats old = load_some(before, LANES);
    top = maximum(top, old);
    store_some(tops, LANES, top);
    store_some(corrections, LANES, select(old == top, splat(1.0f), exp2(old - top)));
    for (int i = 0; i < LANES; i++) rows[i].top = tops[i];
}
