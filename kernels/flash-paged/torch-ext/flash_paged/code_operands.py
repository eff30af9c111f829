"""Cached codes as operands of matrix instructions, from memory to the registers that want them: no shared memory, no
change of lanes, no conversion instructions.

A warp computes with KEYS keys of its own, 16 or 32. What each lane holds of an operand of `mma.m16n8k16` is fixed, but
which channel stands where along the sum over channels, or along the rows of the result, is free. So a lane loads
neighbouring bytes, 16 at a time where there are as many, and reshapes and permutations give its registers the right
names. The queries are loaded in the same order, and the result knows the channel of each row (`channel_of_row`).

Codes become float16 numbers by bits: a code in the low bits of 1024 is 1024 + code, or 1024 + 2**s * code where it lies
s bits higher, and E4M3 bits shifted by one are a number that is 2**8 too small. The products are corrected instead
(`offset_of` of keys, `factor_of`), so that two numbers take one instruction, or two with the one that brings bytes
together. From values the offset is subtracted: their sums run over all keys, and matrix instructions cut off what they
add to an accumulator, which a large sum of offsets would make a bias. With float32 queries the numbers are the codes
themselves.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice


MAGIC = 0x64006400  # 1024 in both halves of a word. A run-time argument of kernels: one machine instruction does (a &
# immediate) | register, but not (a & immediate) | immediate


@triton.constexpr_function
def offset_of(BITS, IS_FLOAT, DTYPE):
    """What the numbers of key operands exceed codes (times 2**s) by."""
    return 0.0 if BITS < 8 or IS_FLOAT or DTYPE == tl.float32 else 1152.0


@triton.jit
def factor_of(index, BYTES: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr, DTYPE: tl.constexpr):
    """float32: what gives the numbers at `index` (of channels) of an operand their size."""
    factor = tl.full(index.shape, 256.0 if IS_FLOAT and DTYPE != tl.float32 else 1.0, tl.float32)
    if BITS < 8 and DTYPE != tl.float32:
        for field in tl.static_range(1, 8 // BITS):
            factor = tl.where(index // BYTES == field, 1.0 / (1 << (BITS * field)), factor)
    return factor


@triton.jit
def permute_bytes(a, b, SELECTOR: tl.constexpr, PTX: tl.constexpr):
    """CUDA's __byte_perm: byte k of the result is the byte of [a, b] that digit k of the selector says. Without PTX, in
    plain operations."""
    if PTX:
        return libdevice.byte_perm(a, b, SELECTOR)
    else:
        result = a & 0
        for k in tl.static_range(4):
            source = b if (SELECTOR >> (4 * k)) & 4 else a
            result |= ((source >> (((SELECTOR >> (4 * k)) & 3) * 8)) & 255) << (8 * k)
        return result


@triton.jit
def subtract_halves(a, b, PTX: tl.constexpr):
    """a - b of the two float16 numbers in words a, and in b, as words: one instruction."""
    if PTX:
        return tl.inline_asm_elementwise("sub.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)
    else:
        b = a * 0 + b
        low = a.to(tl.int16).to(tl.float16, bitcast=True) - b.to(tl.int16).to(tl.float16, bitcast=True)
        high = (a >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        high -= (b >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        low, high = low.to(tl.int16, bitcast=True).to(tl.int32), high.to(tl.int16, bitcast=True).to(tl.int32)
        return (low & 0xFFFF) | (high << 16)


@triton.jit
def _e4m3(pairs, magic):
    """E4M3 bits in the upper byte of each half -> the bits of float16 numbers."""
    return (pairs & -0x7FFF8000) | ((pairs >> 1) & (magic - 0x24802480))


@triton.jit
def _numbers(word, FIELD: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr, DTYPE: tl.constexpr):
    """The float16 numbers in both halves of words [R, C]: [R, C, 2] in DTYPE."""
    low, high = word.to(tl.int16).to(tl.float16, bitcast=True), (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    numbers = tl.join(low, high)
    if DTYPE == tl.float32:
        numbers = numbers.to(tl.float32)
        if IS_FLOAT:
            numbers *= 256.0
        else:
            numbers = (numbers - (1152.0 if BITS == 8 else 1024.0)) * (1.0 / (1 << (FIELD * BITS)))
    return numbers


@triton.jit
def _key_field(
    words, magic, FIELD: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr, DTYPE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Field FIELD of each byte: [R, C, 2, 2], the first two bytes at [..., 0]."""
    if IS_FLOAT:
        low = _e4m3(permute_bytes(words, words, 0x1100, PTX), magic)
        high = _e4m3(permute_bytes(words, words, 0x3322, PTX), magic)
    else:
        ones = magic | ((magic >> 8) & 0x00FF00FF)
        if BITS == 8:
            words = words ^ -0x7F7F7F80
        MASK: tl.constexpr = (0x10001 * (((1 << BITS) - 1) << (FIELD * BITS))) - 0xFF0100
        low = permute_bytes(words, ones, 0x4140, PTX) & MASK
        high = permute_bytes(words, ones, 0x4342, PTX) & MASK
        if BITS < 8 and DTYPE == tl.float16:
            low, high = subtract_halves(low, magic, PTX), subtract_halves(high, magic, PTX)
    return tl.join(_numbers(low, FIELD, BITS, IS_FLOAT, DTYPE), _numbers(high, FIELD, BITS, IS_FLOAT, DTYPE))


