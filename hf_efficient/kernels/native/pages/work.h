// Calls as units that threads share: the spans of some heads of a sequence.

#pragma once
#include "schedule.h"
#include <atomic>
#include <memory>

constexpr int64_t SPAN = 256;           // tokens of a span at most
constexpr int64_t PROMPT_SPAN = 1024;   // where so many queries of a prompt read it that combining costs
constexpr int64_t LEAST_PROMPT = 32;    // queries
constexpr int64_t SPAN_BYTES = 1 << 18;  // of keys and values of a span at most, of all heads
constexpr int64_t TILE_BYTES = 1 << 17;  // of a tile of all heads, up to which one thread takes all heads of a span
constexpr int64_t PARTIALS = 1 << 22;   // floats of all spans' results; beyond that spans become longer

// How a format is read: bytes of a token and head, and `attend_span` of the format.
struct Reader {
    int64_t key_bytes, value_bytes;
    void (*attend_span)(const Span &, int64_t, int64_t, Prefetch, const Partial *);
};

template <class A, class F> static Reader reader(const AttentionCall &call) {  // A: the arithmetic
    return {F(call.k_cache.dim).bytes, F(call.v_cache.dim).bytes, attend_span<A, F>};
}

// How pages and rings of a call are read.
struct Readers {
    Reader pages, rings;
};

// R: the format of the rings, and of pages that are not quantized.
template <class A, class R> static Readers readers(const AttentionCall &call) {
    const Reader rings = reader<A, R>(call);
    switch (call.page_type) {
        case INT8: return {reader<A, Int8Pages>(call), rings};
        case FP8: return {reader<A, Fp8Pages>(call), rings};
        case INT4: return {reader<A, PackedPages<4>>(call), rings};
        case INT2: return {reader<A, PackedPages<2>>(call), rings};
        default: return {rings, rings};
    }
}

static Readers readers(const AttentionCall &call) {
#if QUERY == 0
    return readers<std::conditional_t<BF16_DOT, BFloat16, Float32>, BFloat16Pages>(call);
#elif QUERY == 1
    return readers<Float32, Float32Pages>(call);
#else
    return readers<Float32, Float16Pages>(call);
#endif
}

// A call, whose units threads share: spans of some heads.
struct Work {
    AttentionCall call;
    Readers by;
    ChannelBlocks channels;
    Schedule schedule;
    Results results = {};
    int64_t at_once = 1;  // heads of a unit
    std::vector<std::atomic<int64_t>> spans_left;  // of each sequence and head: whoever finishes the last one combines

    explicit Work(const AttentionCall &call)
        : call(call), by(readers(call)), channels(call.v_cache), schedule(this->call, longest()),
          spans_left(call.batch * call.heads) {}
    Work(const Work &) = delete;  // spans point to the call

    int64_t token_bytes() const { return call.heads * (by.pages.key_bytes + by.pages.value_bytes); }
    bool is_prompt() const { return call.width >= LEAST_PROMPT; }
    int64_t longest() const {  // span
        const int64_t cached = SPAN_BYTES / token_bytes() / TILE_TOKENS * TILE_TOKENS;
        int64_t longest = std::max<int64_t>(TILE_TOKENS, std::min<int64_t>(SPAN, cached)), total = 0;
        if (is_prompt()) longest = PROMPT_SPAN;
        for (int64_t sequence = 0; sequence < call.batch; sequence++) total += call.length(sequence);
        const int64_t of_unit = channels.count * call.height();
        while (total / longest * call.heads * of_unit * TILE_BLOCKS * LANES > PARTIALS) longest *= 2;
        return longest;
    }
    // Of results that threads share. Those of the only span of a sequence stay with the thread that makes them.
    int64_t rows() const { return schedule.is_alone ? 0 : schedule.rows * call.heads; }
    int64_t units() const { return schedule.spans.size() * (call.heads / at_once); }
    const Span &span_of(int64_t unit) const { return schedule.spans[unit / (call.heads / at_once)]; }
    int64_t head_of(int64_t unit) const { return unit % (call.heads / at_once) * at_once; }

