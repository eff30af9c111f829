// Weights of 2, 3, 4 or 8-bit codes (BITS, a compiler flag): W[n][k] = (code - zero) * scale, scale and zero per group
// of columns. kernels/linear/native_cpu.py packs them.

#pragma once
#include "products.h"

constexpr int SEGMENT = 512;  // columns whose sum is scaled and added to the total, which bounds the rounding error

struct Weight {  // mirrored in kernels/linear/native_cpu.py
    const uint8_t *packed;
    const void *scale;    // [blocks, groups, 16] bfloat16 or float32
    const void *zero;     // [blocks, groups, 16] uint8 or float32, or null: the middle of the grid
    int64_t out_features, in_features, group;  // group: columns
    int64_t scale_is_float;
    int64_t rounds_inputs;  // whether bfloat16 inputs are rounded to int8
    int64_t zero_is_float;
};

// Codes of BITS bits: code 2j of a lane at bit BITS * j of its word, code 2j + 1 at bit 16 + BITS * j. Three words hold
// 32 codes of 3 bits, the last two in the bits that are left over. Decoded values are the codes less half the grid, for
// 8 bits less 127.5, whose magnitudes a table of 128 bytes holds: the words have its index and the sign.
struct Codes {
    static constexpr int LINES = BITS == 3 ? 3 : 1, PAIRS = BITS == 3 ? 16 : 16 / BITS, COLUMNS = 2 * PAIRS;
    static constexpr float MIDDLE = BITS == 8 ? 127.5f : 1 << (BITS - 1);

    static INLINE Words shifted(const Words *words, int pair) {
        if (BITS != 3) return words[0] >> (BITS * pair);
        if (pair < 15) return words[pair / 5] >> (3 * (pair % 5));
        return (words[0] >> 15 & 0x10001) | (words[1] >> 14 & 0x20002) | (words[2] >> 13 & 0x40004);
    }

#if BF16_DOT
    __m512i table[BITS == 8 ? 4 : 1];

    Codes() {
        uint16_t values[128];
        for (int i = 0; i < 128; i++) values[i] = bfloat16_bits(BITS == 8 ? i + 0.5f : i % (1 << BITS) - MIDDLE);
        if (BITS == 8) {
            uint8_t *bytes = (uint8_t *)table;
            for (int i = 0; i < 128; i++) bytes[i] = values[i] & 255, bytes[128 + i] = values[i] >> 8;
        } else {
            table[0] = _mm512_loadu_si512(values);
        }
    }

    INLINE void decode(const uint8_t *line, Pairs *out) const {  // 16 lanes of two bfloat16
        Words words[LINES];
#pragma GCC unroll 3
        for (int i = 0; i < LINES; i++) {
            words[i] = ((const Words *)line)[i];
            asm("" : "+v"(words[i]));  // loaded once, not once for each shift
        }
        if (BITS == 8) {
            const __m512i q = (__m512i)words[0], even = _mm512_set1_epi16(255);
            __m512i low = _mm512_permutex2var_epi8(table[0], q, table[1]);
            __m512i high = _mm512_permutex2var_epi8(table[2], q, table[3]);
            high = _mm512_or_si512(high, _mm512_and_si512(q, _mm512_set1_epi8(-128)));
            out[0].bits = _mm512_or_si512(_mm512_and_si512(low, even), _mm512_slli_epi16(high, 8));
            out[1].bits = _mm512_or_si512(_mm512_srli_epi16(low, 8), _mm512_andnot_si512(even, high));
        } else {
#pragma GCC unroll 16
            for (int j = 0; j < PAIRS; j++)
                out[j].bits = _mm512_permutexvar_epi16((__m512i)shifted(words, j), table[0]);
        }
    }

    INLINE void decode(const uint8_t *line, Floats *out) const {
        Pairs both[PAIRS];
        decode(line, both);
#pragma GCC unroll 16
        for (int j = 0; j < PAIRS; j++) {
            out[2 * j] = (Floats)((Words)both[j].bits << 16);
            out[2 * j + 1] = (Floats)((Words)both[j].bits & 0xffff0000u);
        }
    }
#else
    static INLINE Floats value(Words word) {
        Ints code = (Ints)(word & ((1u << BITS) - 1));
        if (BITS == 8) return __builtin_convertvector((code & 127) ^ -(code >> 7), Floats) + 0.5f;
        return __builtin_convertvector(code, Floats) - MIDDLE;
    }

    INLINE void decode(const uint8_t *line, Floats *out) const {
#pragma GCC unroll 16
        for (int j = 0; j < PAIRS; j++) {
            Words word = shifted((const Words *)line, j);
            out[2 * j] = value(word), out[2 * j + 1] = value(word >> 16);
        }
    }
#endif
};

struct Matrix : Weight {
    static constexpr int COLUMNS = Codes::COLUMNS;
    int64_t blocks, steps, groups, width;  // width: columns with the padding
    Codes codes;

    Matrix() = default;
    explicit Matrix(const Weight &weight) : Weight(weight) {
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
        if (!zero) return float(1 << (BITS - 1)) - Floats{};
        const int64_t index = (block * groups + g) * LANES;
        return zero_is_float ? *(const Floats *)((const float *)zero + index)
                             : widen(*(const Bytes *)((const uint8_t *)zero + index));
    }
    // to add to decoded values
    INLINE Floats offsets(int64_t block, int64_t g) const { return Codes::MIDDLE - zeros(block, g); }
    bool has_offsets() const { return zero || BITS == 8; }
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

#if BF16_DOT
// For many_rows.h.
static void dequantize_tile(const Matrix &w, int64_t block, int blocks, int64_t first, int64_t last, __m512i *tile) {
    alignas(64) uint16_t order[32];
    for (int i = 0; i < 16; i++) order[2 * i] = i, order[2 * i + 1] = 16 + i;
    const __m512i interleave = _mm512_load_si512(order);
    for (int b = 0; b < blocks; b++)
        for_segments(w, [&](int64_t, int64_t g, int64_t step, int64_t end) __attribute__((always_inline)) {
            const Floats scale = w.scales(block + b, g), offset = w.offsets(block + b, g);
            for (step = std::max(step, first), end = std::min(end, last); step < end; step++) {
                Floats values[Codes::COLUMNS];
                w.codes.decode(w.line(block + b, step), values);
                __m512i *to = tile + (step - first) * Codes::PAIRS * blocks + b;
#pragma GCC unroll 16
                for (int j = 0; j < Codes::PAIRS; j++) {
                    const Floats even = (values[2 * j] + offset) * scale, odd = (values[2 * j + 1] + offset) * scale;
                    to[j * blocks] =
                        _mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
                }
            }
        });
}
#endif
