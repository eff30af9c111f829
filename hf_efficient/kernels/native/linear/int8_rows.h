// Products of x rounded to int8, with a scale for at most SPAN columns of a row, and of codes as unsigned bytes. They
// are summed as integers, so a row has the same bits alone and among others (int8_tiles.h has many others). A number
// that is more than twice as large as the others of its segment is not rounded, and does not coarsen their scale:
// outliers are kept as in LLM.int8() (Dettmers et al., https://arxiv.org/abs/2208.07339), but one a segment and row.

#pragma once
#include "codes.h"
#include "output.h"

constexpr int SPAN = 64;        // columns, rounded at once
constexpr int ALONE = 1 << 14;  // with fewer elements one thread rounds faster than several
constexpr int BLOCKS_A_UNIT = REGISTERS < 32 ? 1 : 2;
constexpr int MIDDLE_CODE = 1 << (BITS - 1);

// Codes 4 to a lane, in the order that `column` tells.
struct Bytewise {
    static constexpr int VECTORS = BITS == 3 ? 8 : 8 / BITS;  // of a line

    static INLINE void decode(const uint8_t *line, Words *out) {
        const Words *words = (const Words *)line;
        if (BITS == 8) {
            out[0] = Lines::bytes_of_codes(words[0]);
        } else if (BITS != 3) {
            const Words word = words[0];
#pragma GCC unroll 4
            for (int i = 0; i < VECTORS; i++) out[i] = word >> (BITS * i) & ((1 << BITS) - 1) * 0x01010101u;
        } else {
            const Words three[3] = {words[0], words[1], words[2]};
#pragma GCC unroll 8
            for (int i = 0; i < VECTORS; i++)
                out[i] = (Codes::shifted(three, 2 * i) & 0x70007u) | (Codes::shifted(three, 2 * i + 1) & 0x70007u) << 8;
        }
    }

    static constexpr int column(int byte) {  // of the columns of a line
        const int vector = byte / 4, pair = BITS == 3 ? 2 * vector + byte % 2 : vector + byte % 2 * VECTORS;
        return 2 * pair + byte / 2 % 2;
    }
};

constexpr int TOGETHER = 8;  // rows whose outliers stand in one list

struct Outlier {
    float value;                 // of x, 0 in its codes
    int32_t row, column, group;  // of TOGETHER; among the codes of a row; of W
};

struct Rounded {                 // rows of x
    const int8_t *codes;         // [rows, width], columns in the order of Bytewise
    const float *scales, *sums;  // [rows, segments]; sums of a segment's rounded numbers, whole
    const Outlier *outliers;     // [rows, segments], those of TOGETHER rows from the first of them on, row by row
    const int32_t *counts;       // of them: [rows / TOGETHER]
    int64_t width, segments;
};

constexpr int OUTLIER = 2;               // times the others of its segment
constexpr float LARGEST_OUTLIER = 1e6f;  // times the others: beyond, they do not count

static INLINE float from_bits(int32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// plus: what is added to the rounded numbers, of which the low 8 bits are stored. place: the inverse of `order`.
// Outliers of the row of TOGETHER, at most one a segment and one more, are written from `outlier` on. Returns the end.
static Outlier *round_row(const Matrix &w, const uint16_t *x, const uint8_t (&order)[SPAN],
                          const uint8_t (&place)[SPAN], int plus, int8_t *codes, float *scales, float *sums,
                          int32_t row, Outlier *outlier) {
    constexpr int INDEX = SPAN - 1;  // of a number: in bits that bfloat16 leaves free, so that keys differ
    for_segments<SPAN>(w, [&](int64_t segment, int64_t g, int64_t step, int64_t end) __attribute__((always_inline)) {
        const int64_t first = step * w.COLUMNS, last = end * w.COLUMNS, left = std::min(last, w.in_features) - first;
        Floats values[4];
        Ints keys[4], largest = {}, second = {};  // of the bits, so that NaN and infinity stay
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            values[i] = widen(load_some(x + first + LANES * i, left - LANES * i));
            keys[i] = (Ints)absolute(values[i]) | (lane_numbers() + LANES * i);
            const Ints higher = maximum(largest, keys[i]);
            second = maximum(second, largest ^ keys[i] ^ higher);  // with the lower of both
            largest = higher;
        }
        const int32_t key = highest(largest), index = std::min<int64_t>(key & INDEX, left - 1);
        const Ints is_key = largest == key;
        const float others = from_bits(highest(maximum(second, largest & ~is_key)) & ~INDEX);
        float most = from_bits(key & ~INDEX);
        const bool is_alone = most > OUTLIER * others && others > most / LARGEST_OUTLIER;
        *outlier = {bfloat16_value(x[first + index]), row, int32_t(first + place[index]), int32_t(g)};
        outlier += is_alone;
        most = is_alone ? others : most;
        const Ints zero = Ints{} + (is_alone ? key : -1);
        const Floats factor = splat(most > 0 ? 127 / most : 0);
        alignas(64) int8_t bytes[SPAN];
        Ints sum_of_codes = {};
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const Ints rounded = nearest(values[i] * factor) & ~(keys[i] == zero);
            *(Bytes *)(bytes + LANES * i) = to_bytes(rounded + plus);
            sum_of_codes += rounded;
        }
        store_ordered(codes + first, last - first, bytes, order);
        scales[segment] = most / 127;
        sums[segment] = sum(sum_of_codes);
    });
    return outlier;
}

