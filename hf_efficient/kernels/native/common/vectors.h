// Vectors of 16 lanes, threads and scratch memory, for compilers with GCC's vector extensions. Which instructions there
// are is told by the compiler's flags, of kernels/native/tiers.py: what names no tier in its first lines serves all of
// them but `torch`. A header for each width of registers has
//
// - Floats, Ints, Words (4 bytes a lane), Halves (2) and Bytes (1), with the operators of GCC's vectors;
// - conversions: widen, narrow (bfloat16), from_float16, to_float16, to_floats, to_ints, nearest, to_bytes;
// - some of the lanes: load_some, store_some, blend;
// - all of them: sum, highest, any_nan, sums_of_lanes, transpose, look_up, look_up_16, store_ordered;
// - plus_products: sums of 4 bytes times 4 bytes;
// - with BYTE_DOT plus_byte_dots (4 unsigned bytes times 4 signed ones), splat_bytes, minus_bytes;
// - with BYTE_PAIRS plus_pairs (sums of 2 bytes times 2 bytes, in 16 bits), sums_of_pairs;
// - with BF16_DOT PairBits, a vector of pairs of bfloat16: splat_pair, pairs_at, pair_dot, narrow_pairs, narrow_both,
//   expanded_pairs, PairInterleaving.

#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#if defined(__ARM_NEON)
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512VBMI__) && defined(__AVX512VBMI2__)
#define BF16_LOOK_UPS 1  // of any numbers of bfloat16, in registers
#else
#define BF16_LOOK_UPS 0
#endif
#if BF16_LOOK_UPS || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define BF16_DOT 1  // products of pairs of bfloat16; elsewhere they are widened to floats
#else
#define BF16_DOT 0
#endif
#define INLINE inline __attribute__((always_inline))

// Of the OpenMP runtime that torch has loaded, whose threads these kernels share. Declared here because neither the
// flags nor the headers of OpenMP belong to every compiler.
extern "C" void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags);
extern "C" int omp_get_thread_num();
extern "C" int omp_get_num_threads();
extern "C" int omp_get_max_threads();

constexpr int LANES = 16;

static INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Bits 0 to n - 1 of a word.
static INLINE uint64_t bits_below(int64_t n) { return n <= 0 ? 0 : n >= 64 ? ~0ull : (1ull << n) - 1; }

// Whether rows of bfloat16 may be read in pairs, as words: torch's tensors may begin between two words.
static INLINE bool begins_with_a_word(const void *x) { return (uintptr_t)x % alignof(uint32_t) == 0; }

static INLINE uint16_t bfloat16_bits(float value) {  // cut off
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits >> 16;
}

static INLINE float bfloat16_value(uint16_t half) {
    const uint32_t bits = uint32_t(half) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

#if defined(__AVX512BW__)
#include "vectors_avx512.h"
#elif defined(__ARM_NEON)
#include "vectors_neon.h"
#else
#include "vectors_avx2.h"
#endif

static INLINE Floats select(Ints mask, Floats yes, Floats no) {
    return (Floats)(((Ints)yes & mask) | ((Ints)no & ~mask));
}

static INLINE Floats absolute(Floats x) { return (Floats)((Words)x & 0x7fffffffu); }

static INLINE uint16_t float16_bits(float value) { return to_float16(splat(value))[0]; }
static INLINE float float16_value(uint16_t bits) { return from_float16(load_some(&bits, 1))[0]; }

// 32 numbers of bfloat16, for products with 32 others: lanes hold any of them, but always the same.
struct Terms {
#if BF16_DOT
    PairBits bits;
#else
    Floats even, odd;
#endif
};

static INLINE Terms terms_of(Words pairs) {
#if BF16_DOT
    return {(PairBits)pairs};
#else
    return {(Floats)(pairs << 16), (Floats)(pairs & 0xffff0000u)};
#endif
}

// `count` numbers, at most 32, and zeros
static INLINE Terms load_terms(const uint16_t *from, int64_t count) { return terms_of(load_pairs(from, count)); }

static INLINE Floats dot(Floats sum, Terms a, Terms b) {
#if BF16_DOT
    return pair_dot(sum, a.bits, b.bits);
#else
    return multiply_add(a.odd, b.odd, multiply_add(a.even, b.even, sum));
#endif
}

static INLINE Floats dot(Floats sum, Floats values, float x) { return multiply_add(values, splat(x), sum); }

#if BF16_DOT
struct Pairs {  // of bfloat16
    PairBits bits;
};

// sum + both products of each lane's pair with the pair `x`
static INLINE Floats dot(Floats sum, Pairs pairs, uint32_t x) {
    return pair_dot(sum, pairs.bits, splat_pair(x));
}
#endif

struct Buffer {  // of a thread, kept between calls
    void *data = nullptr;
    size_t size = 0;
    template <class T> T *get(size_t count) {
        if (count * sizeof(T) > size) {
            free(data);
            size = (count * sizeof(T) + 4095) & ~size_t(4095);
            data = aligned_alloc(4096, size);
        }
        return (T *)data;
    }
    ~Buffer() { free(data); }
};

// Calls body(first, end) on every thread with its part of 0 to `count`.
template <class F> static INLINE void parallel(int64_t count, F body) {
    auto part = [&] {
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
        body(count * thread / threads, count * (thread + 1) / threads);
    };
    GOMP_parallel([](void *data) { (*(decltype(part) *)data)(); }, &part, 0, 0);
}

// Units of work of some microseconds, which threads take as they are done with others: cores differ in speed, and
// other processes may use them. At first a thread takes a part of all units, so that neighbours stay together.
class Claims {
    const int64_t count;
    std::atomic<int64_t> next{0};

  public:
    explicit Claims(int64_t count) : count(count) {}

    // False, or the units [first, end) are the caller's.
    bool take(int64_t &first, int64_t &end) {
        first = next.load(std::memory_order_relaxed);
        do {
            if (first >= count) return false;
            end = first + std::max<int64_t>(1, (count - first) / (2 * omp_get_num_threads()));
        } while (!next.compare_exchange_weak(first, end, std::memory_order_relaxed));
        return true;
    }
};

// Calls body(claims) on every thread, which takes units from 0 to `count`.
template <class F> static INLINE void parallel_by_claims(int64_t count, F body) {
    Claims claims(count);
    auto part = [&] { body(claims); };
    GOMP_parallel([](void *data) { (*(decltype(part) *)data)(); }, &part, 0, 0);
}

// The same for a body that needs nothing of its thread: it is called with each part that is taken.
template <class F> static INLINE void parallel_parts(int64_t count, F body) {
    parallel_by_claims(count, [&](Claims &claims) {
        for (int64_t first, end; claims.take(first, end);) body(first, end);
    });
}
