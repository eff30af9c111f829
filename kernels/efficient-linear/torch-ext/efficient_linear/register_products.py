"""Products of up to 8 tokens whose operands never leave the registers of a warp: NVIDIA GPUs, 16-bit x, 2 to 4 bits.

A warp takes chunks of 256 columns of a few tiles of 16 rows; the warps of a program share the chunks of K and
add up at the end. Packed words come straight from memory to the lanes that want them, scales and zero points of a chunk
in one load a row, x as the other operand of m16n8k16. Nothing waits for another warp before the end, and groups of
columns do not wait for each other. That is what tl.dot cannot say: its operands pass through shared memory, and a group
has to wait for its sum to scale it.

Fragments are int32 or float32 [rows, 128]: lane l of a warp has elements 4 l .. 4 l + 3 of a row (packing.py for the
words; with g = l // 4 and t = l % 4, element i of the sums is row g + 8 * (i // 2), token 2 * t + i % 2; of x, token g,
columns 16 * (i // 2) + 8 * (i % 2) + 2 * t and the next).
"""

import triton
import triton.language as tl

from .fragments import halves, plane_word, zero_point_word
from .launch_configs import CHUNK


@triton.constexpr_function
def columns_of_chunk():
    """Columns that a warp takes at once."""
    return CHUNK


@triton.constexpr_function
def matrix_instructions(half):
    """$0..3 = $16..19 + two matrix instructions of the weights $4..7 and $8..11 with x in $12..15."""
    kind = "f16" if half else "bf16"
    multiply = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    return f"""{{
        .reg .f32 s<4>;
        {multiply} {{s0, s1, s2, s3}}, {{$4, $5, $6, $7}}, {{$12, $13}}, {{$16, $17, $18, $19}};
        {multiply} {{$0, $1, $2, $3}}, {{$8, $9, $10, $11}}, {{$14, $15}}, {{s0, s1, s2, s3}};
    }}"""


@triton.constexpr_function
def four_words(offset):
    """The words 0, 16, 32 and 48 bytes behind the pointer $4 + offset."""
    return "\n".join(f"ld.global.nc.b32 ${i}, [$4+{offset + 16 * i}];" for i in range(4))


@triton.constexpr_function
def words_across_lanes(offset):
    """The same words, $4 pointing to the first of the 64 bytes, $8 = t: each lane loads 16 bytes, and the four lanes
    of a token transpose their 4 x 4 words."""
    text = f"""{{
        .reg .b32 w<4>, p<2>, q<2>, o, d;
        .reg .pred odd, high;
        .reg .b64 at;
        shl.b32 o, $8, 4;
        cvt.u64.u32 at, o;
        add.u64 at, at, $4;
        ld.global.nc.v4.b32 {{w0, w1, w2, w3}}, [at+{offset}];
        and.b32 d, $8, 1;
        setp.ne.b32 odd, d, 0;
        setp.gt.u32 high, $8, 1;
    """
    # lanes a distance apart exchange what lies off the diagonal
    for distance in (1, 2):
        upper = "odd" if distance == 1 else "high"
        for n in range(2):
            a = 2 * n if distance == 1 else n
            b = a + distance
            text += f"""
            selp.b32 p{n}, w{a}, w{b}, {upper};
            shfl.sync.bfly.b32 q{n}, p{n}, {distance}, 31, 0xffffffff;
            selp.b32 w{a}, q{n}, w{a}, {upper};
            selp.b32 w{b}, w{b}, q{n}, {upper};"""
    return text + "\n".join(f"mov.b32 ${i}, w{i};" for i in range(4)) + "}"


