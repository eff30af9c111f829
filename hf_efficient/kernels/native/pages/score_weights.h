// From the products of queries and keys to the weights of a softmax: scale, softcap, ALiBi, T5's bias and which keys
// are seen.

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
template <class A, int BLOCKS>
static INLINE void soften_blocks(const Biases &biases, const Visibility &sight, int64_t start, const uint64_t *seen,
                                 const Floats *key_scales, int64_t first, int64_t end, Floats (*scores)[TILE_BLOCKS],
                                 Softmax *softmax, Floats *totals, float *corrections, typename A::Term *terms) {
    constexpr int TERMS = TILE_TOKENS / A::NUMBERS;
    const AttentionCall &call = biases.call;
    const bool only_scales = !call.softcap && !biases.slopes && !biases.table && !key_scales;
    const float scale = call.softmax_scale * LOG2_E;
    auto scores_of = [&](int64_t m, Floats (&row)[BLOCKS]) __attribute__((always_inline)) {
        const uint64_t bits = seen[m % call.width];
        Floats high = splat(-INFINITY);
#pragma GCC unroll 4
        for (int b = 0; b < BLOCKS; b++) {
            row[b] = scores[m][b];
            if (only_scales) {
                row[b] *= scale;
            } else {
                if (key_scales) row[b] *= key_scales[b];
                row[b] = biases.apply(row[b], sight, m, start + b * LANES);
            }
            row[b] = blend(bits >> (b * LANES), row[b], splat(-INFINITY));
            high = maximum(high, row[b]);
        }
        return high;
    };
    auto store = [&](int64_t m, Floats (&row)[BLOCKS], float top) __attribute__((always_inline)) {
        Floats all = {};
#pragma GCC unroll 4
        for (int b = 0; b < BLOCKS; b++) {
            row[b] = exp2<A::NUMBERS == 2>(row[b] - top);
            all += row[b];
        }
        totals[m] = multiply_add(totals[m], splat(corrections[m]), all);
        if (terms) return store_terms<A>(row, BLOCKS, terms + m * TERMS);
#pragma GCC unroll 4
        for (int b = 0; b < BLOCKS; b++) scores[m][b] = row[b];
    };
    Floats row[BLOCKS];
    int64_t m = first;
    if (only_scales)  // scores are cheap to compute again
        for (; m + LANES <= end; m += LANES) {
            Floats high[LANES];
            alignas(64) float tops[LANES];
            for (int i = 0; i < LANES; i++) high[i] = scores_of(m + i, row);
            raise((Softmax(&)[LANES])softmax[m], high, tops, (float(&)[LANES])corrections[m]);
            for (int i = 0; i < LANES; i++) scores_of(m + i, row), store(m + i, row, tops[i]);
        }
    for (; m < end; m++) {
        float top;
        const Floats high = scores_of(m, row);
        raise(softmax[m], high, top, corrections[m]);
        store(m, row, top);
    }
}

// Of a tile that is not full, or seen in part.
template <class A, class... Args>
static __attribute__((noinline)) void soften_part(int64_t blocks, const Args &...args) {
    if (blocks == 3) soften_blocks<A, 3>(args...);
    if (blocks == 2) soften_blocks<A, 2>(args...);
    if (blocks == 1) soften_blocks<A, 1>(args...);
}

template <class A, class... Args> static SHARED void soften(int64_t blocks, const Args &...args) {
    if (blocks == TILE_BLOCKS) soften_blocks<A, TILE_BLOCKS>(args...);
    else soften_part<A>(blocks, args...);
}
