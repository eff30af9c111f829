// Attention of few queries over pages that are read in place: FlashDecoding,
// https://crfm.stanford.edu/2023/10/12/flashdecoding.html. Each sequence's tokens are cut into spans, which threads
// share, and the results of the spans are added up. Neither the spans nor the order of sums depends on the threads, so
// results do not either.

#include "page_append.h"
#include "page_attention.h"
#include "shared_pages.h"
#include "layout.h"
#include <array>
#include <atomic>
#include <vector>

EXPORT_LAYOUTS(LAYOUT(Pages, data, scale, minimum, dim, groups, block_bytes, block_scales)
               LAYOUT(AttentionCall, batch, width, query_heads, heads, query_type, page_type, q, out, lse, lse_stride,
                      lse_head_stride, k_cache, v_cache, num_blocks, block_size, wrap, block_table, table_width,
                      table_stride, cache_seqlens, appended, k, v, token_group, k_tail, v_tail, ring_size,
                      quantized_seqlens, ring_rows, left, right, tree_mask, alibi_slopes, slopes_stride,
                      distance_bias, distances, s_aux, softmax_scale, softcap)
               LAYOUT(RaggedCall, call, query_starts, tokens))

constexpr int64_t SPAN = 256;           // tokens of a span at most
constexpr int64_t PROMPT_SPAN = 1024;   // where so many queries of a prompt read it that combining costs
constexpr int64_t LEAST_PROMPT = 32;    // queries
constexpr int64_t SPAN_BYTES = 1 << 18;  // of keys and values of a span at most, of all heads
constexpr int64_t TILE_BYTES = 1 << 17;  // of a tile of all heads, up to which one thread takes all heads of a span
constexpr int64_t PARTIALS = 1 << 22;   // floats of all spans' results; beyond that spans become longer

struct Schedule {
    std::vector<Span> spans;
    std::vector<std::array<int64_t, 2>> own;  // of each sequence, its first span and the one behind its last
    std::vector<int64_t> group;               // of each sequence, -1: none
    std::vector<SharedPages> groups;
    std::vector<std::vector<int64_t>> shared;  // spans of each group
    int64_t rows = 0;                          // of all spans

    Schedule(const AttentionCall &call, int64_t longest) : group(call.batch, -1), groups(shared_pages(call)) {
        std::vector<Span> of_groups;
        for (size_t i = 0; i < groups.size(); i++) {
            for (int64_t j = 0; j < groups[i].count; j++) group[groups[i].first + j] = i;
            cut({&groups[i].call, 0, 0, groups[i].tokens, false}, longest, of_groups);
        }
        shared.resize(groups.size());
        size_t next = 0;  // of the groups' spans, which take long: threads share them
        for (int64_t sequence = 0; sequence < call.batch; sequence++) {
            while (next < of_groups.size() && sequence * int64_t(of_groups.size()) >= int64_t(next) * call.batch)
                add_shared(of_groups[next++]);
            const int64_t length = call.length(sequence), in_pages = call.in_pages(sequence),
                          seen = Visibility(call, sequence).first_seen();
            const int64_t begin = group[sequence] < 0 ? seen : groups[group[sequence]].tokens;
            own.push_back({(int64_t)spans.size(), 0});
            cut({&call, sequence, std::min(begin, in_pages), in_pages, false}, longest, spans);
            cut({&call, sequence, std::max(seen, in_pages), length, true}, longest, spans);
            own.back()[1] = spans.size();
        }
        for (Span &span : spans) span.row = rows, rows += span.call->height();
    }
    void add_shared(const Span &span) {
        size_t of = 0;
        while (span.call != &groups[of].call) of++;
        shared[of].push_back(spans.size());
        spans.push_back(span);
    }
    static void cut(const Span &all, int64_t longest, std::vector<Span> &to) {  // in equal parts that begin at tiles
        const int64_t begin = all.begin / TILE_TOKENS * TILE_TOKENS, count = ceil_div(all.end - begin, longest);
        if (all.end <= all.begin) return;
        const int64_t part = ceil_div(ceil_div(all.end - begin, count), TILE_TOKENS) * TILE_TOKENS;
        for (int64_t start = begin; start < all.end; start += part)
            to.push_back({all.call, all.sequence, std::max(start, all.begin), std::min(start + part, all.end),
                          all.in_ring});
    }
    // Calls body(span, row) for the spans of a sequence. row: of its first query in the rows of the span.
    template <class F> INLINE void for_spans(int64_t sequence, F body) const {
        for (int64_t span = own[sequence][0]; span < own[sequence][1]; span++) body(span, 0);
        if (group[sequence] < 0) return;
        const int64_t row = (sequence - groups[group[sequence]].first);
        for (int64_t span : shared[group[sequence]]) body(span, row);
    }
};

