// Products of tiles by AMX, 16 x 16 results at a time. A tile of W stands in memory as AMX reads it: for each 4 bytes
// of a row of x, those of 16 rows of W.

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

// Tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 blocks of W.
static INLINE void configure_tiles(int64_t first_rows, int64_t second_rows) {
    TileConfig config;
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = AMX_TERMS;
    config.rows[0] = config.rows[1] = config.rows[4] = first_rows;
    config.rows[2] = config.rows[3] = config.rows[5] = second_rows;
    _tile_loadconfig(&config);
}

// Blocks of W, or of what stands in its place: 16 columns each, in chunks of 64 bytes of a row of x.
struct AmxBlocks {
    const void *first;
    int64_t row, chunk, block;  // bytes from one to the next

    // `blocks` of them that lie side by side, [chunk][row][block]
    static INLINE AmxBlocks side_by_side(const void *first, int64_t blocks) {
        return {first, 64 * blocks, 64 * AMX_TERMS * blocks, 64};
    }
};

// sums [rows of one or two tiles][ld_sums bytes] of `N` blocks, 64 bytes apart, += x [rows][ld bytes] times the blocks
// from `tile` on. Signed bytes of x times unsigned ones of W, or pairs of bfloat16.
template <bool BYTES, int ROW_TILES, int N>
static INLINE void amx_product(const char *x, int64_t ld, const AmxBlocks &w, const char *tile, int64_t chunks,
                               bool begin, char *sums, int64_t ld_sums) {
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

template <bool BYTES, int ROW_TILES>
static INLINE void amx_blocks(const char *x, int64_t ld, const AmxBlocks &w, int64_t blocks, int64_t chunks, bool begin,
                              char *sums, int64_t ld_sums) {
    const char *tile = (const char *)w.first;
    int64_t b = 0;
    for (; b + 2 <= blocks; b += 2, tile += 2 * w.block)
        amx_product<BYTES, ROW_TILES, 2>(x, ld, w, tile, chunks, begin, sums + 64 * b, ld_sums);
    if (b < blocks) amx_product<BYTES, ROW_TILES, 1>(x, ld, w, tile, chunks, begin, sums + 64 * b, ld_sums);
}

// The same for any number of rows and of blocks, which lie side by side in `sums`.
template <bool BYTES>
static void amx_rows(int64_t blocks, int64_t rows, const void *x, int64_t ld, const AmxBlocks &w, int64_t chunks,
                     bool begin, void *sums, int64_t ld_sums) {
    const char *from = (const char *)x;
    char *to = (char *)sums;
    constexpr int64_t BOTH = 2 * AMX_ROWS;
    if (rows >= BOTH) configure_tiles(AMX_ROWS, AMX_ROWS);
    for (; rows >= BOTH; rows -= BOTH, from += BOTH * ld, to += BOTH * ld_sums)
        amx_blocks<BYTES, 2>(from, ld, w, blocks, chunks, begin, to, ld_sums);
    if (rows > AMX_ROWS) {
        configure_tiles(AMX_ROWS, rows - AMX_ROWS);
        amx_blocks<BYTES, 2>(from, ld, w, blocks, chunks, begin, to, ld_sums);
    } else if (rows > 0) {
        configure_tiles(rows, rows);
        amx_blocks<BYTES, 1>(from, ld, w, blocks, chunks, begin, to, ld_sums);
    }
    _tile_release();
}
#define AMX 1
#else
#define AMX 0
#endif