@triton.constexpr_function
def row_words(count):
    """16-bit numbers of a row: `count` (1, 2, 4) from the pointer $4 on, two in each of $0..3."""
    if count == 1:
        load = "{ .reg .b16 h; ld.global.nc.b16 h, [$4]; cvt.u32.u16 $0, h; }"
    elif count == 2:
        load = "ld.global.nc.b32 $0, [$4];"
    else:
        load = "ld.global.nc.v2.b32 {$0, $1}, [$4];"
    return load + " ".join(f"mov.b32 ${i}, 0;" for i in range(max(1, count // 2), 4))


@triton.constexpr_function
def rows_bytes(count):
    """Bytes of two rows, `count` (1, 2, 4) from the pointers $4 and $8 on: in $0 and in $2."""
    text = ""
    for first in range(0, 4, 2):
        at = 4 + 2 * first
        load = "ld.global.nc.b32" if count == 4 else "ld.global.nc.u16" if count == 2 else "ld.global.nc.u8"
        if count == 2:
            text += f"{{ .reg .b16 h; {load} h, [${at}]; cvt.u32.u16 ${first}, h; }}"
        else:
            text += f"{load} ${first}, [${at}];"
        text += f"mov.b32 ${first + 1}, 0;"
    return text


@triton.constexpr_function
def scale_of_group(group, half):
    """$0, $1 = number `group` of the row in $4..7, $2, $3 = of that in $8..11, in float32."""
    text = "{ .reg .b16 h, rest;\n"
    for first in range(0, 4, 2):
        word = f"${4 + 2 * first + group // 2}"
        if half:
            order = "{h, rest}" if group % 2 == 0 else "{rest, h}"
            text += f"mov.b32 {order}, {word}; cvt.f32.f16 ${first}, h;"
        else:
            move = f"shl.b32 ${first}, {word}, 16;" if group % 2 == 0 else f"and.b32 ${first}, {word}, 0xFFFF0000;"
            text += move
        text += f"mov.b32 ${first + 1}, ${first};"
    return text + "}"


@triton.constexpr_function
def zero_of_group(group):
    """$0 and $2 = `zero_point_word` of byte `group` of $4, $1 and $3 = of $6; $8: -128 or -1024 in both halves of a
    word."""
    selector = hex(0x7050 | group << 8 | group)  # bytes 5 and 7 are the upper ones of $8
    return " ".join(f"prmt.b32 ${i}, ${4 + 2 * (i % 2)}, $8, {selector};" for i in range(4))


@triton.jit
def elements():
    """The numbers 0 to 127 of the elements of a block, 4 * lane + word: int32 [1, 128]."""
    return tl.arange(0, 128)[None, :]


@triton.jit
def load_x(at, J: tl.constexpr, EXCHANGE: tl.constexpr, PTX: tl.constexpr):
    """The operand of x for planes J and J + 1: int32 [S, 128]. at: pointers to the token's first column of the chunk,
    [S, 128]; EXCHANGE: by loads of 16 bytes and exchanges between lanes, which is less work for many tokens."""
    t = elements() // 4 % 4
    if PTX and EXCHANGE:
        return tl.inline_asm_elementwise(
            words_across_lanes(32 * J), "=r,=r,=r,=r,l,l,l,l,r,r,r,r", [at.to(tl.int64), t], tl.int32, True, 4
        )
    elif PTX:
        return tl.inline_asm_elementwise(
            four_words(32 * J), "=r,=r,=r,=r,l,l,l,l", [(at + 2 * t).to(tl.int64)], tl.int32, True, 4
        )
    else:
        at += 16 * J + 8 * (elements() % 4) + 2 * t
        low, high = tl.load(at).to(tl.int16, bitcast=True), tl.load(at + 1).to(tl.int16, bitcast=True)
        return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def multiply(a0, a1, x, sums, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """sums + the products of two planes of weights with x: float32 [S, 128]."""
    if PTX:
        return tl.inline_asm_elementwise(
            matrix_instructions(DTYPE == tl.float16), "=f,=f,=f,=f,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f",
            [a0, a1, x, sums], tl.float32, True, 4,
        )  # fmt: skip
    else:
        S: tl.constexpr = a0.shape[0]
        # r, t, column half, row half, h -> rows, columns
        a0 = tl.permute(tl.reshape(halves(a0, DTYPE).to(tl.float32), (S, 8, 4, 2, 2, 2)), (0, 4, 1, 3, 2, 5))
        a1 = tl.permute(tl.reshape(halves(a1, DTYPE).to(tl.float32), (S, 8, 4, 2, 2, 2)), (0, 4, 1, 3, 2, 5))
        a = tl.reshape(tl.join(a0, a1), (S, 16, 1, 32))
        # token, t, plane, column half, h -> tokens, columns
        x = tl.permute(tl.reshape(halves(x, DTYPE).to(tl.float32), (S, 8, 4, 2, 2, 2)), (0, 1, 4, 2, 5, 3))
        products = tl.sum(a * tl.reshape(x, (S, 1, 8, 32)), axis=3)
        # row half, r, t, token of two -> r, t, row half, token of two
        products = tl.permute(tl.reshape(products, (S, 2, 8, 4, 2)), (0, 2, 3, 1, 4))
        return sums + tl.reshape(products, (S, 128))


@triton.jit
def repeat(x, TILES: tl.constexpr):
    """[S, 128] -> [TILES * S, 128]."""
    S: tl.constexpr = x.shape[0]
    return tl.reshape(tl.broadcast_to(tl.expand_dims(x, 0), (TILES, S, 128)), (TILES * S, 128))


@triton.jit
def load_words(at, BLOCKS: tl.constexpr):
    """The blocks of a step; three, the last one again where there are fewer."""
    w0 = tl.load(at)
    w1 = w0
    w2 = w0
    if BLOCKS > 1:
        w1 = tl.load(at + 128)
        w2 = w1
    if BLOCKS > 2:
        w2 = tl.load(at + 256)
    return w0, w1, w2


@triton.jit
def sums_of_warps(sums, TILES: tl.constexpr, S: tl.constexpr):
    """[TILES * S, 128] -> [16 TILES rows, 8 tokens]."""
    total = tl.sum(tl.reshape(sums, (TILES, S, 128)), axis=1)
    total = tl.permute(tl.reshape(total, (TILES, 8, 4, 2, 2)), (0, 3, 1, 2, 4))
    return tl.reshape(total, (16 * TILES, 8))


@triton.jit
def accumulate_in_registers(
    x_ptr, packed_ptr, scale_ptr, zero_ptr, row_block, token_block, first_step, last_step, M, N, K, stride_x, stride_sn,
    stride_zn, magic, BITS: tl.constexpr, GROUP: tl.constexpr, ASYMMETRIC: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, UPCAST: tl.constexpr, PTX: tl.constexpr, WARPS: tl.constexpr, EXCHANGE: tl.constexpr,
):  # fmt: skip
    """`weight_only_kernels.accumulate` where 256 divides K, a program has whole chunks, GROUP (64, 128, 256 or 0)
    divides CHUNK, and scales are 16-bit numbers and lie side by side in a row (see `weight_only.few_tokens_tile`)."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    COLUMNS: tl.constexpr = 256 if BITS == 3 else 128  # packing.step_columns
    BLOCKS: tl.constexpr = COLUMNS * BITS // 256
    CHUNK: tl.constexpr = columns_of_chunk()
    STEPS: tl.constexpr = CHUNK // COLUMNS
    PAIRS: tl.constexpr = COLUMNS // 32
    WIDTH: tl.constexpr = GROUP if GROUP > 0 else CHUNK  # columns with one scale
    COUNT: tl.constexpr = CHUNK // WIDTH
    TILES: tl.constexpr = BLOCK_N // 16
    HALF_SCALE: tl.constexpr = scale_ptr.dtype.element_ty == tl.float16

    warp = tl.arange(0, WARPS)
    place = tl.arange(0, TILES * WARPS)
    tiles = (N + 15) // 16
    words_in_tile = K // COLUMNS * (BLOCKS * 128)
    tile = row_block * TILES + place // WARPS
    words_at = packed_ptr + (tl.minimum(tile, tiles - 1).to(tl.int64) * words_in_tile)[:, None] + elements()
    token = token_block * BLOCK_M + elements() // 16
    x_at = x_ptr + tl.minimum(token, M - 1).to(tl.int64) * stride_x
    row = tile[:, None] * 16 + elements() // 16
    upper, lower = tl.minimum(row, N - 1).to(tl.int64), tl.minimum(row + 8, N - 1).to(tl.int64)
    scale_upper, scale_lower = scale_ptr + upper * stride_sn, scale_ptr + lower * stride_sn
    zero_upper, zero_lower = scale_upper, scale_lower
    if ASYMMETRIC:
        zero_upper, zero_lower = zero_ptr + upper * stride_zn, zero_ptr + lower * stride_zn
    is_lower, is_lower_weight = elements() % 4 // 2 == 1, elements() % 2 == 1
    minus_one = magic ^ -0x7FFF8000  # -128 or -1024 in both halves

    first, last = first_step // STEPS, tl.minimum(last_step * COLUMNS, K) // CHUNK
    result = tl.zeros((TILES * WARPS, 128), tl.float32)
    for chunks in tl.range(first, last, WARPS, num_stages=1):
        chunk = tl.minimum(chunks + place % WARPS, last - 1)
        x_column = tl.minimum(chunks + warp, last - 1)[:, None] * CHUNK
        group = (chunk * (CHUNK // GROUP) if GROUP > 0 else chunk * 0)[:, None]
        if PTX:
            scales_upper = tl.inline_asm_elementwise(
                row_words(COUNT), "=r,=r,=r,=r,l,l,l,l", [(scale_upper + group).to(tl.int64)], tl.int32, True, 4
            )
            scales_lower = tl.inline_asm_elementwise(
                row_words(COUNT), "=r,=r,=r,=r,l,l,l,l", [(scale_lower + group).to(tl.int64)], tl.int32, True, 4
            )
            if ASYMMETRIC:
                zeros = tl.inline_asm_elementwise(
                    rows_bytes(COUNT), "=r,=r,=r,=r,l,l,l,l,l,l,l,l",
                    [(zero_upper + group).to(tl.int64), (zero_lower + group).to(tl.int64)], tl.int32, True, 4,
                )  # fmt: skip
        part = tl.zeros((TILES * WARPS, 128), tl.float32)
        sums = part
        zero = 0
        words = 0, 0, 0
        for pair in tl.static_range(CHUNK // 32):  # of planes
            if pair % PAIRS == 0:
                words = load_words(words_at + ((chunk * STEPS + pair // PAIRS) * (BLOCKS * 128))[:, None], BLOCKS)
            if ASYMMETRIC and pair * 32 % WIDTH == 0:
                if PTX:
                    zero = tl.inline_asm_elementwise(
                        zero_of_group(pair * 32 // WIDTH), "=r,=r,=r,=r,r,r,r,r,r,r,r,r", [zeros, minus_one], tl.int32,
                        True, 4,
                    )  # fmt: skip
                else:
                    at_zero = tl.where(is_lower_weight, zero_lower, zero_upper) + group + pair * 32 // WIDTH
                    zero = zero_point_word(tl.load(at_zero).to(tl.int32), magic, BITS, DTYPE)
            a0 = plane_word(words, zero, magic, pair % PAIRS * 2, BITS, ASYMMETRIC, DTYPE, PTX, UPCAST)
            a1 = plane_word(words, zero, magic, pair % PAIRS * 2 + 1, BITS, ASYMMETRIC, DTYPE, PTX, UPCAST)
            x = repeat(load_x(x_at + x_column, pair * 2, EXCHANGE, PTX), TILES)
            sums = multiply(a0, a1, x, sums, DTYPE, PTX)
            if (pair * 32 + 32) % WIDTH == 0:
                if GROUP == 0:
                    part += sums
                else:
                    if PTX:
                        scale = tl.inline_asm_elementwise(
                            scale_of_group(pair * 32 // WIDTH, HALF_SCALE), "=f,=f,=f,=f,r,r,r,r,r,r,r,r",
                            [scales_upper, scales_lower], tl.float32, True, 4,
                        )  # fmt: skip
                    else:
                        scale_at = tl.where(is_lower, scale_lower, scale_upper) + group + pair * 32 // WIDTH
                        scale = tl.load(scale_at).to(tl.float32)
                    part += sums * scale
                sums = tl.zeros((TILES * WARPS, 128), tl.float32)
        inside = (chunks + place % WARPS < last)[:, None]
        result += tl.where(inside, part, 0.0)
    total = sums_of_warps(result, TILES, WARPS)
    if GROUP == 0:
        rows = row_block * BLOCK_N + tl.arange(0, BLOCK_N)
        total *= tl.load(scale_ptr + tl.minimum(rows, N - 1).to(tl.int64) * stride_sn).to(tl.float32)[:, None]
    return total
