// Products of x with dense bfloat16 weights by AMX, which takes rows of a weight as elsewhere it takes rows of x: so
// weights are read as they lie.

#pragma once
#include "amx.h"
#include "dense.h"

constexpr int MOST_DENSE_PRODUCTS = 4;

struct DenseProduct {  // y [rows, columns] <- x @ w [columns, width]^T + bias [columns] or null
    const uint16_t *w, *bias;
    uint16_t *y;
    int64_t columns;
};

#if AMX
constexpr int64_t AMX_COLUMNS = 2 * AMX_ROWS;  // of y at once: rows of a weight
constexpr int64_t AMX_INPUTS = 1 << 20;        // bytes of x at once, which stay in the second-level cache
constexpr int64_t KEPT_COLUMNS = 40 << 10;     // bytes of these rows of a weight that stay in the first-level cache

// x [rows, width] in blocks of 16 rows ("groups"), some at once. width: whole chunks.
class AmxInputs {
    const int64_t groups, pairs;
    Floats *const all;

  public:
    const int64_t at_once, parts;  // groups, and how many times

    AmxInputs(int64_t rows, int64_t width, Buffer &buffer)
        : groups(ceil_div(rows, LANES)), pairs(width / 2), all(buffer.get<Floats>(pairs * groups)),
          at_once(2 * ceil_div(ceil_div(groups, 2), ceil_div(groups, 2 * most_pairs(width)))),
          parts(ceil_div(groups, at_once)) {}

    // Pairs of groups.
    static int64_t most_pairs(int64_t width) { return std::max<int64_t>(1, AMX_INPUTS / (4 * LANES * width)); }
    int64_t count(int64_t part) const { return std::min(at_once, groups - part * at_once); }

    // Measured: groups side by side leave rows of a weight in the first-level cache, which are read again for every
    // two groups. Where these do not fit in it, groups that are whole are read faster.
    AmxBlocks blocks(int64_t part) const {
        const Floats *first = all + part * at_once * pairs;
        if (AMX_COLUMNS * 4 * pairs <= KEPT_COLUMNS) return AmxBlocks::side_by_side(first, count(part));
        return {first, 64, 64 * AMX_TERMS, 64 * pairs};
    }
    void lay_out(const uint16_t *x, int64_t rows) const {
        parallel_parts(groups, [&](int64_t group, int64_t end) {
            for (; group < end; group++) {
                const AmxBlocks to = blocks(group / at_once);
                Floats *block = (Floats *)to.first + group % at_once * (to.block / 64);
                ::lay_out(x + group * LANES * 2 * pairs, rows - group * LANES, 2 * pairs, to.row / 64, block);
            }
        });
    }
};

// `count` products of one x, at most MOST_DENSE_PRODUCTS.
static void dense_amx(const uint16_t *x, const DenseProduct *products, int count, int64_t rows, int64_t width) {
    static thread_local Buffer buffer;
    const AmxInputs inputs(rows, width, buffer);
    inputs.lay_out(x, rows);
    int64_t first[MOST_DENSE_PRODUCTS + 1] = {};  // panels of AMX_COLUMNS
    for (int i = 0; i < count; i++) first[i + 1] = first[i] + ceil_div(products[i].columns, AMX_COLUMNS);
    const int64_t panels = first[count], chunks = width / 2 / AMX_TERMS;
    parallel_by_claims(panels * inputs.parts, [&](Claims &claims) {
        for (int64_t unit = 0, end = 0; unit < end || claims.take(unit, end); unit++) {
            const int64_t part = unit / panels, panel = unit % panels, groups = inputs.count(part);
            const int i = std::upper_bound(first, first + count, panel) - first - 1;
            const DenseProduct &to = products[i];
            const int64_t column = (panel - first[i]) * AMX_COLUMNS;
            const int64_t columns = std::min(AMX_COLUMNS, to.columns - column);
            const AmxBlocks blocks = inputs.blocks(part);
            const Output out = {to.y, to.bias, to.columns, false};
            AmxAhead ahead;
            if (unit + 1 < end && panel + 1 < first[i + 1]) {
                ahead.read = (const char *)(to.w + (column + columns) * width);
                ahead.read_end = ahead.read + 2 * width * std::min(AMX_COLUMNS, to.columns - column - columns);
                ahead.reads = ceil_div(ahead.read_end - ahead.read, 64 * chunks * ceil_div(groups, 2));
            }
            configure_rows(columns);
            for (int64_t group = 0; group < groups; group += 2) {
                const int64_t both = std::min<int64_t>(2, groups - group);
                Words sums[AMX_COLUMNS][2];  // of a row of w and 16 rows of x
                const int64_t row = (part * inputs.at_once + group) * LANES;
                ahead.write = (char *)(to.y + row * to.columns + column), ahead.ld = 2 * to.columns;
                ahead.rows = std::min(both * LANES, rows - row), ahead.writes = ceil_div(2 * LANES, chunks);
                amx_rows_at_once<false>(both, columns, to.w + column * width, 2 * width, blocks.from(group),
                                        chunks, true, sums, sizeof(*sums), ahead);
                ahead.read += 64 * ahead.reads * chunks;
                for (int64_t b = 0; b < both; b++)
                    store_transposed(out, sums[0] + b, 2, columns, column, row + b * LANES, rows);
            }
            _tile_release();
        }
    });
}
#endif

// dense_amx, which is faster for any number of rows, where the CPU has it; else dense_rows
static void dense(const uint16_t *x, const DenseProduct *products, int count, int64_t rows, int64_t width) {
#if AMX
    if (width % (2 * AMX_TERMS) == 0 && AMX_IS_GRANTED) return dense_amx(x, products, count, rows, width);
#endif
    for (int i = 0; i < count; i++)
        dense_rows(x, products[i].w, products[i].bias, products[i].y, rows, products[i].columns, width);
}