@triton.jit
def key_operand(
    words, magic, WARPS: tl.constexpr, KEYS: tl.constexpr, BYTES: tl.constexpr, BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Words at `key_words` -> [WARPS, KEYS, BYTES * 8 / BITS channels]."""
    VEC: tl.constexpr = min(4, BYTES // 16)
    x = _key_field(words, magic, 0, BITS, IS_FLOAT, DTYPE, PTX)
    if BITS < 8:
        x = tl.join(x, _key_field(words, magic, 1, BITS, IS_FLOAT, DTYPE, PTX))
    if BITS == 2:
        y = _key_field(words, magic, 2, BITS, IS_FLOAT, DTYPE, PTX)
        x = tl.join(x, tl.join(y, _key_field(words, magic, 3, BITS, IS_FLOAT, DTYPE, PTX)))
    FIELDS: tl.constexpr = 2 if BITS < 8 else 1
    # eight keys, repetition, warp, g, j, word, low and high bit of the byte, of the field
    x = tl.reshape(x, (KEYS // 8, BYTES // 16 // VEC, WARPS, 8, 4, VEC, 2, 2, FIELDS, 2 if BITS < 4 else 1))
    x = tl.permute(x, (2, 0, 3, 9, 8, 1, 5, 4, 7, 6))
    return tl.reshape(x, (WARPS, KEYS, BYTES * 8 // BITS))


@triton.jit
def _value_byte(
    even, odd, magic, BYTE: tl.constexpr, FIELD: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr,
    DTYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Field FIELD of byte BYTE of two keys: [R, C, 2], without an offset."""
    pairs = permute_bytes(even, odd, 0x4400 + 0x1111 * BYTE, PTX)
    if IS_FLOAT:
        word = _e4m3(pairs, magic)
    elif BITS == 8:
        word = (pairs & 0x00FF00FF) ^ (magic ^ 0x00800080)
    else:
        word = (pairs & (0x10001 * (((1 << BITS) - 1) << (FIELD * BITS)))) | magic
    if DTYPE == tl.float16 and not IS_FLOAT:
        word = subtract_halves(word, (magic | 0x00800080) if BITS == 8 else magic, PTX)
    return _numbers(word, FIELD, BITS, IS_FLOAT, DTYPE)


@triton.jit
def _value_field(
    even, odd, magic, FIELD: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr, DTYPE: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """[R, C, 2 keys, low and high bit of the byte]"""
    a = _value_byte(even, odd, magic, 0, FIELD, BITS, IS_FLOAT, DTYPE, PTX)
    b = _value_byte(even, odd, magic, 1, FIELD, BITS, IS_FLOAT, DTYPE, PTX)
    c = _value_byte(even, odd, magic, 2, FIELD, BITS, IS_FLOAT, DTYPE, PTX)
    d = _value_byte(even, odd, magic, 3, FIELD, BITS, IS_FLOAT, DTYPE, PTX)
    return tl.join(tl.join(a, b), tl.join(c, d))


@triton.jit
def value_operand(
    even, odd, magic, WARPS: tl.constexpr, KEYS: tl.constexpr, BYTES: tl.constexpr, BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Words at `value_words`, of keys and of those that follow them -> [WARPS, BYTES * 8 / BITS channels, KEYS]."""
    VEC: tl.constexpr = min(4, BYTES // 32)
    x = _value_field(even, odd, magic, 0, BITS, IS_FLOAT, DTYPE, PTX)
    if BITS < 8:
        x = tl.join(x, _value_field(even, odd, magic, 1, BITS, IS_FLOAT, DTYPE, PTX))
    if BITS == 2:
        y = _value_field(even, odd, magic, 2, BITS, IS_FLOAT, DTYPE, PTX)
        x = tl.join(x, tl.join(y, _value_field(even, odd, magic, 3, BITS, IS_FLOAT, DTYPE, PTX)))
    FIELDS: tl.constexpr = 2 if BITS < 8 else 1
    # 16 keys, pair of keys, repetition, warp, g, j, word, key of the pair, low and high bit of the byte, of the field
    x = tl.reshape(x, (KEYS // 16, 2, BYTES // 32 // VEC, WARPS, 8, 4, VEC, 2, 2, 2, FIELDS, 2 if BITS < 4 else 1))
    x = tl.permute(x, (3, 11, 10, 2, 6, 9, 8, 4, 0, 5, 1, 7))
    return tl.reshape(x, (WARPS, BYTES * 8 // BITS, KEYS))


@triton.jit
def key_words(WARPS: tl.constexpr, KEYS: tl.constexpr, BYTES: tl.constexpr):
    """Of the words that lanes load of keys [R, C]: first key of the row's warp [R, 1], key after that, word of the
    key. The shapes are chosen for the layout that the compiler gives a load of such a shape: warps over rows, 32 lanes
    by up to 4 words."""
    VEC: tl.constexpr = min(4, BYTES // 16)
    REPS: tl.constexpr = BYTES // 16 // VEC
    row = tl.arange(0, KEYS // 8 * REPS * WARPS)[:, None]
    column = tl.arange(0, 32 * VEC)[None, :]
    lane = column // VEC
    word = row // WARPS % REPS * VEC + lane % 4 * (BYTES // 16) + column % VEC
    return row % WARPS * KEYS, row // (WARPS * REPS) * 8 + lane // 4, word


@triton.jit
def value_words(WARPS: tl.constexpr, KEYS: tl.constexpr, BYTES: tl.constexpr, MOVE: tl.constexpr):
    """As `key_words`, of every second key of the values. MOVE: in the order of `operand_of_weights`."""
    VEC: tl.constexpr = min(4, BYTES // 32)
    REPS: tl.constexpr = BYTES // 32 // VEC
    row = tl.arange(0, KEYS // 8 * REPS * WARPS)[:, None]
    column = tl.arange(0, 32 * VEC)[None, :]
    lane = column // VEC
    word = row // WARPS % REPS * VEC + lane // 4 * (BYTES // 32) + column % VEC
    pair = row // (WARPS * REPS)
    if MOVE:
        return row % WARPS * KEYS, pair // 2 * 16 + pair % 2 * 8 + lane % 4 * 2, word
    else:
        return row % WARPS * KEYS, pair // 2 * 16 + pair % 2 * 2 + lane % 4 * 4, word


@triton.jit
def operand_of_weights(
    p, WARPS: tl.constexpr, KEYS: tl.constexpr, BLOCK_M: tl.constexpr, MOVE: tl.constexpr, PTX: tl.constexpr
):
    """Weights [WARPS, KEYS, BLOCK_M] as the right operand of the product with values. MOVE (float16 alone): in another
    order of keys, in which the lanes of a warp exchange them by `movmatrix`, without shared memory and barriers."""
    if MOVE:
        p = tl.reshape(p, (WARPS, KEYS // 8, 8, BLOCK_M // 8, 8))
        if PTX:  # tiles of 8 by 8 are transposed in registers, and then transposed back in name
            p = tl.inline_asm_elementwise(
                "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [p], tl.float16, is_pure=True, pack=2
            )
            p = tl.permute(p, (0, 1, 4, 3, 2))
        p = tl.reshape(p, (WARPS, KEYS // 16, 2, 4, 2, BLOCK_M))
        p = tl.reshape(tl.permute(p, (0, 1, 3, 2, 4, 5)), (WARPS, KEYS, BLOCK_M))
    return p


@triton.jit
def channel_numbers(
    WARPS: tl.constexpr, KEYS: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr
):
    """Of the numbers (one a channel) that lanes load to go with keys [R, C]: first key of the row's warp [R, 1], row of
    an operand (0 to 7), channel, and whether there is one."""
    VEC: tl.constexpr = min(8, BYTES // 4)
    REPS: tl.constexpr = BYTES // 4 // VEC
    row = tl.arange(0, 8 // BITS * REPS * WARPS)[:, None]
    column = tl.arange(0, 32 * VEC)[None, :]
    lane = column // VEC
    byte = lane % 4 * (BYTES // 4) + row // WARPS % REPS * VEC + column % VEC
    return row % WARPS * KEYS, lane // 4, row // (WARPS * REPS) * WIDTH + byte, byte < WIDTH


@triton.jit
def channels_operand(x, ROWS: tl.constexpr, WARPS: tl.constexpr, BYTES: tl.constexpr, BITS: tl.constexpr):
    """Numbers at `channel_numbers` in the order of `key_operand`'s channels: [WARPS, channels, 8 rows]; with ROWS
    [WARPS, ROWS, channels], the eight again and again."""
    VEC: tl.constexpr = min(8, BYTES // 4)
    # a join among an operand's origins decides how Triton names channels in registers: there is one in `key_operand`,
    # and operands with other names would change lanes
    low, high = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    x = tl.join(low, high)
    x = tl.reshape(x, (8 // BITS, BYTES // 4 // VEC, WARPS, 8, 4, VEC // 4, 4))
    if ROWS:
        x = tl.reshape(tl.permute(x, (2, 3, 0, 1, 5, 4, 6)), (WARPS, 1, 8, BYTES * 8 // BITS))
        x = tl.broadcast_to(x, (WARPS, ROWS // 8, 8, BYTES * 8 // BITS))
        return tl.reshape(x, (WARPS, ROWS, BYTES * 8 // BITS))
    else:
        return tl.reshape(tl.permute(x, (2, 0, 1, 5, 4, 6, 3)), (WARPS, BYTES * 8 // BITS, 8))


@triton.jit
def channel_of_column(k, WIDTH: tl.constexpr, BYTES: tl.constexpr, NONE: tl.constexpr):
    """The channel at k along the sum of a key operand, NONE where there is none."""
    byte = k // 4 % 4 * (BYTES // 4) + k % BYTES // 16 * 4 + k % 4
    return tl.where(byte < WIDTH, k // BYTES * WIDTH + byte, NONE)


@triton.jit
def channel_of_row(m, WIDTH: tl.constexpr, BYTES: tl.constexpr, NONE: tl.constexpr):
    """The channel of row m of a value operand, NONE where there is none."""
    byte = m % 8 * (BYTES // 8) + m % BYTES // 32 * 4 + m // 8 % 4
    return tl.where(byte < WIDTH, m // BYTES * WIDTH + byte, NONE)
