// Products of x rounded to int8, with a scale for at most SPAN columns of a row, and of codes as unsigned bytes. They
// are summed as integers, so a row has the same bits alone and among others (int8_tiles.h has many others). A number
// that is more than twice as large as the others of its segment is not rounded, and does not coarsen their scale:
// outliers are kept as in LLM.int8() (Dettmers et al., https://arxiv.org/abs/2208.07339), but one a segment and row.

#pragma once
#include "codes.h"
#include "output.h"

constexpr int SPAN = 64;        // columns, rounded at once
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

constexpr int TOGETHER = 4;                          // rows whose outliers stand in one list
constexpr int SEGMENTS_AT_ONCE = LANES / TOGETHER;  // that are rounded

struct OutlierColumn {
    int32_t column, segment;  // among the codes of a row
    float values[TOGETHER];  // of x, 0 where it is no outlier: there the codes are 0
};

struct Segment {
    int64_t first, left, last, g;  // columns: the first, how many W has, behind the padding; the group
};

struct Rounded {                 // rows of x
    const int8_t *codes;         // [rows, width], columns in the order of Bytewise
    const float *scales, *sums;     // as `at` tells; sums of a segment's rounded numbers, whole
    const OutlierColumn *outliers;  // [rows, segments], those of TOGETHER rows from the first of them on, by segments
    const int32_t *counts;          // of them: [rows / TOGETHER]
    int64_t width, segments;
    const Segment *of;  // [segments]
    INLINE int64_t at(int64_t row, int64_t segment) const {  // [rows / TOGETHER, segments, TOGETHER]
        return (row / TOGETHER * segments + segment) * TOGETHER + row % TOGETHER;
    }
};

constexpr int OUTLIER = 2;               // times the others of its segment
constexpr float LARGEST_OUTLIER = 1e6f;  // times the others: beyond, they do not count

static INLINE float from_bits(int32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

constexpr int INDEX = SPAN - 1;  // of a number: in bits that bfloat16 leaves free, so that keys differ

// The largest keys of 16 rows of a segment and the second largest, in lanes, from those of every lane in vectors.
static INLINE void fold(Words (&largest)[LANES], Words (&second)[LANES], Ints &first_key, Ints &second_key) {
    transpose(largest), transpose(second);
    first_key = second_key = Ints{};
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        const Ints key = (Ints)largest[i], higher = maximum(first_key, key);
        second_key = maximum(maximum(second_key, (Ints)second[i]), first_key ^ key ^ higher);  // the lower of both
        first_key = higher;
    }
}

