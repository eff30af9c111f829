// Inputs rounded to float8 E4M3 with the weight's own scale of inputs, or one for each row or 128 of its columns: the
// numbers that the codes and scales stand for, of the inputs' own type.

#pragma once
#include "codes.h"

enum { ROUND_ROWS = 1, ROUND_GROUPS = 2 };  // of Weight.rounds_inputs: one scale a row, or one for 128 columns
constexpr int64_t FLOAT8_GROUP = 128;
constexpr float FLOAT8_MOST = 448;

// The nearest number of E4M3, to even; |x| is at most 448, or NaN.
static INLINE Floats to_float8(Floats x) {
    const Words bits = (Words)x, rounded = (bits + 0x7ffffu + (bits >> 20 & 1u)) & 0xfff00000u;
    return select(absolute(x) < 0x1p-6f, nearest_whole(x * 512.0f) * 0x1p-9f, (Floats)rounded) + (x - x);
}

static INLINE Floats input_values(const uint16_t *x, int64_t count) { return widen(load_some(x, count)); }
static INLINE Floats input_values(const float *x, int64_t count) { return load_some(x, count); }
static INLINE void store_input(uint16_t *to, int64_t count, Floats x) { store_some(to, count, narrow(x)); }
static INLINE void store_input(float *to, int64_t count, Floats x) { store_some(to, count, x); }

// Numbers [begin, end) of a row, with one scale.
template <class T>
static INLINE void round_float8(const Matrix &w, const T *x, int64_t begin, int64_t end, T *to) {
    float scale;
    if (w.x_scale) scale = *w.x_scale;
    else {
        Ints largest = {};  // of the bits, so that NaN and infinity stay
        for (int64_t k = begin; k < end; k += LANES)
            largest = maximum(largest, (Ints)absolute(input_values(x + k, end - k)));
        const int32_t bits = highest(largest);
        float most;
        memcpy(&most, &bits, 4);
        scale = most * float(1.0 / FLOAT8_MOST);
        scale = scale < 0x1p-100f ? 0x1p-100f : scale;  // NaN stays
    }
    const Floats inverse = splat(1 / scale);
    for (int64_t k = begin; k < end; k += LANES) {
        const Floats at_least = maximum(splat(-FLOAT8_MOST), input_values(x + k, end - k) * inverse);
        store_input(to + k, end - k, to_float8(minimum(splat(FLOAT8_MOST), at_least)) * scale);  // NaN stays
    }
}

// x [rows, in_features] -> the rounded rows [rows, width], zeros at the end
template <class T> static const T *float8_inputs(const Matrix &w, const T *x, int64_t rows) {
    static thread_local Buffer buffer;
    T *rounded = buffer.get<T>(rows * w.width);
    const int64_t group = w.rounds_inputs == ROUND_GROUPS ? FLOAT8_GROUP : w.in_features;
    auto some = [&](int64_t row, int64_t end) {
        for (; row < end; row++) {
            T *to = rounded + row * w.width;
            for (int64_t k = 0; k < w.in_features; k += group)
                round_float8(w, x + row * w.in_features, k, std::min(k + group, w.in_features), to);
            for (int64_t k = w.in_features; k < w.width; k++) to[k] = 0;
        }
    };
    if (rows * w.width < 1 << 14) some(0, rows);  // one thread rounds faster than several
    else parallel(rows, some);
    return rounded;
}
