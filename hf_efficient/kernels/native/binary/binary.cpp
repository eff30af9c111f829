// y = x @ W^T + bias for weights of two binary terms. Threads share y; the order of each sum does not depend on their
// number.

#include "binary.h"

// With more rows the weight is expanded into tiles: measured on AVX-512.
template <int PARTS> constexpr int FEW_ROWS = 8 / PARTS;

EXPORT_LAYOUTS(LAYOUT(Product, weight, bias, y)
               LAYOUT(BinaryWeight, packed, factors, scale, marks, out_features, in_features, group))

template <class T, int PARTS, class From>
static void few(const Binary<PARTS> *w, const Output *out, int count, const From *x, int64_t rows) {
    const T *inputs = arranged<T>(*w, x, rows);
    for_blocks(w, count, 1, [&](int i, int64_t block) {
        for_row_groups<PARTS>(rows, [&](auto some, int64_t row) {
            constexpr int M = decltype(some)::value;
            Floats totals[M];
            few_rows(w[i], block, inputs + row * PARTS * w->width / (PAIRED<T> ? 2 : 1), totals);
            for (int m = 0; m < M; m++) out[i].store(row + m, block * LANES, totals[m]);
        });
    });
}

template <int PARTS>
static void multiply(const Product *products, int64_t count, const void *x, int64_t rows, bool is_float) {
    Binary<PARTS> w[MOST_PRODUCTS];
    Output out[MOST_PRODUCTS];
    for (int i = 0; i < count; i++) {
        w[i] = Binary<PARTS>(*(const BinaryWeight *)products[i].weight);
        out[i] = {products[i].y, products[i].bias, w[i].out_features, is_float};
    }
    const int64_t columns = w->in_features, width = w->width;
    const uint16_t *halves = (const uint16_t *)x;
    if (is_float && (BF16_DOT || rows <= FEW_ROWS<PARTS>)) return few<float>(w, out, count, (const float *)x, rows);
    if (rows <= FEW_ROWS<PARTS>)
        return few<std::conditional_t<BF16_LOOK_UPS, uint32_t, float>>(w, out, count, halves, rows);
    const TileTerm *terms;
    if (BF16_DOT) terms = (const TileTerm *)padded<uint16_t, uint16_t>(halves, rows, columns, width);
    else if (is_float) terms = (const TileTerm *)padded<float, float>((const float *)x, rows, columns, width);
    else terms = (const TileTerm *)padded<uint16_t, float>(halves, rows, columns, width);
    for (int i = 0; i < count; i++) many(w[i], terms, width / NUMBERS, rows, out[i]);
}

// `count` products of x [rows, in_features] by weights with the same columns, groups and marks. All numbers are
// bfloat16, or all float.
extern "C" void hf_binary(const Product *products, int64_t count, const void *x, int64_t rows, int is_float) {
    const bool is_marked = ((const BinaryWeight *)products->weight)->marks != nullptr;
    (is_marked ? multiply<2> : multiply<1>)(products, count, x, rows, is_float != 0);
}
