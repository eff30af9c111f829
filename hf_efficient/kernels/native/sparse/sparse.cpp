// y = x @ W^T + bias for weights of which only some are stored; all numbers are bfloat16. Threads share y; each sum has one
// order, whatever the number of threads.

#include "many_rows.h"
#include "sparse.h"

constexpr int FEW_ROWS = 40;  // measured on Zen 5

EXPORT_LAYOUTS(LAYOUT(Product, weight, bias, y) LAYOUT(SparseWeight, values, masks, starts, out_features, in_features))

// `count` products with x [rows, in_features] of weights with as many columns
extern "C" void hf_sparse(const Product *products, int64_t count, const void *x, int64_t rows, int) {
    Sparse w[MOST_PRODUCTS];
    Output out[MOST_PRODUCTS];
    for (int i = 0; i < count; i++) {
        w[i] = Sparse(*(const SparseWeight *)products[i].weight);
        out[i] = {products[i].y, products[i].bias, w[i].out_features, false};
    }
    const uint16_t *values = (const uint16_t *)x;
    if (w->in_features != w->width) values = padded<uint16_t, uint16_t>(values, rows, w->in_features, w->width);
    if (rows <= FEW_ROWS) return few(w, out, count, values, rows);
    for (int i = 0; i < count; i++) many(w[i], (const uint32_t *)values, w->width / 2, rows, out[i]);
}
