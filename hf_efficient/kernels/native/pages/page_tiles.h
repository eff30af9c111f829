// Up to 64 tokens of one key head, laid out for products: 16 tokens of keys to a vector, 16 channels of values.

#pragma once
#include "page_formats.h"
#include "tile_product.h"

// What all formats of pages share. Compiled once it takes two thirds of the time; with AVX-512 that would
// cost 8 % of a call.
#if defined(__AVX512BW__)
#define SHARED INLINE
#else
#define SHARED __attribute__((noinline))
#endif

constexpr int TILE_TOKENS = TILE_BLOCKS * LANES;

alignas(64) static const uint8_t NOTHING[4 * 256] = {};  // keys and values of a token that does not exist

struct Tile {
    int64_t count, blocks;                                       // tokens, times 16
    uint64_t present = 0;                                        // a bit for each token that is there
    int64_t index[TILE_TOKENS];                                  // of the head's first scale, 0 for others
    const uint8_t *key[TILE_TOKENS], *value[TILE_TOKENS];

    // key_bytes, value_bytes: of a token and head
    Tile(const Source &source, int64_t start, int64_t count, int64_t head, int64_t key_bytes, int64_t value_bytes)
        : count(count), blocks(ceil_div(count, LANES)) {
        const int64_t heads = source.call.heads, size = source.in_ring ? source.call.ring_size : source.call.block_size;
        for (int64_t i = 0; i < count;) {  // page by page
            const int64_t wrap = source.in_ring ? 0 : source.call.wrap;
            const int64_t token = wrap ? (start + i) % wrap : start + i, left = size - token % size;
            const int64_t slot = source.slot(start + i);
            const int64_t end = std::min(count, i + (wrap ? std::min(left, wrap - token) : left));
            if (slot < 0) {
                for (; i < end; i++) skip(i);
                continue;
            }
            present |= bits_below(end) & ~bits_below(i);
            const int64_t scales = source.values().groups;  // of a token and head
            int64_t at = source.values().token_scale(slot, size, heads * scales) + head * scales;
            const uint8_t *key_at = source.keys().token(slot, size, heads * key_bytes) + head * key_bytes;
            const uint8_t *value_at = source.values().token(slot, size, heads * value_bytes) + head * value_bytes;
            for (; i < end; i++, at += heads * scales, key_at += heads * key_bytes, value_at += heads * value_bytes)
                index[i] = at, key[i] = key_at, value[i] = value_at;
        }
        for (int64_t i = count; i < blocks * LANES; i++) skip(i);
    }
    void skip(int64_t i) { index[i] = 0, key[i] = value[i] = NOTHING; }
    void keep(uint64_t seen) {  // does not read tokens that no query sees
        for (uint64_t unseen = present & ~seen; unseen; unseen &= unseen - 1) skip(__builtin_ctzll(unseen));
        present &= seen;
    }
    // A scale for each token, float16 at scale[index]; 0 where there is none.
    INLINE void scales(const uint16_t *scale, Floats *out) const {
        alignas(64) uint16_t halves[TILE_TOKENS];
        for (int64_t i = 0; i < blocks * LANES; i++) halves[i] = scale[index[i]];
        for (int64_t b = 0; b < blocks; b++)
            out[b] = blend(present >> (b * LANES), from_float16(((const Halves *)halves)[b]), Floats{});
    }
};

struct Stretch {  // tokens [at, end) of a sequence
    const AttentionCall *call;
    int64_t sequence;
    bool in_ring;
    int64_t at, end, key_bytes, value_bytes;  // bytes: of a token and head
};

// Prefetches the tokens of two stretches: `heads` heads from `head` on, which lie side by side.
struct Prefetch {
    Stretch stretches[2];
    int64_t head, heads;

