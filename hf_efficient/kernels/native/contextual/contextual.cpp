// A feed-forward layer that computes only the neurons that a row of x activates: their rows of the first weights, and
// their rows of the last one, which is stored transposed. The order of each sum does not depend on the number of
// threads.

#include <array>

#include "dense_amx.h"
#include "layout.h"

enum Activation : int64_t { RELU, RELU_SQUARED, SILU, GELU, GELU_TANH };

struct ContextualCall {  // mirrored in kernels/linear/contextual_mlp.py
    int64_t rows, hidden, neurons, rank, activation;
    const uint16_t *x, *project;           // [rows, hidden], [rank, hidden]
    const uint16_t *score, *score_up;      // [neurons, rank], or null
    const uint16_t *limit, *spread;        // [neurons]; spread null without score_up
    const uint16_t *gate, *gate_bias;      // [neurons, hidden], [neurons]
    const uint16_t *up, *up_bias;          // as gate
    const uint16_t *down, *down_bias;      // [neurons, hidden], [hidden]
    uint16_t *y;                           // [rows, hidden]
};

EXPORT_LAYOUTS(LAYOUT(ContextualCall, rows, hidden, neurons, rank, activation, x, project, score, score_up, limit,
                      spread, gate, gate_bias, up, up_bias, down, down_bias, y))

constexpr int MOST_ROWS = 32;  // bits of a neuron's mask; kernels/linear/contextual_mlp.py has the same number
constexpr int PARTS = 16;  // of the chosen neurons, each summed in order; their number does not depend on the threads

static INLINE Floats activate(int64_t activation, Floats x) {
    switch (activation) {
    case RELU: return select(x > 0.0f, x, splat(0.0f));
    case RELU_SQUARED: return x = select(x > 0.0f, x, splat(0.0f)), x * x;
    case SILU: return x / (splat(1.0f) + exponential(-x));
    default:
        float lanes[LANES];
        *(Floats *)lanes = x;
        for (float &v : lanes)
            v = activation == GELU ? 0.5f * v * (1 + std::erf(v * 0.70710678f))
                                   : 0.5f * v * (1 + std::tanh(0.79788456f * (v + 0.044715f * v * v * v)));
        return *(const Floats *)lanes;
    }
}

// x . each of 16 rows; prefetches the rows `next`
static INLINE Floats products(const uint16_t *const (&rows)[SUMS], const uint16_t *const (&next)[SUMS],
                              const uint16_t *x, int64_t width) {
    constexpr int AT_ONCE = SUMS_IN_REGISTERS;
    Floats all[SUMS];
#pragma GCC unroll 1
    for (int first = 0; first < SUMS; first += AT_ONCE) {
        Floats sums[AT_ONCE] = {};
        for_terms<1>(width, [&](int64_t k, int64_t count, int) __attribute__((always_inline)) {
            const Terms values = load_terms(x + k, count);
#pragma GCC unroll 16
            for (int j = 0; j < AT_ONCE; j++) {
                __builtin_prefetch(next[first + j] + k);
                sums[j] = dot(sums[j], load_terms(rows[first + j] + k, count), values);
            }
        });
#pragma GCC unroll 16
        for (int j = 0; j < AT_ONCE; j++) all[first + j] = sums[j];
    }
    return sums_of_lanes(all);
}

// The rows of `weight` of elements `first` to first + 15 of `chosen` (null: of 0, 1, ...), the last one again behind
// the end.
static INLINE void point(const uint16_t *(&rows)[SUMS], const uint16_t *weight, const int32_t *chosen, int64_t first,
                         int64_t count, int64_t width) {
    for (int j = 0; j < SUMS; j++) {
        const int64_t index = std::min(first + j, count - 1);
        rows[j] = weight + (chosen ? chosen[index] : index) * width;
    }
}

static INLINE Floats with_bias(Floats sums, const uint16_t *bias, const int32_t *chosen, int64_t first, int64_t count) {
    if (!bias) return sums;
    float biases[SUMS];
    for (int j = 0; j < SUMS; j++) {
        const int64_t index = std::min(first + j, count - 1);
        biases[j] = bfloat16_value(bias[chosen ? chosen[index] : index]);
    }
    return sums + *(const Floats *)biases;
}

static INLINE Floats some(const float *values, int64_t first, int64_t count) {
    return load_some(values + first, count - first);
}

static INLINE Floats some(const uint16_t *values, int64_t first, int64_t count) {
    return widen(load_some(values + first, count - first));
}

