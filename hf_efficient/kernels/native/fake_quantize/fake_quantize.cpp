// Fake quantization of a weight and its gradient, each in one pass: coded_weights.py has the definition, in torch.
// A product is rounded before it is added to, as torch does it: what a weight rounds to is what is stored of it.

#pragma GCC optimize("fp-contract=off")
#pragma STDC FP_CONTRACT OFF

#include "elementwise.h"
#include "layout.h"

struct FakeQuantization {   // mirrored in kernels/linear/fake_quantize.py
    const float *weight;    // [rows, columns]
    const float *scale;     // [rows, groups]
    const float *zero;      // [rows, groups]
    void *rounded;          // [rows, columns] of `type`
    const void *gradient;   // [rows, columns] of `type`; null in the forward
    float *passed;          // [rows, columns]: the gradient of the weight
    float *of_scale;        // [rows, groups]: that of the logarithm of the scale
    int64_t rows, columns, width;  // width: columns of a group; the last one may have fewer
    int64_t type, works_in_type;   // works_in_type: levels are computed in `type`, else in float
    int64_t low, high, passes_all;
};

EXPORT_LAYOUTS(LAYOUT(FakeQuantization, weight, scale, zero, rounded, gradient, passed, of_scale, rows, columns, width,
                      type, works_in_type, low, high, passes_all))

static INLINE Floats in_type(Floats x, int64_t type) {
    return type == BFLOAT16 ? widen(narrow(x)) : type == HALF ? from_float16(to_float16(x)) : x;
}

static INLINE Floats load_typed(const void *data, int64_t type, int64_t at, int64_t count) {
    if (type == FLOAT) return load_some((const float *)data + at, count);
    const Halves halves = load_some((const uint16_t *)data + at, count);
    return type == HALF ? from_float16(halves) : widen(halves);
}

static INLINE float inverse(float scale) {
    const float found = 1 / scale;
    return std::isfinite(found) ? found : 0;
}

template <int TYPE> static void round_group(const FakeQuantization &call, int64_t at, int64_t count, int64_t group) {
    const int64_t type = call.works_in_type ? TYPE : FLOAT;
    const float scale = call.scale[group], zero = call.zero[group];
    const Floats to_steps = splat(inverse(scale)), shift = splat(zero), low = splat(call.low), high = splat(call.high);
    const Floats middle = in_type(splat(zero), type), step = in_type(splat(scale), type);
    for (int64_t end = at + count; at < end; at += LANES) {
        const int64_t some = std::min<int64_t>(LANES, end - at);
        const Floats position = load_some(call.weight + at, some) * to_steps + shift;
        const Floats inside = select(position < low, low, select(position > high, high, position));
        const Floats value = in_type(in_type(nearest_whole(inside) - middle, type) * step, type);
        if (TYPE == FLOAT) store_some((float *)call.rounded + at, some, value);
        else store_some((uint16_t *)call.rounded + at, some, TYPE == HALF ? to_float16(value) : narrow(value));
    }
}

template <int TYPE> static void pass_group(const FakeQuantization &call, int64_t at, int64_t count, int64_t group) {
    const Floats to_steps = splat(inverse(call.scale[group])), shift = splat(call.zero[group]);
    const Floats low = splat(call.low - 0.5f), high = splat(call.high + 0.5f), none = splat(0);
    Floats total = none;
    for (int64_t end = at + count; at < end; at += LANES) {
        const int64_t some = std::min<int64_t>(LANES, end - at);
        const Floats weight = load_some(call.weight + at, some), gradient = load_typed(call.gradient, TYPE, at, some);
        const Floats position = weight * to_steps + shift;
        const Floats inside = select((position > low) & (position < high), gradient, none);
        total += load_typed(call.rounded, TYPE, at, some) * gradient - inside * weight;
        store_some(call.passed + at, some, call.passes_all ? gradient : inside);
    }
    call.of_scale[group] = sum(total);
}

template <int TYPE> static void run(const FakeQuantization &call) {
    const int64_t groups = ceil_div(call.columns, call.width);
    parallel(call.rows, [&](int64_t row, int64_t end) {
        for (; row < end; row++)
            for (int64_t group = 0; group < groups; group++) {
                const int64_t first = group * call.width, count = std::min(call.width, call.columns - first);
                const auto one = call.gradient ? pass_group<TYPE> : round_group<TYPE>;
                one(call, row * call.columns + first, count, row * groups + group);
            }
    });
}

extern "C" void hf_fake_quantize(const FakeQuantization *call) {
    switch (call->type) {
        case FLOAT: return run<FLOAT>(*call);
        case BFLOAT16: return run<BFLOAT16>(*call);
        default: return run<HALF>(*call);
    }
}