struct Results {
    int64_t heads, blocks;  // blocks: of channels
    Softmax *softmax;
    Floats (*sums)[TILE_BLOCKS];

    Partial of(const Span &span, int64_t head) const {
        const int64_t row = span.row * heads + head * span.call->height();
        return {softmax + row, sums + row * blocks};
    }
};

static void store(void *out, int64_t type, int64_t at, int64_t count, Floats values) {
    if (type == FLOAT32) return store_some((float *)out + at, count, values);
    store_some((uint16_t *)out + at, count, type == BFLOAT16 ? narrow(values) : to_float16(values));
}

// The results of the only span of a sequence: as `combine` has them, without what depends on several.
static void combine_one(const AttentionCall &call, const Partial &part, const ChannelBlocks &channels,
                        int64_t sequence, int64_t head) {
    const int64_t dim = call.v_cache.dim, rows = call.height();
    for (int64_t m = 0, in_group = 0; in_group < call.group(); in_group++)
        for (int64_t query = 0; query < call.width; query++, m++) {
            const int64_t query_head = head * call.group() + in_group;
            const int64_t at = ((sequence * call.width + query) * call.query_heads + query_head) * dim;
            const Softmax &of = part.softmax[m];
            const float inverse = of.total == 0 ? 0 : 1 / of.total;
            for (int64_t v = 0; v < channels.vectors; v++) {
                const int64_t block = channels.block_of[v];
                const Floats sums = part.sums[block * rows + m][v - channels.block[block].first];
                store(call.out, call.query_type, at + v * LANES, dim - v * LANES, sums * inverse);
            }
            if (call.lse)
                call.lse[sequence * call.lse_stride + query_head * call.lse_head_stride + query] =
                    of.total == 0 ? -INFINITY : (of.top + log2f(of.total)) * LN_2;
        }
}

// Adds up the results of the spans of one sequence and key head.
static void combine(const AttentionCall &call, const Schedule &schedule, const Results &results,
                    const ChannelBlocks &channels, int64_t sequence, int64_t head) {
    const int64_t dim = call.v_cache.dim, first = schedule.own[sequence][0];
    if (schedule.own[sequence][1] == first + 1 && schedule.group[sequence] < 0 && !call.s_aux)
        return combine_one(call, results.of(schedule.spans[first], head), channels, sequence, head);
    for (int64_t m = 0; m < call.height(); m++) {
        const int64_t query_head = head * call.group() + m / call.width, query = m % call.width;
        // the row of a span whose queries begin with those of other sequences
        auto row_of = [&](const Span &span, int64_t before) {
            return m / call.width * span.call->width + before * call.width + query;
        };
        const float sink = call.s_aux ? call.s_aux[query_head] * LOG2_E : -INFINITY;
        float top = std::max(LOWEST, sink);
        schedule.for_spans(sequence, [&](int64_t index, int64_t before) {
            const Span &span = schedule.spans[index];
            top = std::max(top, results.of(span, head).softmax[row_of(span, before)].top);
        });
        float total = sink == -INFINITY ? 0.0f : exp2f(sink - top);
        Floats sums[16];
        // those alone: 16 are written by a slow loop
        for (int64_t v = 0; v < channels.vectors; v++) sums[v] = Floats{};
        schedule.for_spans(sequence, [&](int64_t index, int64_t before) {
            const Span &span = schedule.spans[index];
            const Partial part = results.of(span, head);
            const int64_t row = row_of(span, before);
            const float weight = part.softmax[row].top == top ? 1.0f : exp2f(part.softmax[row].top - top);
            total += part.softmax[row].total * weight;
            for (int64_t v = 0; v < channels.vectors; v++) {
                const int64_t block = channels.block_of[v];
                sums[v] += part.sums[block * span.call->height() + row][v - channels.block[block].first] * weight;
            }
        });
        const int64_t at = ((sequence * call.width + query) * call.query_heads + query_head) * dim;
        const float inverse = total == 0 ? 0 : 1 / total;
        for (int64_t v = 0; v < channels.vectors; v++)
            store(call.out, call.query_type, at + v * LANES, dim - v * LANES, sums[v] * inverse);
        if (call.lse)
            call.lse[sequence * call.lse_stride + query_head * call.lse_head_stride + query] =
                total == 0 ? -INFINITY : (top + log2f(total)) * LN_2;
    }
}

