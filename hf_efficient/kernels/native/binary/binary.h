// Weights of two binary terms in codes of 2 bits (formats/binary.py): W[n][k] is the scale of row n times the sum of
// what each term's table has for the code, -1, 0 or 1, times the term's factor for the group of columns. Columns that
// are marked have factors of their own. A product needs no number of the weight: it adds up x for each term, and each
// sum of a group meets its factor.

#pragma once
#include "many_rows.h"
#include "products.h"

constexpr int TERMS = 2;

struct BinaryWeight {  // mirrored in kernels/linear/native_binary.py
    const uint8_t *packed;   // [blocks, steps, 64], see kernels/linear/lines.py
    const int8_t *factors;   // [blocks, groups, parts, TERMS, 16]
    const float *scale;      // [blocks * 16]
    const uint8_t *marks;    // [steps * 16], 1 where a column belongs to part 0, else part 1; or null: one part
    int64_t out_features, in_features, group;  // group: columns, whole steps or all of them
};

template <int PARTS> struct Binary : BinaryWeight {
    static constexpr int COLUMNS = 16;  // of a step
    int64_t blocks, steps, groups, width;  // width: columns with the padding
    Floats numbers[TERMS];
#if BF16_LOOK_UPS
    __m512i pairs[TERMS];
#endif

    explicit Binary(const BinaryWeight &weight) : BinaryWeight(weight) {
        constexpr float TABLES[2][TERMS][4] = {{{0, 1, 0, 1}, {0, 0, 1, 1}}, {{1, -1, 0, 0}, {0, 0, 1, -1}}};
        blocks = ceil_div(out_features, LANES);
        steps = ceil_div(in_features, COLUMNS);
        groups = ceil_div(in_features, group);
        width = steps * COLUMNS;
        for (int term = 0; term < TERMS; term++) {
            float values[LANES];
            uint16_t halves[2 * LANES];
            for (int i = 0; i < 2 * LANES; i++) {
                values[i % LANES] = TABLES[PARTS - 1][term][i % 4];
                halves[i] = bfloat16_bits(values[i % LANES]);
            }
            memcpy(&numbers[term], values, sizeof values);
#if BF16_LOOK_UPS
            pairs[term] = _mm512_loadu_si512(halves);
#endif
        }
    }
    Binary() = default;

    INLINE const uint8_t *line(int64_t block, int64_t step) const { return packed + (block * steps + step) * 64; }
    INLINE Floats factor(int64_t block, int64_t g, int part, int term) const {
        const int64_t index = ((block * groups + g) * PARTS + part) * TERMS + term;
        return to_floats(widen_signed(*(const Bytes *)(factors + index * LANES)));
    }
    INLINE Floats scales(int64_t block) const { return *(const Floats *)(scale + block * LANES); }

    INLINE bool has_marked(int64_t step) const {  // whether a column of the step is marked
        uint64_t eights[COLUMNS / 8];
        memcpy(eights, marks + step * COLUMNS, COLUMNS);
        return eights[0] | eights[1];
    }

    template <class V> struct OfTerms { V of[TERMS]; };

    // What the tables have for the codes of column `index` of a line, for products with floats; for products with pairs
    // of bfloat16 those of pair `index`. The pointer only tells which.
    INLINE OfTerms<Floats> values(Words word, int index, const float *) const {
        const Words codes = word >> (index / 2 * 2 + index % 2 * 16);
        return {look_up(numbers[0], codes), look_up(numbers[1], codes)};
    }
#if BF16_LOOK_UPS
    INLINE OfTerms<Pairs> values(Words word, int index, const uint32_t *) const {
        const __m512i codes = (__m512i)(word >> (2 * index));
        return {_mm512_permutexvar_epi16(codes, pairs[0]), _mm512_permutexvar_epi16(codes, pairs[1])};
    }
#endif

    // Calls body(group, first step, last step + 1) for all groups.
    template <class F> INLINE void for_groups(F body) const {
        for (int64_t g = 0; g < groups; g++)
            body(g, g * group / COLUMNS, std::min(ceil_div((g + 1) * group, COLUMNS), steps));
    }
};

// For many_rows.h.
template <int PARTS>
static void dequantize_tile(const Binary<PARTS> &w, int64_t block, int blocks, int64_t first, int64_t last,
                            Floats *tile) {
    for (int b = 0; b < blocks; b++) {
        const Floats scale = w.scales(block + b);
        w.for_groups([&](int64_t g, int64_t step, int64_t end) __attribute__((always_inline)) {
            Floats factors[PARTS][TERMS];
            for (int part = 0; part < PARTS; part++)
                for (int term = 0; term < TERMS; term++) factors[part][term] = w.factor(block + b, g, part, term);
            for (step = std::max(step, first), end = std::min(end, last); step < end; step++) {
                const Words word = *(const Words *)w.line(block + b, step);
                Floats *to = tile + (step - first) * w.COLUMNS / NUMBERS * blocks + b;
#pragma GCC unroll 8
                for (int j = 0; j < w.COLUMNS; j += 2) {
                    Floats values[2];
                    for (int i = 0; i < 2; i++) {
                        const int part = PARTS == 1 || w.marks[step * w.COLUMNS + j + i] ? 0 : PARTS - 1;
                        const auto found = w.values(word, j + i, (const float *)nullptr);
                        values[i] = (found.of[0] * factors[part][0] + found.of[1] * factors[part][1]) * scale;
                    }
#if BF16_DOT
                    to[j / 2 * blocks] = (Floats)narrow_pairs(values[0], values[1]);
#else
                    to[j * blocks] = values[0], to[(j + 1) * blocks] = values[1];
#endif
                }
            }
        });
    }
}

