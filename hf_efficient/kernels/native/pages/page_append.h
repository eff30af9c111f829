// Appends new tokens to the sequences: to their pages, where 8-bit pages are quantized with the bits of kv_formats.py,
// or to their rings.

#pragma once
#include "page_call.h"

static INLINE Floats read_numbers(const void *x, int64_t type, int64_t at, int64_t count) {
    const __mmask16 present = bits_below(count);
    if (type == FLOAT32) return (Floats)_mm512_maskz_loadu_ps(present, (const float *)x + at);
    const __m256i halves = _mm256_maskz_loadu_epi16(present, (const uint16_t *)x + at);
    return type == BFLOAT16 ? widen((Halves)halves) : (Floats)_mm512_cvtph_ps(halves);
}

// The E4M3 numbers next to values of at most 448, ties to even.
static INLINE __m128i to_fp8(Floats values) {
    const Words bits = (Words)values, magnitude = bits & 0x7fffffff;
    const Words normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - ((127 - 7) << 3);
    const __m512i subnormal = _mm512_cvtps_epi32((__m512)((Floats)magnitude * 512.0f));
    const __mmask16 is_small = _mm512_cmplt_epu32_mask((__m512i)magnitude, _mm512_set1_epi32(0x3c800000));  // 2 ** -6
    const __m512i code = _mm512_mask_blend_epi32(is_small, (__m512i)normal, subnormal);
    return _mm512_cvtepi32_epi8(_mm512_or_si512(code, (__m512i)(bits >> 24 & 0x80)));
}

// x [dim] from number `at` on -> codes, and their scale as float16.
static uint16_t quantize(const void *x, int64_t type, int64_t at, int64_t dim, bool is_fp8, uint8_t *codes) {
    const float levels = is_fp8 ? 448 : 127;
    float highest = 0;
    bool is_nan = false;
    for (int64_t i = 0; i < dim; i += LANES) {
        const __m512 magnitudes = _mm512_abs_ps((__m512)read_numbers(x, type, at + i, dim - i));
        highest = std::max(highest, _mm512_reduce_max_ps(magnitudes));
        is_nan |= _mm512_cmp_ps_mask(magnitudes, magnitudes, _CMP_UNORD_Q) != 0;
    }
    const uint16_t scale = is_nan ? 0x7e00 : _cvtss_sh(std::min(highest / levels, 65504.0f), _MM_FROUND_TO_NEAREST_INT);
    const float wide = _cvtsh_ss(scale);
    for (int64_t i = 0; i < dim; i += LANES) {
        __m128i result = _mm_setzero_si128();
        if (wide > 0) {
            const Floats numbers = read_numbers(x, type, at + i, dim - i) / wide;
            const __m512 bounded =
                _mm512_min_ps(_mm512_max_ps((__m512)numbers, _mm512_set1_ps(-levels)), _mm512_set1_ps(levels));
            result = is_fp8 ? to_fp8((Floats)bounded) : _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(bounded));
        }
        _mm_mask_storeu_epi8(codes + i, bits_below(dim - i), result);
    }
    return scale;
}

static void append_numbers(const AttentionCall &call, const Pages &pages, bool in_ring, int64_t slot, const void *x,
                           int64_t token) {
    const int64_t dim = pages.dim, size = call.query_type == FLOAT32 ? 4 : 2;
    const bool quantizes = !in_ring && call.page_type != call.query_type;
    for (int64_t head = 0; head < call.heads; head++) {
        const int64_t from = (token * call.heads + head) * dim, index = slot * call.heads + head;
        if (quantizes)
            ((uint16_t *)pages.scale)[index] =
                quantize(x, call.query_type, from, dim, call.page_type == FP8, (uint8_t *)pages.data + index * dim);
        else memcpy((uint8_t *)pages.data + index * dim * size, (const uint8_t *)x + from * size, dim * size);
    }
}

static void append(const AttentionCall &call) {
    for (int64_t sequence = 0; sequence < call.batch; sequence++) {
        if (call.cache_seqlens[sequence] < 0) continue;
        for (int64_t i = 0; i < call.appended; i++) {
            const Source source = {call, sequence, call.ring_size != 0};
            const int64_t slot = source.slot(call.cache_seqlens[sequence] + i), token = sequence * call.appended + i;
            if (slot < 0) continue;
            append_numbers(call, source.keys(), source.in_ring, slot, call.k, token);
            append_numbers(call, source.values(), source.in_ring, slot, call.v, token);
        }
    }
}