static Rounded rounded(const Matrix &w, const uint16_t *x, int64_t rows, int plus) {
    int64_t segments = 0;
    for_segments<SPAN>(w, [&](int64_t, int64_t, int64_t, int64_t) { segments++; });
    static thread_local Buffer all_codes, all_scales, all_outliers, all_counts;
    int8_t *codes = all_codes.get<int8_t>(rows * w.width);
    float *scales = all_scales.get<float>(2 * rows * segments), *sums = scales + rows * segments;
    Outlier *outliers = all_outliers.get<Outlier>(rows * segments + 1);
    int32_t *counts = all_counts.get<int32_t>(ceil_div(rows, TOGETHER));
    alignas(64) uint8_t order[SPAN], place[SPAN];
    for (int i = 0; i < SPAN; i++) order[i] = i / w.COLUMNS * w.COLUMNS + Bytewise::column(i % w.COLUMNS);
    for (int i = 0; i < SPAN; i++) place[order[i]] = i;
    auto some = [&](int64_t list, int64_t end) {
        for (; list < end; list++) {
            const int64_t first = list * TOGETHER;
            Outlier *const begin = outliers + first * segments, *outlier = begin;
            for (int64_t row = first; row < std::min(first + TOGETHER, rows); row++)
                outlier = round_row(w, x + row * w.in_features, order, place, plus, codes + row * w.width,
                                    scales + row * segments, sums + row * segments, row - first, outlier);
            counts[list] = outlier - begin;
        }
    };
    if (rows * w.width < ALONE) some(0, ceil_div(rows, TOGETHER));
    else parallel(ceil_div(rows, TOGETHER), some);
    return {codes, scales, sums, outliers, counts, w.width, segments};
}

// sum[m][b] += M rows of x times a line of each of BLOCKS neighbouring blocks, `stride` bytes apart; the first products
// go to sum number `chain`. codes: of the first row, `width` bytes apart.
template <int M, int BLOCKS, int CHAINS>
static INLINE void add_line(Ints (&sum)[M][BLOCKS][CHAINS], const uint8_t *line, int64_t stride, const int8_t *codes,
                            int64_t width, int chain) {
    constexpr int VECTORS = Bytewise::VECTORS;
    Words values[BLOCKS][VECTORS];
#pragma GCC unroll 2
    for (int b = 0; b < BLOCKS; b++) {
        for (int i = 0; i < Lines::LINES; i++)
            __builtin_prefetch(line + (b + BLOCKS) * stride + 64 * i, 0, 2);  // as in few_rows.h
        Bytewise::decode(line + b * stride, values[b]);
    }
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++)
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            int32_t four;
            memcpy(&four, codes + m * width + 4 * v, 4);
#pragma GCC unroll 2
            for (int b = 0; b < BLOCKS; b++) {
                Ints &to = sum[m][b][(chain + v) % CHAINS];
                to = plus_products<BITS>(to, values[b][v], four);
            }
        }
}

