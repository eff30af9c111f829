// A vector of 16 lanes is two registers of 256 bits: AVX2, FMA and F16C (tiers avx2 and avx_vnni). See vectors.h.

#pragma once

constexpr int REGISTERS = 8;     // vectors that they hold
constexpr int LOOK_UP_BITS = 3;  // of an index of look_up

typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint8_t Bytes __attribute__((vector_size(16), aligned(1), may_alias));

constexpr int REGISTER_BYTES = 32;
#include "vectors_wide.h"

// Dot products of AVX-VNNI. Compilers do not generate its encoding where AVX-512 has the same instruction, so CPUs with
// that one alone can be asked for it by a macro: they run the kernels of this tier, for tests.
#if defined(VNNI_OF_AVX512)
#define VNNI "%{evex%} "
#elif defined(__AVXVNNI__)
#define VNNI "%{vex%} "
#endif

static INLINE Floats splat(float value) {
    const Floats::Half half = (Floats::Half)_mm256_set1_ps(value);
    return {half, half};
}
static INLINE Ints lane_numbers() {
    const Ints::Half low = {0, 1, 2, 3, 4, 5, 6, 7};
    return {low, low + 8};
}

// What was computed so far is rounded, and not computed again for a second use.
template <class T> static INLINE void keep(Wide<T, 2> &values) { asm("" : "+x"(values.low), "+x"(values.high)); }

// A vector of the results for both halves `x` of `wide`
#define BOTH(type, wide, result) \
    [&]() __attribute__((always_inline)) -> type { \
        auto half = [&](auto x) __attribute__((always_inline)) { return (type::Half)(result); }; \
        return {half(wide.low), half(wide.high)}; \
    }()

static INLINE Floats multiply_add(Floats a, Floats b, Floats sum) {
    return {(Floats::Half)_mm256_fmadd_ps((__m256)a.low, (__m256)b.low, (__m256)sum.low),
            (Floats::Half)_mm256_fmadd_ps((__m256)a.high, (__m256)b.high, (__m256)sum.high)};
}
static INLINE Floats minimum(Floats a, Floats b) {  // else b
    return {(Floats::Half)_mm256_min_ps((__m256)a.low, (__m256)b.low),
            (Floats::Half)_mm256_min_ps((__m256)a.high, (__m256)b.high)};
}
static INLINE Floats maximum(Floats a, Floats b) {
    return {(Floats::Half)_mm256_max_ps((__m256)a.low, (__m256)b.low),
            (Floats::Half)_mm256_max_ps((__m256)a.high, (__m256)b.high)};
}
static INLINE Ints maximum(Ints a, Ints b) {
    return {(Ints::Half)_mm256_max_epi32((__m256i)a.low, (__m256i)b.low),
            (Ints::Half)_mm256_max_epi32((__m256i)a.high, (__m256i)b.high)};
}

static INLINE Words widen_words(Halves halves) {
    return {(Words::Half)_mm256_cvtepu16_epi32(_mm256_castsi256_si128((__m256i)halves)),
            (Words::Half)_mm256_cvtepu16_epi32(_mm256_extracti128_si256((__m256i)halves, 1))};
}
static INLINE Words widen_words(Bytes bytes) {
    return {(Words::Half)_mm256_cvtepu8_epi32((__m128i)bytes),
            (Words::Half)_mm256_cvtepu8_epi32(_mm_srli_si128((__m128i)bytes, 8))};
}
static INLINE Ints widen_signed(Bytes bytes) {
    return {(Ints::Half)_mm256_cvtepi8_epi32((__m128i)bytes),
            (Ints::Half)_mm256_cvtepi8_epi32(_mm_srli_si128((__m128i)bytes, 8))};
}
static INLINE Floats widen(Halves bits) { return (Floats)(widen_words(bits) << 16); }  // the values of bfloat16 bits
static INLINE Floats to_floats(Ints values) { return BOTH(Floats, values, _mm256_cvtepi32_ps((__m256i)x)); }
static INLINE Floats widen(Bytes bytes) { return to_floats((Ints)widen_words(bytes)); }
static INLINE Ints to_ints(Floats values) { return BOTH(Ints, values, _mm256_cvttps_epi32((__m256)x)); }  // cut off
static INLINE Ints nearest(Floats values) { return BOTH(Ints, values, _mm256_cvtps_epi32((__m256)x)); }
static INLINE Floats nearest_whole(Floats values) {
    return BOTH(Floats, values, _mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// The low halves of words below 2 ** 16.
static INLINE Halves to_halves(Words words) {
    const __m256i mixed = _mm256_packus_epi32((__m256i)words.low, (__m256i)words.high);
    return (Halves)_mm256_permute4x64_epi64(mixed, 0xd8);
}
static INLINE Bytes to_bytes(Ints values) {  // their low bits
    const __m256i halves = (__m256i)to_halves((Words)values & 255u);
    return (Bytes)_mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}

static INLINE Halves narrow(Floats values) {  // to bfloat16, to the nearest even
    const Words bits = (Words)values, rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    const Words is_nan = (Words)(values != values);
    return to_halves(((rounded & ~is_nan) | ((bits | 0x400000u) & is_nan)) >> 16);
}

static INLINE Floats from_float16(Halves bits) {
    return {(Floats::Half)_mm256_cvtph_ps(_mm256_castsi256_si128((__m256i)bits)),
            (Floats::Half)_mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)bits, 1))};
}
static INLINE Halves to_float16(Floats values) {
    constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return (Halves)_mm256_set_m128i(_mm256_cvtps_ph((__m256)values.high, NEAREST),
                                    _mm256_cvtps_ph((__m256)values.low, NEAREST));
}

