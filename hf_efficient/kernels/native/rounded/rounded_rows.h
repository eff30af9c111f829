// Products of x rounded to int8, with one scale for a whole row, and of codes as unsigned bytes: W8A8, LLM.int8() and
// BitNet. Products are summed as integers, so a row has the same bits alone and among others.

#pragma once
#include <cmath>

#include "../linear/int8_rows.h"
#include "amx.h"

struct RoundedWeight {  // mirrored in kernels/linear/native_rounded.py. W[n][k] = (code - offset[n]) * scale[n]
    const uint8_t *packed;
    const float *scale;     // [blocks, 16]
    const int32_t *offset;  // [blocks, 16]
    const int32_t *sums;    // [blocks, 16]: of code - offset over a row, for inputs with a zero point; or null
    const float *x_scale;   // static: one value; or null
    const int8_t *x_zero;   // static zero point; or null
    int64_t out_features, in_features;
    int64_t asymmetric;  // whether inputs have zero points
    double threshold;    // columns of x with a magnitude of at least this are not rounded; 0: all are
};

struct RoundedMatrix : RoundedWeight {
    static constexpr int COLUMNS = Lines::COLUMNS;
    int64_t blocks, steps, width;  // width: columns with the padding, whole spans

    RoundedMatrix() = default;
    explicit RoundedMatrix(const RoundedWeight &weight) : RoundedWeight(weight) {
        blocks = ceil_div(out_features, LANES);
        steps = ceil_div(in_features, COLUMNS);
        width = ceil_div(steps * COLUMNS, SPAN) * SPAN;
    }
    INLINE const uint8_t *line(int64_t block, int64_t step) const {
        return packed + (block * steps + step) * Lines::LINES * 64;
    }
    // The codes of one column, as the numbers they stand for before the scale.
    INLINE Floats column(int64_t block, int64_t k) const {
        Words values[Bytewise::VECTORS];
        Bytewise::decode(line(block, k / COLUMNS), values);
        int byte = 0;
        while (Bytewise::column(byte) != k % COLUMNS) byte++;
        const Ints codes = (Ints)(values[byte / 4] >> (byte % 4 * 8) & 255u);
        return to_floats(codes - *(const Ints *)(offset + block * LANES));
    }
};

struct RoundedRow {
    float scale;
    int32_t zero, sum;  // the sum of its codes
};

struct RoundedInputs {
    const int8_t *codes;  // [rows, width], columns in the order of Bytewise
    const RoundedRow *rows;
    int64_t width;
    const int64_t *outliers;  // columns that are not rounded, whose codes are 0
    int64_t outlier_count;
    const float *outlier_values;  // [rows, outlier_count]
};

static INLINE Floats row_values(const uint16_t *x, int64_t count) { return widen(load_some(x, count)); }
static INLINE Floats row_values(const float *x, int64_t count) { return load_some(x, count); }
static INLINE float number(uint16_t x) { return bfloat16_value(x); }
static INLINE float number(float x) { return x; }
static INLINE float at_least_tiny(float scale) { return scale < 0x1p-100f ? 0x1p-100f : scale; }  // NaN stays

// The scale and the zero point of a row, as kernels/linear/w8a8_cpu.py has them to the bit.
template <class T> static INLINE RoundedRow scale_of_row(const RoundedMatrix &w, const T *x) {
    if (w.x_scale) return {*w.x_scale, w.x_zero ? *w.x_zero : 0, 0};
    Floats low = splat(0), high = splat(0);
    Ints largest = {};  // of the bits, so that NaN and infinity stay
    for (int64_t k = 0; k < w.in_features; k += LANES) {
        const Floats values = row_values(x + k, w.in_features - k);
        low = minimum(low, values), high = maximum(high, values);
        largest = maximum(largest, (Ints)absolute(values));
    }
    const int32_t bits = highest(largest);
    float most;
    memcpy(&most, &bits, 4);
    if (!w.asymmetric || most != most) return {at_least_tiny(most * float(1.0 / 127)), 0, 0};
    const float least = -highest(-low), scale = at_least_tiny((highest(high) - least) * float(1.0 / 255));
    return {scale, (int32_t)std::nearbyint(std::min(255.0f, std::max(0.0f, -least * (1 / scale)))) - 128, 0};
}

