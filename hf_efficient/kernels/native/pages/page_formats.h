// Loads 32 channels of a token and head from pages, in their order. Codes are exact in bfloat16; the caller applies
// the scales.

#pragma once
#include "page_call.h"

enum Scales { NONE, PER_TOKEN, PER_GROUP };
constexpr int CHUNK = 32;  // channels

// The arithmetic of products: pairs of bfloat16, or floats. A term is the content of one lane.
struct BFloat16 {
    typedef uint32_t Term;
    static constexpr int NUMBERS = 2, VECTORS = 1;  // numbers of a term, vectors of terms in a chunk
};
struct Float32 {
    typedef float Term;
    static constexpr int NUMBERS = 1, VECTORS = 2;
};

template <class A> struct Chunk {
    __m512i terms[A::VECTORS];
};

template <class A> static INLINE Chunk<A> chunk_of(__m512i bfloat16s) {
    if constexpr (A::VECTORS == 1) return {{bfloat16s}};
    else
        return {{(__m512i)widen((Halves)_mm512_castsi512_si256(bfloat16s)),
                 (__m512i)widen((Halves)_mm512_extracti64x4_epi64(bfloat16s, 1))}};
}

template <class A> static INLINE Chunk<A> chunk_of(__m512 low, __m512 high) {
    if constexpr (A::VECTORS == 1) return {{(__m512i)_mm512_cvtne2ps_pbh(high, low)}};
    else return {{(__m512i)low, (__m512i)high}};
}

// A bit for each of the 32 channels of a chunk that is one.
static INLINE uint32_t channels(int64_t dim, int64_t chunk) { return bits_below(dim - chunk * CHUNK); }

template <Scales S> struct Format {
    static constexpr Scales SCALES = S;
    static constexpr float MIDDLE = 0;  // taken off the codes
    int64_t dim, bytes;                 // bytes: of a token and head
};

struct BFloat16Pages : Format<NONE> {
    explicit BFloat16Pages(int64_t dim) : Format{dim, 2 * dim} {}
    template <class A> INLINE Chunk<A> load(const uint8_t *token, int64_t chunk) const {
        return chunk_of<A>(_mm512_maskz_loadu_epi16(channels(dim, chunk), token + 64 * chunk));
    }
};

struct Float16Pages : Format<NONE> {
    explicit Float16Pages(int64_t dim) : Format{dim, 2 * dim} {}
    template <class A> INLINE Chunk<A> load(const uint8_t *token, int64_t chunk) const {
        const __m512i halves = _mm512_maskz_loadu_epi16(channels(dim, chunk), token + 64 * chunk);
        return chunk_of<A>(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)),
                           _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)));
    }
};

struct Float32Pages : Format<NONE> {
    explicit Float32Pages(int64_t dim) : Format{dim, 4 * dim} {}
    template <class A> INLINE Chunk<A> load(const uint8_t *token, int64_t chunk) const {
        const uint32_t present = channels(dim, chunk);
        token += 128 * chunk;
        return chunk_of<A>(_mm512_maskz_loadu_ps(present & 0xffff, token),
                           _mm512_maskz_loadu_ps(present >> 16, token + 64));
    }
};

struct Int8Pages : Format<PER_TOKEN> {
    explicit Int8Pages(int64_t dim) : Format{dim, dim} {}
    template <class A> INLINE Chunk<A> load(const uint8_t *token, int64_t chunk) const {
        const __m256i codes = _mm256_maskz_loadu_epi8(channels(dim, chunk), token + CHUNK * chunk);
        const __m512i low = _mm512_cvtepi8_epi32(_mm256_castsi256_si128(codes)),
                      high = _mm512_cvtepi8_epi32(_mm256_extracti128_si256(codes, 1));
        return chunk_of<A>(_mm512_cvtepi32_ps(low), _mm512_cvtepi32_ps(high));
    }
};

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
