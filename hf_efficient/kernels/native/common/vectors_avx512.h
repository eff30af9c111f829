// A vector is one register of 512 bits: AVX-512 F, BW, VL and DQ (tiers avx512 to amx). See vectors.h.

#pragma once

constexpr int REGISTERS = 32;     // vectors that they hold
constexpr int LOOK_UP_BITS = 4;   // of an index of look_up

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint8_t Bytes __attribute__((vector_size(16), aligned(1), may_alias));

static INLINE Floats splat(float value) { return (Floats)_mm512_set1_ps(value); }
static INLINE Ints lane_numbers() { return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

// What was computed so far is rounded, and not computed again for a second use.
static INLINE void keep(Floats &values) { asm("" : "+v"(values)); }
static INLINE void keep(Words &values) { asm("" : "+v"(values)); }

static INLINE Floats multiply_add(Floats a, Floats b, Floats sum) { return sum + a * b; }
static INLINE Floats minimum(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }  // else b
static INLINE Floats maximum(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }

// GCC takes __builtin_convertvector from narrower integers apart, lane by lane.
static INLINE Floats widen(Halves bits) {  // the values of bfloat16 bits
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)bits), 16);
}
static INLINE Words widen_words(Bytes bytes) { return (Words)_mm512_cvtepu8_epi32((__m128i)bytes); }
static INLINE Ints widen_signed(Bytes bytes) { return (Ints)_mm512_cvtepi8_epi32((__m128i)bytes); }
static INLINE Floats to_floats(Ints values) { return (Floats)_mm512_cvtepi32_ps((__m512i)values); }
static INLINE Floats widen(Bytes bytes) { return to_floats((Ints)widen_words(bytes)); }
static INLINE Ints to_ints(Floats values) { return __builtin_convertvector(values, Ints); }  // cut off
static INLINE Ints nearest(Floats values) { return (Ints)_mm512_cvtps_epi32((__m512)values); }
static INLINE Floats nearest_whole(Floats values) {
    return (Floats)_mm512_roundscale_ps((__m512)values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static INLINE Bytes to_bytes(Ints values) { return (Bytes)_mm512_cvtepi32_epi8((__m512i)values); }  // their low bits

static INLINE Halves narrow(Floats values) {  // to bfloat16, to the nearest even
#if BF16_DOT
    return (Halves)_mm512_cvtneps_pbh((__m512)values);
#else
    const Words bits = (Words)values, rounded = bits + 0x7fff + (bits >> 16 & 1);
    const __mmask16 is_nan = _mm512_cmp_ps_mask((__m512)values, (__m512)values, _CMP_UNORD_Q);
    const __m512i result = _mm512_mask_blend_epi32(is_nan, (__m512i)rounded, (__m512i)(bits | 0x400000));
    return (Halves)_mm512_cvtepi32_epi16(_mm512_srli_epi32(result, 16));
#endif
}

static INLINE Floats from_float16(Halves bits) { return (Floats)_mm512_cvtph_ps((__m256i)bits); }
static INLINE Halves to_float16(Floats values) {
    return (Halves)_mm512_cvtps_ph((__m512)values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// power * 2 ** whole
static INLINE Floats scaled(Floats power, Floats whole) {
    return (Floats)_mm512_scalef_ps((__m512)power, (__m512)whole);
}

// The first `count` elements (as many as there are lanes where it is larger), and zeros.
static INLINE Floats load_some(const float *from, int64_t count) {
    return (Floats)_mm512_maskz_loadu_ps(bits_below(count), from);
}
static INLINE Halves load_some(const uint16_t *from, int64_t count) {
    return (Halves)_mm256_maskz_loadu_epi16(bits_below(count), from);
}
static INLINE Bytes load_some(const uint8_t *from, int64_t count) {
    return (Bytes)_mm_maskz_loadu_epi8(bits_below(count), from);
}
static INLINE Words load_pairs(const uint16_t *from, int64_t count) {  // of 32
    return (Words)_mm512_maskz_loadu_epi16(bits_below(count), from);
}
static INLINE void store_some(float *to, int64_t count, Floats values) {
    _mm512_mask_storeu_ps(to, bits_below(count), (__m512)values);
}
static INLINE void store_some(uint16_t *to, int64_t count, Halves values) {
    _mm256_mask_storeu_epi16(to, bits_below(count), (__m256i)values);
}
static INLINE void store_some(uint8_t *to, int64_t count, Bytes values) {
    _mm_mask_storeu_epi8(to, bits_below(count), (__m128i)values);
}

// The lanes that are marked by what is not 0, one after another; behind them anything, up to a whole vector.
template <class T, class V> static INLINE void store_marked(T *to, V values, Words marks) {
    const __mmask16 kept = _mm512_test_epi32_mask((__m512i)marks, (__m512i)marks);
    const __m512i compressed = _mm512_maskz_compress_epi32(kept, (__m512i)values);
    memcpy(to, &compressed, sizeof compressed);
}

// `yes` in the lanes whose bits are set
static INLINE Floats blend(uint16_t bits, Floats yes, Floats no) {
    return (Floats)_mm512_mask_blend_ps(bits, (__m512)no, (__m512)yes);
}

// The numbers of bfloat16 from `from` on at the columns whose bits are set, zeros elsewhere.
static INLINE Floats expanded(const uint16_t *from, uint32_t columns) {
    const __m512i values = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    return (Floats)_mm512_slli_epi32(_mm512_maskz_expand_epi32(columns, values), 16);
}
static INLINE Floats expanded_two_of_four(const uint16_t *from, uint32_t columns) {  // 8 numbers
    const __m256i values = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    const __m512i expanded = _mm512_maskz_expand_epi32(columns, _mm512_castsi256_si512(values));
    return (Floats)_mm512_slli_epi32(expanded, 16);
}

static INLINE bool any_nan(Floats x) { return _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q) != 0; }
static INLINE float highest(Floats x) { return _mm512_reduce_max_ps((__m512)x); }
static INLINE int32_t highest(Ints x) { return _mm512_reduce_max_epi32((__m512i)x); }
static INLINE float sum(Floats x) { return _mm512_reduce_add_ps((__m512)x); }
static INLINE int32_t sum(Ints x) { return _mm512_reduce_add_epi32((__m512i)x); }
static INLINE Ints maximum(Ints a, Ints b) { return (Ints)_mm512_max_epi32((__m512i)a, (__m512i)b); }

// The sum of the lanes of each of 16 vectors.
static INLINE Floats sums_of_lanes(const Floats (&values)[LANES]) {
    __m512 twos[8], fours[4], pairs[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const __m512 a = (__m512)values[2 * i], b = (__m512)values[2 * i + 1];
        twos[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {  // each quarter holds what it gives to 4 sums
        const __m512d a = (__m512d)twos[2 * i], b = (__m512d)twos[2 * i + 1];
        fours[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
    }
    constexpr int EVEN = 0x88, ODD = 0xdd;  // quarters 0 and 2 of both operands, or 1 and 3
    for (int i = 0; i < 2; i++) {
        const __m512 a = fours[2 * i], b = fours[2 * i + 1];
        pairs[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, EVEN), _mm512_shuffle_f32x4(a, b, ODD));
    }
    return (Floats)_mm512_add_ps(_mm512_shuffle_f32x4(pairs[0], pairs[1], EVEN),
                                 _mm512_shuffle_f32x4(pairs[0], pairs[1], ODD));
}

// A square of 16 by 16 words, transposed.
static INLINE void transpose(Words (&square)[LANES]) {
    __m512i pairs[16], fours[16];  // of rows, in each quarter of a vector
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32((__m512i)square[i], (__m512i)square[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32((__m512i)square[i], (__m512i)square[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            fours[i + 2 * half] = _mm512_unpacklo_epi64(pairs[i + half], pairs[i + 2 + half]);
            fours[i + 2 * half + 1] = _mm512_unpackhi_epi64(pairs[i + half], pairs[i + 2 + half]);
        }
    // quarter q of fours[4 * i + j] now has column 4 * q + j of rows 4 * i to 4 * i + 3
    constexpr int EVEN = 0x88, ODD = 0xdd;  // quarters 0 and 2 of both operands, or 1 and 3
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const __m512i even_low = _mm512_shuffle_i32x4(fours[j], fours[4 + j], EVEN);
        const __m512i even_high = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], EVEN);
        const __m512i odd_low = _mm512_shuffle_i32x4(fours[j], fours[4 + j], ODD);
        const __m512i odd_high = _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], ODD);
        square[j] = (Words)_mm512_shuffle_i32x4(even_low, even_high, EVEN);
        square[4 + j] = (Words)_mm512_shuffle_i32x4(odd_low, odd_high, EVEN);
        square[8 + j] = (Words)_mm512_shuffle_i32x4(even_low, even_high, ODD);
        square[12 + j] = (Words)_mm512_shuffle_i32x4(odd_low, odd_high, ODD);
    }
}

static INLINE Words negative_bytes(Words bytes) {  // 255 where a byte's highest bit is set, else 0
    return (Words)_mm512_movm_epi8(_mm512_movepi8_mask((__m512i)bytes));
}

// table[the lowest LOOK_UP_BITS bits of each index]
static INLINE Floats look_up(Floats table, Words index) {
    return (Floats)_mm512_permutexvar_ps((__m512i)index, (__m512)table);
}

static INLINE Floats look_up_16(Floats table, Words index) { return look_up(table, index); }

// to[i] <- bytes[order[i]] for i < count, within each 16
static INLINE void store_ordered(int8_t *to, int64_t count, const int8_t (&bytes)[64], const uint8_t (&order)[64]) {
    const __m512i ordered = _mm512_shuffle_epi8(_mm512_load_si512(bytes), _mm512_load_si512(order));
    _mm512_mask_storeu_epi8(to, bits_below(count), ordered);
}

// sum + the products of each lane's 4 codes (unsigned, of WIDTH bits) with the 4 signed bytes of x
#if defined(__AVX512VNNI__)
template <int WIDTH> static INLINE Ints plus_products(Ints sum, Words codes, int32_t x) {
    __m512i result = (__m512i)sum;  // in assembly, since GCC moves sums about between registers
    asm("vpdpbusd %2, %1, %0" : "+v"(result) : "v"((__m512i)codes), "v"(_mm512_set1_epi32(x)));
    return (Ints)result;
}

#define BYTE_DOT 1

static INLINE Words splat_bytes(uint32_t four) { return (Words)_mm512_set1_epi32(four); }
static INLINE Words minus_bytes(Words a, Words b) { return (Words)_mm512_sub_epi8((__m512i)a, (__m512i)b); }

// sum + the products of each lane's 4 unsigned bytes of x with its 4 signed bytes of weights
static INLINE Ints plus_byte_dots(Ints sum, Words x, Words weights) {
    __m512i result = (__m512i)sum;  // in assembly as in plus_products
    asm("vpdpbusd %2, %1, %0" : "+v"(result) : "v"((__m512i)x), "v"((__m512i)weights));
    return (Ints)result;
}
#else
template <int WIDTH> static INLINE Ints plus_products(Ints sum, Words codes, int32_t x) {
    const __m512i bytes = _mm512_set1_epi32(x), low_bits = _mm512_set1_epi8(15);
    auto add = [&](__m512i codes, int times) __attribute__((always_inline)) {  // at most 4 bits: pairs fit into 16
        const __m512i fours = _mm512_madd_epi16(_mm512_maddubs_epi16(codes, bytes), _mm512_set1_epi16(times));
        sum = (Ints)_mm512_add_epi32((__m512i)sum, fours);
    };
    if (WIDTH < 8) add((__m512i)codes, 1);
    else {
        add(_mm512_and_si512((__m512i)codes, low_bits), 1);
        add(_mm512_and_si512(_mm512_srli_epi16((__m512i)codes, 4), low_bits), 16);
    }
    return sum;
}

#define BYTE_PAIRS 1

// Each 16 bits of sum + two products of codes (unsigned) with signed bytes of x
static INLINE Words plus_pairs(Words sum, Words codes, int32_t x) {
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(x));
    asm("vpaddw %1, %0, %0" : "+v"(sum) : "v"(pairs));  // GCC would reorder the sums, and spill them
    return sum;
}
static INLINE Ints sums_of_pairs(Words pairs) {
    return (Ints)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1));
}
#endif