// `yes` in the lanes whose bits are set
static INLINE Floats blend(uint16_t bits, Floats yes, Floats no) {
    const Words::Half lane = {1, 2, 4, 8, 16, 32, 64, 128}, of_lane = lane << 8;
    const Words::Half all = (Words::Half)_mm256_set1_epi32(bits);
    const __m256i low = (__m256i)((all & lane) == lane), high = (__m256i)((all & of_lane) == of_lane);
    return {(Floats::Half)_mm256_blendv_ps((__m256)no.low, (__m256)yes.low, (__m256)low),
            (Floats::Half)_mm256_blendv_ps((__m256)no.high, (__m256)yes.high, (__m256)high)};
}

// Combines the lanes by `f`, halves by halves.
template <class R, class F> static INLINE R fold(__m256 low, __m256 high, F f) {
    __m256 x = f(low, high);
    x = f(x, _mm256_permute2f128_ps(x, x, 1));
    x = f(x, _mm256_permute_ps(x, 0x4e));
    x = f(x, _mm256_permute_ps(x, 0xb1));
    const __m128 first = _mm256_castps256_ps128(x);
    R result;
    memcpy(&result, &first, 4);
    return result;
}
static INLINE float highest(Floats x) {
    return fold<float>((__m256)x.low, (__m256)x.high, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); });
}
static INLINE float sum(Floats x) {
    return fold<float>((__m256)x.low, (__m256)x.high, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); });
}
static INLINE int32_t highest(Ints x) {
    return fold<int32_t>((__m256)x.low, (__m256)x.high,
                         [](__m256 a, __m256 b) { return (__m256)_mm256_max_epi32((__m256i)a, (__m256i)b); });
}
static INLINE int32_t sum(Ints x) {
    return fold<int32_t>((__m256)x.low, (__m256)x.high,
                         [](__m256 a, __m256 b) { return (__m256)_mm256_add_epi32((__m256i)a, (__m256i)b); });
}
static INLINE bool any_nan(Floats x) {
    const Ints different = x != x;
    return _mm256_movemask_epi8((__m256i)(different.low | different.high)) != 0;
}

// The sum of the lanes of each of 16 vectors.
static INLINE Floats sums_of_lanes(const Floats (&values)[LANES]) {
    auto eight = [&](int first) __attribute__((always_inline)) {
        __m256 fours[2];  // in both quarters what they give to 4 sums
        for (int i = 0; i < 2; i++) {
            __m256 x[4];
            for (int j = 0; j < 4; j++) {
                const Floats &from = values[first + 4 * i + j];
                x[j] = (__m256)(from.low + from.high);
            }
            fours[i] = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
        }
        return (Floats::Half)_mm256_add_ps(_mm256_permute2f128_ps(fours[0], fours[1], 0x20),
                                           _mm256_permute2f128_ps(fours[0], fours[1], 0x31));
    };
    return {eight(0), eight(8)};
}

static INLINE void transpose_eight(__m256i (&rows)[8]) {
    __m256i pairs[8], fours[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            fours[i + 2 * half] = _mm256_unpacklo_epi64(pairs[i + half], pairs[i + 2 + half]);
            fours[i + 2 * half + 1] = _mm256_unpackhi_epi64(pairs[i + half], pairs[i + 2 + half]);
        }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        rows[j] = _mm256_permute2x128_si256(fours[j], fours[4 + j], 0x20);
        rows[4 + j] = _mm256_permute2x128_si256(fours[j], fours[4 + j], 0x31);
    }
}

// A square of 16 by 16 words, transposed.
static INLINE void transpose(Words (&square)[LANES]) {
    __m256i parts[2][2][8];  // of rows, of columns
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            parts[i][0][j] = (__m256i)square[8 * i + j].low;
            parts[i][1][j] = (__m256i)square[8 * i + j].high;
        }
        transpose_eight(parts[i][0]), transpose_eight(parts[i][1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            square[8 * i + j] = {(Words::Half)parts[0][i][j], (Words::Half)parts[1][i][j]};
}

static INLINE Words negative_bytes(Words bytes) {  // 255 where a byte's highest bit is set, else 0
    return BOTH(Words, bytes, _mm256_cmpgt_epi8(_mm256_setzero_si256(), (__m256i)x));
}

// The bytes table[index] of half a vector, 0 where an index has its highest bit set.
static INLINE Floats::Half look_up_half(Bytes table, const uint8_t *index) {
    return (Floats::Half)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256((__m128i)table), *(const __m256i *)index);
}

