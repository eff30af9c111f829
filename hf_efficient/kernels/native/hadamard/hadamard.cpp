// Rows of x times signs and a Hadamard transform, as a product of small matrices: kernels/hadamard.py has the
// definition.

#include "layout.h"
#include "vectors.h"

struct Rotation {           // mirrored in kernels/linear/native_hadamard.py
    const void *x;          // [rows, columns] bfloat16 or float32
    const float *signs;     // [columns]
    const float *matrices;  // one behind the other: [order, order filled up to a multiple of 16]
    const int64_t *orders;  // [factors]
    void *y;                // [rows, columns]
    int64_t rows, columns, blocks, factors;
    int64_t is_float;
};

EXPORT_LAYOUTS(LAYOUT(Rotation, x, signs, matrices, orders, y, rows, columns, blocks, factors, is_float))

constexpr int AT_ONCE = 4;  // vectors of sums

// to [rest, order] <- from [order, rest], transposed, times matrix
static void factor(const float *from, const float *matrix, int64_t order, int64_t rest, float *to) {
    const int64_t vectors = ceil_div(order, LANES);
    for (int64_t r = 0; r < rest; r++)
        for (int64_t first = 0; first < vectors; first += AT_ONCE) {
            auto sums = [&](auto count) __attribute__((always_inline)) {
                Floats sum[count.value] = {};
                for (int64_t i = 0; i < order; i++) {
                    const Floats value = splat(from[i * rest + r]);
                    const Floats *row = (const Floats *)(matrix + (i * vectors + first) * LANES);
#pragma GCC unroll 4
                    for (int v = 0; v < count.value; v++) sum[v] = multiply_add(value, row[v], sum[v]);
                }
                for (int v = 0; v < count.value; v++) {
                    const int64_t at = (first + v) * LANES;
                    store_some(to + r * order + at, std::min<int64_t>(LANES, order - at), sum[v]);
                }
            };
            switch (std::min<int64_t>(AT_ONCE, vectors - first)) {
                case 1: sums(std::integral_constant<int, 1>()); break;
                case 2: sums(std::integral_constant<int, 2>()); break;
                case 3: sums(std::integral_constant<int, 3>()); break;
                default: sums(std::integral_constant<int, 4>());
            }
        }
}

static void rotate_block(const Rotation &call, int64_t row, int64_t block) {
    static thread_local Buffer buffers[2];
    const int64_t size = call.columns / call.blocks, first = block * size, index = row * call.columns + first;
    float *now = buffers[0].get<float>(size), *next = buffers[1].get<float>(size);
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t count = std::min<int64_t>(LANES, size - i);
        const Floats x = call.is_float ? load_some((const float *)call.x + index + i, count)
                                       : widen(load_some((const uint16_t *)call.x + index + i, count));
        store_some(now + i, count, x * load_some(call.signs + first + i, count));
    }
    const float *matrix = call.matrices;
    for (int64_t i = 0; i < call.factors; i++) {
        const int64_t order = call.orders[i];
        factor(now, matrix, order, size / order, next);
        matrix += order * ceil_div(order, LANES) * LANES;
        std::swap(now, next);
    }
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t count = std::min<int64_t>(LANES, size - i);
        const Floats y = load_some(now + i, count);
        if (call.is_float) store_some((float *)call.y + index + i, count, y);
        else store_some((uint16_t *)call.y + index + i, count, narrow(y));
    }
}

// Returns 1: nothing is refused.
extern "C" int hf_rotate(const Rotation *call) {
    const int64_t count = call->rows * call->blocks;
    auto some = [&](int64_t unit, int64_t end) {
        for (; unit < end; unit++) rotate_block(*call, unit / call->blocks, unit % call->blocks);
    };
    if (count < 4) some(0, count);  // waking threads would take longer
    else parallel(count, some);
    return 1;
}
