// tile_rows (tile_product.h) of bfloat16 pairs by Intel's AMX: 16 rows of x times 16 pairs of columns an instruction.

#pragma once
#include "vectors.h"

#if BF16_DOT && defined(__AMX_BF16__) && defined(__linux__)
#define HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>

constexpr int AMX_SIDE = 16;  // rows of a register, and its columns of 4 bytes

// The kernel gives a process the registers when it asks for them.
static bool amx_is_allowed() {
    static const bool allowed = [] {
        constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
        return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    }();
    return allowed;
}

// Registers 0 to 3 are sums (0 and 1 of the first rows, 2 and 3 of the others), 4 and 5 rows of x, 6 and 7 the tile.
// Whoever configured the thread's registers before (oneDNN remembers that it did) finds them so again.
class AmxRegisters {
    struct alignas(64) Config {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } before;

public:
    AmxRegisters(int64_t first_rows, int64_t second_rows) {
        _tile_storeconfig(&before);
        Config config = {};
        config.palette = 1;
        for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = AMX_SIDE;
        for (int i : {0, 1, 4}) config.rows[i] = first_rows;
        for (int i : {2, 3, 5}) config.rows[i] = second_rows;
        _tile_loadconfig(&config);
    }
    ~AmxRegisters() {
        if (before.palette) _tile_loadconfig(&before);
        else _tile_release();
    }
};

// Up to 32 rows times the blocks [first, first + COUNT) of the tile; PARTS: how many registers the rows take.
template <int PARTS, int COUNT>
static void amx_block(const uint32_t *x, int64_t ld, const Floats *tile, int64_t blocks, int64_t steps, bool begin,
                      Floats *sums, int64_t stride) {
    const int64_t x_bytes = ld * 4, tile_bytes = blocks * 64;
    Floats *second = sums + AMX_SIDE * stride / 64;
    if (begin) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, stride);
        if (COUNT > 1) _tile_loadd(1, sums + 1, stride);
        if (PARTS > 1) _tile_loadd(2, second, stride);
        if (PARTS > 1 && COUNT > 1) _tile_loadd(3, second + 1, stride);
    }
    for (int64_t k = 0; k < steps; k += AMX_SIDE) {
        _tile_loadd(4, x + k, x_bytes);
        _tile_loadd(6, tile + k * blocks, tile_bytes);
        if (COUNT > 1) _tile_loadd(7, tile + k * blocks + 1, tile_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if (COUNT > 1) _tile_dpbf16ps(1, 4, 7);
        if (PARTS > 1) {
            _tile_loadd(5, x + AMX_SIDE * ld + k, x_bytes);
            _tile_dpbf16ps(2, 5, 6);
            if (COUNT > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, stride);
    if (COUNT > 1) _tile_stored(1, sums + 1, stride);
    if (PARTS > 1) _tile_stored(2, second, stride);
    if (PARTS > 1 && COUNT > 1) _tile_stored(3, second + 1, stride);
}

// x: [rows][ld], tile: [steps][blocks], steps a multiple of 16, sums: [rows] rows `stride` bytes apart.
static void amx_rows(int64_t blocks, int64_t rows, const uint32_t *x, int64_t ld, const Floats *tile, int64_t steps,
                     bool begin, Floats *sums, int64_t stride) {
    auto some = [&](int64_t row, auto parts) {
        constexpr int PARTS = decltype(parts)::value;
        const uint32_t *at = x + row * ld;
        Floats *to = sums + row * stride / 64;
        int64_t block = 0;
        for (; block + 2 <= blocks; block += 2)
            amx_block<PARTS, 2>(at, ld, tile + block, blocks, steps, begin, to + block, stride);
        if (block < blocks) amx_block<PARTS, 1>(at, ld, tile + block, blocks, steps, begin, to + block, stride);
    };
    asm volatile("" ::: "memory");  // GCC does not know that loading a register reads memory
    int64_t row = 0;
    if (rows >= 2 * AMX_SIDE) {
        const AmxRegisters registers(AMX_SIDE, AMX_SIDE);
        for (; row + 2 * AMX_SIDE <= rows; row += 2 * AMX_SIDE) some(row, std::integral_constant<int, 2>());
    }
    const int64_t left = rows - row;
    if (left > AMX_SIDE) {
        const AmxRegisters registers(AMX_SIDE, left - AMX_SIDE);
        some(row, std::integral_constant<int, 2>());
    } else if (left) {
        const AmxRegisters registers(left, AMX_SIDE);
        some(row, std::integral_constant<int, 1>());
    }
}
#else
#define HAS_AMX 0
#endif
