// Weights of 2, 3, 4 or 8-bit codes (BITS, a compiler flag), scale and zero per group of columns. KIND, another flag,
// tells what codes stand for: W[n][k] = (code - zero) * scale (GRID), table[code] * scale (CODEBOOK), or the code is a
// float8 E4M3 (FLOAT8) or E5M2 (FLOAT8_E5M2). kernels/linear/native_cpu.py packs them.

#pragma once
#include "products.h"

enum { GRID, CODEBOOK, FLOAT8, FLOAT8_E5M2 };
enum { NEVER, ALWAYS, WIDE };  // of Weight.rounds_inputs: WIDE is so many rows that rounding saves time
#ifndef KIND
#define KIND GRID
#endif
constexpr bool IS_FLOAT8 = KIND == FLOAT8 || KIND == FLOAT8_E5M2;

constexpr int SEGMENT = 512;  // columns whose sum is scaled and added to the total, which bounds the rounding error

struct Weight {  // mirrored in kernels/linear/native_cpu.py
    const uint8_t *packed;
    const void *scale;    // [blocks, groups, 16] bfloat16 or float32
    const void *zero;     // [blocks, groups, 16] uint8 or float32, or null: the middle of the grid
    int64_t out_features, in_features, group;  // group: columns
    int64_t scale_is_float;
    int64_t rounds_inputs;  // which bfloat16 inputs are rounded to int8; of float8 see float8_inputs.h
    int64_t zero_is_float;
    const float *table;    // CODEBOOK: 2 ** BITS numbers, of bfloat16 where x is
    const float *x_scale;  // float8: of static inputs, or null
};

// Codes of BITS bits: code 2j of a lane at bit BITS * j of its word, code 2j + 1 at bit 16 + BITS * j. Three words hold
// 32 codes of 3 bits, the last two in the bits that are left over. Codes of 8 bits stand as the sign and the magnitude
// of the code less 127.5. Decoded values are the codes less MIDDLE.
struct Lines {
    static constexpr int LINES = BITS == 3 ? 3 : 1, PAIRS = BITS == 3 ? 16 : 16 / BITS, COLUMNS = 2 * PAIRS;

    static INLINE Words shifted(const Words *words, int pair) {
        if (BITS != 3) return words[0] >> (BITS * pair);
        if (pair < 15) return words[pair / 5] >> (3 * (pair % 5));
        return (words[0] >> 15 & 0x10001) | (words[1] >> 14 & 0x20002) | (words[2] >> 13 & 0x40004);
    }

    // Codes of 8 bits from their signs and magnitudes.
    static INLINE Words bytes_of_codes(Words word) { return word ^ (negative_bytes(word) | 0x80808080u); }

    static INLINE void load(const uint8_t *line, Words *words) {
#pragma GCC unroll 3
        for (int i = 0; i < LINES; i++) {
            words[i] = ((const Words *)line)[i];
            keep(words[i]);  // loaded once, not once for each shift
        }
    }
};

#if BF16_LOOK_UPS
#include "codes_bf16.h"
#else
// Decoded values are codes (for up to LOOK_UP_BITS bits less half of the grid) times `factor`, with which x is divided:
// then a mask and a conversion decode a code.
struct Codes : Lines {
    static constexpr bool LOOKS_UP = BITS <= LOOK_UP_BITS || KIND != GRID;  // the values, without a factor
    static constexpr float MIDDLE = LOOKS_UP ? 1 << (BITS - 1) : 0;
    Floats table;

    explicit Codes(const float *numbers = nullptr) {
        float values[LANES];
        for (int i = 0; i < LANES; i++) {
            const int code = i % (1 << BITS);
            values[i] = numbers ? numbers[code] : code - MIDDLE;
        }
        memcpy(&table, values, sizeof values);
    }

    static constexpr float factor(int column) { return LOOKS_UP ? 1 : 1 << column % COLUMNS / 2 * BITS; }

    // The values of a line, each computed where it is used, since registers are few.
    struct Decoded {
        Floats table;
        Words words[LINES], high;

