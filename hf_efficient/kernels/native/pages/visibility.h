// Which keys the queries of a sequence see, and how far away they are (in torch: kernels/attention/masks.py).

#pragma once
#include "page_call.h"

struct Visibility {
    int64_t length, width, left, right;
    const uint64_t *ancestors;  // bits of the tree's nodes that each query sees, or null

    Visibility(const AttentionCall &call, int64_t sequence)
        : length(call.length(sequence)), width(call.width), left(call.left), right(call.right),
          ancestors(call.tree_mask ? (const uint64_t *)call.tree_mask + sequence * call.width : nullptr) {}

    int64_t first_new() const { return length - width; }
    int64_t position(int64_t query) const {  // in a tree: behind its ancestors
        return first_new() + (ancestors ? __builtin_popcountll(ancestors[query] & bits_below(width)) - 1 : query);
    }
    int64_t key_position(int64_t token) const {
        return ancestors && token >= first_new() ? position(token - first_new()) : token;
    }
    int64_t first_seen() const { return left < 0 ? 0 : std::max<int64_t>(0, first_new() - left); }

    // A bit for each of the `count` tokens from `start` on that the query sees.
    uint64_t seen(int64_t query, int64_t start, int64_t count) const {
        const int64_t at = position(query), low = left < 0 ? 0 : at - left;
        int64_t high = length;
        if (ancestors) high = std::max<int64_t>(0, first_new());
        else if (right >= 0) high = std::min(length, at + right + 1);
        uint64_t result = bits_below(high - start) & ~bits_below(low - start);
        if (ancestors) {
            uint64_t nodes = ancestors[query] & bits_below(width);
            for (int64_t node = 0; node < width && left >= 0; node++)
                if (position(node) < low) nodes &= ~(1ull << node);
            const int64_t shift = first_new() - start;  // the bit of node 0
            if (shift >= 0) result |= shift < 64 ? nodes << shift : 0;
            else result |= -shift < 64 ? nodes >> -shift : 0;
        }
        return result & bits_below(std::min(count, length - start));
    }
};
