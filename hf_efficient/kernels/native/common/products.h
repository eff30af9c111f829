// Products of several weights with one x: what Python fills, how threads share the blocks of the weights, and rows of x
// padded to whole steps.

#pragma once
#include "amx.h"
#include "layout.h"
#include "vectors.h"

constexpr int MOST_PRODUCTS = 4;  // with one x; kernels/native/structs.py has the same number

struct Product {         // y = x @ weight^T + bias
    const void *weight;  // the library's structure of a weight
    const void *bias;    // [out_features], or null
    void *y;             // [rows, out_features]
};

// Calls body(index of the weight, block) for every `step`-th block of `count` weights, from all threads.
// wide: of many rows. Then threads take parts as they are done, and of weights of one size the same blocks.
template <class W, class F>
static INLINE void for_blocks(const W *w, int count, int step, F body, bool wide = false) {
    int64_t first[MOST_PRODUCTS + 1] = {};
    bool side_by_side = wide;
    for (int i = 0; i < count; i++) {
        first[i + 1] = first[i] + ceil_div(w[i].blocks, step);
        side_by_side &= w[i].blocks == w->blocks;
    }
    auto some = [&](int64_t unit, int64_t end) {
        const Tiles configured;
        for (; side_by_side && unit < end; unit++) body(unit % count, unit / count * step);
        for (int i = 0; unit < end; unit++) {
            while (unit >= first[i + 1]) i++;
            body(i, (unit - first[i]) * step);
        }
    };
    if (wide) parallel_parts(first[count], some);
    else parallel(first[count], some);
}

constexpr int64_t ALONE = 1 << 14;  // with fewer numbers one thread reads them faster than several

// Rows of x as To with `width` columns, zeros at the end.
template <class From, class To> static To *padded(const From *x, int64_t rows, int64_t columns, int64_t width) {
    static thread_local Buffer inputs;
    To *const all = inputs.get<To>(rows * width);
    auto some = [=](int64_t row, int64_t end) {
        for (; row < end; row++) {
            const From *from = x + row * columns;
            To *copy = all + row * width;
            int64_t i = 0;
            if constexpr (sizeof(From) == sizeof(To)) memcpy(copy, from, columns * sizeof(To)), i = columns;
            else {
                for (; i + LANES <= columns; i += LANES) *(Floats *)(copy + i) = widen(*(const Halves *)(from + i));
                for (; i < columns; i++) copy[i] = bfloat16_value(from[i]);
            }
            for (; i < width; i++) copy[i] = 0;
        }
    };
    if (rows * width < ALONE) some(0, rows);
    else parallel(rows, some);
    return all;
}
