// Many rows of x times dense bfloat16 weights: tiles of W are laid out in pairs, as those of codes are.

#pragma once
#include "dense.h"
#include "many_rows.h"

#if BF16_DOT
struct DenseWeight {
    static constexpr int COLUMNS = 2 * LANES;  // of a step
    const uint16_t *data;                      // [rows, width], width a multiple of COLUMNS
    int64_t rows, width, blocks, steps;
};

static void dequantize_tile(const DenseWeight &w, int64_t block, int blocks, int64_t first, int64_t last,
                            Floats *tile) {
    for (int b = 0; b < blocks; b++) {
        const int64_t row = (block + b) * LANES, count = std::min<int64_t>(LANES, w.rows - row);
        const uint16_t *from = w.data + row * w.width;
        const int64_t ahead = row + 2 * LANES <= w.rows ? LANES * w.width : 0;  // to the next block
        for (int64_t step = first; step < last; step++) {
            Words square[LANES];
            const uint16_t *at = from + step * w.COLUMNS;
            if (count == LANES) {
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++, at += w.width) {
                    __builtin_prefetch(at + ahead, 0, 2);
                    square[i] = *(const Words *)at;
                }
            } else
                for (int64_t i = 0; i < LANES; i++)
                    square[i] = i < count ? *(const Words *)(at + i * w.width) : Words{};
            transpose(square);
            Floats *to = tile + (step - first) * LANES * blocks + b;
            for (int t = 0; t < LANES; t++) to[t * blocks] = (Floats)square[t];
        }
    }
}
#endif

constexpr int64_t LEAST_TILED_ROWS = 48;  // measured: fewer do not pay for laying W out

// `dense` of dense.h, by tiles where that takes less time: they add the terms of a sum in another order.
static void dense_product(const uint16_t *x, const uint16_t *w, const uint16_t *bias, uint16_t *y, int64_t rows,
                          int64_t columns, int64_t width) {
#if BF16_DOT && !AMX
    if (rows >= LEAST_TILED_ROWS && width % DenseWeight::COLUMNS == 0) {
        const DenseWeight weight = {w, columns, width, ceil_div(columns, LANES), width / DenseWeight::COLUMNS};
        return many(weight, (const uint32_t *)x, width / 2, rows, {y, bias, columns, false});
    }
#endif
    dense(x, w, bias, y, rows, columns, width);
}
