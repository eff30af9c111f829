// The tail-biting path of a bitshift trellis (QTIP, https://arxiv.org/abs/2406.11235) whose values are nearest to given
// numbers. kernels/linear/trellis_search.py holds the same search in torch, of which this one returns the bits.
//
// A state is a window of STATE_BITS bits of a circular stream; the next state begins some bits further. The search runs
// from the end to the beginning: the cost of a state is its own error and the least cost of its successors, which have
// the state's high bits as their low ones. States with the same successors are a group. A first search, around the seam
// and with free ends, finds the state at the beginning; the second one begins and ends in it.

#include <utility>

#include "layout.h"
#include "metrics.h"

constexpr int STATE_BITS = 14, STATES = 1 << STATE_BITS;
constexpr int FRACTION = 7;    // bits of the numbers behind the point
constexpr int LARGEST = 255;   // of the magnitudes of the numbers
constexpr uint16_t FAR = 65535;

struct Search {  // mirrored in kernels/linear/trellis_search.py
    const float *numbers;       // [columns, rows]
    const int8_t *values;       // [STATES]
    const uint8_t *steps;       // [padded]: bits between the window of a row and that of the next one
    const int64_t *sequences;   // [count + 1]: first rows
    uint8_t *codes;             // [columns, padded]: the lowest bits of the states, as many as the row has steps
    int8_t *found;              // [columns, padded]: the values of the states
    int64_t columns, rows, padded, count;
    int64_t reach;              // rows on either side of the seam in the first search
};

EXPORT_LAYOUTS(LAYOUT(Search, numbers, values, steps, sequences, codes, found, columns, rows, padded, count, reach))

// The least cost of each group of successors, of a row and of the row behind.
struct Costs {
    uint16_t both[2][STATES / 2 + 64];
    uint16_t *now, *next;
};

// `now` of a row of K bits from `next`, for the row before it, of BEFORE bits; `back` [STATES >> BEFORE] is which state
// of the row each of its groups takes. From all costs `shift` is taken. Returns the least of `now`.
template <int K, int BEFORE>
static uint16_t step(Costs &costs, const int8_t *values, int16_t number, uint16_t shift, uint8_t *back) {
    constexpr int GROUPS = STATES >> BEFORE, CHOICES = 1 << BEFORE, COUNT = Metrics::COUNT;
    const Metrics minus = Metrics::splat(number);
    Metrics least = Metrics::splat(0xffff);
    for (int g = 0; g < GROUPS; g += COUNT) {
        Metrics best = Metrics::splat(FAR), choice = Metrics::splat(0);
#pragma GCC unroll 16
        for (int s = g, c = 0; c < CHOICES; c++, s += GROUPS) {
            const Metrics error = square(difference(shifted_up<FRACTION>(Metrics::load_signed(values + s)), minus));
            best.least(saturated(repeated<K>(costs.next + (s >> K)), error), choice, c);
        }
        choice.store_bytes(back + g);
        least = smaller(least, best);
        (best - Metrics::splat(shift)).store(costs.now + g);
    }
    uint16_t each[COUNT];
    least.store(each);
    return *std::min_element(each, each + COUNT) - shift;
}

struct Path {
    const Search &search;
    const float *numbers;
    int64_t first, length;
    Costs &costs;
    uint8_t *back;  // [rows of a search, STATES / 2]

    // Visits `count` rows down from row `last` (of the sequence, circular), of which `back` gets the choices.
    void visit(int64_t last, int64_t count) {
        static const int8_t none[STATES] = {};
        uint16_t shift = 0;
        for (int64_t i = 0; i < count; i++) {
            const int64_t row = first + wrapped(last - i), bits = bits_of(last - i), before = bits_of(last - i - 1);
            const bool counts = row < search.rows;
            const float number = counts ? std::max(-float(LARGEST), std::min(float(LARGEST), numbers[row])) : 0;
            const int8_t *values = counts ? search.values : none;
            const int16_t rounded = (int16_t)__builtin_lrintf(number * (1 << FRACTION));
            uint8_t *to = back + i * (STATES / 2);
#define STEP(K, BEFORE) \
    if (bits == K && before == BEFORE) shift = step<K, BEFORE>(costs, values, rounded, shift, to)
            STEP(1, 2);
            STEP(2, 1);
            STEP(2, 2);
            STEP(2, 3);
            STEP(3, 2);
            STEP(3, 3);
            STEP(3, 4);
            STEP(4, 3);
            STEP(4, 4);
            STEP(4, 5);
            STEP(5, 4);
            STEP(5, 5);
#undef STEP
            std::swap(costs.now, costs.next);
        }
    }
    int64_t bits_of(int64_t row) const { return search.steps[first + wrapped(row)]; }
    int64_t wrapped(int64_t row) const { return ((row % length) + length) % length; }
    // the state behind that of `row`, by the choices of the i-th visited row
    int follow(int state, int64_t row, int64_t i) const {
        const int bits = bits_of(row), group = state >> bits;
        return back[i * (STATES / 2) + group] << (STATE_BITS - bits) | group;
    }

    void find(uint8_t *codes, int8_t *found) {
        const int64_t reach = search.reach;
        costs.now = costs.both[0], costs.next = costs.both[1];
        std::fill(costs.next, costs.next + STATES / 2, 0);
        visit(reach - 1, 2 * reach);
        const int group = std::min_element(costs.next, costs.next + (STATES >> bits_of(-reach - 1))) - costs.next;
        int state = follow(group << bits_of(-reach - 1), -reach - 1, 2 * reach - 1);
        for (int64_t row = -reach; row < 0; row++) state = follow(state, row, reach - 2 - row);
        std::fill(costs.next, costs.next + STATES / 2, FAR);
        costs.next[state & ((STATES >> bits_of(length - 1)) - 1)] = 0;
        visit(length - 1, length - 1);
        for (int64_t row = 0; row < length; row++) {
            codes[first + row] = state & ((1 << bits_of(row)) - 1);
            if (row < length - 1) state = follow(state, row, length - 2 - row);
        }
        // read from the codes: numbers that are all far off may lead the path into another state than it began in
        state = 0;
        for (int64_t row = STATE_BITS - 1; row > -length; row--) {
            const int64_t at = first + wrapped(row);
            state = (state << bits_of(row) | codes[at]) & (STATES - 1);
            found[at] = search.values[state];
        }
    }
};

extern "C" void hf_viterbi(const Search *search) {
    int64_t longest = 0;
    for (int64_t i = 0; i < search->count; i++)
        longest = std::max(longest, search->sequences[i + 1] - search->sequences[i]);
    parallel(search->columns * search->count, [&](int64_t unit, int64_t end) {
        static thread_local Buffer buffers[2];
        Costs &costs = *buffers[0].get<Costs>(1);
        uint8_t *back = buffers[1].get<uint8_t>(std::max(longest, 2 * search->reach) * (STATES / 2));
        for (; unit < end; unit++) {
            const int64_t column = unit / search->count, *first = search->sequences + unit % search->count;
            Path path{*search, search->numbers + column * search->rows, first[0], first[1] - first[0], costs, back};
            path.find(search->codes + column * search->padded, search->found + column * search->padded);
        }
    });
}
