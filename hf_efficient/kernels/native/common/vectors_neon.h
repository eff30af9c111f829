// A vector of 16 lanes is four registers of 128 bits: NEON of ARMv8.2 with dot products of bytes (tier neon), and with
// those of mixed signs and of bfloat16 (tier neon_bf16). See vectors.h.

#pragma once

constexpr int REGISTERS = 8;     // vectors that they hold
constexpr int LOOK_UP_BITS = 3;  // of an index of look_up

template <class T, int N> struct Wide;
typedef Wide<uint16_t, 2> Halves;
typedef uint8_t Bytes __attribute__((vector_size(16), aligned(1), may_alias));

constexpr int REGISTER_BYTES = 16;
#include "vectors_wide.h"

// R from what `f` makes of each register of the given vectors.
template <class R, class F, class... V> static INLINE R map(F f, const V &...wide) {
    if constexpr (sizeof(R) == REGISTER_BYTES) return (R)f(wide...);
    else return {map<typename R::Half>(f, wide.low...), map<typename R::Half>(f, wide.high...)};
}
// One register from all four, by `f` of two.
template <class V, class F> static INLINE auto fold(const V &x, F f) {
    return f(f(x.low.low, x.high.low), f(x.low.high, x.high.high));
}
#define OF(type, x, result) \
    map<type>([&](auto x) __attribute__((always_inline)) { return result; }, x)
#define OF_BOTH(type, x, y, result) \
    map<type>([&](auto x, auto y) __attribute__((always_inline)) { return result; }, x, y)

static INLINE Floats splat(float value) {
    const auto part = vdupq_n_f32(value);
    return {{part, part}, {part, part}};
}
static INLINE Ints lane_numbers() {
    const Ints::Half::Half first = {0, 1, 2, 3};
    return {{first, first + 4}, {first + 8, first + 12}};
}

// What was computed so far is rounded, and not computed again for a second use.
template <class T> static INLINE void keep(Wide<T, 4> &x) {
    asm("" : "+w"(x.low.low), "+w"(x.low.high), "+w"(x.high.low), "+w"(x.high.high));
}

static INLINE Floats multiply_add(Floats a, Floats b, Floats sum) {
    auto part = [](auto a, auto b, auto sum) __attribute__((always_inline)) { return vfmaq_f32(sum, a, b); };
    return map<Floats>(part, a, b, sum);
}
// else b, as where one is NaN
static INLINE Floats minimum(Floats a, Floats b) { return OF_BOTH(Floats, a, b, vbslq_f32(vcltq_f32(a, b), a, b)); }
static INLINE Floats maximum(Floats a, Floats b) { return OF_BOTH(Floats, a, b, vbslq_f32(vcgtq_f32(a, b), a, b)); }
static INLINE Ints maximum(Ints a, Ints b) { return OF_BOTH(Ints, a, b, vmaxq_s32(a, b)); }

static INLINE Words widen_words(Halves halves) {
    const uint16x8_t low = (uint16x8_t)halves.low, high = (uint16x8_t)halves.high;
    return {{vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low)}, {vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)}};
}
static INLINE Words widen_words(Bytes bytes) {
    return widen_words(Halves(vmovl_u8(vget_low_u8((uint8x16_t)bytes)), vmovl_high_u8((uint8x16_t)bytes)));
}
static INLINE Ints widen_signed(Bytes bytes) {
    const int16x8_t low = vmovl_s8(vget_low_s8((int8x16_t)bytes)), high = vmovl_high_s8((int8x16_t)bytes);
    return {{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low)}, {vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)}};
}
// The values of 8 bfloat16 numbers, in half of a vector.
static INLINE Floats::Half widen_eight(Bytes numbers) {
    const uint16x8_t bits = (uint16x8_t)numbers;
    return {(float32x4_t)vshll_n_u16(vget_low_u16(bits), 16), (float32x4_t)vshll_high_n_u16(bits, 16)};
}
static INLINE Floats widen(Halves bits) {  // the values of bfloat16 bits
    return {widen_eight((Bytes)bits.low), widen_eight((Bytes)bits.high)};
}
static INLINE Floats to_floats(Ints values) { return OF(Floats, values, vcvtq_f32_s32(values)); }
static INLINE Floats widen(Bytes bytes) { return to_floats((Ints)widen_words(bytes)); }
static INLINE Ints to_ints(Floats values) { return OF(Ints, values, vcvtq_s32_f32(values)); }  // cut off
static INLINE Ints nearest(Floats values) { return OF(Ints, values, vcvtnq_s32_f32(values)); }
static INLINE Floats nearest_whole(Floats values) { return OF(Floats, values, vrndnq_f32(values)); }