// Calls body(the number of rows, the first row) for all rows in groups of as many as share one decoding.
template <class F> static INLINE void for_groups_of_rows(int64_t rows, F body) {
    int64_t row = 0;
    if (REGISTERS == 32)
        for (; row + 8 <= rows; row += 8) body(std::integral_constant<int, 8>(), row);
    for (; row + 4 <= rows; row += 4) body(std::integral_constant<int, 4>(), row);
    if (rows - row >= 2) body(std::integral_constant<int, 2>(), row), row += 2;
    if (rows > row) body(std::integral_constant<int, 1>(), row);
}

// The codes of a block in a column, the one with the number `column` among the codes of a row of x.
static INLINE Floats code_at(const Matrix &w, int64_t block, int column) {
    Words values[Bytewise::VECTORS];
    Bytewise::decode(w.line(block, column / w.COLUMNS), values);
    return to_floats((Ints)(values[column % w.COLUMNS / 4] >> (column % 4 * 8) & 255u));
}

// totals[m][b] += the outliers of M rows of TOGETHER times their columns of W. weight(b, column): codes less the middle
// of the grid.
template <int M, int BLOCKS, class F>
static INLINE void add_outliers(const Matrix &w, int64_t block, const Rounded &x, int64_t row, bool has_rest,
                                Floats (&totals)[M][BLOCKS], F weight) {
    const int64_t list = row / TOGETHER;
    const Outlier *outlier = x.outliers + list * TOGETHER * x.segments;
    for (const Outlier *end = outlier + x.counts[list]; outlier < end; outlier++) {
        const int64_t m = outlier->row - row % TOGETHER;
        if (m < 0 || m >= M) continue;
#pragma GCC unroll 4
        for (int b = 0; b < BLOCKS; b++) {
            Floats weights = weight(b, outlier->column);
            if (has_rest) weights += MIDDLE_CODE - w.zeros(block + b, outlier->group);
            const Floats scale = w.scales(block + b, outlier->group) * outlier->value;
            totals[m][b] = multiply_add(weights, scale, totals[m][b]);
        }
    }
}

template <int M, int BLOCKS>
static INLINE void int8_rows(const Matrix &w, int64_t block, const Rounded &x, int64_t row, const Output &out) {
    constexpr int CHAINS = M * BLOCKS < 4 && Bytewise::VECTORS > 1 ? 2 : 1;  // sums that do not wait for each other
    const int64_t stride = w.line(1, 0) - w.line(0, 0);
    const int8_t *codes = x.codes + row * x.width;
    const float *scales = x.scales + row * x.segments, *sums = x.sums + row * x.segments;
    Floats totals[M][BLOCKS] = {};
    for_segments<SPAN>(w, [&](int64_t segment, int64_t g, int64_t step, int64_t end) __attribute__((always_inline)) {
        Ints sum[M][BLOCKS][CHAINS] = {};
        const uint8_t *line = w.line(block, step);
        const int8_t *at = codes + step * w.COLUMNS;
        for (; step < end; step++, line += Codes::LINES * 64, at += w.COLUMNS)
            add_line(sum, line, stride, at, x.width, 0);
#pragma GCC unroll 2
        for (int b = 0; b < BLOCKS; b++) {
            const Floats scale = w.scales(block + b, g), zero = w.zeros(block + b, g);
            const Floats middle = w.zero_is_float ? splat(MIDDLE_CODE) : zero;
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                Ints all = sum[m][b][0];
                if (CHAINS > 1) all += sum[m][b][CHAINS - 1];
                const float of_x = sums[m * x.segments + segment];
                Floats products = to_floats(all) - middle * of_x;  // whole numbers below 2 ** 24: exact
                if (w.zero_is_float) products += (middle - zero) * of_x;
                totals[m][b] += products * (scale * scales[m * x.segments + segment]);
            }
        }
    });
    add_outliers(w, block, x, row, w.zero, totals, [&](int b, int column) __attribute__((always_inline)) {
        return code_at(w, block + b, column) - MIDDLE_CODE;
    });
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int b = 0; b < BLOCKS; b++) out.store(row + m, (block + b) * LANES, totals[m][b]);
}

template <int BLOCKS>
static void int8_rows_of_blocks(const Matrix &w, int64_t block, const Rounded &x, int64_t rows, const Output &out) {
    for_groups_of_rows(rows, [&](auto count, int64_t row) {
        int8_rows<decltype(count)::value, BLOCKS>(w, block, x, row, out);
    });
}
