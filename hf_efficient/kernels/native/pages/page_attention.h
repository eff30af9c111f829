// Attention of the queries that share a key head over some tokens of their sequence, which page_tiles.h reads from
// pages or a ring. Each row of queries gets a softmax and weighted sums of values; schedule.h adds up those of several
// spans.

#pragma once
#include "page_tiles.h"
#include "score_weights.h"

struct Span {  // tokens [begin, end) of a sequence of `call`, all in pages or all in its ring
    const AttentionCall *call;
    int64_t sequence, begin, end;
    bool in_ring;
    int64_t row = 0;  // of the results, its first
};

// The result of a span: a Softmax for each row of queries, and the weighted sums of values [block of channels][row][4]
// vectors.
struct Partial {
    Softmax *softmax;
    Floats (*sums)[TILE_BLOCKS];
};

// The queries of a sequence for `heads` key heads, [key head, head of the group, query], as terms of channels.
template <class A> struct Queries {
    typedef typename A::Term Term;
    int64_t rows, dim, ld;  // rows: of a key head, ld: terms of a sequence, whole chunks
    Term *terms;

    Queries(const AttentionCall &call, int64_t sequence, int64_t head, int64_t heads)
        : rows(call.height()), dim(call.k_cache.dim), ld(ceil_div(dim, CHUNK) * CHUNK / A::NUMBERS) {
        static thread_local Buffer buffer;
        terms = buffer.get<Term>(heads * rows * ld);
        memset(terms, 0, heads * rows * ld * sizeof(Term));
        for (int64_t m = 0; m < heads * rows; m++) {
            const int64_t query_head = head * call.group() + m / call.width;
            const int64_t at = ((sequence * call.width + m % call.width) * call.query_heads + query_head) * dim;
            const uint16_t *halves = (const uint16_t *)call.q + at;
            if constexpr (A::NUMBERS == 2) memcpy(terms + m * ld, halves, dim * 2);
            else if (call.query_type == FLOAT32) memcpy(terms + m * ld, (const float *)call.q + at, dim * 4);
            else
                for (int64_t c = 0; c < dim; c += LANES) {
                    const Halves some = load_some(halves + c, dim - c);
                    *(Floats *)(terms + m * ld + c) = call.query_type == FLOAT16 ? from_float16(some) : widen(some);
                }
        }
    }
    static INLINE void widened(const Term *terms, int64_t chunk, Floats *out) {
        const Term *from = terms + chunk * A::VECTORS * LANES;
        for (int half = 0; half < 2; half++) {
            if constexpr (A::NUMBERS == 2) out[half] = widen(((const Halves *)from)[half]);
            else out[half] = ((const Floats *)from)[half];
        }
    }

    // Keys minimum + (code - MIDDLE) * scale: scaled[row] <- the query times the scales, offsets[row] <- its product
    // with what code MIDDLE stands for. terms: of one key head.
    void scale(const Term *terms, const uint16_t *scale, const uint16_t *minimum, float middle, Term *scaled,
               float *offsets) const {
        for (int64_t m = 0; m < rows; m++) offsets[m] = 0;
        for (int64_t chunk = 0; chunk < ceil_div(dim, CHUNK); chunk++) {
            Floats scales[2], middles[2];
            for (int half = 0; half < 2; half++) {
                const int64_t at = chunk * CHUNK + half * LANES;
                scales[half] = from_float16(load_some(scale + at, dim - at));
                middles[half] = from_float16(load_some(minimum + at, dim - at)) + middle * scales[half];
            }
            for (int64_t m = 0; m < rows; m++) {
                Floats query[2];
                widened(terms + m * ld, chunk, query);
                const Chunk<A> product = chunk_of<A>(query[0] * scales[0], query[1] * scales[1]);
                memcpy(scaled + m * ld + chunk * A::VECTORS * LANES, &product, sizeof(product));
                offsets[m] += sum(query[0] * middles[0] + query[1] * middles[1]);
            }
        }
    }
};

