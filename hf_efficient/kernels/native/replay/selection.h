// The largest floats of each row and their indices, and the softmax of rows.

#pragma once
#include "elementwise.h"
#include "look_ups.h"

// As the numbers are ordered: -0 beside 0, NaN above all others.
static INLINE Ints ordered(Floats x) {
    x = x + 0.0f;  // -0 becomes 0
    const Ints bits = (Ints)x, nans = (Ints)(x != x);
    return ((bits ^ (bits >> 31 & INT32_MAX)) & ~nans) | (nans & INT32_MAX);
}

struct Best {
    int32_t key;  // of `ordered`
    int32_t index;
    INLINE void meet(Best other) {
        if (other.key > key || (other.key == key && other.index < index)) *this = other;
    }
};

constexpr int64_t MOST_LARGEST = 64;  // kernels/replay/likeliest.py has the same number

// The `wanted` largest of x [width], the largest first; of equal ones the first. wanted <= width.
static void largest(const float *x, int64_t width, int64_t wanted, float *values, int64_t *indices) {
    Best best[MOST_LARGEST];
    int64_t found = 0;
    for (int64_t first = 0; first < width; first += LANES) {
        const int64_t count = std::min<int64_t>(LANES, width - first);
        const Ints keys = ordered(load_some(x + first, count));
        if (found == wanted && highest(keys) <= best[wanted - 1].key) continue;
        for (int64_t i = 0; i < count; i++) {
            if (found == wanted && keys[i] <= best[wanted - 1].key) continue;
            int64_t at = found < wanted ? found++ : wanted - 1;
            for (; at > 0 && best[at - 1].key < keys[i]; at--) best[at] = best[at - 1];
            best[at] = {keys[i], (int32_t)(first + i)};
        }
    }
    for (int64_t i = 0; i < wanted; i++) values[i] = x[indices[i] = best[i].index];
}

static void softmax(const float *x, int64_t width, float *y) {
    const auto some = [&](int64_t i) {  // no power behind the end
        return select(lane_numbers() < (int32_t)(width - i), load_some(x + i, width - i), splat(-INFINITY));
    };
    Floats most = splat(-INFINITY), sums = splat(0.0f);
    for (int64_t i = 0; i < width; i += LANES) most = select(some(i) > most, some(i), most);
    most = splat(highest(most));
    for (int64_t i = 0; i < width; i += LANES) {
        const Floats distance = some(i) - most;
        const Floats power = select(distance < -87.3f, splat(0.0f), exponential(distance));
        store_some(y + i, width - i, power);
        sums += power;
    }
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
    for (int64_t i = 0; i < width; i += LANES) store_some(y + i, width - i, load_some(y + i, width - i) / sum);
}

// Of each of the rows of x [rows, width] the `wanted` largest and their indices; their softmax where `wanted` is 0.
static void select_rows(const float *x, int64_t rows, int64_t width, int64_t wanted, float *y, int64_t *indices) {
    auto some = [&](int64_t row, int64_t end) {
        for (; row < end; row++)
            if (wanted) largest(x + row * width, width, wanted, y + row * wanted, indices + row * wanted);
            else softmax(x + row * width, width, y + row * width);
    };
    if (rows * width < WORTH_IT) some(0, rows);
    else parallel(rows, some);
}