constexpr int SUMS_OF_A_TERM = REGISTERS < 32 ? 2 : 8;  // that registers hold at once

// Calls body(the number of rows, the first row) for groups of rows that share one decoding.
template <int PARTS, class F> static INLINE void for_row_groups(int64_t rows, F body) {
    constexpr int MOST = SUMS_OF_A_TERM / PARTS;
    int64_t row = 0;
    for (; row + MOST <= rows; row += MOST) body(std::integral_constant<int, MOST>(), row);
    if constexpr (MOST > 4)
        if (rows - row >= 4) body(std::integral_constant<int, 4>(), row), row += 4;
    if constexpr (MOST > 2)
        if (rows - row >= 2) body(std::integral_constant<int, 2>(), row), row += 2;
    if (rows > row) body(std::integral_constant<int, 1>(), row);
}

// T of x for the few rows: uint32_t, pairs of bfloat16 (with BF16_LOOK_UPS), or float.
template <class T> constexpr bool PAIRED = std::is_same<T, uint32_t>::value;

// x [rows, in_features] with what belongs to a column, or to a pair of columns, side by side for each group of rows and
// its parts, which hold zeros for columns of another part.
template <class T, int PARTS, class From>
static const T *arranged(const Binary<PARTS> &w, const From *x, int64_t rows) {
    typedef std::conditional_t<PAIRED<T>, uint16_t, float> Number;
    constexpr int NUMBERS_OF_T = sizeof(T) / sizeof(Number);
    static thread_local Buffer buffer;
    Number *const all = buffer.get<Number>(rows * PARTS * w.width);
    for_row_groups<PARTS>(rows, [&](auto count, int64_t row) {
        constexpr int SUMS = decltype(count)::value * PARTS;
        for (int sum = 0; sum < SUMS; sum++) {
            const From *from = x + (row + sum / PARTS) * w.in_features;
            Number *to = all + row * PARTS * w.width + sum * NUMBERS_OF_T;
            for (int64_t k = 0; k < w.width; k++) {
                const bool counts = k < w.in_features && (PARTS == 1 || (w.marks[k] != 0) == (sum % PARTS == 0));
                Number value = 0;
                if (counts) {
                    if constexpr (std::is_same<From, Number>::value) value = from[k];
                    else value = bfloat16_value(from[k]);
                }
                to[k / NUMBERS_OF_T * SUMS * NUMBERS_OF_T + k % NUMBERS_OF_T] = value;
            }
        }
    });
    return (const T *)all;
}

// totals[m] of a block for M rows of x, which stand as `arranged` makes them.
template <int M, int PARTS, class T>
static INLINE void few_rows(const Binary<PARTS> &w, int64_t block, const T *x, Floats (&totals)[M]) {
    constexpr int COLUMNS = Binary<PARTS>::COLUMNS;
    constexpr int SUMS = M * PARTS, CHAINS = SUMS == 1 ? 2 : 1;  // sums that do not wait for each other
    constexpr int INPUTS = COLUMNS / (PAIRED<T> ? 2 : 1);        // of a step, for each sum
    constexpr int SEGMENT = 512 / COLUMNS;  // steps whose sum meets its factor, which bounds the rounding error
    for (int m = 0; m < M; m++) totals[m] = Floats{};
    w.for_groups([&](int64_t g, int64_t step, int64_t last) __attribute__((always_inline)) {
        while (step < last) {
            Floats sum[SUMS][TERMS][CHAINS] = {};
            const uint8_t *line = w.line(block, step);
            const T *at = x + step * INPUTS * SUMS;
            for (const int64_t end = std::min(last, step + SEGMENT); step < end; step++, line += 64) {
                __builtin_prefetch(line + (REGISTERS < 32 ? 1 << 14 : w.steps * 64), 0, 2);  // as linear/few_rows.h
                Words word = *(const Words *)line;
                keep(word);
                auto add = [&](auto first_part) __attribute__((always_inline)) {
                    constexpr int FIRST = decltype(first_part)::value;
#pragma GCC unroll 16
                    for (int j = 0; j < INPUTS; j++) {
                        const auto values = w.values(word, j, x);
#pragma GCC unroll 8
                        for (int i = FIRST; i < SUMS; i += FIRST + 1)
#pragma GCC unroll 2
                            for (int term = 0; term < TERMS; term++) {
                                Floats &to = sum[i][term][j % CHAINS];
                                to = dot(to, values.of[term], at[j * SUMS + i]);
                            }
                    }
                };
                if (PARTS == 1 || w.has_marked(step)) add(std::integral_constant<int, 0>());
                else add(std::integral_constant<int, PARTS - 1>());
                at += INPUTS * SUMS;
            }
#pragma GCC unroll 2
            for (int part = 0; part < PARTS; part++)
#pragma GCC unroll 2
                for (int term = 0; term < TERMS; term++) {
                    const Floats factor = w.factor(block, g, part, term);
#pragma GCC unroll 8
                    for (int m = 0; m < M; m++) {
                        const Floats *sums = sum[m * PARTS + part][term];
                        totals[m] += factor * (CHAINS > 1 ? sums[0] + sums[CHAINS - 1] : sums[0]);
                    }
                }
        }
    });
    const Floats scale = w.scales(block);
    for (int m = 0; m < M; m++) totals[m] *= scale;
}
