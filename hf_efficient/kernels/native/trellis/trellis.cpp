// y = x @ W^T + bias for weights coded along a trellis; x, bias and y are bfloat16. Threads share y; the order of each
// sum does not depend on their number.

#include "trellis.h"
#include "many_rows.h"

// With more rows the weight is expanded into tiles.
constexpr int FEW_ROWS = 8;

EXPORT_LAYOUTS(LAYOUT(Product, weight, bias, y) LAYOUT(TrellisWeight, packed, scale, next, out_features, in_features))

// `count` products of x [rows, in_features], the last argument unused: the signature is that of hf_linear.
extern "C" void hf_trellis(const Product *products, int64_t count, const void *x, int64_t rows, int) {
    Trellis w[MOST_PRODUCTS];
    Output out[MOST_PRODUCTS];
    for (int i = 0; i < count; i++) {
        w[i] = Trellis(*(const TrellisWeight *)products[i].weight);
        out[i] = {products[i].y, products[i].bias, w[i].out_features, false};
    }
    const uint16_t *values = (const uint16_t *)x;
    if (rows <= FEW_ROWS) return few(w, out, count, values, rows);
    if (BF16_DOT) {
        if (w->in_features != w->width || !begins_with_a_word(x))
            values = padded<uint16_t, uint16_t>(values, rows, w->in_features, w->width);
    } else {
        values = (const uint16_t *)padded<uint16_t, float>(values, rows, w->in_features, w->width);
    }
    for (int i = 0; i < count; i++) many(w[i], (const TileTerm *)values, w->width / NUMBERS, rows, out[i]);
}
