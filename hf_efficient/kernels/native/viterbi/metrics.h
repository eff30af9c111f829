// Vectors of unsigned 16-bit path metrics, for the search alone: 32 lanes in tiers of AVX-512, 16 elsewhere.

#pragma once
#include "vectors.h"

#if defined(__AVX512BW__)
struct Metrics {
    static constexpr int COUNT = 32;
    __m512i bits;

    static INLINE Metrics splat(uint16_t value) { return {_mm512_set1_epi16(value)}; }
    static INLINE Metrics load(const uint16_t *from) { return {_mm512_loadu_si512(from)}; }
    static INLINE Metrics load_signed(const int8_t *from) {
        return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)from))};
    }
    INLINE void store(uint16_t *to) const { _mm512_storeu_si512(to, bits); }
    INLINE void store_bytes(uint8_t *to) const {
        _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi16_epi8(bits));
    }
    // takes `other` where it is smaller, and notes its `number` there
    INLINE void least(Metrics other, Metrics &numbers, uint16_t number) {
        const __mmask32 smaller = _mm512_cmplt_epu16_mask(other.bits, bits);
        numbers.bits = _mm512_mask_mov_epi16(numbers.bits, smaller, _mm512_set1_epi16(number));
        bits = _mm512_min_epu16(bits, other.bits);
    }
};
static INLINE Metrics saturated(Metrics a, Metrics b) { return {_mm512_adds_epu16(a.bits, b.bits)}; }  // their sum
static INLINE Metrics operator-(Metrics a, Metrics b) { return {_mm512_sub_epi16(a.bits, b.bits)}; }
static INLINE Metrics smaller(Metrics a, Metrics b) { return {_mm512_min_epu16(a.bits, b.bits)}; }
template <int SHIFT> static INLINE Metrics shifted_up(Metrics a) { return {_mm512_slli_epi16(a.bits, SHIFT)}; }
// of signed numbers: their saturated difference, and the high part of a square, rounded
static INLINE Metrics difference(Metrics a, Metrics b) { return {_mm512_subs_epi16(a.bits, b.bits)}; }
static INLINE Metrics square(Metrics a) { return {_mm512_mulhrs_epi16(a.bits, a.bits)}; }

// Each of the first COUNT >> K metrics, 2 ** K times.
template <int K> static INLINE Metrics repeated(const uint16_t *from) {
    uint16_t order[32];
    for (int i = 0; i < 32; i++) order[i] = i >> K;
    return {_mm512_permutexvar_epi16(_mm512_loadu_si512(order), _mm512_loadu_si512(from))};
}
#elif defined(__AVX2__)
struct Metrics {
    static constexpr int COUNT = 16;
    __m256i bits;

    static INLINE Metrics splat(uint16_t value) { return {_mm256_set1_epi16(value)}; }
    static INLINE Metrics load(const uint16_t *from) { return {_mm256_loadu_si256((const __m256i *)from)}; }
    static INLINE Metrics load_signed(const int8_t *from) {
        return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from))};
    }
    INLINE void store(uint16_t *to) const { _mm256_storeu_si256((__m256i *)to, bits); }
    INLINE void store_bytes(uint8_t *to) const {
        const __m128i low = _mm256_castsi256_si128(bits), high = _mm256_extracti128_si256(bits, 1);
        _mm_storeu_si128((__m128i *)to, _mm_packus_epi16(low, high));
    }
    INLINE void least(Metrics other, Metrics &numbers, uint16_t number) {
        const __m256i least = _mm256_min_epu16(bits, other.bits), kept = _mm256_cmpeq_epi16(least, bits);
        numbers.bits = _mm256_blendv_epi8(_mm256_set1_epi16(number), numbers.bits, kept);
        bits = least;
    }
};
static INLINE Metrics saturated(Metrics a, Metrics b) { return {_mm256_adds_epu16(a.bits, b.bits)}; }
static INLINE Metrics operator-(Metrics a, Metrics b) { return {_mm256_sub_epi16(a.bits, b.bits)}; }
static INLINE Metrics smaller(Metrics a, Metrics b) { return {_mm256_min_epu16(a.bits, b.bits)}; }
template <int SHIFT> static INLINE Metrics shifted_up(Metrics a) { return {_mm256_slli_epi16(a.bits, SHIFT)}; }
static INLINE Metrics difference(Metrics a, Metrics b) { return {_mm256_subs_epi16(a.bits, b.bits)}; }
static INLINE Metrics square(Metrics a) { return {_mm256_mulhrs_epi16(a.bits, a.bits)}; }

template <int K> static INLINE Metrics repeated(const uint16_t *from) {
    uint8_t order[32];
    for (int i = 0; i < 32; i++) order[i] = 2 * (i / 2 >> K) + i % 2;
    const __m256i first = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)from));
    return {_mm256_shuffle_epi8(first, _mm256_loadu_si256((const __m256i *)order))};
}
#else
struct Metrics {
    static constexpr int COUNT = 16;
    uint16_t values[COUNT];

    template <class F> static INLINE Metrics made(F f) {
        Metrics result;
        for (int i = 0; i < COUNT; i++) result.values[i] = f(i);
        return result;
    }
    static INLINE Metrics splat(uint16_t value) { return made([&](int) { return value; }); }
    static INLINE Metrics load(const uint16_t *from) { return made([&](int i) { return from[i]; }); }
    static INLINE Metrics load_signed(const int8_t *from) { return made([&](int i) { return uint16_t(from[i]); }); }
    INLINE void store(uint16_t *to) const { memcpy(to, values, sizeof values); }
    INLINE void store_bytes(uint8_t *to) const {
        for (int i = 0; i < COUNT; i++) to[i] = values[i];
    }
    INLINE void least(Metrics other, Metrics &numbers, uint16_t number) {
        for (int i = 0; i < COUNT; i++)
            if (other.values[i] < values[i]) values[i] = other.values[i], numbers.values[i] = number;
    }
};
static INLINE Metrics saturated(Metrics a, Metrics b) {
    return Metrics::made([&](int i) { return std::min(a.values[i] + b.values[i], 0xffff); });
}
static INLINE Metrics operator-(Metrics a, Metrics b) {
    return Metrics::made([&](int i) { return a.values[i] - b.values[i]; });
}
static INLINE Metrics smaller(Metrics a, Metrics b) {
    return Metrics::made([&](int i) { return std::min(a.values[i], b.values[i]); });
}
template <int SHIFT> static INLINE Metrics shifted_up(Metrics a) {
    return Metrics::made([&](int i) { return a.values[i] << SHIFT; });
}
static INLINE Metrics difference(Metrics a, Metrics b) {
    return Metrics::made([&](int i) {
        return std::max(-32768, std::min(32767, int16_t(a.values[i]) - int16_t(b.values[i])));
    });
}
static INLINE Metrics square(Metrics a) {
    return Metrics::made([&](int i) { return ((int16_t(a.values[i]) * int16_t(a.values[i]) >> 14) + 1) >> 1; });
}
template <int K> static INLINE Metrics repeated(const uint16_t *from) {
    return Metrics::made([&](int i) { return from[i >> K]; });
}
#endif