// The low halves of words.
static INLINE Halves to_halves(Words words) {
    auto half = [](const Words::Half &x) __attribute__((always_inline)) {
        return vmovn_high_u32(vmovn_u32(x.low), x.high);
    };
    return {half(words.low), half(words.high)};
}
static INLINE Bytes to_bytes(Ints values) {  // their low bits
    const Halves halves = to_halves((Words)values);
    return (Bytes)vmovn_high_u16(vmovn_u16((uint16x8_t)halves.low), (uint16x8_t)halves.high);
}

static INLINE Halves narrow(Floats values) {  // to bfloat16, to the nearest even
#if BF16_DOT
    auto half = [](const Floats::Half &x) __attribute__((always_inline)) {
        return (Halves::Half)vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(x.low), x.high);
    };
    return {half(values.low), half(values.high)};
#else
    const Words bits = (Words)values, rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    const Words is_nan = (Words)(values != values);
    return to_halves(((rounded & ~is_nan) | ((bits | 0x400000u) & is_nan)) >> 16);
#endif
}

static INLINE Floats from_float16(Halves bits) {
    auto half = [](auto bits) __attribute__((always_inline)) {
        const float16x8_t x = (float16x8_t)bits;
        return Floats::Half(vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x));
    };
    return {half(bits.low), half(bits.high)};
}
static INLINE Halves to_float16(Floats values) {
    auto half = [](const Floats::Half &x) __attribute__((always_inline)) {
        return (Halves::Half)vcvt_high_f16_f32(vcvt_f16_f32(x.low), x.high);
    };
    return {half(values.low), half(values.high)};
}

// `yes` in the lanes whose bits are set
static INLINE Floats blend(uint16_t bits, Floats yes, Floats no) {
    const Words::Half::Half lane = {1, 2, 4, 8};
    const Words all = Words({lane, lane << 4}, {lane << 8, lane << 12}) & uint32_t(bits);
    auto part = [](auto bits, auto yes, auto no) __attribute__((always_inline)) {
        return vbslq_f32(vtstq_u32(bits, bits), yes, no);
    };
    return map<Floats>(part, all, yes, no);
}

static INLINE float highest(Floats x) {
    return vmaxvq_f32(fold(x, [](auto a, auto b) __attribute__((always_inline)) { return vmaxq_f32(a, b); }));
}
static INLINE int32_t highest(Ints x) {
    return vmaxvq_s32(fold(x, [](auto a, auto b) __attribute__((always_inline)) { return vmaxq_s32(a, b); }));
}
static INLINE float sum(Floats x) {
    return vaddvq_f32(fold(x, [](auto a, auto b) __attribute__((always_inline)) { return vaddq_f32(a, b); }));
}
static INLINE int32_t sum(Ints x) {
    return vaddvq_s32(fold(x, [](auto a, auto b) __attribute__((always_inline)) { return vaddq_s32(a, b); }));
}
static INLINE bool any_nan(Floats x) {
    const Ints different = x != x;
    return vmaxvq_u32(fold((Words)different, [](auto a, auto b) __attribute__((always_inline)) { return a | b; })) != 0;
}