// How a format is read: bytes of a token and head, and `attend_span` of the format.
struct Reader {
    int64_t key_bytes, value_bytes;
    void (*attend_span)(const Span &, int64_t, int64_t, Prefetch, const Partial *);
};

template <class A, class F> static Reader reader(const AttentionCall &call) {  // A: the arithmetic
    return {F(call.k_cache.dim).bytes, F(call.v_cache.dim).bytes, attend_span<A, F>};
}

static void attend(const AttentionCall &call, const Reader &pages, const Reader &rings) {
    const ChannelBlocks channels(call.v_cache);
    const int64_t rows = call.height(), of_unit = channels.count * rows;
    const int64_t token_bytes = call.heads * (pages.key_bytes + pages.value_bytes);
    const int64_t cached = SPAN_BYTES / token_bytes / TILE_TOKENS * TILE_TOKENS;
    int64_t longest = std::max<int64_t>(TILE_TOKENS, std::min<int64_t>(SPAN, cached)), total = 0;
    if (call.width >= LEAST_PROMPT) longest = PROMPT_SPAN;
    for (int64_t sequence = 0; sequence < call.batch; sequence++) total += call.length(sequence);
    while (total / longest * call.heads * of_unit * TILE_BLOCKS * LANES > PARTIALS) longest *= 2;
    const Schedule schedule(call, longest);
    // heads of a unit; few spans of a prompt are shared by heads, as they take long
    const size_t few = call.width > 16 ? 8 : 2;
    const int64_t at_once = schedule.spans.size() > few && token_bytes * TILE_TOKENS <= TILE_BYTES ? call.heads : 1;
    const int64_t units = schedule.spans.size() * (call.heads / at_once), all_rows = schedule.rows * call.heads;
    static thread_local Buffer softmaxes, sums;
    const Results results = {call.heads, channels.count, softmaxes.get<Softmax>(all_rows),
                             (Floats(*)[TILE_BLOCKS])sums.get<Floats>(all_rows * channels.count * TILE_BLOCKS)};
    // whoever finishes the last span combines them
    std::vector<std::atomic<int64_t>> spans_left(call.batch * call.heads);
    for (int64_t sequence = 0; sequence < call.batch; sequence++)
        for (int64_t head = 0; head < call.heads; head++) {
            int64_t count = 0;
            schedule.for_spans(sequence, [&](int64_t, int64_t) { count++; });
            spans_left[sequence * call.heads + head] = count;
            if (count == 0) combine(call, schedule, results, channels, sequence, head);
        }
    // Heads of one span follow each other because they share cache lines. Spans of a prompt differ in length, the last
    // ones being the longest: threads take one after another, and the shortest at the end.
    const bool is_prompt = call.width >= LEAST_PROMPT;
    std::atomic<int64_t> taken{0};
    auto head_of = [&](int64_t unit) { return unit % (call.heads / at_once) * at_once; };
    auto span_of = [&](int64_t unit) -> const Span & {
        const int64_t span = unit / (call.heads / at_once), count = schedule.spans.size();
        return schedule.spans[is_prompt ? count - 1 - span : span];
    };
    parallel(units, [&](int64_t unit, int64_t end) {
        auto stretch = [&](const Span &span, int64_t begin, int64_t end) -> Stretch {
            const Reader &by = span.in_ring ? rings : pages;
            const int64_t last = std::min(end, span.end);
            return {span.call, span.sequence, span.in_ring, begin, last, by.key_bytes, by.value_bytes};
        };
        std::vector<Partial> parts(at_once);
        for (const int64_t last = is_prompt ? units - 1 : end - 1;; unit++) {
            if (is_prompt) unit = taken++;
            if (unit > last) break;
            const int64_t groups = call.heads / at_once, head = head_of(unit), next_unit = std::min(unit + 1, last);
            const Span &span = span_of(unit), &next = span_of(next_unit);
            Prefetch ahead = {{stretch(next, next.begin, next.end)}, head_of(next_unit), at_once};
            if (groups == 1) {  // the next tile, up to the first of the next span
                const int64_t second = (span.begin / TILE_TOKENS + 1) * TILE_TOKENS;
                ahead.stretches[0] = stretch(span, second, span.end);
                ahead.stretches[1] = stretch(next, next.begin, next.begin + TILE_TOKENS);
            }
            for (int64_t h = 0; h < at_once; h++) parts[h] = results.of(span, head + h);
            (span.in_ring ? rings : pages).attend_span(span, head, at_once, ahead, parts.data());
            int64_t first = span.sequence, count = 1;
            for (const SharedPages &group : schedule.groups)
                if (&group.call == span.call) first = group.first, count = group.count;
            for (int64_t sequence = first; sequence < first + count; sequence++)
                for (int64_t h = head; h < head + at_once; h++)
                    if (--spans_left[sequence * call.heads + h] == 0)
                        combine(call, schedule, results, channels, sequence, h);
        }
    });
}

