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

// x [count vectors] times Sylvester's matrix of as many rows as there are lanes, each vector alone
static void within_vectors(float *x, int64_t count) {
    static const auto &signs = *[] {
        static float made[LANES][LANES];
        for (int i = 0; i < LANES; i++)
            for (int j = 0; j < LANES; j++) made[i][j] = __builtin_parity(i & j) ? -1.0f : 1.0f;
        return &made;
    }();
    auto transform = [&](float *from, auto vectors) __attribute__((always_inline)) {
        Floats sum[vectors.value] = {};
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors.value; v++)
                sum[v] = multiply_add(splat(from[v * LANES + i]), *(const Floats *)signs[i], sum[v]);
        for (int v = 0; v < vectors.value; v++) *(Floats *)(from + v * LANES) = sum[v];
    };
    int64_t at = 0;
    for (; at + AT_ONCE <= count; at += AT_ONCE) transform(x + at * LANES, std::integral_constant<int, AT_ONCE>());
    for (; at < count; at++) transform(x + at * LANES, std::integral_constant<int, 1>());
}

// x [rows, columns] times Sylvester's matrix; columns: a power of two, in whole vectors
static void sylvester(float *x, int64_t rows, int64_t columns) {
    within_vectors(x, rows * columns / LANES);
    for (int64_t half = LANES; half < columns; half *= 2)
        for (float *first = x; first < x + rows * columns; first += 2 * half)
            for (int64_t i = 0; i < half; i += LANES) {
                const Floats a = *(const Floats *)(first + i), b = *(const Floats *)(first + half + i);
                *(Floats *)(first + i) = a + b, *(Floats *)(first + half + i) = a - b;
            }
}

constexpr int SUMS = REGISTERS < 32 ? 4 : 12;

// to [order, columns] <- the transposed matrix times from [order, columns]; columns: whole vectors
static void across_rows(const float *from, const float *matrix, int64_t order, int64_t columns, float *to) {
    const int64_t width = ceil_div(order, LANES) * LANES;
    auto some = [&](int64_t j, int64_t at, auto count) __attribute__((always_inline)) {
        Floats sum[count.value] = {};
        for (int64_t i = 0; i < order; i++) {
            const Floats row = *(const Floats *)(from + i * columns + at);
            const float *factors = matrix + i * width + j;
#pragma GCC unroll 12
            for (int s = 0; s < count.value; s++) sum[s] = multiply_add(row, splat(factors[s]), sum[s]);
        }
        for (int64_t s = 0; s < std::min<int64_t>(count.value, order - j); s++)
            *(Floats *)(to + (j + s) * columns + at) = sum[s];
    };
    for (int64_t at = 0; at < columns; at += LANES) {
        int64_t j = 0;
        for (; j + SUMS <= order; j += SUMS) some(j, at, std::integral_constant<int, SUMS>());
        for (; j < order; j += 4) some(j, at, std::integral_constant<int, 4>());
    }
}

static void rotate_block(const Rotation &call, int64_t row, int64_t block) {
    static thread_local Buffer buffers[2];
    const int64_t size = call.columns / call.blocks, first = block * size, index = row * call.columns + first;
    float *now = buffers[0].get<float>(size), *next = buffers[1].get<float>(size);
    const bool has_lead = call.orders[0] & (call.orders[0] - 1);  // else all is one matrix of Sylvester's
    const int64_t lead = has_lead ? call.orders[0] : 1, power = size / lead;
    const bool is_fast = power % LANES == 0;
    const float scale = is_fast && !has_lead ? call.matrices[0] : 1;  // the first matrix holds it
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t count = std::min<int64_t>(LANES, size - i);
        const Floats x = call.is_float ? load_some((const float *)call.x + index + i, count)
                                       : widen(load_some((const uint16_t *)call.x + index + i, count));
        store_some(now + i, count, x * load_some(call.signs + first + i, count) * scale);
    }
    if (is_fast) {
        sylvester(now, lead, power);
        if (has_lead) across_rows(now, call.matrices, lead, power, next), std::swap(now, next);
    }
    const float *matrix = call.matrices;
    for (int64_t i = 0; i < (is_fast ? 0 : call.factors); i++) {
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
