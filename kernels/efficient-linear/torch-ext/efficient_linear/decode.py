"""Device code: the blocks of a step to the operand of matrix instructions, for integers and for codebooks."""

import triton
import triton.language as tl

from .codebook_fragments import two_planes
from .fragments import join_planes, plane


@triton.jit
def pair(
    words, zero, magic, codebook_at, tables, J: tl.constexpr, BITS: tl.constexpr, ASYMMETRIC: tl.constexpr,
    LOOKUP: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Planes J and J + 1 of a step, as `join_planes` takes them. Arguments as in `unpack`."""
    if LOOKUP > 0:
        return two_planes(words, codebook_at, tables, J, BITS, LOOKUP, DTYPE, PTX)
    else:
        first = plane(words, zero, magic, J, BITS, ASYMMETRIC, DTYPE, PTX, UPCAST)
        return first, plane(words, zero, magic, J + 1, BITS, ASYMMETRIC, DTYPE, PTX, UPCAST)


@triton.jit
def unpack(
    words, zero, magic, codebook_at, tables, FIRST: tl.constexpr, PLANES: tl.constexpr, BITS: tl.constexpr,
    ASYMMETRIC: tl.constexpr, LOOKUP: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr, UPCAST: tl.constexpr,
    QUADS: tl.constexpr,
):  # fmt: skip
    """The operand of the matrix instructions FIRST .. FIRST + PLANES - 1 (PLANES 2, 4 or 8) of a step, DTYPE [16 T, 16
    PLANES]: codes minus zero points, or entries of the codebook.

    words: the step's blocks, each int32 [T, 128]; zero: `zero_point_word` of the row of each word, alike (read when
    ASYMMETRIC); codebook_at and tables: of the row of each word (read when LOOKUP)."""
    p0, p1 = pair(words, zero, magic, codebook_at, tables, FIRST, BITS, ASYMMETRIC, LOOKUP, DTYPE, PTX, UPCAST)
    p2, p3, p4, p5, p6, p7 = p0, p0, p0, p0, p0, p0
    if PLANES >= 4:
        p2, p3 = pair(words, zero, magic, codebook_at, tables, FIRST + 2, BITS, ASYMMETRIC, LOOKUP, DTYPE, PTX, UPCAST)
    if PLANES == 8:
        p4, p5 = pair(words, zero, magic, codebook_at, tables, FIRST + 4, BITS, ASYMMETRIC, LOOKUP, DTYPE, PTX, UPCAST)
        p6, p7 = pair(words, zero, magic, codebook_at, tables, FIRST + 6, BITS, ASYMMETRIC, LOOKUP, DTYPE, PTX, UPCAST)
    return join_planes(p0, p1, p2, p3, p4, p5, p6, p7, PLANES, QUADS)
