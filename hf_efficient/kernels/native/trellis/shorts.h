// Vectors of 32 lanes of 16 bits, a column of the weight in each, and how the states of a trellis become values.

#pragma once
#include "vectors.h"

constexpr int STATE_BITS = 14;
constexpr uint16_t STATE_MASK = (1 << STATE_BITS) - 1, FACTORS[2] = {0x1e05, 0x8313}, SIX_BITS = 0x3f3f;
constexpr int MIDDLE = 126;  // what values have too much

#if defined(__AVX512BW__)
struct Shorts {
    __m512i bits;

    static INLINE Shorts load(const void *from) { return {_mm512_loadu_si512(from)}; }
    static INLINE Shorts splat(int16_t value) { return {_mm512_set1_epi16(value)}; }
};

// The states that begin at bit SHIFT of `words` and go on in `more`.
template <int SHIFT> static INLINE Shorts states(Shorts words, Shorts more) {
    __m512i found = words.bits;
    if constexpr (SHIFT > 16 - STATE_BITS) {
#if defined(__AVX512VBMI2__)
        found = _mm512_shrdi_epi16(words.bits, more.bits, SHIFT);
#else
        found = _mm512_or_si512(_mm512_srli_epi16(words.bits, SHIFT), _mm512_slli_epi16(more.bits, 16 - SHIFT));
#endif
    } else if constexpr (SHIFT > 0) {
        found = _mm512_srli_epi16(words.bits, SHIFT);
    }
    return {_mm512_and_si512(found, _mm512_set1_epi16(STATE_MASK))};
}

static INLINE Shorts values(Shorts states) {
    const __m512i mask = _mm512_set1_epi16(SIX_BITS);
    const __m512i low = _mm512_mullo_epi16(states.bits, _mm512_set1_epi16(FACTORS[0]));
    const __m512i high = _mm512_mulhi_epu16(low, _mm512_set1_epi16((int16_t)FACTORS[1]));
    const __m512i both = _mm512_add_epi8(_mm512_and_si512(low, mask), _mm512_and_si512(high, mask));
    return {_mm512_maddubs_epi16(both, _mm512_set1_epi8(1))};
}

// sum + the products of each pair of lanes
static INLINE Ints plus_pairs(Ints sum, Shorts a, Shorts b) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpwssd_epi32((__m512i)sum, a.bits, b.bits);
#else
    return (Ints)_mm512_add_epi32((__m512i)sum, _mm512_madd_epi16(a.bits, b.bits));
#endif
}

static INLINE Ints first_half(Shorts a) { return (Ints)_mm512_cvtepi16_epi32(_mm512_castsi512_si256(a.bits)); }
static INLINE Ints second_half(Shorts a) { return (Ints)_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(a.bits, 1)); }
static INLINE void store_shorts(int16_t *to, Ints values) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)values));
}
#elif defined(__AVX2__)
struct Shorts {
    __m256i low, high;

    static INLINE Shorts load(const void *from) {
        return {_mm256_loadu_si256((const __m256i *)from), _mm256_loadu_si256((const __m256i *)from + 1)};
    }
    static INLINE Shorts splat(int16_t value) { return {_mm256_set1_epi16(value), _mm256_set1_epi16(value)}; }
};

template <int SHIFT> static INLINE Shorts states(Shorts words, Shorts more) {
    auto half = [](__m256i words, __m256i more) __attribute__((always_inline)) {
        if constexpr (SHIFT > 0) words = _mm256_srli_epi16(words, SHIFT);
        if constexpr (SHIFT > 16 - STATE_BITS) words = _mm256_or_si256(words, _mm256_slli_epi16(more, 16 - SHIFT));
        return _mm256_and_si256(words, _mm256_set1_epi16(STATE_MASK));
    };
    return {half(words.low, more.low), half(words.high, more.high)};
}

static INLINE Shorts values(Shorts states) {
    auto half = [](__m256i states) __attribute__((always_inline)) {
        const __m256i mask = _mm256_set1_epi16(SIX_BITS);
        const __m256i low = _mm256_mullo_epi16(states, _mm256_set1_epi16(FACTORS[0]));
        const __m256i high = _mm256_mulhi_epu16(low, _mm256_set1_epi16((int16_t)FACTORS[1]));
        const __m256i both = _mm256_add_epi8(_mm256_and_si256(low, mask), _mm256_and_si256(high, mask));
        return _mm256_maddubs_epi16(both, _mm256_set1_epi8(1));
    };
    return {half(states.low), half(states.high)};
}

