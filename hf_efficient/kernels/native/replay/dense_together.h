// Neighbouring DENSE instructions of one x in bfloat16, which run as products of several weights.

#pragma once
#include "dense_tiles.h"
#include "instruction.h"

static bool overlap(const void *a, int64_t bytes_of_a, const void *b, int64_t bytes_of_b) {
    return (const char *)a < (const char *)b + bytes_of_b && (const char *)b < (const char *)a + bytes_of_a;
}

// Whether the product `later` writes what `earlier` reads, or the other way round, or where it writes. All of one x.
static bool must_wait(const Instruction &later, const Instruction &earlier) {
    auto writes_what_is_read = [](const Instruction &one, const Instruction &other) {
        const int64_t bytes = 2 * one.sizes[1] * one.sizes[2], columns = other.sizes[2];
        return overlap(one.y.data, bytes, other.b.data, 2 * columns * other.sizes[3]) ||
               (other.c.data && overlap(one.y.data, bytes, other.c.data, 2 * columns)) ||
               overlap(one.y.data, bytes, other.y.data, 2 * other.sizes[1] * columns);
    };
    return writes_what_is_read(later, earlier) || writes_what_is_read(earlier, later);
}

// The product `in`, and those behind it of the same x. Returns how many these are, of `left` instructions.
static int64_t dense_together(const Instruction *in, int64_t left) {
    DenseProduct products[MOST_DENSE_PRODUCTS];
    int64_t count = 0;
    for (; count < std::min<int64_t>(left, MOST_DENSE_PRODUCTS); count++) {
        const Instruction &at = in[count];
        if (at.op != DENSE || at.a.data != in->a.data || at.a.type != in->a.type || at.sizes[1] != in->sizes[1] ||
            at.sizes[3] != in->sizes[3])
            break;
        if (std::any_of(in, in + count, [&](const Instruction &earlier) { return must_wait(at, earlier); })) break;
        products[count] = {(const uint16_t *)at.b.data, (const uint16_t *)at.c.data, (uint16_t *)at.y.data,
                           at.sizes[2]};
    }
    dense_products((const uint16_t *)in->a.data, products, count, in->sizes[1], in->sizes[3]);
    return count;
}
