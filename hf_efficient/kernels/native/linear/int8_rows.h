// Products of x rounded to int8, with a scale for at most SPAN columns of a row, and of codes as unsigned bytes. They
// are summed as integers, so a row has the same bits alone and among others.

#pragma once
#include "codes.h"
#include "output.h"

#if BF16_DOT
constexpr int SPAN = 64;        // columns, rounded at once
constexpr int ALONE = 1 << 14;  // with fewer elements one thread rounds faster than several
constexpr int BLOCKS_A_UNIT = 2;

// Codes 4 to a lane, in the order that `column` tells.
struct Bytewise {
    static constexpr int VECTORS = BITS == 3 ? 8 : 8 / BITS;  // of a line

    static INLINE void decode(const uint8_t *line, __m512i *out) {
        const __m512i word = _mm512_loadu_si512(line);
        if (BITS == 8) {  // from sign and magnitude of code - 127.5
            const __m512i flip =
                _mm512_mask_blend_epi8(_mm512_movepi8_mask(word), _mm512_set1_epi8(-128), _mm512_set1_epi8(-1));
            out[0] = _mm512_xor_si512(word, flip);
        } else if (BITS != 3) {
#pragma GCC unroll 4
            for (int i = 0; i < VECTORS; i++)
                out[i] = _mm512_and_si512(_mm512_srli_epi32(word, BITS * i), _mm512_set1_epi8((1 << BITS) - 1));
        } else {
            const Words words[3] = {(Words)word, ((const Words *)line)[1], ((const Words *)line)[2]};
#pragma GCC unroll 8
            for (int i = 0; i < VECTORS; i++)
                out[i] = (__m512i)((Codes::shifted(words, 2 * i) & 0x70007) |
                                   (Codes::shifted(words, 2 * i + 1) & 0x70007) << 8);
        }
    }

    static constexpr int column(int byte) {  // of the columns of a line
        const int vector = byte / 4, pair = BITS == 3 ? 2 * vector + byte % 2 : vector + byte % 2 * VECTORS;
        return 2 * pair + byte / 2 % 2;
    }
};

struct Rounded {                 // rows of x
    const int8_t *codes;         // [rows, width], columns in the order of Bytewise
    const float *scales, *sums;  // [rows, segments]; sums of a segment's rounded numbers
    int64_t width, segments;
};

// sum + the products of each lane's 4 codes with x; in assembly, since GCC moves sums about between registers
static INLINE __m512i plus_products(__m512i sum, __m512i codes, __m512i x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x));
    return sum;
}

static void round_row(const Matrix &w, const uint16_t *x, __m512i order, int8_t *codes, float *scales, float *sums) {
    for_segments<SPAN>(w, [&](int64_t segment, int64_t, int64_t step, int64_t end) __attribute__((always_inline)) {
        const int64_t first = step * w.COLUMNS, last = end * w.COLUMNS, count = std::min(last, w.in_features) - first;
        __m512 values[4];
        __m512i largest = _mm512_setzero_si512();  // of the bits, so that NaN and infinity stay
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            values[i] =
                (__m512)widen((Halves)_mm256_maskz_loadu_epi16(bits_below(count - LANES * i), x + first + LANES * i));
            largest = _mm512_max_epi32(largest, _mm512_and_si512((__m512i)values[i], _mm512_set1_epi32(0x7fffffff)));
        }
        const float most = _mm512_cvtss_f32((__m512)_mm512_set1_epi32(_mm512_reduce_max_epi32(largest)));
        const __m512 factor = _mm512_set1_ps(most > 0 ? 127 / most : 0);
        alignas(64) __m128i bytes[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            bytes[i] = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(values[i], factor)));
        const __m512i ordered = _mm512_permutexvar_epi8(order, _mm512_load_si512(bytes));
        _mm512_mask_storeu_epi8(codes + first, bits_below(last - first), ordered);
        const int32_t sum =
            _mm512_reduce_add_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), ordered));
        scales[segment] = most / 127;
        sums[segment] = scales[segment] * sum;
    });
}