        INLINE void decode(const Codes &codes, const uint8_t *line) {
            table = codes.table;
            load(line, words);
            if (BITS == 8 && KIND == GRID) words[0] = bytes_of_codes(words[0]);
            if (BITS > LOOK_UP_BITS) high = words[0] >> 16;
        }
        INLINE Floats operator[](int column) const {
            if constexpr (BITS <= LOOK_UP_BITS) {
                const Words both = shifted(words, column / 2);
                return look_up(table, column % 2 ? both >> 16 : both);
            } else if constexpr (KIND == CODEBOOK) {
                return look_up_16(table, (column % 2 ? high : words[0]) >> (column / 2 * BITS));
            } else if constexpr (KIND == FLOAT8) {  // as a float, with another bias of the exponent
                const Words top = (column % 2 ? high : words[0]) << (24 - column / 2 * 8);
                return (Floats)((top & 0x80000000u) | (top >> 4 & 0x07f00000u)) * 0x1p120f;
            } else if constexpr (KIND == FLOAT8_E5M2) {
                const Words top = (column % 2 ? high : words[0]) << (24 - column / 2 * 8);
                return (Floats)((top & 0x80000000u) | (top >> 3 & 0x0fe00000u)) * 0x1p112f;
            } else {
                const uint32_t mask = ((1u << BITS) - 1) << (column / 2 * BITS);
                return to_floats((Ints)((column % 2 ? high : words[0]) & mask));
            }
        }
        INLINE Floats value(int column) const { return (*this)[column] * (1 / factor(column)); }
    };
    template <class T> using As = Decoded;
};
#endif

struct Matrix : Weight {
    static constexpr int COLUMNS = Codes::COLUMNS;
    int64_t blocks, steps, groups, width;  // width: columns with the padding
    Codes codes;

    Matrix() = default;
    explicit Matrix(const Weight &weight) : Weight(weight), codes(weight.table) {
        blocks = ceil_div(out_features, LANES);
        steps = ceil_div(in_features, COLUMNS);
        groups = ceil_div(in_features, group);
        width = steps * COLUMNS;
    }
    INLINE const uint8_t *line(int64_t block, int64_t step) const {
        return packed + (block * steps + step) * Codes::LINES * 64;
    }
    INLINE Floats scales(int64_t block, int64_t g) const {
        int64_t index = (block * groups + g) * LANES;
        return scale_is_float ? *(const Floats *)((const float *)scale + index)
                              : widen(*(const Halves *)((const uint16_t *)scale + index));
    }
    INLINE Floats zeros(int64_t block, int64_t g) const {
        if (!zero) return splat(1 << (BITS - 1));
        const int64_t index = (block * groups + g) * LANES;
        return zero_is_float ? *(const Floats *)((const float *)zero + index)
                             : widen(*(const Bytes *)((const uint8_t *)zero + index));
    }
    // to add to decoded values
    INLINE Floats offsets(int64_t block, int64_t g) const { return Codes::MIDDLE - zeros(block, g); }
    bool has_offsets() const { return zero || Codes::MIDDLE != 1 << (BITS - 1); }
};

// Calls body(segment, group, first step, last step + 1) for all segments of at most LENGTH columns.
template <int LENGTH = SEGMENT, class F> static INLINE void for_segments(const Matrix &w, F body) {
    constexpr int COLUMNS = Codes::COLUMNS;
    int64_t segment = 0;
    for (int64_t g = 0; g < w.groups; g++) {
        const int64_t end = std::min(ceil_div((g + 1) * w.group, COLUMNS), w.steps);
        for (int64_t step = g * w.group / COLUMNS; step < end; step += LENGTH / COLUMNS)
            body(segment++, g, step, std::min(step + LENGTH / COLUMNS, end));
    }
}

// For many_rows.h.
static void dequantize_tile(const Matrix &w, int64_t block, int blocks, int64_t first, int64_t last, Floats *tile) {
    for (int b = 0; b < blocks; b++)
        for_segments(w, [&](int64_t, int64_t g, int64_t step, int64_t end) __attribute__((always_inline)) {
            const Floats scale = w.scales(block + b, g), offset = w.offsets(block + b, g);
            for (step = std::max(step, first), end = std::min(end, last); step < end; step++) {
                Codes::Decoded values;
                for (int i = 0; i < Codes::LINES; i++)
                    __builtin_prefetch(w.line(block + b + 1, step) + 64 * i, 0, 2);
                values.decode(w.codes, w.line(block + b, step));
#if BF16_DOT
                Floats *to = tile + (step - first) * Codes::PAIRS * blocks + b;
#pragma GCC unroll 16
                for (int j = 0; j < Codes::PAIRS; j++) {
                    const Floats even = (values.value(2 * j) + offset) * scale;
                    const Floats odd = (values.value(2 * j + 1) + offset) * scale;
                    to[j * blocks] = (Floats)narrow_pairs(even, odd);
                }
#else
                Floats *to = tile + (step - first) * Codes::COLUMNS * blocks + b;
#pragma GCC unroll 32
                for (int j = 0; j < Codes::COLUMNS; j++) to[j * blocks] = (values.value(j) + offset) * scale;
#endif
            }
        });
}
