// A square of 16 by 16 words, transposed in registers.

#pragma once
#include "vectors.h"

static INLINE void transpose(__m512i (&rows)[LANES]) {
    __m512i pairs[16], fours[16];  // of rows, in each quarter of a vector
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
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
        rows[j] = _mm512_shuffle_i32x4(even_low, even_high, EVEN);
        rows[4 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, EVEN);
        rows[8 + j] = _mm512_shuffle_i32x4(even_low, even_high, ODD);
        rows[12 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, ODD);
    }
}