static Rounded rounded(const Matrix &w, const uint16_t *x, int64_t rows) {
    int64_t segments = 0;
    for_segments<SPAN>(w, [&](int64_t, int64_t, int64_t, int64_t) { segments++; });
    static thread_local Buffer all_codes, all_scales;
    int8_t *codes = all_codes.get<int8_t>(rows * w.width);
    float *scales = all_scales.get<float>(2 * rows * segments), *sums = scales + rows * segments;
    alignas(64) uint8_t order[64];
    for (int i = 0; i < 64; i++) order[i] = i / w.COLUMNS * w.COLUMNS + Bytewise::column(i % w.COLUMNS);
    const __m512i bytes = _mm512_load_si512(order);
    auto some = [&](int64_t row, int64_t end) {
        for (; row < end; row++)
            round_row(w, x + row * w.in_features, bytes, codes + row * w.width, scales + row * segments,
                      sums + row * segments);
    };
    if (rows * w.width < ALONE) some(0, rows);
    else parallel(rows, some);
    return {codes, scales, sums, w.width, segments};
}

template <int M, int BLOCKS>
static INLINE void int8_rows(const Matrix &w, int64_t block, const Rounded &x, int64_t row, const Output &out) {
    constexpr int VECTORS = Bytewise::VECTORS;
    constexpr int CHAINS = M * BLOCKS < 4 && VECTORS > 1 ? 2 : 1;  // sums that do not wait for each other
    const int64_t stride = w.line(1, 0) - w.line(0, 0);
    const int8_t *codes = x.codes + row * x.width;
    const float *scales = x.scales + row * x.segments, *sums = x.sums + row * x.segments;
    Floats totals[M][BLOCKS] = {};
    for_segments<SPAN>(w, [&](int64_t segment, int64_t g, int64_t step, int64_t end) __attribute__((always_inline)) {
        __m512i sum[M][BLOCKS][CHAINS] = {};
        const uint8_t *line = w.line(block, step);
        const int8_t *at = codes + step * w.COLUMNS;
        for (; step < end; step++, line += Codes::LINES * 64, at += w.COLUMNS) {
            __m512i values[BLOCKS][VECTORS];
#pragma GCC unroll 2
            for (int b = 0; b < BLOCKS; b++) {
                for (int i = 0; i < Codes::LINES; i++)
                    __builtin_prefetch(line + (b + BLOCKS) * stride + 64 * i, 0, 2);  // as in few_rows.h
                Bytewise::decode(line + b * stride, values[b]);
            }
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++)
#pragma GCC unroll 8
                for (int m = 0; m < M; m++) {
                    int32_t four;
                    memcpy(&four, at + m * x.width + 4 * v, 4);
#pragma GCC unroll 2
                    for (int b = 0; b < BLOCKS; b++)
                        sum[m][b][v % CHAINS] =
                            plus_products(sum[m][b][v % CHAINS], values[b][v], _mm512_set1_epi32(four));
                }
        }
#pragma GCC unroll 2
        for (int b = 0; b < BLOCKS; b++) {
            const Floats scale = w.scales(block + b, g), zero = w.zeros(block + b, g);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                __m512i all = sum[m][b][0];
                if (CHAINS > 1) all = _mm512_add_epi32(all, sum[m][b][CHAINS - 1]);
                const Floats products = (Floats)_mm512_cvtepi32_ps(all);
                totals[m][b] +=
                    scale * (products * scales[m * x.segments + segment] - zero * sums[m * x.segments + segment]);
            }
        }
    });
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
        for (int b = 0; b < BLOCKS; b++) out.store(row + m, (block + b) * LANES, totals[m][b]);
}

template <int BLOCKS>
static void int8_rows_of_blocks(const Matrix &w, int64_t block, const Rounded &x, int64_t rows, const Output &out) {
    int64_t row = 0;
    for (; row + 8 <= rows; row += 8) int8_rows<8, BLOCKS>(w, block, x, row, out);
    if (rows - row >= 4) int8_rows<4, BLOCKS>(w, block, x, row, out), row += 4;
    if (rows - row >= 2) int8_rows<2, BLOCKS>(w, block, x, row, out), row += 2;
    if (rows > row) int8_rows<1, BLOCKS>(w, block, x, row, out);
}

// For `count` weights with the same groups.
static void int8(const Matrix *w, const Output *out, int count, const uint16_t *values, int64_t rows) {
    const Rounded x = rounded(*w, values, rows);
    for_blocks(w, count, BLOCKS_A_UNIT, [&](int i, int64_t block) {
        if (block + BLOCKS_A_UNIT <= w[i].blocks) int8_rows_of_blocks<BLOCKS_A_UNIT>(w[i], block, x, rows, out[i]);
        else int8_rows_of_blocks<1>(w[i], block, x, rows, out[i]);
    });
}
#endif