template <class T>
static void round_whole_row(const RoundedMatrix &w, const T *x, const uint8_t (&order)[SPAN], int8_t *codes,
                            RoundedRow &row) {
    row = scale_of_row(w, x);
    const Floats inverse = splat(1 / row.scale);
    Ints sum_of_codes = {};
    for (int64_t first = 0; first < w.width; first += SPAN) {
        alignas(64) int8_t bytes[SPAN];
#pragma GCC unroll 4
        for (int i = 0; i < SPAN; i += LANES) {
            const int64_t left = w.in_features - first - i;
            Floats values = row_values(x + first + i, std::max<int64_t>(left, 0)) * inverse;
            if (w.asymmetric)
                values = nearest_whole(minimum(maximum(values, splat(-512)), splat(512))) + float(row.zero);
            Ints rounded = nearest(minimum(maximum(values, splat(-128)), splat(127)));
            if (left < LANES) {  // a zero point is no code of the padding
                int32_t present[LANES];
                for (int lane = 0; lane < LANES; lane++) present[lane] = lane < left ? -1 : 0;
                Ints mask;
                memcpy(&mask, present, sizeof mask);
                rounded = rounded & mask;
            }
            *(Bytes *)(bytes + i) = to_bytes(rounded);
            sum_of_codes += rounded;
        }
        store_ordered(codes + first, SPAN, bytes, order);
    }
    row.sum = sum(sum_of_codes);
}

// Columns in which any row holds a magnitude of `threshold` or more: their values are taken out of a copy of x.
template <class T>
static const T *without_outliers(const RoundedMatrix &w, const T *x, int64_t rows, RoundedInputs &inputs) {
    static thread_local Buffer found, values, copied;
    int64_t *outliers = found.get<int64_t>(w.in_features), count = 0;
    const float threshold = w.threshold;
    for (int64_t first = 0; first < w.in_features; first += LANES) {
        const int64_t end = std::min(first + LANES, w.in_features);
        Ints largest = {};  // of the bits, which are ordered as magnitudes are, and NaN above all
        for (int64_t row = 0; row < rows; row++)
            largest = maximum(largest, (Ints)absolute(row_values(x + row * w.in_features + first, end - first)));
        if (from_bits(highest(largest)) < threshold) continue;
        for (int64_t k = first; k < end; k++)
            for (int64_t row = 0; row < rows; row++)
                if (std::fabs(number(x[row * w.in_features + k])) >= threshold) {
                    outliers[count++] = k;
                    break;
                }
    }
    inputs.outliers = outliers, inputs.outlier_count = count;
    if (!count) return x;
    T *copy = copied.get<T>(rows * w.in_features);
    float *kept = values.get<float>(rows * count);
    memcpy(copy, x, rows * w.in_features * sizeof(T));
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < count; i++) {
            T &at = copy[row * w.in_features + outliers[i]];
            kept[row * count + i] = number(at), at = 0;
        }
    inputs.outlier_values = kept;
    return copy;
}

template <class T> static RoundedInputs round_inputs(const RoundedMatrix &w, const T *x, int64_t rows) {
    static thread_local Buffer all_codes, all_rows;
    RoundedInputs inputs = {};
    if (w.threshold > 0) x = without_outliers(w, x, rows, inputs);
    int8_t *codes = all_codes.get<int8_t>(rows * w.width);
    RoundedRow *scales = all_rows.get<RoundedRow>(rows);
    alignas(64) uint8_t order[SPAN];
    for (int i = 0; i < SPAN; i++) order[i] = i / w.COLUMNS * w.COLUMNS + Bytewise::column(i % w.COLUMNS);
    auto some = [&](int64_t row, int64_t end) {
        for (; row < end; row++) round_whole_row(w, x + row * w.in_features, order, codes + row * w.width, scales[row]);
    };
    if (rows * w.width < ALONE) some(0, rows);
    else parallel(rows, some);
    inputs.codes = codes, inputs.rows = scales, inputs.width = w.width;
    return inputs;
}

// y of a block from the sums of its codes times those of a row.
static INLINE void store_rounded(const RoundedMatrix &w, int64_t block, const RoundedInputs &x, int64_t row, Ints sum,
                                 const Output &out) {
    const RoundedRow &own = x.rows[row];
    const int64_t lanes = block * LANES;
    const Floats scale = *(const Floats *)(w.scale + lanes);
    sum -= *(const Ints *)(w.offset + lanes) * own.sum;
    if (w.sums) sum -= *(const Ints *)(w.sums + lanes) * own.zero;
    Floats y = to_floats(sum) * scale * own.scale;
    if (x.outlier_count) {
        Floats unrounded = splat(0);
        for (int64_t i = 0; i < x.outlier_count; i++)
            unrounded = dot(unrounded, w.column(block, x.outliers[i]), x.outlier_values[row * x.outlier_count + i]);
        y += unrounded * scale;
    }
    out.store(row, lanes, y);
}