// Calls body(row, index, its 16 products with each of `weights`) for every 16 indices of this thread's part, rows in
// turn.
template <int WEIGHTS, class F>
static INLINE void for_tiles(const ContextualCall &call, const uint16_t *const (&weights)[WEIGHTS], int64_t width,
                             const uint16_t *x, const int32_t *chosen, int64_t count, F body) {
    parallel(ceil_div(count, SUMS), [&](int64_t tile, int64_t end) {
        const uint16_t *rows[WEIGHTS][SUMS], *next[WEIGHTS][SUMS];
        for (int w = 0; w < WEIGHTS; w++) point(rows[w], weights[w], chosen, tile * SUMS, count, width);
        for (; tile < end; tile++) {
            for (int w = 0; w < WEIGHTS; w++)
                point(next[w], weights[w], chosen, std::min(tile + 1, end - 1) * SUMS, count, width);
            for (int64_t row = 0; row < call.rows; row++) {
                Floats sums[WEIGHTS];
                for (int w = 0; w < WEIGHTS; w++) sums[w] = products(rows[w], next[w], x + row * width, width);
                body(row, tile * SUMS, sums);
            }
            memcpy(rows, next, sizeof rows);
        }
    });
}

struct Scratch {
    uint16_t *inner;  // [rows, rank]
    float *values;    // [rows, room]: of all neurons while they are chosen, then of the chosen ones
    Words *masks;     // [room]: which rows of x call for a neuron
    int32_t *chosen;  // [room]
    int64_t room;     // neurons, rounded up to a whole vector
    float *at(int64_t row, int64_t index) const { return values + row * room + index; }
    Words &mask(int64_t index) const { return masks[index / LANES]; }
};

static INLINE void mark(const Scratch &to, int64_t row, int64_t first, int64_t neurons, Ints calls) {
    const Ints indices = lane_numbers();
    to.mask(first) |= (Words)(calls & (indices < int32_t(neurons - first)) & 1) << uint32_t(row);
}

// masks <- the neurons whose predicted contribution is large enough
static void predict(const ContextualCall &call, const Scratch &to) {
    const DenseProduct inner = {call.project, nullptr, to.inner, call.rank};
    dense(call.x, &inner, 1, call.rows, call.hidden);
    const int64_t count = call.neurons;
    if (!call.score_up)
        return for_tiles<1>(call, {call.score}, call.rank, to.inner, nullptr, count,
                            [&](int64_t row, int64_t first, const Floats *scores) __attribute__((always_inline)) {
                                mark(to, row, first, count, scores[0] > some(call.limit, first, count));
                            });
    for_tiles<2>(call, {call.score, call.score_up}, call.rank, to.inner, nullptr, count,
                 [&](int64_t row, int64_t first, const Floats *scores) __attribute__((always_inline)) {
                     const Floats gate = activate(call.activation, scores[0]), up = scores[1];
                     const Floats spread = some(call.spread, first, count), limit = some(call.limit, first, count);
                     mark(to, row, first, count, (gate * gate + spread) * (up * up + limit) > 1.0f);
                 });
}

// values, masks <- the activations of all neurons, and which of them are large enough
static void threshold(const ContextualCall &call, const Scratch &to) {
    for_tiles<1>(call, {call.gate}, call.hidden, call.x, nullptr, call.neurons,
                 [&](int64_t row, int64_t first, const Floats *sums) __attribute__((always_inline)) {
                     const Floats value =
                         activate(call.activation, with_bias(sums[0], call.gate_bias, nullptr, first, call.neurons));
                     *(Floats *)to.at(row, first) = value;
                     mark(to, row, first, call.neurons,
                          absolute(value) > some(call.limit, first, call.neurons));
                 });
}

// The number of chosen neurons, which stand in `chosen`, their masks and values without gaps.
static int64_t gather(const ContextualCall &call, const Scratch &to) {
    int64_t count = 0;
    Ints indices = lane_numbers();
    for (int64_t first = 0; first < to.room; first += LANES, indices += LANES) {
        const Words wanted = to.mask(first);
        store_marked(to.chosen + count, indices, wanted);
        store_marked((uint32_t *)to.masks + count, wanted, wanted);
        if (!call.rank)
            for (int64_t row = 0; row < call.rows; row++)
                store_marked(to.at(row, count), *(Floats *)to.at(row, first), wanted);
        for (int j = 0; j < LANES; j++) count += wanted[j] != 0;
    }
    return count;
}

// sums [hidden, rounded up to a whole vector] += values . 16 rows of the last weight; brings `next` rows near
static INLINE void add_rows(const uint16_t *const (&rows)[SUMS], const uint16_t *const (&next)[SUMS], Floats values,
                            float *sums, int64_t hidden) {
    for (int64_t k = 0; k < hidden; k += LANES) {
        Floats chains[4] = {*(Floats *)(sums + k)};
#pragma GCC unroll 16
        for (int j = 0; j < SUMS; j++) {
            const Halves halves = load_some(rows[j] + k, hidden - k);
            if (k % (2 * LANES) == 0) __builtin_prefetch(next[j] + k);
            chains[j % 4] = dot(chains[j % 4], widen(halves), values[j]);
        }
        *(Floats *)(sums + k) = (chains[0] + chains[1]) + (chains[2] + chains[3]);
    }
}

