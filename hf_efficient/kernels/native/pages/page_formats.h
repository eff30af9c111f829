// Loads 32 channels of a token and head from pages, in their order (flash_paged's kv_formats.py has the layouts). Codes
// are exact in bfloat16; the caller applies the scales.

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
    Words terms[A::VECTORS];
};

template <class A> static INLINE Chunk<A> chunk_of(Floats low, Floats high) {
#if BF16_DOT
    if constexpr (A::VECTORS == 1) return {{(Words)narrow_both(low, high)}};
    else
#endif
        return {{(Words)low, (Words)high}};
}

#if BF16_LOOK_UPS
template <class A> static INLINE Chunk<A> chunk_of(__m512i bfloat16s) {
    if constexpr (A::VECTORS == 1) return {{(Words)bfloat16s}};
    else
        return {{(Words)widen((Halves)_mm512_castsi512_si256(bfloat16s)),
                 (Words)widen((Halves)_mm512_extracti64x4_epi64(bfloat16s, 1))}};
}

// A bit for each of the 32 channels of a chunk that is one.
static INLINE uint32_t channels(int64_t dim, int64_t chunk) { return bits_below(dim - chunk * CHUNK); }
#endif

template <Scales S> struct Format {
    static constexpr Scales SCALES = S;
    static constexpr float MIDDLE = 0;  // taken off the codes
    int64_t dim, bytes;                 // bytes: of a token and head
};

// A format whose `some` reads up to 16 channels as floats.
#define LOAD_HALVES(size) \
    template <class A> INLINE Chunk<A> load(const uint8_t *token, int64_t chunk) const { \
        const int64_t at = chunk * CHUNK; \
        return chunk_of<A>(some(token + at * size, dim - at), some(token + (at + LANES) * size, dim - at - LANES)); \
    }

struct BFloat16Pages : Format<NONE> {
    explicit BFloat16Pages(int64_t dim) : Format{dim, 2 * dim} {}
#if BF16_DOT
    template <class A> INLINE Chunk<A> load(const uint8_t *token, int64_t chunk) const {
        return {{load_pairs((const uint16_t *)token + chunk * CHUNK, dim - chunk * CHUNK)}};
    }
#else
    static INLINE Floats some(const void *from, int64_t count) {
        return widen(load_some((const uint16_t *)from, count));
    }
    LOAD_HALVES(2)
#endif
};

struct Float16Pages : Format<NONE> {
    explicit Float16Pages(int64_t dim) : Format{dim, 2 * dim} {}
    static INLINE Floats some(const void *from, int64_t count) {
        return from_float16(load_some((const uint16_t *)from, count));
    }
    LOAD_HALVES(2)
};

struct Float32Pages : Format<NONE> {
    explicit Float32Pages(int64_t dim) : Format{dim, 4 * dim} {}
    static INLINE Floats some(const void *from, int64_t count) { return load_some((const float *)from, count); }
    LOAD_HALVES(4)
};

struct Int8Pages : Format<PER_TOKEN> {
    explicit Int8Pages(int64_t dim) : Format{dim, dim} {}
    static INLINE Floats some(const uint8_t *from, int64_t count) {
        return to_floats(widen_signed(load_some(from, count)));
    }
    LOAD_HALVES(1)
};

#if BF16_LOOK_UPS
#include "page_formats_bf16.h"
#else
struct Fp8Pages : Format<PER_TOKEN> {  // E4M3
    explicit Fp8Pages(int64_t dim) : Format{dim, dim} {}
    static INLINE Floats some(const uint8_t *from, int64_t count) {
        const Words codes = widen_words(load_some(from, count)), magnitude = codes & 127u;
        const Floats normal = (Floats)((magnitude << 20) + ((127 - 7) << 23));
        const Floats subnormal = to_floats((Ints)magnitude) * (1 / 512.0f);
        Floats value = select((Ints)magnitude < 8, subnormal, normal);
        value = select((Ints)magnitude == 127, splat(__builtin_nanf("")), value);
        return (Floats)((Words)value | (codes & 128u) << 24);
    }
    LOAD_HALVES(1)
};

// Codes of 4 or 2 bits less the middle of their range. Byte c has channel c + part * (dim * BITS / 8) at bit part *
// BITS.
template <int BITS> struct PackedPages : Format<PER_GROUP> {
    static constexpr float MIDDLE = ((1 << BITS) - 1) / 2.0f;

    explicit PackedPages(int64_t dim) : Format{dim, dim * BITS / 8} {}
    INLINE Floats some(const uint8_t *token, int64_t channel) const {
        if (channel >= dim) return Floats{};
        const int64_t part = channel / bytes, byte = channel % bytes;
        Words codes;
        if (byte + LANES <= bytes) codes = widen_words(*(const Bytes *)(token + byte)) >> int(part * BITS);
        else {  // of several parts
            uint32_t each[LANES] = {};
            for (int64_t i = 0; i < std::min<int64_t>(LANES, dim - channel); i++)
                each[i] = token[(channel + i) % bytes] >> (channel + i) / bytes * BITS;
            codes = *(const Words *)each;
        }
        return to_floats((Ints)(codes & ((1u << BITS) - 1))) - MIDDLE;
    }
    template <class A> INLINE Chunk<A> load(const uint8_t *token, int64_t chunk) const {
        return chunk_of<A>(some(token, chunk * CHUNK), some(token, chunk * CHUNK + LANES));
    }
};
#endif
#undef LOAD_HALVES