// R: the format of the rings, and of pages that are not quantized.
template <class A, class R> static void attend(const AttentionCall &call) {
    const Reader rings = reader<A, R>(call);
    switch (call.page_type) {
        case INT8: return attend(call, reader<A, Int8Pages>(call), rings);
        case FP8: return attend(call, reader<A, Fp8Pages>(call), rings);
        case INT4: return attend(call, reader<A, PackedPages<4>>(call), rings);
        case INT2: return attend(call, reader<A, PackedPages<2>>(call), rings);
        default: return attend(call, rings, rings);
    }
}

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

static void attend_queries(const AttentionCall &call) {
#if QUERY == 0
    attend<std::conditional_t<BF16_DOT, BFloat16, Float32>, BFloat16Pages>(call);
#elif QUERY == 1
    attend<Float32, Float32Pages>(call);
#else
    attend<Float32, Float16Pages>(call);
#endif
}

// Attends with queries [first, end) of a prompt, as a batch of one sequence for each `width` of them.
static void attend_part(const AttentionCall &call, int64_t sequence, int64_t first, int64_t end, int64_t width) {
    const int64_t size = call.query_type == FLOAT32 ? 4 : 2,
                  at = (sequence * call.width + first) * call.query_heads * size;
    std::vector<int32_t> lengths;
    for (int64_t last = first + width; last <= end; last += width)
        lengths.push_back(call.length(sequence) - call.width + last);
    AttentionCall part = call;
    part.batch = lengths.size(), part.width = width, part.appended = 0, part.cache_seqlens = lengths.data();
    part.q = (const char *)call.q + at * call.k_cache.dim, part.out = (char *)call.out + at * call.v_cache.dim;
    part.block_table += sequence * call.table_stride, part.table_stride = 0;
    const std::vector<int32_t> rings(part.batch, call.ring(sequence));
    part.ring_rows = rings.data();
    if (call.lse) part.lse += sequence * call.lse_stride + first, part.lse_stride = width;
    if (call.alibi_slopes) part.alibi_slopes += sequence * call.slopes_stride, part.slopes_stride = 0;
    attend_queries(part);
}

// Appends and attends; the call `fits`.
static void append_and_attend(const AttentionCall &call) {
    constexpr int64_t QUERIES = 64, AT_ONCE = 16 * QUERIES;  // of a prompt
    append(call);
    if (call.width <= QUERIES) return attend_queries(call);
    for (int64_t sequence = 0; sequence < call.batch; sequence++) {
        int64_t first = call.width % QUERIES;
        if (first) attend_part(call, sequence, 0, first, first);
        for (; first < call.width; first += AT_ONCE)
            attend_part(call, sequence, first, std::min(first + AT_ONCE, call.width), QUERIES);
    }
}

// Appends and attends. QUERY, a compiler flag, is the type of the queries. Returns 0, with nothing done, unless `fits`.
extern "C" int hf_attend_pages(const AttentionCall *call) {
    if (!fits(*call)) return 0;
    return append_and_attend(*call), 1;
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
    for_equal_widths(*ragged, [](const AttentionCall &part) { return append_and_attend(part), true; });
    const int64_t row = all.query_heads * all.v_cache.dim * size;
    memset((char *)all.out + end * row, 0, (ragged->tokens - end) * row);
    return 1;
}
