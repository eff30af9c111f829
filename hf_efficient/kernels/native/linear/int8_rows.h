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

struct Rounded {                 // rows of x
    const int8_t *codes;         // [rows, width], columns in the order of Bytewise
    const float *scales, *sums;  // [rows, segments]; sums of a segment's rounded numbers, whole
    const float *outliers;       // [rows, segments], in units of the scale; 0 where there is none, and rounded to 0
    const uint8_t *places;       // [rows, segments], of the outliers among the codes of a segment
    int64_t width, segments;
};

constexpr int OUTLIER = 2;                 // times the others of its segment
constexpr float LARGEST_OUTLIER = 1e6f;    // times the others: beyond, they do not count

// The index of the only number whose magnitude has these bits; -1 where there are several.
static INLINE int only(const Floats (&values)[SPAN / LANES], int32_t bits) {
    int32_t magnitudes[SPAN];
    for (int i = 0; i < SPAN / LANES; i++) *(Ints *)(magnitudes + LANES * i) = (Ints)absolute(values[i]);
    int found = -1;
    for (int i = 0; i < SPAN; i++) {
        if (magnitudes[i] != bits) continue;
        if (found >= 0) return -1;
        found = i;
    }
    return found;
}

static INLINE float from_bits(int32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// plus: what is added to the rounded numbers, of which the low 8 bits are stored. place: the inverse of `order`.
static void round_row(const Matrix &w, const uint16_t *x, const uint8_t (&order)[SPAN], const uint8_t (&place)[SPAN],
                      int plus, int8_t *codes, float *scales, float *sums, float *outliers, uint8_t *places) {
    for_segments<SPAN>(w, [&](int64_t segment, int64_t, int64_t step, int64_t end) __attribute__((always_inline)) {
        const int64_t first = step * w.COLUMNS, last = end * w.COLUMNS, count = std::min(last, w.in_features) - first;
        Floats values[4];
        Ints largest = {};  // of the bits, so that NaN and infinity stay
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            values[i] = widen(load_some(x + first + LANES * i, count - LANES * i));
            largest = maximum(largest, (Ints)absolute(values[i]));
        }
        const int32_t bits = highest(largest);
        const Ints all_bits = largest * 0 + bits;
        Ints others = {};
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const Ints own = (Ints)absolute(values[i]);
            others = maximum(others, own & (all_bits > own));
        }
        float most = from_bits(bits), outlier = 0;
        const float second = from_bits(highest(others));
        if (most > OUTLIER * second && second > most / LARGEST_OUTLIER) {
            const int index = only(values, bits);
            if (index >= 0) {
                alignas(64) float all[SPAN];
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) *(Floats *)(all + LANES * i) = values[i];
                outlier = all[index] * (127 / second), all[index] = 0, most = second;
                places[segment] = place[index];
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) values[i] = *(const Floats *)(all + LANES * i);
            }
        }
        outliers[segment] = outlier;
        const Floats factor = splat(most > 0 ? 127 / most : 0);
        alignas(64) int8_t bytes[SPAN];
        Ints sum_of_codes = {};
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const Ints rounded = nearest(values[i] * factor);
            *(Bytes *)(bytes + LANES * i) = to_bytes(rounded + plus);
            sum_of_codes += rounded;
        }
        store_ordered(codes + first, last - first, bytes, order);
        scales[segment] = most / 127;
        sums[segment] = sum(sum_of_codes);
    });
}

static Rounded rounded(const Matrix &w, const uint16_t *x, int64_t rows, int plus) {
    int64_t segments = 0;
    for_segments<SPAN>(w, [&](int64_t, int64_t, int64_t, int64_t) { segments++; });
    static thread_local Buffer all_codes, all_scales, all_places;
    int8_t *codes = all_codes.get<int8_t>(rows * w.width);
    float *scales = all_scales.get<float>(3 * rows * segments), *sums = scales + rows * segments;
    float *outliers = sums + rows * segments;
    uint8_t *places = all_places.get<uint8_t>(rows * segments);
    alignas(64) uint8_t order[SPAN], place[SPAN];
    for (int i = 0; i < SPAN; i++) order[i] = i / w.COLUMNS * w.COLUMNS + Bytewise::column(i % w.COLUMNS);
    for (int i = 0; i < SPAN; i++) place[order[i]] = i;
    auto some = [&](int64_t row, int64_t end) {
        for (; row < end; row++)
            round_row(w, x + row * w.in_features, order, place, plus, codes + row * w.width, scales + row * segments,
                      sums + row * segments, outliers + row * segments, places + row * segments);
    };
    if (rows * w.width < ALONE) some(0, rows);
    else parallel(rows, some);
    return {codes, scales, sums, outliers, places, w.width, segments};
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

// The codes of 16 rows of W in a column: number `place` of the codes from `line` on.
static INLINE Floats code_at(const uint8_t *line, int place) {
    constexpr int A_LINE = 4 * Bytewise::VECTORS;
    Words values[Bytewise::VECTORS];
    Bytewise::decode(line + place / A_LINE * Codes::LINES * 64, values);
    return to_floats((Ints)(values[place % A_LINE / 4] >> (place % 4 * 8) & 255u));
}

// weights: codes less the middle of their grid. rest: the middle less the zero point, where it is not that.
static INLINE Floats plus_outlier(Floats products, Floats weights, bool has_rest, Floats rest, float outlier) {
    if (has_rest) weights += rest;
    return multiply_add(weights, splat(outlier), products);
}

template <int M, int BLOCKS>
static INLINE void int8_rows(const Matrix &w, int64_t block, const Rounded &x, int64_t row, const Output &out) {
    constexpr int CHAINS = M * BLOCKS < 4 && Bytewise::VECTORS > 1 ? 2 : 1;  // sums that do not wait for each other
    const int64_t stride = w.line(1, 0) - w.line(0, 0);
    const int8_t *codes = x.codes + row * x.width;
    const float *scales = x.scales + row * x.segments, *sums = x.sums + row * x.segments;
    const float *outliers = x.outliers + row * x.segments;
    const uint8_t *places = x.places + row * x.segments;
    Floats totals[M][BLOCKS] = {};
    for_segments<SPAN>(w, [&](int64_t segment, int64_t g, int64_t step, int64_t end) __attribute__((always_inline)) {
        Ints sum[M][BLOCKS][CHAINS] = {};
        const uint8_t *line = w.line(block, step), *const first = line;
        const int8_t *at = codes + step * w.COLUMNS;
        for (; step < end; step++, line += Codes::LINES * 64, at += w.COLUMNS)
            add_line(sum, line, stride, at, x.width, 0);
#pragma GCC unroll 2
        for (int b = 0; b < BLOCKS; b++) {
            const Floats scale = w.scales(block + b, g), zero = w.zeros(block + b, g);
            const Floats middle = w.zero_is_float ? splat(MIDDLE_CODE) : zero, rest = middle - zero;
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                Ints all = sum[m][b][0];
                if (CHAINS > 1) all += sum[m][b][CHAINS - 1];
                const float of_x = sums[m * x.segments + segment];
                Floats products = to_floats(all) - middle * of_x;  // whole numbers below 2 ** 24: exact
                if (w.zero_is_float) products += rest * of_x;
                if (const float outlier = outliers[m * x.segments + segment]) {
                    const Floats code = code_at(first + b * stride, places[m * x.segments + segment]);
                    products = plus_outlier(products, code - middle, w.zero_is_float, rest, outlier);
                }
                totals[m][b] += products * (scale * scales[m * x.segments + segment]);
            }
        }
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
