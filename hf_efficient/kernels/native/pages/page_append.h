// Appends new tokens to the sequences: to their pages, where 8-bit pages are quantized with the bits of kv_formats.py,
// or to their rings.

#pragma once
#include "page_call.h"

static INLINE Floats read_numbers(const void *x, int64_t type, int64_t at, int64_t count) {
    if (type == FLOAT32) return load_some((const float *)x + at, count);
    const Halves halves = load_some((const uint16_t *)x + at, count);
    return type == BFLOAT16 ? widen(halves) : from_float16(halves);
}

// The E4M3 numbers next to values of at most 448, ties to even.
static INLINE Ints to_fp8(Floats values) {
    const Words bits = (Words)values, magnitude = bits & 0x7fffffffu;
    const Words normal = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - ((127 - 7) << 3);
    const Ints subnormal = nearest((Floats)magnitude * 512.0f);
    const Ints is_small = (Ints)magnitude < 0x3c800000;  // 2 ** -6
    return (((Ints)normal & ~is_small) | (subnormal & is_small)) | (Ints)(bits >> 24 & 0x80u);
}

// x [dim] from number `at` on -> codes, and their scale as float16.
static uint16_t quantize(const void *x, int64_t type, int64_t at, int64_t dim, bool is_fp8, uint8_t *codes) {
    const float levels = is_fp8 ? 448 : 127;
    float most = 0;
    bool is_nan = false;
    for (int64_t i = 0; i < dim; i += LANES) {
        const Floats magnitudes = absolute(read_numbers(x, type, at + i, dim - i));
        most = std::max(most, highest(magnitudes));
        is_nan |= any_nan(magnitudes);
    }
    const uint16_t scale = is_nan ? 0x7e00 : float16_bits(std::min(most / levels, 65504.0f));
    const float wide = float16_value(scale);
    for (int64_t i = 0; i < dim; i += LANES) {
        Bytes result = {};
        if (wide > 0) {
            const Floats numbers = read_numbers(x, type, at + i, dim - i) / wide;
            const Floats bounded = minimum(maximum(numbers, splat(-levels)), splat(levels));
            result = to_bytes(is_fp8 ? to_fp8(bounded) : nearest(bounded));
        }
        store_some(codes + i, dim - i, result);
    }
    return scale;
}

static void append_numbers(const AttentionCall &call, const Pages &pages, bool in_ring, int64_t slot, const void *x,
                           int64_t token) {
    const int64_t dim = pages.dim, size = call.query_type == FLOAT32 ? 4 : 2;
    const bool quantizes = !in_ring && call.page_type != call.query_type;
    const int64_t bytes = quantizes ? dim : dim * size;  // of a head
    uint8_t *to = (uint8_t *)pages.token(slot, call.block_size, call.heads * bytes);
    const int64_t scale = quantizes ? pages.token_scale(slot, call.block_size, call.heads) : 0;
    for (int64_t head = 0; head < call.heads; head++, to += bytes) {
        const int64_t from = (token * call.heads + head) * dim;
        if (quantizes)
            ((uint16_t *)pages.scale)[scale + head] =
                quantize(x, call.query_type, from, dim, call.page_type == FP8, to);
        else memcpy(to, (const uint8_t *)x + from * size, dim * size);
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