// sums [block of channels][`height` rows] <- their corrected values, and a tile's values times `scores`, for the first
// `rows` and tokens of the first `blocks`. weights: room for the scores as terms of tokens, where they stand without
// scales already. value_scales: of tokens, where scales are PER_TOKEN.
template <class A>
static SHARED void add_values(const Tile &tile, int64_t blocks, Scales scales, float middle, const Pages &values,
                              const ChannelBlocks &channels, int64_t rows, int64_t height,
                              const Floats (*scores)[TILE_BLOCKS], Floats *value_scales, const float *corrections,
                              typename A::Term *weights, const Floats *value_tile, Floats (*sums)[TILE_BLOCKS]) {
    constexpr int TERMS = TILE_TOKENS / A::NUMBERS;  // of a tile's tokens
    Floats value_middles[TILE_BLOCKS];
    int64_t group = -1;
    for (int64_t i = 0; i < channels.count; i++, sums += height) {
        const auto block = channels.block[i];
        const bool is_new = block.group != group;
        group = block.group;
        if (scales == PER_GROUP && is_new) {
            tile.scales(values.scale + group, value_scales);
            tile.scales(values.minimum + group, value_middles);
            for (int64_t b = 0; b < tile.blocks; b++) value_middles[b] += middle * value_scales[b];
        }
        for (int64_t m = 0; m < rows; m++) {
            Floats shift = {};
            if (scales != NONE) {
                Floats scaled_weights[TILE_BLOCKS];
                for (int64_t b = 0; b < blocks; b++) {
                    scaled_weights[b] = scores[m][b] * value_scales[b];
                    if (scales == PER_GROUP) shift += scores[m][b] * value_middles[b];
                }
                if (is_new) store_terms<A>(scaled_weights, blocks, weights + m * TERMS);
            }
            const float constant = scales == PER_GROUP ? sum(shift) : 0;
            if (scales != PER_GROUP && corrections[m] == 1) continue;
            for (int64_t v = 0; v < block.width; v++) sums[m][v] = sums[m][v] * corrections[m] + constant;
        }
        const int64_t steps = ceil_div(tile.count, A::NUMBERS), some = std::min(steps, blocks * LANES / A::NUMBERS);
        tile_rows(block.width, block.width, rows, weights, TERMS, value_tile + block.first * steps, some, false,
                  height >= LEAST_AMX_ROWS, sums);
    }
}

// Of queries, whose scores stay in the first-level cache: whole blocks of `tile_rows`.
constexpr int64_t ROWS_AT_ONCE = AMX ? 32 : 48;
constexpr int64_t ROWS_OF_DIAGONAL = AMX ? 32 : 16;  // where queries of a prompt see part of a tile each

