// Vectors of 16 lanes, threads and scratch memory, for any compiler with GCC's vector extensions.

#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512VBMI__) && defined(__AVX512BW__)
#include <immintrin.h>
#define BF16_DOT 1
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

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint8_t Bytes __attribute__((vector_size(16), aligned(1), may_alias));

// GCC takes __builtin_convertvector from narrower integers apart, lane by lane.
static INLINE Floats widen(Halves bits) {  // the values of bfloat16 bits
#if BF16_DOT
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)bits), 16);
#else
    return (Floats)(__builtin_convertvector(bits, Words) << 16);
#endif
}

static INLINE Floats widen(Bytes bytes) {
#if BF16_DOT
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)bytes));
#else
    return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
#endif
}

static INLINE Halves narrow(Floats values) {  // to bfloat16, to the nearest even
#if BF16_DOT
    return (Halves)_mm512_cvtneps_pbh((__m512)values);
#else
    Words bits = (Words)values;
    return __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, Halves);
#endif
}

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

static INLINE Floats dot(Floats sum, Floats values, float x) { return sum + values * x; }

#if BF16_DOT
struct Pairs {  // of bfloat16
    __m512i bits;
};

// sum + both products of each lane's pair with the pair `x`
static INLINE Floats dot(Floats sum, Pairs pairs, uint32_t x) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs.bits, (__m512bh)_mm512_set1_epi32(x));
}
#else
struct Pairs {};
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

static INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Bits 0 to n - 1 of a word.
static INLINE uint64_t bits_below(int64_t n) { return n <= 0 ? 0 : n >= 64 ? ~0ull : (1ull << n) - 1; }
