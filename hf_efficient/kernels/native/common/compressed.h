// Lanes put together and spread out by marks, in tiers without an instruction for it: avx2, avx_vnni and those of ARM.

#pragma once

// The lanes that are marked by what is not 0, one after another; behind them anything, up to a whole vector.
template <class T, class V> static INLINE void store_marked(T *to, V values, Words marks) {
    uint32_t lanes[LANES], marked[LANES];
    memcpy(lanes, &values, sizeof lanes), memcpy(marked, &marks, sizeof marked);
    for (int j = 0, index = 0; j < LANES; index += marked[j++] != 0) ((uint32_t *)to)[index] = lanes[j];
}

// For each mask of 8 columns: the bytes of their values, which are the last 2 of each SIZE bytes, from byte FIRST on.
// Zeros have the highest bit set.
template <int SIZE, int FIRST = 0> struct Expansions {
    alignas(8 * SIZE) uint8_t bytes[256][8 * SIZE] = {};

    constexpr Expansions() {
        for (int mask = 0; mask < 256; mask++)
            for (int column = 0, from = FIRST; column < 8; column++) {
                uint8_t *to = bytes[mask] + SIZE * column;
                for (int i = 0; i < SIZE; i++) to[i] = 128;
                if (mask >> column & 1)
                    for (int i = SIZE - 2; i < SIZE; i++) to[i] = from++;
            }
    }
};
template <int SIZE, int FIRST = 0> static constexpr Expansions<SIZE, FIRST> EXPANSIONS;

// The numbers of bfloat16 from `from` on at the columns whose bits are set, zeros elsewhere.
static INLINE Floats expanded(const uint16_t *from, uint32_t columns) {
    auto eight = [](const uint16_t *from, uint8_t mask) __attribute__((always_inline)) {
        return look_up_half(((const Bytes *)from)[0], EXPANSIONS<sizeof(float)>.bytes[mask]);
    };
    return {eight(from, columns), eight(from + __builtin_popcount(columns & 255), columns >> 8)};
}

// The same where each 8 of the 16 columns have 4 numbers.
static INLINE Floats expanded_two_of_four(const uint16_t *from, uint32_t columns) {
    const Bytes all = ((const Bytes *)from)[0];
    return {look_up_half(all, EXPANSIONS<sizeof(float)>.bytes[columns & 255]),
            look_up_half(all, EXPANSIONS<sizeof(float), 4 * sizeof(uint16_t)>.bytes[columns >> 8])};
}
