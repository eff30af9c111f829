"""Device code: packed codes of a codebook (layout: packing.py) to its entries, without reading memory.

A table of up to 16 entries of 16 bits lies in registers as bytes: four words of low bytes, four of high bytes. One byte
permutation (PRMT) takes four codes, in hexadecimal digits, and gives the bytes of four entries out of eight: for 16
entries two and a bitwise choice by the codes' highest bits, which another permutation spreads over bytes. Two more
permutations put low and high bytes together. Per weight this is 1.25 permutations for up to 8 entries and 1.75, of
about 2.5 instructions in all, for 16.

ROCm has no such instruction under Triton and float32 entries are too wide: there entries are read from memory.
"""

import triton
import triton.language as tl

from .fragments import halves, words_from_rows


GATHER, PERMUTE = tl.constexpr(1), tl.constexpr(2)  # LOOKUP; 0 = no codebook


@triton.jit
def permute_bytes(a, b, selector, PTX: tl.constexpr):
    """CUDA's __byte_perm: byte k of the result is the byte of [a, b] that digit k of the selector's low 16 bits says,
    or with 8 added to the digit that byte's sign bit in all its bits. Without PTX, for the interpreter, in plain
    operations."""
    if PTX:  # by inline assembly, behind which the compiler leaves both halves of a word together
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, selector], tl.int32, is_pure=True, pack=1
        )
    else:
        both = (b.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | a.to(tl.uint32, bitcast=True).to(tl.uint64)
        result = selector & 0
        for k in tl.static_range(4):
            digit = selector >> (4 * k)
            byte = ((both >> (8 * (digit & 7)).to(tl.uint64)) & 255).to(tl.int32)
            result |= tl.where((digit & 8) != 0, (byte >> 7) * 255, byte) << (8 * k)
        return result


@triton.jit
def table_word(codebook_at, FIRST: tl.constexpr, SHIFT: tl.constexpr, DTYPE: tl.constexpr):
    """Bytes (the low ones for SHIFT 0, the high ones for 8) of the entries FIRST .. FIRST + 3 of each table, rounded to
    DTYPE: int32 in the shape of the pointers."""
    word = 0
    for entry in tl.static_range(4):
        bits = tl.load(codebook_at + FIRST + entry).to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
        word |= ((bits >> SHIFT) & 255) << (8 * entry)
    return word


@triton.jit
def load_tables(codebook_at, BITS: tl.constexpr, DTYPE: tl.constexpr):
    """Low bytes, then high bytes, of four times four entries; where there are fewer, those repeat the first."""
    EIGHT: tl.constexpr = 4 if BITS >= 3 else 0
    SIXTEEN: tl.constexpr = 8 if BITS == 4 else 0
    low0 = table_word(codebook_at, 0, 0, DTYPE)
    low1 = table_word(codebook_at, EIGHT, 0, DTYPE)
    low2 = table_word(codebook_at, SIXTEEN, 0, DTYPE)
    low3 = table_word(codebook_at, SIXTEEN + EIGHT, 0, DTYPE)
    high0 = table_word(codebook_at, 0, 8, DTYPE)
    high1 = table_word(codebook_at, EIGHT, 8, DTYPE)
    high2 = table_word(codebook_at, SIXTEEN, 8, DTYPE)
    high3 = table_word(codebook_at, SIXTEEN + EIGHT, 8, DTYPE)
    return low0, low1, low2, low3, high0, high1, high2, high3


@triton.jit
def load_codebook(
    codebook_ptr, lane_rows, N, BITS: tl.constexpr, LOOKUP: tl.constexpr, PER_ROW: tl.constexpr, DTYPE: tl.constexpr
):
    """What `two_planes` reads, of the row of each word, [T, 128] (scalars for one codebook of all rows): the place of
    the table in memory and its words in registers (LOOKUP not GATHER)."""
    if PER_ROW:
        upper = tl.minimum(lane_rows, N - 1).to(tl.int64) * (1 << BITS)
        lower = tl.minimum(lane_rows + 8, N - 1).to(tl.int64) * (1 << BITS)
        if LOOKUP == GATHER:
            return codebook_ptr + words_from_rows(upper, lower), 0
        else:
            u0, u1, u2, u3, u4, u5, u6, u7 = load_tables(codebook_ptr + upper, BITS, DTYPE)
            l0, l1, l2, l3, l4, l5, l6, l7 = load_tables(codebook_ptr + lower, BITS, DTYPE)
            return codebook_ptr, (
                words_from_rows(u0, l0),
                words_from_rows(u1, l1),
                words_from_rows(u2, l2),
                words_from_rows(u3, l3),
                words_from_rows(u4, l4),
                words_from_rows(u5, l5),
                words_from_rows(u6, l6),
                words_from_rows(u7, l7),
            )
    elif LOOKUP == GATHER:
        return codebook_ptr, 0
    else:
        return codebook_ptr, load_tables(codebook_ptr, BITS, DTYPE)


@triton.jit
def digits(words, QUAD: tl.constexpr, BITS: tl.constexpr):
    """The codes of the matrix instructions 4 QUAD .. 4 QUAD + 3 as hexadecimal digits: int32 [T, 128]."""
    if BITS == 4:
        return words[QUAD]
    elif BITS == 2:
        return (words[0] >> (2 * QUAD)) & 0x33333333
    else:
        third = words[2] << (2 - QUAD) if QUAD < 2 else words[2] >> (QUAD - 2)
        return ((words[QUAD // 2] >> (2 * (QUAD % 2))) & 0x33333333) | (third & 0x44444444)


@triton.jit
def two_planes(
    words,
    codebook_at,
    tables,
    J: tl.constexpr,
    BITS: tl.constexpr,
    LOOKUP: tl.constexpr,
    DTYPE: tl.constexpr,
    PTX: tl.constexpr,
):
    """Entries of the matrix instructions J and J + 1 (J even): DTYPE [T, 128, 2] each."""
    HIGH: tl.constexpr = J % 4 // 2  # half of the digits
    codes = digits(words, J // 4, BITS)
    if LOOKUP == GATHER:
        codes = codes >> (16 * HIGH)
        v0 = tl.load(codebook_at + (codes & 15)).to(DTYPE)
        v1 = tl.load(codebook_at + ((codes >> 4) & 15)).to(DTYPE)
        v2 = tl.load(codebook_at + ((codes >> 8) & 15)).to(DTYPE)
        v3 = tl.load(codebook_at + ((codes >> 12) & 15)).to(DTYPE)
        return tl.join(v0, v1), tl.join(v2, v3)
    else:
        low0, low1, low2, low3, high0, high1, high2, high3 = tables
        selector = (codes & 0x77777777) >> (16 * HIGH) if BITS == 4 else codes >> (16 * HIGH)
        low = permute_bytes(low0, low1, selector, PTX)
        high = permute_bytes(high0, high1, selector, PTX)
        if BITS == 4:
            upper = permute_bytes(codes << 4, codes, 0xFBEA if HIGH else 0xD9C8, PTX)
            low = (low & ~upper) | (permute_bytes(low2, low3, selector, PTX) & upper)
            high = (high & ~upper) | (permute_bytes(high2, high3, selector, PTX) & upper)
        first = permute_bytes(low, high, 0x5140, PTX)
        second = permute_bytes(low, high, 0x7362, PTX)
        return halves(first, DTYPE), halves(second, DTYPE)