// Rounds up to TOGETHER rows of x in SEGMENTS_AT_ONCE segments. IS_WHOLE: all of them are there, and full. order: of
// the bytes of a segment, place: its inverse. plus: what is added to the rounded numbers, of which the low 8 bits are
// stored. Returns the end of the columns of outliers.
template <bool IS_WHOLE>
static OutlierColumn *round_rows(const Matrix &w, const uint16_t *x, int rows, const Segment *segments,
                                 const uint8_t (&order)[SPAN], const uint8_t (&place)[SPAN], int plus, int8_t *codes,
                                 float *scales, float *sums, int64_t segment, OutlierColumn *outlier) {
    constexpr int VECTORS = SPAN / LANES;
    auto load = [&](int i, int v) __attribute__((always_inline)) {
        const Segment &of = segments[i / TOGETHER];
        const uint16_t *from = x + i % TOGETHER * w.in_features + of.first + LANES * v;
        return widen(IS_WHOLE ? *(const Halves *)from : load_some(from, of.left - LANES * v));
    };
    auto key = [&](Floats value, int v) __attribute__((always_inline)) {  // of the bits, so that NaN and infinity stay
        return (Ints)absolute(value) | (lane_numbers() + LANES * v);
    };
    alignas(64) Words largest[LANES], second[LANES], totals[LANES];
    if (!IS_WHOLE)
        for (Words(*of)[LANES] : {&largest, &second, &totals}) memset(*of, 0, sizeof *of);
    auto for_each = [&](auto body) __attribute__((always_inline)) {
        for (int half = 0; half < LANES; half += TOGETHER)
            for (int i = half; i < half + (IS_WHOLE ? TOGETHER : segments[half / TOGETHER].left ? rows : 0); i++)
                body(i);
    };
    for_each([&](int i) __attribute__((always_inline)) {
        // of the rows behind these
        const uint16_t *next = x + (i % TOGETHER + TOGETHER) * w.in_features + segments[i / TOGETHER].first;
        Ints high = {}, low = {};
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            if (v % 2 == 0) __builtin_prefetch(next + LANES * v);
            const Ints keys = key(load(i, v), v), higher = maximum(high, keys);
            low = maximum(low, high ^ keys ^ higher), high = higher;
        }
        largest[i] = (Words)high, second[i] = (Words)low;
    });
    Ints keys, others;
    fold(largest, second, keys, others);
    Floats most = (Floats)(keys & ~INDEX);
    const Floats of_others = (Floats)(others & ~INDEX);
    const Ints is_alone = (Ints)(most > OUTLIER * of_others) & (Ints)(of_others > most / LARGEST_OUTLIER);
    // the inverse of smaller numbers is infinite; a NaN stays
    most = maximum(splat(0x1p-119f), select(is_alone, of_others, most));
    alignas(64) float factors[LANES];
    alignas(64) int32_t alone[LANES];  // the key of the number that is not rounded, or -1
    *(Floats *)factors = 127 / most;
    int64_t present = LANES;  // what lies behind belongs to other rows
    while (!IS_WHOLE && !segments[present / TOGETHER - 1].left) present -= TOGETHER;
    store_some(scales, present, most / 127);
    *(Ints *)alone = (keys & is_alone) | ~is_alone;
    alignas(64) int8_t bytes[LANES][SPAN];
    for_each([&](int i) __attribute__((always_inline)) {
        const Ints zero = Ints{} + alone[i];
        Words total = {};
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const Floats values = load(i, v);
            const Ints rounded = nearest(values * factors[i]) & ~(key(values, v) == zero);
            *(Bytes *)(bytes[i] + LANES * v) = to_bytes(rounded + plus);
            total += (Words)rounded;  // which wraps where numbers and their scale are NaN
        }
        totals[i] = total;
    });
    transpose(totals);
    Words all = {};
    for (int i = 0; i < LANES; i++) all += totals[i];
    store_some(sums, present, to_floats((Ints)all));
    OutlierColumn *begin = outlier;
    for_each([&](int i) __attribute__((always_inline)) {
        const Segment &of = segments[i / TOGETHER];
        const int row = i % TOGETHER;
        store_ordered(codes + row * w.width + of.first, IS_WHOLE ? SPAN : of.last - of.first, bytes[i], order);
        if (row == 0) begin = outlier;
        if (alone[i] < 0) return;
        const int32_t index = alone[i] & INDEX, column = of.first + place[index];
        OutlierColumn *to = begin;
        while (to < outlier && to->column != column) to++;
        if (to == outlier) *outlier++ = {column, int32_t(segment + i / TOGETHER), {}};
        to->values[row] = bfloat16_value(x[row * w.in_features + of.first + index]);
    });
    return outlier;
}

static Rounded rounded(const Matrix &w, const uint16_t *x, int64_t rows, int plus) {
    static thread_local Buffer all_codes, all_scales, all_outliers, all_counts, all_segments;
    Segment *const of = all_segments.get<Segment>(w.steps + SEGMENTS_AT_ONCE), *end = of;
    for_segments<SPAN>(w, [&](int64_t, int64_t g, int64_t step, int64_t last) {
        const int64_t first = step * w.COLUMNS;
        *end++ = {first, std::min(last * w.COLUMNS, w.in_features) - first, last * w.COLUMNS, g};
    });
    const int64_t segments = end - of;
    const int64_t full = std::find_if(of, end, [](const Segment &some) { return some.left < SPAN; }) - of;
    memset(end, 0, (SEGMENTS_AT_ONCE - 1) * sizeof(Segment));  // none
    int8_t *codes = all_codes.get<int8_t>(rows * w.width);
    const int64_t lists = ceil_div(rows, TOGETHER), numbers = lists * segments * TOGETHER;
    float *scales = all_scales.get<float>(2 * numbers), *sums = scales + numbers;
    OutlierColumn *outliers = all_outliers.get<OutlierColumn>(lists * TOGETHER * segments);
    int32_t *counts = all_counts.get<int32_t>(lists);
    alignas(64) uint8_t order[SPAN], place[SPAN];
    for (int i = 0; i < SPAN; i++) order[i] = i / w.COLUMNS * w.COLUMNS + Bytewise::column(i % w.COLUMNS);
    for (int i = 0; i < SPAN; i++) place[order[i]] = i;
    auto some = [&](int64_t list, int64_t last) {
        for (; list < last; list++) {
            const int64_t first = list * TOGETHER, present = std::min<int64_t>(TOGETHER, rows - first);
            OutlierColumn *const begin = outliers + first * segments, *outlier = begin;
            for (int64_t s = 0; s < segments; s += SEGMENTS_AT_ONCE) {
                const bool is_whole = present == TOGETHER && s + SEGMENTS_AT_ONCE <= full;
                outlier = (is_whole ? round_rows<true> : round_rows<false>)(
                    w, x + first * w.in_features, present, of + s, order, place, plus, codes + first * w.width,
                    scales + (list * segments + s) * TOGETHER, sums + (list * segments + s) * TOGETHER, s, outlier);
            }
            counts[list] = outlier - begin;
        }
    };
    if (rows * w.width < ALONE) some(0, lists);
    else parallel(lists, some);
    return {codes, scales, sums, outliers, counts, w.width, segments, of};
}