// table[the lowest LOOK_UP_BITS bits of each index], from the first 8 lanes
static INLINE Floats look_up(Floats table, Words index) {
    return {(Floats::Half)_mm256_permutevar8x32_ps((__m256)table.low, (__m256i)index.low),
            (Floats::Half)_mm256_permutevar8x32_ps((__m256)table.low, (__m256i)index.high)};
}

static INLINE Floats look_up_16(Floats table, Words index) {  // of 16 entries
    auto half = [&](Words::Half index) __attribute__((always_inline)) {
        const __m256 low = _mm256_permutevar8x32_ps((__m256)table.low, (__m256i)index);
        const __m256 high = _mm256_permutevar8x32_ps((__m256)table.high, (__m256i)index);
        return (Floats::Half)_mm256_blendv_ps(low, high, (__m256)(index << 28));
    };
    return {half(index.low), half(index.high)};
}

// to[i] <- bytes[order[i]] for i < count, within each 16
static INLINE void store_ordered(int8_t *to, int64_t count, const int8_t (&bytes)[64], const uint8_t (&order)[64]) {
    alignas(32) int8_t ordered[64];
    for (int i = 0; i < 64; i += 32) {
        const __m256i some = _mm256_load_si256((const __m256i *)(bytes + i));
        const __m256i places = _mm256_load_si256((const __m256i *)(order + i));
        _mm256_store_si256((__m256i *)(ordered + i), _mm256_shuffle_epi8(some, places));
    }
    if (count == 64) memcpy(to, ordered, 64);
    else memcpy(to, ordered, std::max<int64_t>(count, 0));
}

// sum + the products of each lane's 4 codes (unsigned, of WIDTH bits) with the 4 signed bytes of x
#if defined(VNNI)
static INLINE Ints::Half byte_dots(Ints::Half sum, Words::Half u, Words::Half s) {  // unsigned and signed bytes
    asm(VNNI "vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(u), "x"(s));
    return sum;
}
template <int WIDTH> static INLINE Ints plus_products(Ints sum, Words codes, int32_t x) {
    const Words::Half bytes = (Words::Half)_mm256_set1_epi32(x);
    return {byte_dots(sum.low, codes.low, bytes), byte_dots(sum.high, codes.high, bytes)};
}

#define BYTE_DOT 1

static INLINE Words splat_bytes(uint32_t four) { return Words{} + four; }
static INLINE Words minus_bytes(Words a, Words b) {
    return {(Words::Half)_mm256_sub_epi8((__m256i)a.low, (__m256i)b.low),
            (Words::Half)_mm256_sub_epi8((__m256i)a.high, (__m256i)b.high)};
}

// sum + the products of each lane's 4 unsigned bytes of x with its 4 signed bytes of weights
static INLINE Ints plus_byte_dots(Ints sum, Words x, Words weights) {
    return {byte_dots(sum.low, x.low, weights.low), byte_dots(sum.high, x.high, weights.high)};
}
#else
template <int WIDTH> static INLINE Ints plus_products(Ints sum, Words codes, int32_t x) {
    const __m256i bytes = _mm256_set1_epi32(x), low_bits = _mm256_set1_epi8(15);
    auto half = [&](__m256i sum, __m256i codes) __attribute__((always_inline)) {
        auto add = [&](__m256i codes, int times) __attribute__((always_inline)) {  // of 4 bits: pairs fit into 16
            const __m256i fours = _mm256_madd_epi16(_mm256_maddubs_epi16(codes, bytes), _mm256_set1_epi16(times));
            sum = _mm256_add_epi32(sum, fours);
        };
        if (WIDTH < 8) add(codes, 1);
        else {
            add(_mm256_and_si256(codes, low_bits), 1);
            add(_mm256_and_si256(_mm256_srli_epi16(codes, 4), low_bits), 16);
        }
        return (Ints::Half)sum;
    };
    return {half((__m256i)sum.low, (__m256i)codes.low), half((__m256i)sum.high, (__m256i)codes.high)};
}

#define BYTE_PAIRS 1

// Each 16 bits of sum + two products of codes (unsigned) with signed bytes of x
static INLINE Words plus_pairs(Words sum, Words codes, int32_t x) {
    const __m256i bytes = _mm256_set1_epi32(x);
    auto half = [&](Words::Half sum, Words::Half codes) __attribute__((always_inline)) {
        const __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, bytes);
        asm("vpaddw %1, %0, %0" : "+x"(sum) : "x"(pairs));  // GCC would reorder the sums, and spill them
        return sum;
    };
    return {half(sum.low, codes.low), half(sum.high, codes.high)};
}
static INLINE Ints sums_of_pairs(Words pairs) {
    return BOTH(Ints, pairs, _mm256_madd_epi16((__m256i)x, _mm256_set1_epi16(1)));
}
#endif

#include "compressed.h"