static INLINE Ints plus_pairs(Ints sum, Shorts a, Shorts b) {
#if defined(VNNI)
    asm(VNNI "vpdpwssd %2, %1, %0" : "+x"(sum.low) : "x"(a.low), "x"(b.low));
    asm(VNNI "vpdpwssd %2, %1, %0" : "+x"(sum.high) : "x"(a.high), "x"(b.high));
    return sum;
#else
    return {(Ints::Half)_mm256_add_epi32((__m256i)sum.low, _mm256_madd_epi16(a.low, b.low)),
            (Ints::Half)_mm256_add_epi32((__m256i)sum.high, _mm256_madd_epi16(a.high, b.high))};
#endif
}

static INLINE Ints widen_shorts(__m256i a) {
    return {(Ints::Half)_mm256_cvtepi16_epi32(_mm256_castsi256_si128(a)),
            (Ints::Half)_mm256_cvtepi16_epi32(_mm256_extracti128_si256(a, 1))};
}
static INLINE Ints first_half(Shorts a) { return widen_shorts(a.low); }
static INLINE Ints second_half(Shorts a) { return widen_shorts(a.high); }
static INLINE void store_shorts(int16_t *to, Ints values) { *(Halves *)to = to_halves((Words)values & 0xffffu); }
#else
struct Shorts {
    uint16x8_t parts[4];

    static INLINE Shorts load(const void *from) {
        const uint16_t *numbers = (const uint16_t *)from;
        return {{vld1q_u16(numbers), vld1q_u16(numbers + 8), vld1q_u16(numbers + 16), vld1q_u16(numbers + 24)}};
    }
    static INLINE Shorts splat(int16_t value) {
        const uint16x8_t part = vdupq_n_u16(value);
        return {{part, part, part, part}};
    }
};

// What `f` makes of each part of the given vectors.
template <class F, class... S> static INLINE Shorts map_shorts(F f, const S &...from) {
    return {{f(from.parts[0]...), f(from.parts[1]...), f(from.parts[2]...), f(from.parts[3]...)}};
}

template <int SHIFT> static INLINE Shorts states(Shorts words, Shorts more) {
    auto part = [](uint16x8_t words, uint16x8_t more) __attribute__((always_inline)) {
        if constexpr (SHIFT > 0) words = vshrq_n_u16(words, SHIFT);
        if constexpr (SHIFT > 16 - STATE_BITS) words = vorrq_u16(words, vshlq_n_u16(more, 16 - SHIFT));
        return vandq_u16(words, vdupq_n_u16(STATE_MASK));
    };
    return map_shorts(part, words, more);
}

static INLINE Shorts values(Shorts states) {
    auto part = [](uint16x8_t states) __attribute__((always_inline)) {
        const uint16x8_t mask = vdupq_n_u16(SIX_BITS), low = vmulq_u16(states, vdupq_n_u16(FACTORS[0]));
        const uint32x4_t products[2] = {vmull_u16(vget_low_u16(low), vdup_n_u16(FACTORS[1])),
                                        vmull_high_u16(low, vdupq_n_u16(FACTORS[1]))};
        const uint16x8_t high = vuzp2q_u16((uint16x8_t)products[0], (uint16x8_t)products[1]);
        return vpaddlq_u8(vaddq_u8((uint8x16_t)vandq_u16(low, mask), (uint8x16_t)vandq_u16(high, mask)));
    };
    return map_shorts(part, states);
}

static INLINE Ints plus_pairs(Ints sum, Shorts a, Shorts b) {
    auto part = [](uint16x8_t a, uint16x8_t b) __attribute__((always_inline)) {
        const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
        return (Ints::Half::Half)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
    };
    const auto *x = a.parts, *y = b.parts;
    return sum + Ints({part(x[0], y[0]), part(x[1], y[1])}, {part(x[2], y[2]), part(x[3], y[3])});
}

static INLINE Ints::Half widen_shorts(uint16x8_t a) {
    const int16x8_t x = (int16x8_t)a;
    return {(Ints::Half::Half)vmovl_s16(vget_low_s16(x)), (Ints::Half::Half)vmovl_high_s16(x)};
}
static INLINE Ints first_half(Shorts a) { return {widen_shorts(a.parts[0]), widen_shorts(a.parts[1])}; }
static INLINE Ints second_half(Shorts a) { return {widen_shorts(a.parts[2]), widen_shorts(a.parts[3])}; }
static INLINE void store_shorts(int16_t *to, Ints values) {
    for (int i = 0; i < LANES; i++) to[i] = values[i];
}
#endif
