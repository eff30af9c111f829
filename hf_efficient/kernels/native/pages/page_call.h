// The arguments of one call: hf_efficient/kernels/attention/native_cpu.py has the same structures, call.py the record.

#pragma once
#include "vectors.h"

// The keys or the values of a cache, or of its rings: data [tokens, heads, dim] of one format, a token being a slot of
// a page (block * block_size + offset) or of a ring (row * ring_size + slot). The pages of blocks lie end to end, or
// those that are quantized at distances of their own.
struct Pages {
    const void *data;
    const uint16_t *scale, *minimum;  // float16: kv_formats.py says of which shapes
    int64_t dim;                      // channels of a head
    int64_t groups;                   // of channels that share a scale: 4 and 2-bit values, else 1
    int64_t block_bytes, block_scales;  // from page to page of data, and scales from page to page; 0: end to end

    // the first byte of a token's heads, of `token_bytes` together
    const uint8_t *token(int64_t slot, int64_t block_size, int64_t token_bytes) const {
        if (!block_bytes) return (const uint8_t *)data + slot * token_bytes;
        return (const uint8_t *)data + slot / block_size * block_bytes + slot % block_size * token_bytes;
    }
    // the first of `count` scales of a token, or of `tokens` tokens that share them
    int64_t token_scale(int64_t slot, int64_t block_size, int64_t count, int64_t tokens = 1) const {
        if (!block_scales) return slot / tokens * count;
        return slot / block_size * block_scales + slot % block_size / tokens * count;
    }
};

enum NumberType : int64_t { BFLOAT16, FLOAT32, FLOAT16, INT8, FP8, INT4, INT2 };

struct AttentionCall {
    int64_t batch, width, query_heads, heads;  // width: queries of a sequence
    int64_t query_type, page_type;
    const void *q;  // [batch, width, query_heads, k_cache.dim]
    void *out;      // [batch, width, query_heads, v_cache.dim], of the queries' type
    float *lse;     // [batch, query_heads, width] with strides lse_stride, lse_head_stride, 1, or null
    int64_t lse_stride, lse_head_stride;

    Pages k_cache, v_cache;
    int64_t num_blocks, block_size;
    int64_t wrap;  // tokens after which a block table begins again, as those of windows do; 0: never
    const int32_t *block_table;  // [batch, table_width], rows table_stride apart
    int64_t table_width, table_stride;
    const int32_t *cache_seqlens;  // tokens of a sequence before the new ones; negative: a sequence of padding
    int64_t appended;              // new tokens of a sequence
    const void *k, *v;             // [batch, appended, heads, dim], of the queries' type
    int64_t token_group;           // tokens whose keys share scales, of 4 and 2-bit pages

    Pages k_tail, v_tail;  // rings, of the queries' type; null without
    int64_t ring_size;     // slots of a ring
    const int32_t *quantized_seqlens;  // tokens of a ring's sequence in pages, the others are in the ring
    const int32_t *ring_rows;          // [batch], the ring of a sequence; null: that of its number

    int64_t left, right;        // the window; -1: no limit
    const int64_t *tree_mask;   // [batch, width] bits of a token tree, or null
    const float *alibi_slopes;  // [query_heads] for each sequence, or null
    int64_t slopes_stride;      // from sequence to sequence
    const float *distance_bias;  // [query_heads, distances], added to scores by distance, or null
    int64_t distances;           // greater ones get what the last does
    const float *s_aux;         // [query_heads] sink logits, or null
    double softmax_scale, softcap;

    int64_t group() const { return query_heads / heads; }
    // rows of queries that share a key head: head of the group, query
    int64_t height() const { return group() * width; }
    int64_t ring(int64_t sequence) const { return ring_rows ? ring_rows[sequence] : sequence; }
    int64_t length(int64_t sequence) const {
        return cache_seqlens[sequence] < 0 ? 0 : cache_seqlens[sequence] + appended;
    }
    int64_t in_pages(int64_t sequence) const {
        const int64_t all = length(sequence);
        return ring_size && all ? quantized_seqlens[ring(sequence)] : all;
    }
};

// Where the tokens of a sequence lie: in pages, or in its ring.
struct Source {
    const AttentionCall &call;
    int64_t sequence;
    bool in_ring;

    const Pages &keys() const { return in_ring ? call.k_tail : call.k_cache; }
    const Pages &values() const { return in_ring ? call.v_tail : call.v_cache; }

    int64_t slot(int64_t token) const {  // -1: nowhere
        if (in_ring) return call.ring(sequence) * call.ring_size + token % call.ring_size;
        if (call.wrap) token %= call.wrap;
        const int64_t block = call.block_table[sequence * call.table_stride + token / call.block_size];
        return block < 0 ? -1 : block * call.block_size + token % call.block_size;
    }
};

// A call whose sequences have different numbers of queries, laid end to end: sequence b has those of
// [query_starts[b], query_starts[b + 1]), and k and v are as long. `width` and `appended` of `call` are not read.
struct RaggedCall {
    AttentionCall call;
    const int32_t *query_starts;  // [batch + 1]
    int64_t tokens;               // of q, out, k and v; those behind the last sequence are padding
};