template <int M, int BLOCKS>
static INLINE void rounded_rows(const RoundedMatrix &w, int64_t block, const RoundedInputs &x, int64_t row,
                                const Output &out) {
    constexpr int CHAINS = M * BLOCKS < 4 ? 2 : 1;                // sums that do not wait for each other
    constexpr int LINES = Bytewise::VECTORS == 1 ? CHAINS : 1;  // at once
    const int64_t stride = w.line(1, 0) - w.line(0, 0);
    Ints sum[M][BLOCKS][CHAINS] = {};
    const uint8_t *line = w.line(block, 0);
    const int8_t *at = x.codes + row * x.width;
    auto add = [&](int chain) __attribute__((always_inline)) {
        add_line(sum, line, stride, at, x.width, chain);
        line += Lines::LINES * 64, at += w.COLUMNS;
    };
    int64_t step = 0;
    for (; step + LINES <= w.steps; step += LINES)
#pragma GCC unroll 2
        for (int i = 0; i < LINES; i++) add(i);
    for (; step < w.steps; step++) add(0);

#pragma GCC unroll 2
    for (int b = 0; b < BLOCKS; b++)
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            Ints all = sum[m][b][0];
            if (CHAINS > 1) all += sum[m][b][CHAINS - 1];
            store_rounded(w, block + b, x, row + m, all, out);
        }
}

template <int BLOCKS>
static void rounded_rows_of_blocks(const RoundedMatrix &w, int64_t block, const RoundedInputs &x, int64_t rows,
                                   const Output &out) {
    for_groups_of_rows(rows, [&](auto count, int64_t row) {
        rounded_rows<decltype(count)::value, BLOCKS>(w, block, x, row, out);
    });
}

#if AMX
constexpr int64_t AMX_ROWS_AT_ONCE = 512;

// Many rows by AMX, which reads codes as unsigned bytes.
template <int BLOCKS>
static void amx_rounded_rows(const RoundedMatrix &w, int64_t block, const RoundedInputs &x, int64_t rows,
                             const Output &out) {
    constexpr int VECTORS = Bytewise::VECTORS;
    static thread_local Buffer decoded, results;
    const int64_t vectors = w.width / 4;
    Words *tile = decoded.get<Words>(vectors * BLOCKS);
    for (int b = 0; b < BLOCKS; b++) {
        for (int64_t step = 0; step < w.steps; step++) {
            Words values[VECTORS];
            Bytewise::decode(w.line(block + b, step), values);
            for (int v = 0; v < VECTORS; v++) tile[(step * VECTORS + v) * BLOCKS + b] = values[v];
        }
        for (int64_t v = w.steps * VECTORS; v < vectors; v++) tile[v * BLOCKS + b] = Words{};
    }
    Ints(*sums)[BLOCKS] = (Ints(*)[BLOCKS])results.get<Ints>(AMX_ROWS_AT_ONCE * BLOCKS);
    for (int64_t row = 0; row < rows; row += AMX_ROWS_AT_ONCE) {
        const int64_t count = std::min(AMX_ROWS_AT_ONCE, rows - row);
        amx_rows<true>(BLOCKS, count, x.codes + row * x.width, x.width, AmxBlocks::side_by_side(tile, BLOCKS),
                       w.width / SPAN, true, sums, sizeof *sums);
        for (int64_t m = 0; m < count; m++)
            for (int b = 0; b < BLOCKS; b++) store_rounded(w, block + b, x, row + m, sums[m][b], out);
    }
}
#endif

// For `count` weights with the same inputs, rounded in the same way.
template <class T>
static void rounded_products(const RoundedMatrix *w, const Output *out, int count, const T *values, int64_t rows) {
    const RoundedInputs x = round_inputs(*w, values, rows);
#if AMX
    if (rows >= LEAST_AMX_ROWS && AMX_IS_GRANTED)
        return for_blocks(w, count, 2, [&](int i, int64_t block) {
            if (block + 2 <= w[i].blocks) amx_rounded_rows<2>(w[i], block, x, rows, out[i]);
            else amx_rounded_rows<1>(w[i], block, x, rows, out[i]);
        }, true);
#endif
    for_blocks(w, count, BLOCKS_A_UNIT, [&](int i, int64_t block) {
        if (block + BLOCKS_A_UNIT <= w[i].blocks) rounded_rows_of_blocks<BLOCKS_A_UNIT>(w[i], block, x, rows, out[i]);
        else rounded_rows_of_blocks<1>(w[i], block, x, rows, out[i]);
    });
}
