// The spans into which the tokens of a call's sequences are cut, and how their results are added up. Neither the spans
// nor the order of sums depends on the threads, so results do not either.

#pragma once
#include "page_attention.h"
#include "shared_pages.h"
#include <array>
#include <vector>

struct Schedule {
    std::vector<Span> spans;
    std::vector<std::array<int64_t, 2>> own;  // of each sequence, its first span and the one behind its last
    std::vector<int64_t> group;               // of each sequence, -1: none
    std::vector<SharedPages> groups;
    std::vector<std::vector<int64_t>> shared;  // spans of each group
    int64_t rows = 0;                          // of all spans
    bool is_alone = true;                      // whether no sequence has two spans, and none is shared

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
        for (const auto &range : own) is_alone &= groups.empty() && range[1] - range[0] < 2;
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
    int64_t first = 0;  // row

    int64_t row(const Span &span, int64_t head) const { return span.row * heads + head * span.call->height(); }
    Partial of(const Span &span, int64_t head) const {
        return {softmax + row(span, head) - first, sums + (row(span, head) - first) * blocks};
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
