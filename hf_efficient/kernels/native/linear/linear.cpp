// y = x @ W^T + bias for weights of codes. Threads share y; the order of each sum does not depend on their number.

#include "amx_few.h"
#include "elementwise.h"
#include "float8_inputs.h"
#include "int8_tiles.h"
#include "many_rows.h"

// With more rows W is decoded into tiles: measured with AMX, on Zen 5 (which takes tiles of bfloat16 only), on AVX-512
// and on AVX2.
constexpr int FEW_ROWS = AMX ? LEAST_AMX_ROWS - 1 : BF16_LOOK_UPS ? 32 : REGISTERS < 32 ? 8 : 16;

// Whether rows of bfloat16 are rounded to int8. AMX multiplies many of them faster as they are.
static bool by_int8(const Weight &w, int64_t rows) {
#if AMX
    if (rows > 32 && AMX_IS_GRANTED) return false;
#elif BYTE_DOT || BYTE_PAIRS && BITS < 8
    // Measured from 1,536 rows of W on: from there on rounding is never slower, and without instructions for bfloat16
    // 1.2 to 2.5 times as fast.
    constexpr int64_t WIDE_ROWS = BF16_DOT ? 32 : 8, WIDE_GROUP = 32;
    if (w.rounds_inputs == WIDE) return rows >= WIDE_ROWS && std::min(w.group, w.in_features) >= WIDE_GROUP;
#endif
    return w.rounds_inputs == ALWAYS;
}

struct Rows {  // mirrored in kernels/linear/native_cpu.py
    const Weight *weight;
    const int64_t *ids;  // `count` rows of W
    void *y;             // [count, in_features], numbers of `type`
    int64_t count, type;
};

EXPORT_LAYOUTS(LAYOUT(Product, weight, bias, y) LAYOUT(Rows, weight, ids, y, count, type)
               LAYOUT(Weight, packed, scale, zero, out_features, in_features, group, scale_is_float, rounds_inputs,
                      zero_is_float, table, x_scale))

// `count` products of x [rows, in_features]; the weights have the same columns, groups and rounding. All numbers are
// bfloat16, or all float.
extern "C" void hf_linear(const Product *products, int64_t count, const void *x, int64_t rows, int is_float) {
    Matrix w[MOST_PRODUCTS];
    Output out[MOST_PRODUCTS];
    for (int i = 0; i < count; i++) {
        w[i] = Matrix(*(const Weight *)products[i].weight);
        out[i] = {products[i].y, products[i].bias, w[i].out_features, is_float != 0};
    }
    int64_t columns = w->in_features;
    const int64_t width = w->width;
    if (IS_FLOAT8 && w->rounds_inputs) {
        if (is_float) x = float8_inputs(*w, (const float *)x, rows);
        else x = float8_inputs(*w, (const uint16_t *)x, rows);
        columns = width;
    }
    if (KIND == GRID && !is_float && by_int8(*w, rows))
        return int8(w, out, count, (const uint16_t *)x, rows);
#if BF16_DOT
    if (!is_float && (BF16_LOOK_UPS || rows > FEW_ROWS)) {
        const uint16_t *values = (const uint16_t *)x;
        if (columns != width || !begins_with_a_word(x))
            values = padded<uint16_t, uint16_t>(values, rows, columns, width);
        const uint32_t *pairs = (const uint32_t *)values;
#if AMX
        if (amx_few_takes(*w, rows)) return amx_few(w, out, count, pairs, width / 2, rows);
#endif
        if constexpr (BF16_LOOK_UPS)
            if (rows <= FEW_ROWS) return few(w, out, count, pairs, width / 2, rows);
        for (int i = 0; i < count; i++) many(w[i], pairs, width / 2, rows, out[i]);
        return;
    }
#endif
    const float *values = (const float *)x;
    if (!is_float) values = padded<uint16_t, float>((const uint16_t *)x, rows, columns, width);
    else if (columns != width) values = padded<float, float>(values, rows, columns, width);
    if (BF16_DOT || rows <= FEW_ROWS) return few(w, out, count, values, width, rows);
    for (int i = 0; i < count; i++) many(w[i], (const TileTerm *)values, width, rows, out[i]);
}

// y[column][row] (float, ld_y) <- rows 16 * first to 16 * end of W, transposed
extern "C" void hf_dequantize(const Weight *weight, int64_t first, int64_t end, float *y, int64_t ld_y) {
    const Matrix w(*weight);
    parallel(end - first, [&](int64_t index, int64_t last) {
        for (; index < last; index++)
            for_segments(w, [&](int64_t, int64_t g, int64_t step, int64_t last_step) {
                const int64_t block = first + index, rows = std::min<int64_t>(LANES, w.out_features - block * LANES);
                const Floats scale = w.scales(block, g), offset = w.offsets(block, g);
                for (; step < last_step; step++) {
                    Codes::Decoded values;
                    values.decode(w.codes, w.line(block, step));
                    for (int64_t j = 0; j < std::min<int64_t>(w.COLUMNS, w.in_features - step * w.COLUMNS); j++) {
                        const Floats result = (values.value(j) + offset) * scale;
                        float *to = y + (step * w.COLUMNS + j) * ld_y + index * LANES;
                        if (rows == LANES) *(Floats *)to = result;
                        else memcpy(to, &result, rows * 4);
                    }
                }
            });
    });
}

// y[i] <- row ids[i] of W. Returns 0, and writes nothing, where W has no such row.
extern "C" int hf_rows(const Rows *rows) {
    constexpr int64_t WORTH_IT = 1 << 13;  // elements that several threads share
    const Matrix w(*rows->weight);
    for (int64_t i = 0; i < rows->count; i++)
        if (rows->ids[i] < 0 || rows->ids[i] >= w.out_features) return 0;
    auto some = [&](int64_t i, int64_t end) {
        static thread_local Buffer buffer;
        float *row = buffer.get<float>(w.width + LANES);
        for (; i < end; i++) {
            const int64_t block = rows->ids[i] / LANES, lane = rows->ids[i] % LANES;
            for_segments(w, [&](int64_t, int64_t g, int64_t step, int64_t last_step) {
                const Floats scale = w.scales(block, g), offset = w.offsets(block, g);
                for (; step < last_step; step++) {
                    Codes::Decoded values;
                    values.decode(w.codes, w.line(block, step));
                    for (int64_t j = 0; j < w.COLUMNS; j++) {
                        const Floats all = (values.value(j) + offset) * scale;
                        row[step * w.COLUMNS + j] = all[lane];
                    }
                }
            });
            store(row, rows->y, rows->type, i * w.in_features, 1, w.in_features);
        }
    };
    if (rows->count * w.in_features < WORTH_IT) some(0, rows->count);
    else parallel(rows->count, some);
    return 1;
}