// Attends over a span, tile by tile, for `heads` key heads from `first_head` on, whose keys lie side by side. results:
// one for each head. A: the arithmetic. F: the format of the pages or of the ring.
template <class A, class F>
static void attend_span(const Span &span, int64_t first_head, int64_t heads, Prefetch ahead, const Partial *results) {
    const AttentionCall &call = *span.call;
    typedef typename A::Term Term;
    constexpr int TERMS = TILE_TOKENS / A::NUMBERS;  // of a tile's tokens
    const Source source = {call, span.sequence, span.in_ring};
    const Pages &keys = source.keys(), &values = source.values();
    const Visibility sight(call, span.sequence);
    const ChannelBlocks channels(values);
    const F key_format(keys.dim), value_format(values.dim);
    const int64_t rows = call.height(), width = call.width, ld = ceil_div(keys.dim, CHUNK) * CHUNK / A::NUMBERS;

    static thread_local Buffer buffers[8];
    Floats *key_tile = buffers[0].get<Floats>(ld * A::NUMBERS * TILE_BLOCKS);
    Floats *value_tile = buffers[1].get<Floats>(TERMS * channels.vectors);
    Floats(*scores)[TILE_BLOCKS] = (Floats(*)[TILE_BLOCKS])buffers[2].get<Floats>(rows * TILE_BLOCKS);
    Term *weights = buffers[3].get<Term>(rows * TERMS), *scaled = buffers[4].get<Term>(rows * ld);
    float *offsets = buffers[5].get<float>(2 * rows), *corrections = offsets + rows;
    uint64_t *seen = buffers[6].get<uint64_t>(width);
    Floats *const totals = buffers[7].get<Floats>(heads * rows);

    const Queries<A> queries(call, span.sequence, first_head, heads);
    const Tiles configured;
    for (int64_t h = 0; h < heads; h++) {
        for (int64_t m = 0; m < rows; m++) results[h].softmax[m] = Softmax();
        std::fill_n((Floats *)results[h].sums, channels.count * rows * TILE_BLOCKS, Floats{});
        std::fill_n(totals + h * rows, rows, Floats{});
    }
    // prefetches five times a tile and head: many at once would wait for each other
    const int64_t share = ceil_div(ahead.tokens(), 5 * heads * ceil_div(span.end - span.begin, TILE_TOKENS));
    for (int64_t start = span.begin, end; start < span.end; start = end) {
        end = std::min(start + TILE_TOKENS, span.end);
        const int64_t group_end = F::SCALES == PER_GROUP ? (start / call.token_group + 1) * call.token_group : end;
        if ((group_end - start) % LANES || call.token_group % LANES) end = std::min(end, group_end);
        for (int64_t h = 0; h < heads; h++) {
            const int64_t head = first_head + h;
            const Partial &result = results[h];
            const Biases biases(call, span.sequence, head);
            Tile tile(source, start, end - start, head, key_format.bytes, value_format.bytes);
            uint64_t anyone = 0, everyone = ~0ull;
            for (int64_t i = 0; i < width; i++) {
                seen[i] = sight.seen(i, start, tile.count) & tile.present;
                anyone |= seen[i], everyone &= seen[i];
            }
            if (!anyone) break;

            tile.keep(anyone);
            ahead.some(share);
            Floats key_scales[TILE_BLOCKS], value_scales[TILE_BLOCKS];
            if constexpr (F::SCALES == PER_TOKEN) {
                tile.scales(keys.scale, key_scales);
                tile.scales(values.scale, value_scales);
            }
            const Floats *of_keys = F::SCALES == PER_TOKEN ? key_scales : nullptr;
            auto multiply = [&](const Term *query_terms, int64_t count, int64_t block, int64_t last, int64_t some,
                                int64_t m) {
                tile_rows(last - block, some, count, query_terms + m * ld, ld, key_tile,
                          ceil_div(keys.dim, A::NUMBERS), true, rows >= LEAST_AMX_ROWS,
                          (Floats(*)[TILE_BLOCKS])&scores[m][block]);
            };
            auto attend = [&](int64_t first, int64_t end, int64_t blocks) {  // rows
                soften<A>(blocks, biases, sight, start, seen, of_keys, first, end, scores, result.softmax,
                          totals + h * rows, corrections, F::SCALES == NONE ? weights : nullptr);
                if (first == 0) ahead.some(share);
                add_values<A>(tile, blocks, F::SCALES, F::MIDDLE, values, channels, end - first, rows, scores + first,
                              value_scales, corrections + first, weights + first * TERMS, value_tile,
                              result.sums + first);
            };
            const Term *query_terms = queries.terms + h * rows * ld;
            if constexpr (F::SCALES != PER_GROUP) {
                load_keys<A>(tile, 0, tile.blocks, key_format, keys, key_tile);
                ahead.some(share);
                const bool is_diagonal = anyone != everyone && width >= 2 * ROWS_OF_DIAGONAL;
                for (int64_t m = 0, last; m < rows; m = last) {
                    last = std::min(m + ROWS_AT_ONCE, rows);
                    int64_t blocks = tile.blocks;  // up to the last token that one of the rows sees
                    if (is_diagonal) {
                        const int64_t first = m % width, end = std::min(first + ROWS_OF_DIAGONAL, width);
                        last = m + end - first;
                        uint64_t some = 0;
                        for (int64_t i = first; i < end; i++) some |= seen[i];
                        blocks = some ? (63 - __builtin_clzll(some)) / LANES + 1 : 1;
                    }
                    multiply(query_terms, last - m, 0, tile.blocks, blocks, m);
                    if (m == 0) {
                        ahead.some(share);
                        load_values<A>(tile, value_format, values, channels, value_tile);
                        ahead.some(share);
                    }
                    attend(m, last, blocks);
                }
            } else {
                for (int64_t block = 0, last; block < tile.blocks; block = last) {  // group of tokens by group
                    const int64_t token = start + block * LANES;
                    last = std::min(tile.blocks, block + ceil_div(call.token_group - token % call.token_group, LANES));
                    const int64_t slot = source.slot(token);
                    if (slot < 0) continue;
                    const int64_t shared = call.heads * keys.dim;
                    const int64_t group =
                        keys.token_scale(slot, call.block_size, shared, call.token_group) + head * keys.dim;
                    queries.scale(query_terms, keys.scale + group, keys.minimum + group, F::MIDDLE, scaled, offsets);
                    load_keys<A>(tile, block, last, key_format, keys, key_tile);
                    multiply(scaled, rows, block, last, last - block, 0);
                    for (int64_t m = 0; m < rows; m++)
                        for (int64_t b = block; b < last; b++) scores[m][b] += offsets[m];
                    ahead.some(ceil_div(share * (last - block), tile.blocks));
                }
                ahead.some(share);
                load_values<A>(tile, value_format, values, channels, value_tile);
                ahead.some(share);
                attend(0, rows, tile.blocks);
            }
        }
    }
    for (int64_t h = 0; h < heads; h++)
        for (int64_t m = 0; m < rows; m++) results[h].softmax[m].total = sum(totals[h * rows + m]);
}
