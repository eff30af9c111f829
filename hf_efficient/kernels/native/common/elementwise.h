// Strided tensors of several types, seen as rows of floats.

#pragma once
#include <cmath>

#include "vectors.h"

enum Type : int64_t { FLOAT, BFLOAT16, HALF };

static INLINE Floats splat(float value) { return value - (Floats){}; }

static INLINE Floats select(Ints mask, Floats yes, Floats no) {
    return (Floats)(((Ints)yes & mask) | ((Ints)no & ~mask));
}

// e^x to 2 units in the last place: 2^n * e^r with |r| <= ln 2 / 2
static INLINE Floats exponential(Floats x) {
    x = select(x < -87.3f, splat(-87.3f), select(x > 88.7f, splat(88.7f), x));
    const Floats n = __builtin_convertvector(
        __builtin_convertvector(x * 1.44269504f + select(x < 0.0f, splat(-0.5f), splat(0.5f)), Ints), Floats);
    const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
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

static INLINE float half_value(uint16_t half) { return (float)*(_Float16 *)&half; }

// x <- `count` elements from index `first` of `data` on, `stride` apart; x has room for a whole vector at the end
static INLINE void load(float *x, const void *data, int64_t type, int64_t first, int64_t stride, int64_t count) {
    if (type == FLOAT) {
        const float *from = (const float *)data + first;
        if (stride == 1) memcpy(x, from, count * 4);
        else for (int64_t i = 0; i < count; i++) x[i] = from[i * stride];
        return;
    }
    const uint16_t *from = (const uint16_t *)data + first;
    if (type == HALF) {
        for (int64_t i = 0; i < count; i++) x[i] = half_value(from[i * stride]);
        return;
    }
    int64_t i = 0;
    if (stride == 1)
        for (; i + LANES <= count; i += LANES) *(Floats *)(x + i) = widen(*(const Halves *)(from + i));
    for (; i < count; i++) x[i] = bfloat16_value(from[i * stride]);
}

static INLINE void store(const float *x, void *data, int64_t type, int64_t first, int64_t stride, int64_t count) {
    if (type == FLOAT) {
        float *to = (float *)data + first;
        if (stride == 1) memcpy(to, x, count * 4);
        else for (int64_t i = 0; i < count; i++) to[i * stride] = x[i];
        return;
    }
    uint16_t *to = (uint16_t *)data + first;
    if (type == HALF) {
        for (int64_t i = 0; i < count; i++) *(_Float16 *)(to + i * stride) = (_Float16)x[i];
        return;
    }
    int64_t i = 0;
    if (stride == 1)
        for (; i + LANES <= count; i += LANES) *(Halves *)(to + i) = narrow(*(const Floats *)(x + i));
    for (; i < count; i++) {
        const Halves half = narrow(splat(x[i]));
        to[i * stride] = half[0];
    }
}
