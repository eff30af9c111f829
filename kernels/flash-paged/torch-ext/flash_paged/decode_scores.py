"""What the decode kernels share beyond the tiles of the forward kernel: where keys lie and which queries see them."""

import triton
import triton.language as tl

from .tiles import cap_scores


@triton.jit
def find_pages(block_table, sequence, start, length, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The pages of keys start..start+BLOCK_N of a sequence, int32: one number where they lie in one page, else one for
    each key.

    -1 from `length` on. Without a block_table (PAGE_SIZE 0) the sequence is a page of its own. `start` is a multiple of
    BLOCK_N. Kernels look pages up one key tile ahead, so that loads of keys need not wait for them.
    """
    if PAGE_SIZE == 0:
        pages = sequence.to(tl.int32)
    elif PAGE_SIZE % BLOCK_N == 0:
        pages = tl.load(block_table + start // PAGE_SIZE, mask=start < length, other=-1)
    else:
        offset = tl.arange(0, BLOCK_N)
        at = start // PAGE_SIZE + offset // PAGE_SIZE if BLOCK_N % PAGE_SIZE == 0 else (start + offset) // PAGE_SIZE
        pages = tl.load(block_table + at, mask=start + offset < length, other=-1)
    return pages


@triton.jit
def locate(pages, start, length, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where keys start..start+BLOCK_N of a sequence lie, by their `find_pages`: page, first slot, slots after that one,
    and which of them exist. Table entries of -1 are not followed; their keys do not exist.
    """
    offset = tl.arange(0, BLOCK_N)
    present = start + offset < length
    slot = tl.cast(start, tl.int64)
    if PAGE_SIZE > 0:
        if PAGE_SIZE % BLOCK_N == 0:
            slot = tl.cast(start % PAGE_SIZE, tl.int64)
        else:
            offset = (offset if BLOCK_N % PAGE_SIZE == 0 else start + offset) % PAGE_SIZE
            slot = tl.cast(0, tl.int64)
        present = present & (pages >= 0)
    return pages.to(tl.int64), slot, offset, present


@triton.jit
def popcount(x):
    """The number of bits set in int64 x."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((x * 0x0101010101010101) >> 56).to(tl.int32)


@triton.jit
def query_positions(query, valid, shift, tree_mask, TREE: tl.constexpr):
    """Positions of the queries [M] of a sequence, and with TREE their masks, from the sequence's part of tree_mask."""
    tree = tl.zeros_like(query).to(tl.int64)
    position = query + shift
    if TREE:
        tree = tl.load(tree_mask + query, mask=valid, other=0)
        position = shift + popcount(tree) - 1
    return position, tree


@triton.jit
def visible_scores(
    s, key, present, position, tree, tree_mask, slope, shift, seqlen_q, left, right, scale, cap,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, TREE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """Products s of queries and keys to scores in powers of two: scaled, capped, less ALiBi's slope times distance
    (https://arxiv.org/abs/2108.12409), -inf where a query does not see a key. `key`, its number, and whether it is
    `present` broadcast to s, and so do position, tree and slope of a query.

    With TREE the last seqlen_q keys (from `shift` on) are nodes of a tree: a query sees those of its mask, and they
    stand at the position of the query of the same node. Else query i at `position` i + shift sees up to `right` keys
    after it."""
    if SOFTCAP:
        s = cap_scores(s, scale, cap)
    else:
        s = s * scale
    key_position = key
    seen = present
    if TREE:
        node = key - shift
        if HAS_LEFT or ALIBI:
            masks = tl.load(tree_mask + node, mask=(node >= 0) & (node < seqlen_q), other=0)
            key_position = tl.where(node >= 0, shift + popcount(masks) - 1, key)
        bit = tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)
        seen = seen & ((node < 0) | (((tree >> bit) & 1) != 0))
    elif HAS_RIGHT:
        seen = seen & (key <= position + right)
    if HAS_LEFT:
        seen = seen & (key_position >= position - left)
    if ALIBI:
        s -= slope * tl.abs(position - key_position).to(tl.float32)
    return tl.where(seen, s, float("-inf"))
