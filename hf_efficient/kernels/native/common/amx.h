// Products of tiles by AMX (tier amx), 16 x 16 results at a time: int32 sums of signed bytes of x times unsigned ones
// of W, or float sums of pairs of bfloat16. A tile of W stands in memory as AMX reads it: for each 4 bytes of a row of
// x, those of 16 rows of W.

#pragma once
#include "vectors.h"

constexpr int LEAST_AMX_ROWS = 5;  // of x; with fewer the vector units are faster

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>

constexpr int AMX_ROWS = 16;   // of a tile
constexpr int AMX_TERMS = 16;  // of 4 bytes in a row of a tile

// The system grants a process the use of tiles once.
static const bool AMX_IS_GRANTED = [] {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}();

struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 blocks of W. A thread's tiles are configured while one or more of
// these live: to configure and release them takes as long as some products, so one that lives longer saves it.
class Tiles {
    static inline thread_local int64_t users = 0, first = 0, second = 0;

  public:
    Tiles() { users++; }
    Tiles(const Tiles &) = delete;
    ~Tiles() {
        if (--users || !first) return;
        _tile_release();
        first = 0;
    }
    // first_rows, second_rows: 1 to AMX_ROWS, of x, in tiles 4 and 5
    INLINE void configure(int64_t first_rows, int64_t second_rows) {
        if (first_rows == first && second_rows == second) return;
        first = first_rows, second = second_rows;
        TileConfig config;
        for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = AMX_TERMS;
        config.rows[0] = config.rows[1] = config.rows[4] = first_rows;
        config.rows[2] = config.rows[3] = config.rows[5] = second_rows;
        _tile_loadconfig(&config);
    }
    // for up to 2 * AMX_ROWS rows of x
    INLINE void configure(int64_t rows) {
        configure(std::min<int64_t>(rows, AMX_ROWS), rows > AMX_ROWS ? rows - AMX_ROWS : rows);
    }
};

// Blocks of W, or of what stands in its place: 16 columns each, in chunks of 64 bytes of a row of x.
struct AmxBlocks {
    const void *first;
    int64_t row, chunk, block;  // bytes from one to the next

    // `blocks` of them that lie side by side, [chunk][row][block]
    static INLINE AmxBlocks side_by_side(const void *first, int64_t blocks) {
        return {first, 64 * blocks, 64 * AMX_TERMS * blocks, 64};
    }
    AmxBlocks from(int64_t number) const { return {(const char *)first + number * block, row, chunk, block}; }
};

// Lines of memory that are asked for while tiles are multiplied, some for each chunk: those that are read later, to the
// second level, and rows that are written next.
struct AmxAhead {
    const char *read = nullptr, *read_end = nullptr;
    int64_t reads = 0;  // for each chunk
    char *write = nullptr;
    int64_t ld = 0, rows = 0, writes = 0;  // bytes from row to row, how many are left, how many for each chunk

    INLINE void some() {
        for (int64_t i = 0; i < reads && read < read_end; i++, read += 64) __builtin_prefetch(read, 0, 2);
        for (int64_t i = 0; i < writes && rows > 0; i++, rows--, write += ld) __builtin_prefetch(write, 1, 3);
    }
};
struct NothingAhead {
    INLINE void some() {}
};