// The sum of the lanes of each of 16 vectors.
static INLINE Floats sums_of_lanes(const Floats (&values)[LANES]) {
    auto pair = [&](int first) __attribute__((always_inline)) {
        auto add = [](auto a, auto b) __attribute__((always_inline)) { return vaddq_f32(a, b); };
        return vpaddq_f32(fold(values[first], add), fold(values[first + 1], add));
    };
    auto four = [&](int first) __attribute__((always_inline)) { return vpaddq_f32(pair(first), pair(first + 2)); };
    return {{four(0), four(4)}, {four(8), four(12)}};
}

// A square of 16 by 16 words, transposed: squares of 4 by 4, each transposed and put in the place of its mirror image.
static INLINE void transpose(Words (&square)[LANES]) {
    uint32x4_t parts[LANES][4];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        const Words &row = square[i];
        parts[i][0] = row.low.low, parts[i][1] = row.low.high, parts[i][2] = row.high.low, parts[i][3] = row.high.high;
    }
    auto column = [&](int j, int part) __attribute__((always_inline)) {  // of rows 4 * part to 4 * part + 3
        const uint32x4_t *from = parts[4 * part] + j / 4;
        auto pair = [&](int i) __attribute__((always_inline)) {
            const uint32x4_t a = from[4 * i], b = from[4 * i + 4];
            return vreinterpretq_u64_u32(j % 2 ? vtrn2q_u32(a, b) : vtrn1q_u32(a, b));
        };
        const uint64x2_t first = pair(0), second = pair(2);
        return vreinterpretq_u32_u64(j % 4 < 2 ? vtrn1q_u64(first, second) : vtrn2q_u64(first, second));
    };
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) square[j] = {{column(j, 0), column(j, 1)}, {column(j, 2), column(j, 3)}};
}

static INLINE Words negative_bytes(Words bytes) {  // 255 where a byte's highest bit is set, else 0
    return OF(Words, bytes, vreinterpretq_u32_u8(vcltzq_s8((int8x16_t)bytes)));
}

// The bytes table[index], 0 where an index has its highest bit set.
static INLINE uint8x16_t look_up_bytes(Bytes table, const uint8_t *index) {
    return vqtbl1q_u8((uint8x16_t)table, vld1q_u8(index));
}
static INLINE Floats::Half look_up_half(Bytes table, const uint8_t *index) {
    return {(float32x4_t)look_up_bytes(table, index), (float32x4_t)look_up_bytes(table, index + 16)};
}

// The offsets of the bytes of float number `index & most` of a table.
static INLINE Words byte_offsets(Words index, uint32_t most) { return (index & most) * 0x04040404u + 0x03020100u; }

// table[the lowest LOOK_UP_BITS bits of each index], from the first 8 lanes
static INLINE Floats look_up(Floats table, Words index) {
    const uint8x16x2_t bytes = {(uint8x16_t)table.low.low, (uint8x16_t)table.low.high};
    const Words offsets = byte_offsets(index, 7);
    return OF(Floats, offsets, (float32x4_t)vqtbl2q_u8(bytes, (uint8x16_t)offsets));
}

static INLINE Floats look_up_16(Floats table, Words index) {  // of 16 entries
    const uint8x16x4_t bytes = {(uint8x16_t)table.low.low, (uint8x16_t)table.low.high, (uint8x16_t)table.high.low,
                                (uint8x16_t)table.high.high};
    const Words offsets = byte_offsets(index, 15);
    return OF(Floats, offsets, (float32x4_t)vqtbl4q_u8(bytes, (uint8x16_t)offsets));
}

// to[i] <- bytes[order[i]] for i < count, within each 16
static INLINE void store_ordered(int8_t *to, int64_t count, const int8_t (&bytes)[64], const uint8_t (&order)[64]) {
    const uint8x16x4_t table = vld1q_u8_x4((const uint8_t *)bytes);
    for (int i = 0; i < 64; i += 16)
        store_some((uint8_t *)to + i, count - i, (Bytes)vqtbl4q_u8(table, vld1q_u8(order + i)));
}

