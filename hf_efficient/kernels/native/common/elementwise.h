// Strided tensors of float, bfloat16 or float16, loaded and stored as rows of floats; e^x of floats.

#pragma once
#include <cmath>

#include "vectors.h"

enum Type : int64_t { FLOAT, BFLOAT16, HALF };

// e^x to 2 units in the last place: 2^n * e^r with |r| <= ln 2 / 2
static INLINE Floats exponential(Floats x) {
    x = minimum(splat(88.7f), maximum(splat(-87.3f), x));  // in this order a NaN stays
    const Floats n = nearest_whole(x * 1.44269504f), r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return scaled(p, n);
}

// Calls body(at) for every index of the first three of `sizes`.
template <class F> static INLINE void for_rows(const int64_t *sizes, F body) {
    int64_t at[3];
    for (at[0] = 0; at[0] < sizes[0]; at[0]++)
        for (at[1] = 0; at[1] < sizes[1]; at[1]++)
            for (at[2] = 0; at[2] < sizes[2]; at[2]++) body(at);
}

static INLINE int64_t offset(const int64_t *strides, const int64_t *at) {
    return strides[0] * at[0] + strides[1] * at[1] + strides[2] * at[2];
}

// x <- `count` elements from index `first` of `data` on, `stride` apart; x has room for a whole vector at the end
static INLINE void load(float *x, const void *data, int64_t type, int64_t first, int64_t stride, int64_t count) {
    if (type == FLOAT) {
        const float *from = (const float *)data + first;
        if (stride == 1) memcpy(x, from, count * 4);
        else for (int64_t i = 0; i < count; i++) x[i] = from[i * stride];
        return;
    }
    const uint16_t *from = (const uint16_t *)data + first;
    for (int64_t i = 0; i < count; i += LANES) {
        const uint16_t *some = from + i * stride;
        uint16_t copy[LANES];
        const int64_t left = std::min<int64_t>(LANES, count - i);
        if (stride != 1) {
            for (int64_t j = 0; j < left; j++) copy[j] = some[j * stride];
            some = copy;
        }
        const Halves halves = load_some(some, left);
        *(Floats *)(x + i) = type == HALF ? from_float16(halves) : widen(halves);
    }
}

static INLINE void store(const float *x, void *data, int64_t type, int64_t first, int64_t stride, int64_t count) {
    if (type == FLOAT) {
        float *to = (float *)data + first;
        if (stride == 1) memcpy(to, x, count * 4);
        else for (int64_t i = 0; i < count; i++) to[i * stride] = x[i];
        return;
    }
    uint16_t *to = (uint16_t *)data + first;
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats values = load_some(x + i, count - i);
        const Halves halves = type == HALF ? to_float16(values) : narrow(values);
        if (stride == 1) store_some(to + i, count - i, halves);
        else for (int64_t j = 0; j < std::min<int64_t>(LANES, count - i); j++) to[(i + j) * stride] = halves[j];
    }
}
