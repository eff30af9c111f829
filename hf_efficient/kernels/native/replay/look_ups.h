// Rows of a table, and columns in another order. Nothing is read where an index is out of range.

#pragma once
#include "vectors.h"

constexpr int64_t WORTH_IT = 1 << 13;  // elements that several threads share

static INLINE bool in_range(const int64_t *index, int64_t count, int64_t present) {
    for (int64_t i = 0; i < count; i++)
        if (index[i] < 0 || index[i] >= present) return false;
    return true;
}

static bool look_up_rows(const int64_t *index, int64_t present, int64_t count, int64_t bytes, const char *a, char *y) {
    if (!in_range(index, count, present)) return false;
    for (int64_t i = 0; i < count; i++) memcpy(y + i * bytes, a + index[i] * bytes, bytes);
    return true;
}

// y[row][i] = a[row][index[i]]
template <class T> static bool gather(const int64_t *index, int64_t rows, int64_t width, const T *a, T *y) {
    if (!in_range(index, width, width)) return false;
    auto some = [&](int64_t row, int64_t end) {
        for (; row < end; row++)
            for (int64_t i = 0; i < width; i++) y[row * width + i] = a[row * width + index[i]];
    };
    if (rows * width < WORTH_IT) some(0, rows);
    else parallel(rows, some);
    return true;
}
