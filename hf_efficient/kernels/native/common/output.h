// The destination of a product: y [rows, columns], row after row, and the bias that is added to it.

#pragma once
#include "vectors.h"

// y [rows, columns] and bias [columns] or null: bfloat16, or float
struct Output {
    void *y;
    const void *bias;
    int64_t columns;
    bool is_float;

    // 16 results of a row from column `first` on, less where y ends
    INLINE void store(int64_t row, int64_t first, Floats values) const {
        const int64_t count = std::min<int64_t>(LANES, columns - first), index = row * columns + first;
        if (count == LANES) {
            if (is_float) {
                if (bias) values += *(const Floats *)((const float *)bias + first);
                *(Floats *)((float *)y + index) = values;
            } else {
                if (bias) values += widen(*(const Halves *)((const uint16_t *)bias + first));
                *(Halves *)((uint16_t *)y + index) = narrow(values);
            }
        } else if (is_float) {
            if (bias) values += load_some((const float *)bias + first, count);
            store_some((float *)y + index, count, values);
        } else {
            if (bias) values += widen(load_some((const uint16_t *)bias + first, count));
            store_some((uint16_t *)y + index, count, narrow(values));
        }
    }
};