// sum + the products of each lane's 4 codes (unsigned, of WIDTH bits) with the 4 signed bytes of x
template <int WIDTH> static INLINE Ints plus_products(Ints sum, Words codes, int32_t x) {
    const int8x16_t bytes = vreinterpretq_s8_s32(vdupq_n_s32(x));
    auto add = [=](auto sum, auto codes) __attribute__((always_inline)) {
        return vdotq_s32(sum, (int8x16_t)codes, bytes);
    };
    if (WIDTH < 8) return map<Ints>(add, sum, codes);
#if defined(__ARM_FEATURE_MATMUL_INT8)
    auto add_mixed = [=](auto sum, auto codes) __attribute__((always_inline)) {
        return vusdotq_s32(sum, (uint8x16_t)codes, bytes);
    };
    return map<Ints>(add_mixed, sum, codes);
#else
    // codes less 128 are signed bytes
    const int32x4_t middle = vshlq_n_s32(vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(64), bytes), 1);
    sum = OF(Ints, sum, sum + middle);
    return map<Ints>(add, sum, codes ^ 0x80808080u);
#endif
}

#include "compressed.h"

#if BF16_DOT
typedef Words PairBits;

static INLINE PairBits splat_pair(uint32_t pair) {
    const auto part = vdupq_n_u32(pair);
    return {{part, part}, {part, part}};
}
static INLINE PairBits pairs_at(const uint16_t *from) { return load_pairs(from, 32); }

// sum + both products of each lane's pairs
static INLINE Floats pair_dot(Floats sum, PairBits a, PairBits b) {
    auto part = [](auto sum, auto a, auto b) __attribute__((always_inline)) {
        return vbfdotq_f32(sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
    };
    return map<Floats>(part, sum, a, b);
}
static INLINE PairBits narrow_both(Floats low, Floats high) {  // 32 numbers, in order
    const Halves first = narrow(low), second = narrow(high);
    typedef Words::Half::Half Part;
    return {{(Part)first.low, (Part)first.high}, {(Part)second.low, (Part)second.high}};
}
// Pairs of the numbers of two vectors, in the lanes of half a vector for each 8 of them.
template <class V> static INLINE Words::Half zipped(V first, V second) {
    const uint16x8_t a = (uint16x8_t)first, b = (uint16x8_t)second;
    return {(uint32x4_t)vzip1q_u16(a, b), (uint32x4_t)vzip2q_u16(a, b)};
}
static INLINE PairBits narrow_pairs(Floats even, Floats odd) {  // to a pair in each lane
    const Halves first = narrow(even), second = narrow(odd);
    return {zipped(first.low, second.low), zipped(first.high, second.high)};
}

// The `count` numbers from `from` on at the columns whose bits are set. NEAR_END: nothing behind them may be read.
template <bool NEAR_END> static INLINE PairBits expanded_pairs(const uint16_t *from, uint32_t columns, int count) {
    uint16_t copy[48];
    if (NEAR_END) memcpy(copy, from, 2 * count), from = copy;
    auto eight = [&](int first) __attribute__((always_inline)) {
        const uint32_t mask = columns >> first & 255;
        const uint8x16_t numbers = look_up_bytes(((const Bytes *)from)[0], EXPANSIONS<sizeof(uint16_t)>.bytes[mask]);
        from += __builtin_popcount(mask);
        return (uint32x4_t)numbers;
    };
    const uint32x4_t a = eight(0), b = eight(8), c = eight(16), d = eight(24);
    return {{a, b}, {c, d}};
}

// Pairs of the numbers of `first` and `odd`, for the first 16 numbers and, in `second`, for the last.
struct PairInterleaving {
    INLINE void apply(Words &first, Words &second, Words odd) const {
        const Words all = first;
        first = {zipped(all.low.low, odd.low.low), zipped(all.low.high, odd.low.high)};
        second = {zipped(all.high.low, odd.high.low), zipped(all.high.high, odd.high.high)};
    }
};
#endif
