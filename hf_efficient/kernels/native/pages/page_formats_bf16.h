// Formats of codes whose numbers are found in registers (tiers bf16 and amx). See page_formats.h.

#pragma once

// E4M3: tables have both bytes of the bfloat16 number of each magnitude.
struct Fp8Pages : Format<PER_TOKEN> {
    __m512i low_bytes[2], high_bytes[2];

    explicit Fp8Pages(int64_t dim) : Format{dim, dim} {
        uint8_t low[128], high[128];
        for (int code = 0; code < 128; code++) {
            const int exponent = code >> 3, mantissa = code & 7;
            float value = (exponent ? 8 + mantissa : mantissa) / 512.0f * (1 << (exponent ? exponent - 1 : 0));
            uint16_t bits = code == 127 ? 0x7fc0 : bfloat16_bits(value);
            low[code] = bits & 255, high[code] = bits >> 8;
        }
        memcpy(low_bytes, low, 128), memcpy(high_bytes, high, 128);
    }
    template <class A> INLINE Chunk<A> load(const uint8_t *token, int64_t chunk) const {
        const __m512i codes =
            _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(channels(dim, chunk), token + CHUNK * chunk));
        const __m512i in_both_bytes = _mm512_or_si512(codes, _mm512_slli_epi16(codes, 8));
        const __m512i low = _mm512_permutex2var_epi8(low_bytes[0], in_both_bytes, low_bytes[1]);
        const __m512i high = _mm512_permutex2var_epi8(high_bytes[0], in_both_bytes, high_bytes[1]);
        const __m512i magnitude = _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, low, high);
        return chunk_of<A>(_mm512_or_si512(magnitude, _mm512_and_si512(in_both_bytes, _mm512_set1_epi16(-0x8000))));
    }
};

// Codes of 4 or 2 bits less the middle of their range: the rounding errors of scaled queries and weights are then half
// as large. Byte c has channel c + part * (dim * BITS / 8) at bit part * BITS.
template <int BITS> struct PackedPages : Format<PER_GROUP> {
    static constexpr float MIDDLE = ((1 << BITS) - 1) / 2.0f;
    __m512i values;                 // by code, again and again
    __m512i bytes_of[8], shifts[8];  // of each channel of a chunk

    explicit PackedPages(int64_t dim) : Format{dim, dim * BITS / 8} {
        uint16_t table[32], byte[CHUNK], shift[CHUNK];
        for (int i = 0; i < 32; i++) table[i] = bfloat16_bits(i % (1 << BITS) - MIDDLE);
        values = _mm512_loadu_si512(table);
        for (int64_t chunk = 0; chunk < ceil_div(dim, CHUNK); chunk++) {
            for (int64_t i = 0, channel = chunk * CHUNK; i < CHUNK; i++, channel++)
                byte[i] = channel % bytes, shift[i] = channel < dim ? channel / bytes * BITS : 0;
            bytes_of[chunk] = _mm512_loadu_si512(byte), shifts[chunk] = _mm512_loadu_si512(shift);
        }
    }
    template <class A> INLINE Chunk<A> load(const uint8_t *token, int64_t chunk) const {
        const __m512i first = _mm512_maskz_loadu_epi8(bits_below(bytes), token);
        __m512i codes;  // in the low bits of 16
        if (bytes <= 64) codes = _mm512_permutexvar_epi8(bytes_of[chunk], first);
        else
            codes = _mm512_permutex2var_epi8(first, bytes_of[chunk],
                                             _mm512_maskz_loadu_epi8(bits_below(bytes - 64), token + 64));
        return chunk_of<A>(_mm512_permutexvar_epi16(_mm512_srlv_epi16(codes, shifts[chunk]), values));
    }
};
