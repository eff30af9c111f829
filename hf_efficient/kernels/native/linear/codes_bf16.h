// Codes as pairs of bfloat16, by look-ups in registers (tiers bf16 and amx). 8 bits: of 128 magnitudes. For x in float
// the numbers of a table are looked up as floats.

#pragma once

static INLINE float float8_value(int magnitude) {  // of E4M3, or of E5M2, whose infinity and NaN are not loaded
    constexpr int BITS_BEHIND = KIND == FLOAT8 ? 3 : 2, LEAST = KIND == FLOAT8 ? -9 : -16;
    const int exponent = magnitude >> BITS_BEHIND, mantissa = magnitude & ((1 << BITS_BEHIND) - 1);
    if (magnitude == 127) return __builtin_nanf("");
    if (!exponent) return __builtin_ldexpf(mantissa, LEAST);
    return __builtin_ldexpf((1 << BITS_BEHIND) + mantissa, LEAST + exponent - 1);
}

struct Codes : Lines {
    static constexpr float MIDDLE = BITS == 8 && KIND == GRID ? 127.5f : 1 << (BITS - 1);
    static constexpr bool LOOKS_UP = true;
    static constexpr float factor(int) { return 1; }
    __m512i table[BITS == 8 ? 4 : 1];
    Floats numbers_of_table;

    explicit Codes(const float *numbers = nullptr) {
        uint16_t values[128];
        for (int i = 0; i < 128; i++) {
            const int code = i % (1 << BITS);
            if (IS_FLOAT8) values[i] = bfloat16_bits(float8_value(i));
            else values[i] = bfloat16_bits(BITS == 8 ? i + 0.5f : numbers ? numbers[code] : code - MIDDLE);
        }
        if (BITS == 8) {
            uint8_t *bytes = (uint8_t *)table;
            for (int i = 0; i < 128; i++) bytes[i] = values[i] & 255, bytes[128 + i] = values[i] >> 8;
        } else {
            table[0] = _mm512_loadu_si512(values);
        }
        if (KIND == CODEBOOK && numbers)
            for (int i = 0; i < LANES; i++) numbers_of_table[i] = numbers[i % (1 << BITS)];
    }

    INLINE void decode(const uint8_t *line, Pairs *out) const {  // 16 lanes of two bfloat16
        Words words[LINES];
        load(line, words);
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
        if constexpr (KIND == CODEBOOK) {
            Words words[LINES];
            load(line, words);
#pragma GCC unroll 16
            for (int j = 0; j < PAIRS; j++) {
                const Words both = shifted(words, j);
                out[2 * j] = look_up(numbers_of_table, both);
                out[2 * j + 1] = look_up(numbers_of_table, both >> 16);
            }
            return;
        }
        Pairs both[PAIRS];
        decode(line, both);
#pragma GCC unroll 16
        for (int j = 0; j < PAIRS; j++) {
            out[2 * j] = (Floats)((Words)both[j].bits << 16);
            out[2 * j + 1] = (Floats)((Words)both[j].bits & 0xffff0000u);
        }
    }

    template <class T, int COUNT> struct All {
        T values[COUNT];
        INLINE void decode(const Codes &codes, const uint8_t *line) { codes.decode(line, values); }
        INLINE const T &operator[](int i) const { return values[i]; }
        INLINE const T &value(int column) const { return values[column]; }
    };
    typedef All<Floats, COLUMNS> Decoded;
    // for products with x of type T: pairs of bfloat16, or floats
    template <class T> using As = std::conditional_t<std::is_same<T, uint32_t>::value, All<Pairs, PAIRS>, Decoded>;
};

