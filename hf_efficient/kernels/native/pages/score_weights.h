// From the products of queries and keys to the weights of a softmax.

#pragma once
#include "online_softmax.h"
#include "page_formats.h"
#include "tile_product.h"
#include "visibility.h"

// Turns products into scores in powers of two, by the softmax's scale, softcap, ALiBi and T5's bias.
struct Biases {
    const AttentionCall &call;
    const float *slopes, *table;  // of the group's heads, or null

    Biases(const AttentionCall &call, int64_t sequence, int64_t head)
        : call(call),
          slopes(call.alibi_slopes ? call.alibi_slopes + sequence * call.slopes_stride + head * call.group()
                                   : nullptr),
          table(call.distance_bias ? call.distance_bias + head * call.group() * call.distances : nullptr) {}

    // score: of row m of the queries, for 16 keys from `token` on
    INLINE Floats apply(Floats score, const Visibility &sight, int64_t m, int64_t token) const {
        if (call.softcap) score = soft_capped(score * float(call.softmax_scale), call.softcap) * LOG2_E;
        else score *= float(call.softmax_scale * LOG2_E);
        if (!slopes && !table) return score;
        const int64_t at = sight.position(m % call.width);
        float distances[LANES];
        for (int i = 0; i < LANES; i++) {
            const int64_t distance = std::abs(at - sight.key_position(std::min(token + i, sight.length - 1)));
            distances[i] = table ? table[m / call.width * call.distances + std::min(distance, call.distances - 1)]
                                 : distance;
        }
        if (table) return score + *(const Floats *)distances * LOG2_E;
        return score - *(const Floats *)distances * (slopes[m / call.width] * LOG2_E);
    }
};

// Weights of the keys [blocks] as terms of tokens.
template <class A> static INLINE void store_terms(const Floats *weights, int64_t blocks, typename A::Term *out) {
    if constexpr (A::NUMBERS == 2) {
#pragma GCC unroll 2
        for (int64_t b = 0; b < blocks; b += 2) {
            const Floats second = b + 1 < blocks ? weights[b + 1] : Floats{};
            *(Words *)(out + b * LANES / 2) = chunk_of<A>(weights[b], second).terms[0];
        }
    } else {
        for (int64_t b = 0; b < blocks; b++) ((Floats *)out)[b] = weights[b];
    }
}

// scores [row][block] of a tile's products <- weights of its tokens in the softmax, for rows [first, end).
// terms: where they are stored instead, as terms of tokens, or null. totals: sums of each row's weights, lane by lane.
// corrections: what earlier sums are multiplied by. key_scales: of the products of each token, or null.
template <class A>
static __attribute__((noinline)) void soften(const Biases &biases, const Visibility &sight, int64_t blocks,
                                             int64_t start, const uint64_t *seen, const Floats *key_scales,
                                             int64_t first, int64_t end, Floats (*scores)[TILE_BLOCKS],
                                             Softmax *softmax, Floats *totals, float *corrections,
                                             typename A::Term *terms) {
    constexpr int TERMS = TILE_TOKENS / A::NUMBERS;
    const AttentionCall &call = biases.call;
    const bool only_scales = !call.softcap && !biases.slopes && !biases.table && !key_scales;
    const float scale = call.softmax_scale * LOG2_E;
    auto some_rows = [&](auto count, int64_t m, int64_t some) __attribute__((always_inline)) {
        constexpr int BLOCKS = decltype(count)::value;
        Floats high[LANES];
        alignas(64) float tops[LANES];
        auto score = [&](int64_t row, uint64_t bits, int b) __attribute__((always_inline)) {
            if (!only_scales) return scores[row][b];
            return blend(bits >> (b * LANES), scores[row][b] * scale, splat(-INFINITY));
        };
        int64_t query = m % call.width;
        auto next = [&] { query = query + 1 == call.width ? 0 : query + 1; };
        for (int64_t i = 0; i < some; i++, next()) {
            if (!only_scales)
                for (int b = 0; b < BLOCKS; b++) {
                    Floats scaled = scores[m + i][b];
                    if (key_scales) scaled *= key_scales[b];
                    scaled = biases.apply(scaled, sight, m + i, start + b * LANES);
                    scores[m + i][b] = blend(seen[query] >> (b * LANES), scaled, splat(-INFINITY));
                }
            high[i] = score(m + i, seen[query], 0);
#pragma GCC unroll 4
            for (int b = 1; b < BLOCKS; b++) high[i] = maximum(high[i], score(m + i, seen[query], b));
        }
        raise(softmax + m, highest_of_each(high, some), some, tops, corrections + m);
        query = m % call.width;
        for (int64_t i = 0; i < some; i++, next()) {
            Floats row[BLOCKS], all = {};
#pragma GCC unroll 4
            for (int b = 0; b < BLOCKS; b++) {
                row[b] = exp2<A::NUMBERS == 2>(score(m + i, seen[query], b) - tops[i]);
                all += row[b];
            }
            totals[m + i] = multiply_add(totals[m + i], splat(corrections[m + i]), all);
            if (terms) store_terms<A>(row, BLOCKS, terms + (m + i) * TERMS);
            else
#pragma GCC unroll 4
                for (int b = 0; b < BLOCKS; b++) scores[m + i][b] = row[b];
        }
    };
    for (int64_t m = first; m < end; m += LANES) {
        const int64_t some = std::min<int64_t>(LANES, end - m);
        if (blocks == 4) some_rows(std::integral_constant<int, 4>(), m, some);
        if (blocks == 3) some_rows(std::integral_constant<int, 3>(), m, some);
        if (blocks == 2) some_rows(std::integral_constant<int, 2>(), m, some);
        if (blocks == 1) some_rows(std::integral_constant<int, 1>(), m, some);
    }
}
