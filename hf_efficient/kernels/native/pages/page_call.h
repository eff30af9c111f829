// What one call is told. hf_efficient/kernels/attention/native_cpu.py has the same structures.

#pragma once
#include "vectors.h"

// The keys or the values of a cache, or of its rings: data [tokens, heads, dim] of one format, a token being a slot of a page
// (block * block_size + offset) or of a ring (row * ring + slot).
struct Pages {
    const void *data;
    const uint16_t *scale, *minimum;  // float16: kv_formats.py says of which shapes
    int64_t dim;                      // channels of a head
    int64_t groups;                   // of channels that share a scale: 4 and 2-bit values, else 1
};

enum NumberType : int64_t { BFLOAT16, FLOAT32, FLOAT16, INT8, FP8, INT4, INT2 };

struct Call {
    int64_t batch, width, query_heads, heads;  // width: queries of a row
    int64_t query_type, page_type;
    const void *query;  // [batch, width, query_heads, keys.dim]
    void *out;          // [batch, width, query_heads, values.dim], as the queries
    float *lse;         // [batch, query_heads, width] with strides lse_row, lse_head, 1, or null
    int64_t lse_row, lse_head;

    Pages keys, values;
    int64_t num_blocks, block_size;
    const int32_t *table;  // [batch, table_stride or less]
    int64_t table_columns, table_stride;
    const int32_t *lengths;  // tokens of a row before the new ones; negative: a row of padding
    int64_t appended;        // new tokens of a row
    const void *new_keys, *new_values;  // [batch, appended, heads, dim], numbers as the queries
    int64_t token_group;  // tokens whose keys share scales: 4 and 2 bits

    Pages ring_keys, ring_values;  // null without; numbers of the queries' type
    int64_t ring;
    const int32_t *stored;  // tokens of a row in pages, the others are in the ring

    int64_t left, right;      // the window; -1: no limit
    const int64_t *ancestors;  // [batch, width] bits of a token tree, or null
    const float *slopes;      // of ALiBi [query_heads] a row, or null
    int64_t slopes_stride;    // from row to row
    const float *sinks;       // [query_heads], or null
    double scale, softcap;

    int64_t group() const { return query_heads / heads; }
    int64_t height() const { return group() * width; }  // rows of queries that share a key head: head of the group, query
    int64_t length(int64_t row) const { return lengths[row] < 0 ? 0 : lengths[row] + appended; }
    int64_t in_pages(int64_t row) const {
        const int64_t all = length(row);
        return ring && all ? stored[row] : all;
    }
};

// Where the tokens of a row lie: in pages, or in its ring.
struct Source {
    const Call &call;
    int64_t row;
    bool in_ring;

    const Pages &keys() const { return in_ring ? call.ring_keys : call.keys; }
    const Pages &values() const { return in_ring ? call.ring_values : call.values; }

    int64_t slot(int64_t token) const {  // -1: nowhere
        if (in_ring) return row * call.ring + token % call.ring;
        const int64_t block = call.table[row * call.table_stride + token / call.block_size];
        return block < 0 ? -1 : block * call.block_size + token % call.block_size;
    }
};
