// Prompts in blocks of queries, each a sequence that ends with its block.

#pragma once
#include "work.h"

// Queries [first, end) of a prompt, as a batch of one sequence for each `width` of them.
struct PromptPart {
    std::vector<int32_t> lengths, rings;
    AttentionCall call;

    PromptPart(const AttentionCall &all, int64_t sequence, int64_t first, int64_t end, int64_t width) : call(all) {
        const int64_t size = all.query_type == FLOAT32 ? 4 : 2,
                      at = (sequence * all.width + first) * all.query_heads * size;
        for (int64_t last = first + width; last <= end; last += width)
            lengths.push_back(all.length(sequence) - all.width + last);
        rings.assign(lengths.size(), all.ring(sequence));
        call.batch = lengths.size(), call.width = width, call.appended = 0, call.cache_seqlens = lengths.data();
        call.q = (const char *)all.q + at * all.k_cache.dim, call.out = (char *)all.out + at * all.v_cache.dim;
        call.block_table += sequence * all.table_stride, call.table_stride = 0;
        call.ring_rows = rings.data();
        if (all.lse) call.lse += sequence * all.lse_stride + first, call.lse_stride = width;
        if (all.alibi_slopes) call.alibi_slopes += sequence * all.slopes_stride, call.slopes_stride = 0;
    }
    PromptPart(const PromptPart &) = delete;
};

// Attends in calls whose tokens are appended, in several prompts at once.
class Attention {
    static constexpr int64_t QUERIES = 64, AT_ONCE = 16 * QUERIES;  // of prompts
    std::vector<std::unique_ptr<PromptPart>> parts;
    std::vector<std::unique_ptr<Work>> works;
    int64_t queries = 0;

    void add_part(const AttentionCall &all, int64_t sequence, int64_t first, int64_t end, int64_t width) {
        parts.emplace_back(new PromptPart(all, sequence, first, end, width));
        add_prompts(parts.back()->call);
    }
    void add_prompts(const AttentionCall &call) {
        works.emplace_back(new Work(call));
        queries += call.batch * call.width;
        if (queries >= AT_ONCE) finish();
    }

  public:
    void add(const AttentionCall &call) {
        if (call.width < LEAST_PROMPT) {
            const std::unique_ptr<Work> alone(new Work(call));
            return attend(&alone, 1);
        }
        if (call.width <= QUERIES) return add_prompts(call);
        for (int64_t sequence = 0; sequence < call.batch; sequence++) {
            int64_t first = call.width % QUERIES;
            if (first) add_part(call, sequence, 0, first, first);
            for (; first < call.width; first += AT_ONCE)
                add_part(call, sequence, first, std::min(first + AT_ONCE, call.width), QUERIES);
        }
    }
    void finish() {
        if (!works.empty()) attend(works.data(), works.size());
        works.clear(), parts.clear(), queries = 0;
    }
};