    // Where results go, and how many heads a unit has where threads share `spans`: few of a prompt are shared by heads,
    // as they take long.
    void begin(Softmax *softmax, Floats (*sums)[TILE_BLOCKS], size_t spans) {
        results = {call.heads, channels.count, softmax, sums};
        const size_t few = call.width > 16 ? 8 : 2;
        at_once = spans > few && token_bytes() * TILE_TOKENS <= TILE_BYTES ? call.heads : 1;
        for (int64_t sequence = 0; sequence < call.batch; sequence++)
            for (int64_t head = 0; head < call.heads; head++) {
                int64_t count = 0;
                schedule.for_spans(sequence, [&](int64_t, int64_t) { count++; });
                spans_left[sequence * call.heads + head] = count;
                if (count == 0) combine(call, schedule, results, channels, sequence, head);
            }
    }
    Stretch stretch(const Span &span, int64_t begin, int64_t end) const {
        const Reader &reader = span.in_ring ? by.rings : by.pages;
        const int64_t last = std::min(end, span.end);
        return {span.call, span.sequence, span.in_ring, begin, last, reader.key_bytes, reader.value_bytes};
    }
    // next, next_unit: what the thread does afterwards
    void run(int64_t unit, const Work &next, int64_t next_unit) {
        const Span &span = span_of(unit), &behind = next.span_of(next_unit);
        const int64_t head = head_of(unit);
        Prefetch ahead = {{next.stretch(behind, behind.begin, behind.end)}, next.head_of(next_unit), at_once};
        if (at_once == call.heads) {  // the next tile, up to the first of the next span
            const int64_t second = (span.begin / TILE_TOKENS + 1) * TILE_TOKENS;
            ahead.stretches[0] = stretch(span, second, span.end);
            ahead.stretches[1] = next.stretch(behind, behind.begin, behind.begin + TILE_TOKENS);
        }
        static thread_local Buffer softmaxes, sums;
        static thread_local std::vector<Partial> parts;
        Results to = results;
        if (schedule.is_alone) {
            const int64_t rows = at_once * call.height();
            to.softmax = softmaxes.get<Softmax>(rows), to.first = to.row(span, head);
            to.sums = (Floats(*)[TILE_BLOCKS])sums.get<Floats>(rows * channels.count * TILE_BLOCKS);
        }
        parts.clear();
        for (int64_t h = 0; h < at_once; h++) parts.push_back(to.of(span, head + h));
        (span.in_ring ? by.rings : by.pages).attend_span(span, head, at_once, ahead, parts.data());
        int64_t first = span.sequence, count = 1;
        for (const SharedPages &group : schedule.groups)
            if (&group.call == span.call) first = group.first, count = group.count;
        for (int64_t sequence = first; sequence < first + count; sequence++)
            for (int64_t h = head; h < head + at_once; h++)
                if (--spans_left[sequence * call.heads + h] == 0)
                    combine(call, schedule, to, channels, sequence, h);
    }
};

// Attends in `count` calls at once. Heads of one span follow each other because they share cache lines. Spans of
// prompts or of several calls differ in length: threads take the longest first.
static void attend(const std::unique_ptr<Work> *works, size_t count) {
    static thread_local Buffer softmaxes, sums;
    int64_t rows = 0, blocks = 0;
    size_t spans = 0;
    for (size_t i = 0; i < count; i++) {
        rows += works[i]->rows(), blocks += works[i]->rows() * works[i]->channels.count;
        spans += works[i]->schedule.spans.size();
    }
    Softmax *softmax = softmaxes.get<Softmax>(rows);
    Floats(*of_work)[TILE_BLOCKS] = (Floats(*)[TILE_BLOCKS])sums.get<Floats>(blocks * TILE_BLOCKS);
    for (size_t i = 0; i < count; i++) {
        works[i]->begin(softmax, of_work, spans);
        softmax += works[i]->rows(), of_work += works[i]->rows() * works[i]->channels.count;
    }
    if (count == 1 && !works[0]->is_prompt())
        return parallel(works[0]->units(), [&](int64_t unit, int64_t end) {
            for (; unit < end; unit++) works[0]->run(unit, *works[0], std::min(unit + 1, end - 1));
        });
    struct Unit {
        Work *work;
        int64_t unit, cost;
    };
    std::vector<Unit> units;
    for (size_t i = 0; i < count; i++)
        for (int64_t unit = 0; unit < works[i]->units(); unit++) {
            const Span &span = works[i]->span_of(unit);
            units.push_back({works[i].get(), unit, (span.end - span.begin) * span.call->width});
        }
    std::stable_sort(units.begin(), units.end(), [](const Unit &a, const Unit &b) { return a.cost > b.cost; });
    std::atomic<size_t> taken{0};
    parallel(units.size(), [&](int64_t, int64_t) {
        for (size_t i; (i = taken++) < units.size();) {
            const Unit &next = units[std::min(i + 1, units.size() - 1)];
            units[i].work->run(units[i].unit, *next.work, next.unit);
        }
    });
}
