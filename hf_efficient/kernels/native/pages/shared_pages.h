// Sequences side by side that begin with the same pages, as those with one system prompt do. All their queries attend
// to these pages at once, which are read once (Juravsky et al. 2024, "Hydragen", https://arxiv.org/abs/2402.05099).

#pragma once
#include "page_call.h"
#include <vector>

struct SharedPages {
    int64_t first, count;  // sequences
    AttentionCall call;    // of all their queries, as one sequence that sees all of its tokens
    int32_t tokens;        // call.cache_seqlens points to it
};

// How many first tokens of two sequences lie in the same full pages, before their new tokens.
static int64_t tokens_in_common(const AttentionCall &call, int64_t a, int64_t b) {
    const int64_t both = (std::min(call.length(a), call.length(b)) - call.width) / call.block_size;
    const int32_t *of_a = call.block_table + a * call.table_stride, *of_b = call.block_table + b * call.table_stride;
    int64_t column = 0;
    while (column < both && of_a[column] == of_b[column] && of_a[column] >= 0) column++;
    return column * call.block_size;
}

// The groups of a batch, which are worth it from LEAST_SHARED tokens of all their sequences on. Where positions matter
// to the scores, or tokens do not stay in their pages, there are none.
static std::vector<SharedPages> shared_pages(const AttentionCall &call) {
    constexpr int64_t LEAST_SHARED = 256, MOST_QUERIES = 64;
    std::vector<SharedPages> groups;
    if (call.left >= 0 || call.wrap || call.ring_size || call.alibi_slopes || call.distance_bias || call.tree_mask)
        return groups;
    for (int64_t first = 0, end; first < call.batch; first = end) {
        int64_t tokens = 0;
        for (end = first + 1; end < call.batch && (end - first + 1) * call.width <= MOST_QUERIES; end++) {
            const int64_t common = tokens_in_common(call, first, end);
            if (common == 0 || common < tokens) break;
            if (!tokens) tokens = common;
        }
        const int64_t count = end - first;
        if (tokens * (count - 1) < LEAST_SHARED) continue;
        AttentionCall part = call;
        part.batch = 1, part.width = count * call.width, part.appended = 0, part.right = -1;
        const int64_t at = first * call.width * call.query_heads * call.k_cache.dim;
        part.q = (const char *)call.q + at * (call.query_type == FLOAT32 ? 4 : 2);
        part.block_table += first * call.table_stride;
        groups.push_back({first, count, part, (int32_t)tokens});
    }
    for (SharedPages &group : groups) group.call.cache_seqlens = &group.tokens;
    return groups;
}
