"""The device functions that the forward and the decode kernel share: where keys lie, loading, scores, online softmax.

Scores are kept in powers of two: the launcher folds log2(e) into the softmax scale (see `score_scales`).
"""

import math
import os

import triton
import triton.language as tl


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# tl.dot on bfloat16 is silently wrong in the interpreter (triton 3.6 to 3.9), so only there operands are widened.
_WIDEN_BF16 = tl.constexpr(INTERPRETED)


def score_scales(softmax_scale: float, softcap: float) -> tuple[float, float]:
    """The factors that `softmax_weights` and `cap_scores` apply: (scale, cap), in powers of two."""
    log2e = math.log2(math.e)
    if softcap:
        return 2 * log2e * softmax_scale / softcap, log2e * softcap
    return log2e * softmax_scale, 0.0


def split_dim(dim: int) -> tuple[int, int]:
    """The powers of two, at least 16 (the second may be 0), whose sum covers a head dim: 96 is (64, 32), 128 is (128,
    0)."""
    whole = max(16, triton.next_power_of_2(dim))
    half = whole // 2
    rest = max(16, triton.next_power_of_2(dim - half)) if dim > half >= 16 else half
    return (half, rest) if rest < half else (whole, 0)


@triton.jit
def packed_tile(index, cu_seqlens_q, batch, fewest, BLOCK_M: tl.constexpr):
    """The sequence, and the tile of BLOCK_M queries in it, that stand at place `index` among the tiles of all packed
    sequences of at least `fewest` queries. The last tile of a sequence comes first: under a causal mask it has most
    keys. Behind all of them, a tile that no sequence has.
    """
    BLOCK_B: tl.constexpr = 128
    sequence = 0
    before = 0  # tiles of the earlier sequences
    total = 0
    for start in tl.range(0, batch, BLOCK_B):
        number = start + tl.arange(0, BLOCK_B)
        inside = number < batch
        first = tl.load(cu_seqlens_q + number, mask=inside, other=0)
        end = tl.load(cu_seqlens_q + number + 1, mask=inside, other=0)
        tiles = tl.where(inside & (end - first >= fewest), (end - first + BLOCK_M - 1) // BLOCK_M, 0)
        ends = total + tl.cumsum(tiles, 0)
        passed = inside & (ends <= index)
        sequence += tl.sum(passed.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(passed, ends, 0), 0))
        total += tl.sum(tiles, 0)
    sequence = tl.minimum(sequence, batch - 1)
    queries = tl.load(cu_seqlens_q + sequence + 1) - tl.load(cu_seqlens_q + sequence)
    tile = (queries + BLOCK_M - 1) // BLOCK_M - 1 - (index - before)
    return sequence, tl.where(index < total, tile, 2147483647 // BLOCK_M)


@triton.jit
def program_tile(program, tiles, pairs, section):
    """Which tile of queries of which (sequence, head) pair a program computes.

    Sections of `section` pairs follow each other. Within one the last tiles of all pairs come first, because under a
    causal mask they are the longest.
    """
    first_pair = program // (tiles * section) * section
    index = program - first_pair * tiles
    width = tl.minimum(section, pairs - first_pair)
    return tiles - 1 - index // width, first_pair + index % width


@triton.jit
def dot(a, b, acc=None):
    """a [M, K] times b [K, N] in float32 (IEEE for float32 operands), plus acc [M, N] where given."""
    if _WIDEN_BF16 and a.dtype == tl.bfloat16:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def locate_keys(
    k, v, block_table, start, length,
    stride_kb, stride_kt, stride_vb, stride_vt,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Pointers to the rows of keys and values start..start+BLOCK_N of a sequence, and which of them exist.

    k and v point to the head's first key (PAGE_SIZE 0: keys follow each other) or to the head in page 0. `start` is
    below `length` and a multiple of BLOCK_N. Table entries of -1 are never followed: their keys do not exist.
    """
    offsets = tl.arange(0, BLOCK_N)
    present = start + offsets < length
    if PAGE_SIZE == 0:
        k_rows = k + tl.cast(start, tl.int64) * stride_kt + offsets * stride_kt
        v_rows = v + tl.cast(start, tl.int64) * stride_vt + offsets * stride_vt
    elif PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(block_table + start // PAGE_SIZE).to(tl.int64)
        slot = start % PAGE_SIZE
        k_rows = k + page * stride_kb + slot * stride_kt + offsets * stride_kt
        v_rows = v + page * stride_vb + slot * stride_vt + offsets * stride_vt
        present = present & (page >= 0)
    else:
        at, slot = (start + offsets) // PAGE_SIZE, (start + offsets) % PAGE_SIZE
        if BLOCK_N % PAGE_SIZE == 0:  # `start` stands at the first slot of a page
            at, slot = start // PAGE_SIZE + offsets // PAGE_SIZE, offsets % PAGE_SIZE
        page = tl.load(block_table + at, mask=present, other=-1).to(tl.int64)
        k_rows = k + page * stride_kb + slot * stride_kt
        v_rows = v + page * stride_vb + slot * stride_vt
        present = page >= 0
    return k_rows, v_rows, present


@triton.jit
def load_rows(rows, present, CHECK: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """[rows, BLOCK_DIM] from row pointers; zero beyond DIM and, where CHECK, in rows that are not `present`."""
    column = tl.arange(0, BLOCK_DIM)
    pointers = rows[:, None] + column[None, :]
    if DIM == BLOCK_DIM:
        if CHECK:
            tile = tl.load(pointers, mask=present[:, None], other=0.0)
        else:
            tile = tl.load(pointers)
    elif CHECK:
        tile = tl.load(pointers, mask=present[:, None] & (column < DIM)[None, :], other=0.0)
    else:
        tile = tl.load(pointers, mask=(column < DIM)[None, :], other=0.0)
    return tile


@triton.jit
def cap_scores(s, scale, cap):
    """cap * tanh(s / cap), with the factors of `score_scales`: in powers of two, exact at both ends."""
    return cap - 2 * cap / (1 + tl.exp2(s * scale))


@triton.jit
def subtract_alibi(s, slope, position, key, scale, SOFTCAP: tl.constexpr):
    """ALiBi (https://arxiv.org/abs/2108.12409): scores [M, N] minus slope (in powers of two, a number or
    [M, 1]) times the distance of position [M] and key [N]. The result is scaled: softmax_weights takes it as SCALED."""
    if not SOFTCAP:
        s = s * scale
    return s - slope * tl.abs(position[:, None] - key[None, :]).to(tl.float32)


@triton.jit
def softmax_weights(s, total, maximum, scale, SCALED: tl.constexpr):
    """One step of the online softmax (https://arxiv.org/abs/1805.02867): scores s [M, N] join the sum total [M], which
    is relative to 2**maximum [M]. Returns their weights [M, N], the factor [M] of what was summed before, total and
    maximum.
    SCALED: s is in powers of two already (softcap or ALiBi).
    """
    if SCALED:
        higher = tl.maximum(maximum, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - base[:, None])
    else:
        higher = tl.maximum(maximum, tl.max(s, 1) * scale)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s * scale - base[:, None])
    shrink = tl.exp2(maximum - base)
    return p, shrink, total * shrink + tl.sum(p, 1), higher