#if BF16_DOT
typedef __m512i PairBits;

static INLINE PairBits splat_pair(uint32_t pair) { return _mm512_set1_epi32(pair); }
static INLINE PairBits pairs_at(const uint16_t *from) { return _mm512_loadu_si512(from); }

// sum + both products of each lane's pairs
static INLINE Floats pair_dot(Floats sum, PairBits a, PairBits b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
static INLINE PairBits narrow_both(Floats low, Floats high) {  // 32 numbers, in order
    return (PairBits)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}
static INLINE PairBits narrow_pairs(Floats even, Floats odd) {  // to a pair in each lane
    constexpr struct alignas(64) Order {
        uint16_t of[32] = {};
        constexpr Order() {
            for (int i = 0; i < 16; i++) of[2 * i] = i, of[2 * i + 1] = 16 + i;
        }
    } ORDER;
    return _mm512_permutexvar_epi16(_mm512_load_si512(ORDER.of), narrow_both(even, odd));
}

// The `count` numbers from `from` on at the columns whose bits are set. NEAR_END: nothing behind them may be read.
template <bool NEAR_END> static INLINE PairBits expanded_pairs(const uint16_t *from, uint32_t columns, int count) {
    const __m512i values = NEAR_END ? _mm512_maskz_loadu_epi16(bits_below(count), from) : _mm512_loadu_si512(from);
    // with a zeroing mask an expansion waits for the one before it: 1.7 ns instead of 0.6 (Zen 5)
    __m512i zeros = _mm512_setzero_si512();
    asm("" : "+v"(zeros));
    return _mm512_mask_expand_epi16(zeros, columns, values);
}

// Pairs of the numbers of `first` and `odd`, for the first 16 numbers and, in `second`, for the last.
struct PairInterleaving {
    __m512i order[2];

    PairInterleaving() {
        uint16_t channels[2][32];
        for (int i = 0; i < 32; i++) channels[0][i] = i / 2 + i % 2 * 32, channels[1][i] = channels[0][i] + 16;
        memcpy(order, channels, sizeof order);
    }
    INLINE void apply(Words &first, Words &second, Words odd) const {
        second = (Words)_mm512_permutex2var_epi16((__m512i)first, order[1], (__m512i)odd);
        first = (Words)_mm512_permutex2var_epi16((__m512i)first, order[0], (__m512i)odd);
    }
};
#endif