// sums [rows of one or two tiles][ld_sums bytes] of `N` blocks, 64 bytes apart, += x [rows][ld bytes] times the blocks
// from `tile` on. Signed bytes of x times unsigned ones of W, or pairs of bfloat16.
template <bool BYTES, int ROW_TILES, int N, class Ahead>
static INLINE void amx_product(const char *x, int64_t ld, const AmxBlocks &w, const char *tile, int64_t chunks,
                               bool begin, char *sums, int64_t ld_sums, Ahead &ahead) {
    char *second = sums + AMX_ROWS * ld_sums;
    if (begin) {
        _tile_zero(0);
        if (N == 2) _tile_zero(1);
        if (ROW_TILES == 2) _tile_zero(2);
        if (N == 2 && ROW_TILES == 2) _tile_zero(3);
    } else {
        _tile_loadd(0, sums, ld_sums);
        if (N == 2) _tile_loadd(1, sums + 64, ld_sums);
        if (ROW_TILES == 2) _tile_loadd(2, second, ld_sums);
        if (N == 2 && ROW_TILES == 2) _tile_loadd(3, second + 64, ld_sums);
    }
#define AMX_DOT(sum, a, b) \
    if constexpr (BYTES) _tile_dpbsud(sum, a, b); \
    else _tile_dpbf16ps(sum, a, b)
    for (int64_t i = 0; i < chunks; i++, x += 64, tile += w.chunk) {
        _tile_loadd(4, x, ld);
        _tile_loadd(6, tile, w.row);
        AMX_DOT(0, 4, 6);
        if constexpr (N == 2) {
            _tile_loadd(7, tile + w.block, w.row);
            AMX_DOT(1, 4, 7);
        }
        ahead.some();
        if constexpr (ROW_TILES == 2) {
            _tile_loadd(5, x + AMX_ROWS * ld, ld);
            AMX_DOT(2, 5, 6);
            if constexpr (N == 2) {
                AMX_DOT(3, 5, 7);
            }
        }
    }
#undef AMX_DOT
    _tile_stored(0, sums, ld_sums);
    if (N == 2) _tile_stored(1, sums + 64, ld_sums);
    if (ROW_TILES == 2) _tile_stored(2, second, ld_sums);
    if (N == 2 && ROW_TILES == 2) _tile_stored(3, second + 64, ld_sums);
}

// The same for any number of blocks, which lie side by side in `sums`.
template <bool BYTES, int ROW_TILES, class Ahead>
static INLINE void amx_blocks(const char *x, int64_t ld, const AmxBlocks &w, int64_t blocks, int64_t chunks, bool begin,
                              char *sums, int64_t ld_sums, Ahead &ahead) {
    const char *tile = (const char *)w.first;
    int64_t b = 0;
    for (; b + 2 <= blocks; b += 2, tile += 2 * w.block)
        amx_product<BYTES, ROW_TILES, 2>(x, ld, w, tile, chunks, begin, sums + 64 * b, ld_sums, ahead);
    if (b < blocks) amx_product<BYTES, ROW_TILES, 1>(x, ld, w, tile, chunks, begin, sums + 64 * b, ld_sums, ahead);
}

// `amx_blocks` for as many rows as tiles are configured for.
template <bool BYTES, class Ahead>
static INLINE void amx_rows_at_once(int64_t blocks, int64_t rows, const void *x, int64_t ld, const AmxBlocks &w,
                                    int64_t chunks, bool begin, void *sums, int64_t ld_sums, Ahead &ahead) {
    auto of = [&](auto tiles) __attribute__((always_inline)) {
        amx_blocks<BYTES, decltype(tiles)::value>((const char *)x, ld, w, blocks, chunks, begin, (char *)sums, ld_sums,
                                                  ahead);
    };
    if (rows > AMX_ROWS) of(std::integral_constant<int, 2>());
    else of(std::integral_constant<int, 1>());
}

// The same for any number of rows.
template <bool BYTES>
static void amx_rows(int64_t blocks, int64_t rows, const void *x, int64_t ld, const AmxBlocks &w, int64_t chunks,
                     bool begin, void *sums, int64_t ld_sums) {
    constexpr int64_t BOTH = 2 * AMX_ROWS;
    NothingAhead ahead;
    Tiles configured;
    for (int64_t row = 0; row < rows; row += BOTH) {
        const int64_t count = std::min(BOTH, rows - row);
        configured.configure(count);
        amx_rows_at_once<BYTES>(blocks, count, (const char *)x + row * ld, ld, w, chunks, begin,
                                (char *)sums + row * ld_sums, ld_sums, ahead);
    }
}
#define AMX 1
#else
struct Tiles {
    Tiles() {}
};
#define AMX 0
#endif
