// y = x @ W^T + bias with inputs that are rounded to int8, one scale a row. Threads share y.

#include "rounded_rows.h"

EXPORT_LAYOUTS(LAYOUT(Product, weight, bias, y)
               LAYOUT(RoundedWeight, packed, scale, offset, sums, x_scale, x_zero, out_features, in_features,
                      asymmetric, threshold))

// `count` products of x [rows, in_features]; the weights have the same columns and round x in the same way. All numbers
// are bfloat16, or all float.
extern "C" void hf_rounded_linear(const Product *products, int64_t count, const void *x, int64_t rows, int is_float) {
    RoundedMatrix w[MOST_PRODUCTS];
    Output out[MOST_PRODUCTS];
    for (int i = 0; i < count; i++) {
        w[i] = RoundedMatrix(*(const RoundedWeight *)products[i].weight);
        out[i] = {products[i].y, products[i].bias, w[i].out_features, is_float != 0};
    }
    if (is_float) rounded_products(w, out, count, (const float *)x, rows);
    else rounded_products(w, out, count, (const uint16_t *)x, rows);
}
