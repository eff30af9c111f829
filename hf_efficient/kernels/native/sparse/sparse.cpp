// y = x @ W^T + bias for pruned weights; all numbers are bfloat16. Threads share y; the order of each sum does not
// depend on their number.

#include "many_rows.h"
#include "sparse.h"

// With more rows the weight is expanded into tiles. Measured with AMX, on Zen 5, and on AVX-512 and AVX2.
constexpr int FEW_ROWS = AMX ? LEAST_AMX_ROWS - 1 : BF16_LOOK_UPS ? 40 : 2 * AT_ONCE;

EXPORT_LAYOUTS(LAYOUT(Product, weight, bias, y)
               LAYOUT(SparseWeight, values, masks, starts, out_features, in_features, two_of_four))

// `count` products of x [rows, in_features], the last argument unused: the signature is that of hf_linear.
extern "C" void hf_sparse(const Product *products, int64_t count, const void *x, int64_t rows, int) {
    Sparse w[MOST_PRODUCTS];
    Output out[MOST_PRODUCTS];
    for (int i = 0; i < count; i++) {
        w[i] = Sparse(*(const SparseWeight *)products[i].weight);
        out[i] = {products[i].y, products[i].bias, w[i].out_features, false};
    }
    const uint16_t *values = (const uint16_t *)x;
    if (w->in_features != w->width || !begins_with_a_word(x))
        values = padded<uint16_t, uint16_t>(values, rows, w->in_features, w->width);
    if (rows <= FEW_ROWS) return few(w, out, count, values, rows);
    if constexpr (!BF16_DOT) values = (const uint16_t *)padded<uint16_t, float>(values, rows, w->width, w->width);
    for (int i = 0; i < count; i++) many(w[i], (const TileTerm *)values, w->width / NUMBERS, rows, out[i]);
}
