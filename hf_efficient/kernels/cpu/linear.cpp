// y = x @ W^T + bias for weights of codes. Threads share y; each sum has one order, whatever the number of threads.

#include "few_rows.h"
#include "int8_rows.h"
#include "many_rows.h"

constexpr int FEW_ROWS = 32;  // of bfloat16, measured on Zen 5; float has no faster product than that of few rows

// Rows of x as To with `width` columns, zeros at the end.
template <class From, class To> static To *padded(const From *x, int64_t rows, int64_t columns, int64_t width) {
    static thread_local Buffer inputs;
    To *copy = inputs.get<To>(rows * width);
    for (int64_t row = 0; row < rows; row++, x += columns, copy += width) {
        for (int64_t i = 0; i < columns; i++) {
            if constexpr (sizeof(From) == sizeof(To)) copy[i] = x[i];
            else copy[i] = bfloat16_value(x[i]);
        }
        for (int64_t i = columns; i < width; i++) copy[i] = 0;
    }
    return copy - rows * width;
}

// x [rows, in_features], bias [out_features] or null, y [rows, out_features]: all bfloat16, or all float
extern "C" void hf_linear(const Weight *weight, const void *x, int64_t rows, const void *bias, void *y, int is_float) {
    const Matrix w(*weight);
    const Output out = {y, bias, w.out_features, is_float != 0};
    const bool whole = w.in_features == w.width;
#if BF16_DOT
    if (!is_float && w.rounds_inputs) return int8(w, (const uint16_t *)x, rows, out);
    if (!is_float) {
        const uint16_t *values = (const uint16_t *)x;
        if (!whole) values = padded<uint16_t, uint16_t>(values, rows, w.in_features, w.width);
        const uint32_t *pairs = (const uint32_t *)values;
        return rows > FEW_ROWS ? many(w, pairs, w.width / 2, rows, out) : few(w, pairs, w.width / 2, rows, out);
    }
#endif
    const float *values = (const float *)x;
    if (!is_float) values = padded<uint16_t, float>((const uint16_t *)x, rows, w.in_features, w.width);
    else if (!whole) values = padded<float, float>(values, rows, w.in_features, w.width);
    few(w, values, w.width, rows, out);
}

// y[column][row] (float, ld_y) <- rows 16 * first to 16 * end of W, transposed
extern "C" void hf_dequantize(const Weight *weight, int64_t first, int64_t end, float *y, int64_t ld_y) {
    const Matrix w(*weight);
    parallel(end - first, [&](int64_t place, int64_t last) {
        for (; place < last; place++)
            for_segments(w, [&](int64_t, int64_t g, int64_t step, int64_t last_step) {
                const int64_t block = first + place, rows = std::min<int64_t>(LANES, w.out_features - block * LANES);
                const Floats scale = w.scales(block, g), offset = w.offsets(block, g);
                for (; step < last_step; step++) {
                    Floats values[w.COLUMNS];
                    w.codes.decode(w.line(block, step), values);
                    for (int64_t j = 0; j < std::min<int64_t>(w.COLUMNS, w.in_features - step * w.COLUMNS); j++) {
                        const Floats result = (values[j] + offset) * scale;
                        float *to = y + (step * w.COLUMNS + j) * ld_y + place * LANES;
                        if (rows == LANES) *(Floats *)to = result;
                        else memcpy(to, &result, rows * 4);
                    }
                }
            });
    });
}