    int64_t tokens() const {
        return std::max<int64_t>(0, stretches[0].end - stretches[0].at) +
               std::max<int64_t>(0, stretches[1].end - stretches[1].at);
    }
    void some(int64_t count) {
        for (Stretch &stretch : stretches)
            while (stretch.at < stretch.end) {
                if (count <= 0) return;
                const Source source = {*stretch.call, stretch.sequence, stretch.in_ring};
                const int64_t wrap = source.in_ring ? 0 : source.call.wrap, all = source.call.heads;
                const int64_t size = source.in_ring ? source.call.ring_size : source.call.block_size;
                const int64_t token = wrap ? stretch.at % wrap : stretch.at, slot = source.slot(stretch.at);
                int64_t some = std::min({count, stretch.end - stretch.at, size - token % size});  // of one page
                if (wrap) some = std::min(some, wrap - token);
                stretch.at += some, count -= some;
                if (slot < 0) continue;
                const int64_t key = stretch.key_bytes, value = stretch.value_bytes;
                lines(source.keys().token(slot, size, all * key) + head * key, all * key, key, some);
                lines(source.values().token(slot, size, all * value) + head * value, all * value, value, some);
            }
    }
    // To the second level: lines on their way to the first are few, and reading would wait for them.
    INLINE void lines(const uint8_t *data, int64_t distance, int64_t bytes, int64_t tokens) const {
        for (; tokens > 0; tokens--, data += distance)
            for (int64_t i = 0; i < heads * bytes; i += 64) __builtin_prefetch(data + i, 0, 2);
    }
};

// to[i * distance] <- column i
static SHARED void store_transposed(Words (&square)[LANES], Floats *to, int64_t distance) {
    transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) to[i * distance] = (Floats)square[i];
}

// out[term of channels][block] <- keys of blocks [first, end), a term of 16 tokens to a vector
template <class A, class F>
static void load_keys(const Tile &tile, int64_t first, int64_t end, const F &format, const Pages &pages, Floats *out) {
    for (int64_t chunk = 0; chunk < ceil_div(pages.dim, CHUNK); chunk++)
        for (int64_t b = first; b < end; b++) {
            Words terms[A::VECTORS][LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                const Chunk<A> loaded = format.template load<A>(tile.key[b * LANES + i], chunk);
#pragma GCC unroll 2
                for (int v = 0; v < A::VECTORS; v++) terms[v][i] = loaded.terms[v];
            }
#pragma GCC unroll 2
            for (int v = 0; v < A::VECTORS; v++) {
                Floats *to = out + (chunk * A::VECTORS + v) * LANES * (end - first) + b - first;
                store_transposed(terms[v], to, end - first);
            }
        }
}

// Pairs of the numbers of two tokens, for the first 16 channels of a chunk and for the last.
template <class A> struct Interleaving {};
#if BF16_DOT
template <> struct Interleaving<BFloat16> : PairInterleaving {};
#endif

// The channels of values in blocks of up to 4 vectors, of which none has channels of two groups.
struct ChannelBlocks {
    int64_t count = 0, vectors;
    struct {
        int64_t first, width, group;  // in vectors
    } block[16];
    int64_t block_of[16];  // of each vector

    explicit ChannelBlocks(const Pages &values) : vectors(ceil_div(values.dim, LANES)) {
        const int64_t per_group = ceil_div(vectors, values.groups);
        for (int64_t first = 0; first < vectors; count++) {
            const int64_t group = first / per_group, end = std::min(vectors, (group + 1) * per_group);
            block[count] = {first, std::min<int64_t>(TILE_BLOCKS, end - first), group};
            for (int64_t i = 0; i < block[count].width; i++) block_of[first++] = count;
        }
    }
};

// For each block of channels, tile[term of tokens][width] <- values, a term of 16 channels to a vector
template <class A, class F>
static void load_values(const Tile &tile, const F &format, const Pages &pages, const ChannelBlocks &channels,
                        Floats *out) {
    const int64_t steps = ceil_div(tile.count, A::NUMBERS), chunks = ceil_div(pages.dim, CHUNK);
    const Interleaving<A> interleaving;
    Floats *to[17], beyond;  // where a vector of channels goes for step 0, and how far from step to step
    int64_t stride[17];
    for (int64_t v = 0; v < channels.vectors; v++) {
        const auto &block = channels.block[channels.block_of[v]];
        to[v] = out + block.first * steps + v - block.first, stride[v] = block.width;
    }
    to[channels.vectors] = &beyond, stride[channels.vectors] = 0;
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        Floats *const *const both = to + 2 * chunk;
        const int64_t first_stride = stride[2 * chunk], second_stride = stride[2 * chunk + 1];
        for (int64_t k = 0; k < steps; k++) {
            const Chunk<A> loaded = format.template load<A>(tile.value[k * A::NUMBERS], chunk);
            Words first = loaded.terms[0], second = loaded.terms[A::VECTORS - 1];
            if constexpr (A::NUMBERS == 2)
                interleaving.apply(first, second, format.template load<A>(tile.value[k * 2 + 1], chunk).terms[0]);
            both[0][k * first_stride] = (Floats)first, both[1][k * second_stride] = (Floats)second;
        }
    }
}
