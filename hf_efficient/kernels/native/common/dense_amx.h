// The products of dense.h by AMX (tier amx, widths that are multiples of 32). Where x is small it is laid out as AMX
// reads it, and weights are read as they lie; else it is the other way round.

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
constexpr int64_t AMX_COLUMNS = 2 * AMX_ROWS;  // of y at once
constexpr int64_t INPUTS_AT_ONCE = 1 << 20;    // bytes of x that stay in the second-level cache
constexpr int64_t FEW_INPUTS = 400 << 10;      // bytes of x: with more it pays to lay out weights instead (measured),
constexpr int64_t LEAST_SHARING = 256;         // where so many rows stay in that cache and share what is laid out

// The columns of some products of one x from `row` on, in panels of AMX_COLUMNS.
class DensePanels {
    const DenseProduct *products;
    int64_t row;
    int64_t first[MOST_DENSE_PRODUCTS + 1] = {};

  public:
    int64_t count;

    DensePanels(const DenseProduct *products, int of, int64_t row) : products(products), row(row) {
        for (int i = 0; i < of; i++) first[i + 1] = first[i] + ceil_div(products[i].columns, AMX_COLUMNS);
        count = first[of];
    }
    struct Panel {
        Output out;
        const uint16_t *w;  // its rows of the weight
        int64_t width, column, columns, left;  // left: columns of the product behind the panel

        // Asks for the rows of the weight behind these in `steps` products of `chunks`.
        AmxAhead ahead(int64_t steps, int64_t chunks) const {
            AmxAhead ahead;
            ahead.ld = 2 * out.columns, ahead.writes = ceil_div(2 * LANES, chunks);
            ahead.read = (const char *)(w + columns * width);
            ahead.read_end = ahead.read + 2 * width * std::min(AMX_COLUMNS, left);
            ahead.reads = ceil_div(ahead.read_end - ahead.read, 64 * chunks * steps);
            return ahead;
        }
        char *at(int64_t row) const { return (char *)((uint16_t *)out.y + row * out.columns + column); }
    };
    Panel get(int64_t number, int64_t width) const {
        int i = 0;
        while (number >= first[i + 1]) i++;
        const DenseProduct &of = products[i];
        const int64_t column = (number - first[i]) * AMX_COLUMNS;
        const int64_t columns = std::min(AMX_COLUMNS, of.columns - column);
        return {{of.y + row * of.columns, of.bias, of.columns, false}, of.w + column * width, width, column, columns,
                of.columns - column - columns};
    }
};

// Few rows of x: these are laid out, and weights are read as they lie.
static void dense_amx_few(const uint16_t *x, const DensePanels &panels, int64_t rows, int64_t width) {
    static thread_local Buffer buffer;
    const int64_t groups = ceil_div(rows, LANES), pairs = width / 2, chunks = pairs / AMX_TERMS;
    Floats *const all = buffer.get<Floats>(pairs * groups);
    parallel_parts(groups, [&](int64_t group, int64_t end) {
        for (; group < end; group++)
            lay_out(x + group * LANES * width, rows - group * LANES, width, 1, all + group * pairs);
    });
    const AmxBlocks blocks = {all, 64, 64 * AMX_TERMS, 64 * pairs};
    parallel_by_claims(panels.count, [&](Claims &claims) {
        Tiles configured;
        for (int64_t unit = 0, end = 0; unit < end || claims.take(unit, end); unit++) {
            const auto panel = panels.get(unit, width);
            AmxAhead ahead = panel.ahead(ceil_div(groups, 2), chunks);
            configured.configure(panel.columns);
            for (int64_t group = 0; group < groups; group += 2) {
                const int64_t both = std::min<int64_t>(2, groups - group), row = group * LANES;
                Words sums[AMX_COLUMNS][2];  // of a row of the weight and 16 rows of x
                ahead.write = panel.at(row), ahead.rows = std::min<int64_t>(2 * LANES, rows - row);
                amx_rows_at_once<false>(both, panel.columns, panel.w, 2 * width, blocks.from(group), chunks, true, sums,
                                        sizeof(*sums), ahead);
                for (int64_t b = 0; b < both; b++)
                    store_transposed(panel.out, sums[0] + b, 2, panel.columns, panel.column, row + b * LANES, rows);
            }
        }
    });
}

// Many rows of x, which are read as they lie: weights are laid out, once for `most` rows, which stay in the cache.
static void dense_amx_many(const uint16_t *x, const DensePanels &panels, int64_t rows, int64_t width, int64_t most) {
    constexpr int64_t BOTH = 2 * AMX_ROWS;
    const int64_t pairs = width / 2, chunks = pairs / AMX_TERMS;
    const int64_t at_once = ceil_div(ceil_div(rows, ceil_div(rows, most)), BOTH) * BOTH;
    parallel_by_claims(panels.count * ceil_div(rows, at_once), [&](Claims &claims) {
        static thread_local Buffer buffer;
        Floats *const tiles = buffer.get<Floats>(2 * pairs);
        Tiles configured;
        for (int64_t unit = 0, end = 0; unit < end || claims.take(unit, end); unit++) {
            const auto panel = panels.get(unit % panels.count, width);
            const int64_t first = unit / panels.count * at_once, last = std::min(first + at_once, rows);
            const int64_t blocks = ceil_div(panel.columns, LANES);
            for (int64_t b = 0; b < blocks; b++)
                lay_out(panel.w + b * LANES * width, panel.columns - b * LANES, width, 1, tiles + b * pairs);
            AmxAhead ahead = panel.ahead(ceil_div(last - first, BOTH), chunks);
            for (int64_t row = first; row < last; row += BOTH) {
                const int64_t count = std::min(BOTH, last - row);
                configured.configure(count);
                Floats sums[BOTH][2];  // of a row of x and 16 columns
                ahead.write = panel.at(row), ahead.rows = count;
                amx_rows_at_once<false>(blocks, count, x + row * width, 2 * width,
                                        {tiles, 64, 64 * AMX_TERMS, 64 * pairs}, chunks, true, sums, sizeof(*sums),
                                        ahead);
                for (int64_t i = 0; i < count; i++)
                    for (int64_t b = 0; b < blocks; b++)
                        panel.out.store(row + i, panel.column + b * LANES, sums[i][b]);
            }
        }
    });
}

// `count` products of one x, at most MOST_DENSE_PRODUCTS.
static void dense_amx(const uint16_t *x, const DenseProduct *products, int count, int64_t rows, int64_t width) {
    const int64_t at_once = std::max<int64_t>(2, INPUTS_AT_ONCE / (2 * LANES * width)) * LANES;
    if (2 * rows * width > FEW_INPUTS && at_once >= LEAST_SHARING)
        return dense_amx_many(x, DensePanels(products, count, 0), rows, width, at_once);
    for (int64_t row = 0; row < rows; row += at_once)
        dense_amx_few(x + row * width, DensePanels(products, count, row), std::min(at_once, rows - row), width);
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