// Decodes a line of each of BLOCKS neighbouring blocks, `stride` bytes apart, and calls add(vector, m, b, its values, 4
// codes of x) for M rows. codes: of the first row, `width` bytes apart.
template <int M, int BLOCKS, class F>
static INLINE void decode_line(const uint8_t *line, int64_t stride, const int8_t *codes, int64_t width, F add) {
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
            for (int b = 0; b < BLOCKS; b++) add(v, m, b, values[b][v], four);
        }
}

// sum[m][b] += M rows of x times a line of each block; the first products go to sum number `chain`.
template <int M, int BLOCKS, int CHAINS>
static INLINE void add_line(Ints (&sum)[M][BLOCKS][CHAINS], const uint8_t *line, int64_t stride, const int8_t *codes,
                            int64_t width, int chain) {
    auto add = [&](int v, int m, int b, Words values, int32_t four) __attribute__((always_inline)) {
        Ints &to = sum[m][b][(chain + v) % CHAINS];
        to = plus_products<BITS>(to, values, four);
    };
    decode_line<M, BLOCKS>(line, stride, codes, width, add);
}

#if BYTE_PAIRS
constexpr int PAIRS_A_SUM = 32767 / (2 * 127 * ((1 << BITS) - 1));  // that fit into 16 bits
constexpr int LINES_A_SUM = PAIRS_A_SUM / Bytewise::VECTORS;        // 0 with 8 bits

// As add_line, for at most LINES_A_SUM lines: products are summed in 16 bits before they are in 32.
template <int M, int BLOCKS>
static INLINE void add_lines(Ints (&sum)[M][BLOCKS][1], const uint8_t *line, int64_t lines, int64_t stride,
                             const int8_t *codes, int64_t width) {
    Words pairs[M][BLOCKS] = {};
    auto add = [&](int, int m, int b, Words values, int32_t four) __attribute__((always_inline)) {
        pairs[m][b] = plus_pairs(pairs[m][b], values, four);
    };
    for (int64_t i = 0; i < lines; i++, line += Codes::LINES * 64, codes += 4 * Bytewise::VECTORS)
        decode_line<M, BLOCKS>(line, stride, codes, width, add);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int b = 0; b < BLOCKS; b++) sum[m][b][0] += sums_of_pairs(pairs[m][b]);
}
#endif

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
    constexpr int SOME = std::min(M, TOGETHER);
#pragma GCC unroll 2
    for (int m = 0; m < M; m += SOME) {
        const int64_t list = (row + m) / TOGETHER;
        const OutlierColumn *outlier = x.outliers + list * TOGETHER * x.segments;
        for (const OutlierColumn *end = outlier + x.counts[list]; outlier < end; outlier++)
#pragma GCC unroll 4
            for (int b = 0; b < BLOCKS; b++) {
                const int64_t g = x.of[outlier->segment].g;
                Floats weights = weight(b, outlier->column);
                if (has_rest) weights += MIDDLE_CODE - w.zeros(block + b, g);
                weights *= w.scales(block + b, g);
#pragma GCC unroll 4
                for (int i = 0; i < SOME; i++)
                    totals[m + i][b] =
                        multiply_add(weights, splat(outlier->values[row % TOGETHER + i]), totals[m + i][b]);
            }
    }
}

template <int M, int BLOCKS>
static INLINE void int8_rows(const Matrix &w, int64_t block, const Rounded &x, int64_t row, const Output &out) {
#if BYTE_PAIRS
    constexpr int CHAINS = 1;
#else
    constexpr int CHAINS = M * BLOCKS < 4 && Bytewise::VECTORS > 1 ? 2 : 1;  // sums that do not wait for each other
#endif
    const int64_t stride = w.line(1, 0) - w.line(0, 0);
    const int8_t *codes = x.codes + row * x.width;
    Floats totals[M][BLOCKS] = {};
    for_segments<SPAN>(w, [&](int64_t segment, int64_t g, int64_t step, int64_t end) __attribute__((always_inline)) {
        Ints sum[M][BLOCKS][CHAINS] = {};
        const uint8_t *line = w.line(block, step);
        const int8_t *at = codes + step * w.COLUMNS;
#if BYTE_PAIRS
        if constexpr (BITS < 8)
            for (int64_t some; step < end; step += some, line += some * Codes::LINES * 64, at += some * w.COLUMNS)
                add_lines(sum, line, some = std::min<int64_t>(LINES_A_SUM, end - step), stride, at, x.width);
        else
#endif
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
                const int64_t at = x.at(row + m, segment);
                const float of_x = x.sums[at];
                Floats products = to_floats(all) - middle * of_x;  // whole numbers below 2 ** 24: exact
                if (w.zero_is_float) products += (middle - zero) * of_x;
                totals[m][b] += products * (scale * x.scales[at]);
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
