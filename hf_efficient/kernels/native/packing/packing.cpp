// Codes of a checkpoint in the order of the kernels, written in one pass: kernels/linear/lines.py has the definition.

#include "layout.h"
#include "vectors.h"

struct Packing {  // mirrored in kernels/linear/lines.py
    const uint8_t *codes;  // out_features rows of canonical codes, `stride` bytes apart
    uint32_t *words;       // [blocks, steps, lines, 16]
    int64_t stride, out_features, in_features;
    int64_t bits, stored;  // of a code in `codes` and in `words`
    int64_t added;         // to each code
    int64_t has_signs;     // whether 8 bits become sign and magnitude of code - 127.5
};

EXPORT_LAYOUTS(LAYOUT(Packing, codes, words, stride, out_features, in_features, bits, stored, added, has_signs))

static void decode(const uint8_t *from, int64_t columns, int64_t bits, uint8_t added, uint8_t *to) {
    const uint8_t mask = bits_below(bits);
    if (bits == 3) {
        for (int64_t i = 0; i < columns; i++) {
            const int64_t at = 3 * i;
            const int word = from[at / 8] | (at % 8 > 5 ? from[at / 8 + 1] << 8 : 0);
            to[i] = (word >> at % 8 & mask) + added;
        }
        return;
    }
    const int64_t each = 8 / bits, whole = columns / each;
    for (int64_t i = 0; i < whole; i++)
        for (int64_t j = 0; j < each; j++) to[i * each + j] = (from[i] >> bits * j & mask) + added;
    for (int64_t i = whole * each; i < columns; i++) to[i] = (from[i / each] >> bits * (i % each) & mask) + added;
}

// The words of one step of a row, 16 words apart.
template <int BITS> static INLINE void encode(const uint8_t *codes, uint32_t *words) {
    constexpr int COLUMNS = BITS == 3 ? 32 : 32 / BITS;
    uint32_t found[BITS == 3 ? 3 : 1] = {};
#pragma GCC unroll 32
    for (int column = 0; column < COLUMNS; column++) {
        const int pair = column / 2, shift = 16 * (column % 2);
        const uint32_t code = codes[column];
        if (BITS != 3) found[0] |= code << (shift + BITS * pair);
        else if (pair < 15) found[pair / 5] |= code << (shift + pair % 5 * 3);
        else
            for (int bit = 0; bit < 3; bit++) found[bit] |= (code >> bit & 1) << (shift + 15);
    }
    for (uint32_t word : found) *words = word, words += LANES;
}

// The same of codes that have BITS bits in the checkpoint, too: a step is 4 bytes, whose even columns go to the lower
// half.
template <int BITS> static INLINE uint32_t reorder(uint32_t codes, bool has_signs) {
    if (BITS == 8) {
        if (has_signs) codes ^= 0x80808080 ^ (~codes >> 7 & 0x01010101) * 127;
        return (codes & 0xFF0000FF) | (codes >> 8 & 0xFF00) | (codes << 8 & 0xFF0000);
    }
    auto half = [](uint32_t some) {
        if (BITS == 2) some &= 0x33333333, some = (some | some >> 2);
        some &= 0x0F0F0F0F, some = (some | some >> 4) & 0x00FF00FF;
        return (some | some >> 8) & 0xFFFF;
    };
    return half(codes) | half(codes >> BITS) << 16;
}

template <int BITS> static void pack(const Packing &call) {
    constexpr int COLUMNS = BITS == 3 ? 32 : 32 / BITS, LINES = BITS == 3 ? 3 : 1;
    const int64_t steps = ceil_div(call.in_features, COLUMNS), width = steps * COLUMNS;
    const int64_t whole = BITS == 3 || call.bits != BITS || call.added % 128 ? 0 : call.in_features / COLUMNS;
    const uint32_t flipped = call.added ? 0x80808080 : 0;
    parallel(ceil_div(call.out_features, LANES), [&](int64_t block, int64_t end) {
        static thread_local Buffer buffer;
        uint8_t *row = buffer.get<uint8_t>(width);
        for (; block < end; block++)
            for (int64_t lane = 0; lane < LANES; lane++) {
                const int64_t index = block * LANES + lane;
                const int64_t columns = index < call.out_features ? call.in_features : 0;
                const uint8_t *from = call.codes + index * call.stride;
                uint32_t *words = call.words + block * steps * LINES * LANES + lane;
                int64_t step = 0;
                for (; columns && step < whole; step++) {
                    uint32_t codes;
                    memcpy(&codes, from + 4 * step, 4);
                    words[step * LANES] = reorder<BITS>(codes ^ flipped, call.has_signs);
                }
                if (step == steps) continue;
                if (columns) decode(from, columns, call.bits, call.added, row);
                memset(row + columns, 0, width - columns);
                if (BITS == 8 && call.has_signs)
                    for (int64_t i = 0; i < width; i++) row[i] ^= row[i] < 128 ? 255 : 128;
                for (; step < steps; step++)
                    encode<BITS>(row + step * COLUMNS, words + step * LINES * LANES);
            }
    });
}

extern "C" void hf_pack(const Packing *call) {
    switch (call->stored) {
        case 2: return pack<2>(*call);
        case 3: return pack<3>(*call);
        case 4: return pack<4>(*call);
        default: return pack<8>(*call);
    }
}
