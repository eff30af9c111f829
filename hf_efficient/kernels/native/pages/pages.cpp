// Attention of few queries over pages that are read in place: FlashDecoding,
// https://crfm.stanford.edu/2023/10/12/flashdecoding.html. Each sequence's tokens are cut into spans, which threads
// share, and the results of the spans are added up. Neither the spans nor the order of sums depends on the threads, so
// results do not either.

#include "layout.h"
#include "page_append.h"
#include "prompts.h"

EXPORT_LAYOUTS(LAYOUT(Pages, data, scale, minimum, dim, groups, block_bytes, block_scales)
               LAYOUT(AttentionCall, batch, width, query_heads, heads, query_type, page_type, q, out, lse, lse_stride,
                      lse_head_stride, k_cache, v_cache, num_blocks, block_size, wrap, block_table, table_width,
                      table_stride, cache_seqlens, appended, k, v, token_group, k_tail, v_tail, ring_size,
                      quantized_seqlens, ring_rows, left, right, tree_mask, alibi_slopes, slopes_stride,
                      distance_bias, distances, s_aux, softmax_scale, softcap)
               LAYOUT(RaggedCall, call, query_starts, tokens))

// Whether every sequence has room for its tokens, and every block that will be read exists. Where block tables wrap,
// only a single new token overwrites no token that its query sees.
static bool fits(const AttentionCall &call) {
    const int64_t room = call.table_width * call.block_size;
    for (int64_t sequence = 0; sequence < call.batch; sequence++) {
        const int64_t length = call.length(sequence), beyond = length - call.in_pages(sequence);
        const bool wraps = call.wrap && length > call.wrap;
        const int64_t in_pages = wraps ? call.wrap : call.in_pages(sequence);
        if (in_pages < 0 || in_pages > room || beyond < 0 || beyond > call.ring_size) return false;
        if (wraps && (call.width > 1 || call.left < 0 || call.left >= call.wrap)) return false;
        int64_t first = wraps ? 0 : Visibility(call, sequence).first_seen();
        if (!call.ring_size && length) first = std::min<int64_t>(first, call.cache_seqlens[sequence]);
        for (int64_t column = first / call.block_size; column < ceil_div(in_pages, call.block_size); column++)
            if (call.block_table[sequence * call.table_stride + column] >= call.num_blocks) return false;
    }
    return true;
}

// Appends and attends. QUERY, a compiler flag, is the type of the queries. Returns 0, with nothing done, unless `fits`.
extern "C" int hf_attend_pages(const AttentionCall *call) {
    if (!fits(*call)) return 0;
    append(*call);
    Attention attention;
    attention.add(*call), attention.finish();
    return 1;
}

// Calls body(call) for each stretch of sequences with equally many queries; stops where it returns false.
template <class F> static bool for_equal_widths(const RaggedCall &ragged, F body) {
    const AttentionCall &all = ragged.call;
    const int64_t size = all.query_type == FLOAT32 ? 4 : 2;
    auto count = [&](int64_t sequence) { return ragged.query_starts[sequence + 1] - ragged.query_starts[sequence]; };
    for (int64_t first = 0, end; first < all.batch; first = end) {
        for (end = first + 1; end < all.batch && count(end) == count(first); end++) continue;
        if (!count(first)) continue;
        const int64_t at = ragged.query_starts[first] * size, dim = all.k_cache.dim, value_dim = all.v_cache.dim;
        AttentionCall part = all;
        part.batch = end - first, part.width = part.appended = count(first);
        part.q = (const char *)all.q + at * all.query_heads * dim;
        part.out = (char *)all.out + at * all.query_heads * value_dim;
        part.k = (const char *)all.k + at * all.heads * dim, part.v = (const char *)all.v + at * all.heads * value_dim;
        part.block_table += first * all.table_stride, part.cache_seqlens += first;
        if (part.ring_rows) part.ring_rows += first;
        if (part.tree_mask) part.tree_mask += ragged.query_starts[first];
        if (!body(part)) return false;
    }
    return true;
}

// As hf_attend_pages, for sequences with different numbers of queries. The results of padding are zeros.
extern "C" int hf_attend_ragged(const RaggedCall *ragged) {
    const AttentionCall &all = ragged->call;
    const int64_t end = ragged->query_starts[all.batch], size = all.query_type == FLOAT32 ? 4 : 2;
    if (end > ragged->tokens || !for_equal_widths(*ragged, fits)) return 0;
    Attention attention;
    for_equal_widths(*ragged, [&](const AttentionCall &part) { return append(part), attention.add(part), true; });
    attention.finish();
    const int64_t row = all.query_heads * all.v_cache.dim * size;
    memset((char *)all.out + end * row, 0, (ragged->tokens - end) * row);
    return 1;
}