// What 16 chosen neurons from index `first` on give to row `row`, 0 where it does not call for them.
static INLINE Floats contribution(const ContextualCall &call, const Scratch &to, int64_t count, int64_t row,
                                  int64_t first, const Floats *sums) {
    Floats value = *(Floats *)to.at(row, first);
    if (call.rank) value = activate(call.activation, with_bias(*sums++, call.gate_bias, to.chosen, first, count));
    if (call.up) value *= with_bias(*sums, call.up_bias, to.chosen, first, count);
    const Ints indices = lane_numbers();
    const Ints calls = (Ints)(to.mask(first) >> uint32_t(row) & 1) != 0;
    return select(calls & (indices < int32_t(count - first)), value, splat(0.0f));
}

// partial [PARTS, rows, wide] <- what each part of the chosen neurons gives; WEIGHTS of a neuron are still to be
// multiplied with x
template <int WEIGHTS>
static void multiply(const ContextualCall &call, const Scratch &to, int64_t count, const uint16_t *const *weights,
                     float *partial, int64_t wide) {
    const int64_t tiles = ceil_div(count, SUMS), hidden = call.hidden;
    parallel(PARTS, [&](int64_t part, int64_t last) {
        const uint16_t *rows[WEIGHTS + 1][SUMS], *next[WEIGHTS + 1][SUMS];
        auto locate = [&](const uint16_t *(&to_rows)[WEIGHTS + 1][SUMS], int64_t tile) __attribute__((always_inline)) {
            for (int w = 0; w <= WEIGHTS; w++)
                point(to_rows[w], w < WEIGHTS ? weights[w] : call.down, to.chosen, std::min(tile, tiles - 1) * SUMS,
                      count, hidden);
        };
        locate(rows, tiles * part / PARTS);
        for (; part < last; part++) {
            float *sums = partial + part * call.rows * wide;
            memset(sums, 0, 4 * call.rows * wide);
            for (int64_t tile = tiles * part / PARTS; tile < tiles * (part + 1) / PARTS; tile++) {
                locate(next, tile + 1);
                for (int64_t row = 0; row < call.rows; row++) {
                    Floats found[WEIGHTS + 1];
                    for (int w = 0; w < WEIGHTS; w++)
                        found[w] = products(rows[w], next[w], call.x + row * hidden, hidden);
                    add_rows(rows[WEIGHTS], next[WEIGHTS], contribution(call, to, count, row, tile * SUMS, found),
                             sums + row * wide, hidden);
                }
                memcpy(rows, next, sizeof rows);
            }
        }
    });
}

static void finish(const ContextualCall &call, const float *partial, int64_t wide) {
    for (int64_t row = 0; row < call.rows; row++)
        for (int64_t k = 0; k < call.hidden; k += LANES) {
            Floats sum = call.down_bias ? some(call.down_bias, k, call.hidden) : splat(0.0f);
            for (int part = 0; part < PARTS; part++)
                sum += *(const Floats *)(partial + (part * call.rows + row) * wide + k);
            const Halves halves = narrow(sum);
            memcpy(call.y + row * call.hidden + k, &halves, 2 * std::min<int64_t>(LANES, call.hidden - k));
        }
}

extern "C" int hf_contextual_mlp(const ContextualCall *given) {
    const ContextualCall &call = *given;
    if (call.rows > MOST_ROWS) return 0;
    static thread_local Buffer buffers[5];
    const int64_t room = ceil_div(call.neurons, LANES) * LANES, wide = room + LANES;
    const Scratch scratch = {buffers[0].get<uint16_t>(call.rows * call.rank + 1),
                             buffers[1].get<float>(call.rows * room + LANES), (Words *)buffers[2].get<uint32_t>(wide),
                             buffers[3].get<int32_t>(wide), room};
    memset(scratch.masks, 0, 4 * room);
    if (call.rank) predict(call, scratch);
    else threshold(call, scratch);
    const int64_t count = gather(call, scratch), padded = ceil_div(call.hidden, LANES) * LANES;
    float *partial = buffers[4].get<float>(PARTS * call.rows * padded);
    if (!count) memset(partial, 0, 4 * PARTS * call.rows * padded);
    else if (call.rank && call.up)
        multiply<2>(call, scratch, count, std::array{call.gate, call.up}.data(), partial, padded);
    else if (call.rank || call.up)
        multiply<1>(call, scratch, count, call.rank ? &call.gate : &call.up, partial, padded);
    else multiply<0>(call, scratch, count, nullptr, partial, padded);
    finish(call, partial, padded);
    return 1;
}
