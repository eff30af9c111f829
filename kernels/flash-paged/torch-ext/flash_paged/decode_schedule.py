"""Which program reads which keys when few queries are decoded: every program takes an equal share of all key tiles.

The work is one list of key tiles: sequence by sequence, in a sequence lane by lane (key head, query tile), in a lane
the key tiles that its queries see. Program p takes tiles p * share to (p + 1) * share, across lanes and sequences
(stream-K, https://arxiv.org/abs/2301.03598), so that a batch of very different lengths is spread as evenly as one of
equal lengths. The number of programs follows from shapes, the share from the lengths on the device: a CUDA graph can be
replayed while lengths grow.
"""

import triton
import triton.language as tl


MAX_PARTS = tl.constexpr(128)  # of a lane: one program adds them all
MIN_KEYS = tl.constexpr(128)  # of a program: fewer cost more to combine than they save


@triton.jit
def sequence_tiles(
    sequence, batch, cache_seqlens, seqlen_q, seqlen_k, appended, left,
    HAS_LEFT: tl.constexpr, TREE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Of one sequence or a vector of them: its keys, the first key tile that any query sees, and the tiles of a lane
    from there.

    A sequence without keys has one empty tile, so that a program writes its output; sequences beyond `batch` have none.
    """
    length = (sequence * 0).to(tl.int32) + seqlen_k
    if cache_seqlens is not None:
        length = tl.load(cache_seqlens + sequence, mask=sequence < batch, other=-1)
        length = tl.minimum(tl.where(length < 0, 0, length + appended), seqlen_k)
    begin = length * 0
    if HAS_LEFT:  # a node of a tree without ancestors stands one before the first node
        begin = tl.maximum(length - seqlen_q - left - (1 if TREE else 0), 0) // BLOCK_N
    tiles = tl.maximum(tl.cdiv(length, BLOCK_N) - begin, 1)
    return length, begin, tl.where(sequence < batch, tiles, 0)


@triton.jit
def _find(position, ends, before):
    """How many of these ends lie at or before tile `position`, and the last of those, if any."""
    passed = ends <= position
    return tl.sum(passed.to(tl.int32), 0), tl.maximum(before, tl.max(tl.where(passed, ends, 0), 0))


@triton.jit
def program_share(
    batch, lanes, cache_seqlens, seqlen_q, seqlen_k, appended, left,
    HAS_LEFT: tl.constexpr, TREE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """The share of this program: its number of tiles, its own tiles position..stop, its own lanes first..end among the
    batch * lanes of all, and the first tile of the first lane's sequence. BLOCK_B sequences are read at once.
    """
    total = tl.zeros([BLOCK_B], tl.int32)
    longest = tl.zeros([BLOCK_B], tl.int32)
    for start in tl.range(0, batch, BLOCK_B):
        sequence = start + tl.arange(0, BLOCK_B)
        _, _, tiles = sequence_tiles(
            sequence, batch, cache_seqlens, seqlen_q, seqlen_k, appended, left, HAS_LEFT, TREE, BLOCK_N
        )
        total += tiles
        longest = tl.maximum(longest, tiles)
    all_tiles = tl.sum(total, 0) * lanes
    share = tl.maximum(tl.cdiv(all_tiles, tl.num_programs(0)), tl.cdiv(tl.max(longest, 0), MAX_PARTS))
    share = tl.maximum(share, MIN_KEYS // BLOCK_N)
    position = tl.minimum(tl.program_id(0) * share, all_tiles)
    stop = tl.minimum(position + share, all_tiles)

    first_sequence = 0
    first_start = 0
    last_sequence = 0
    last_start = 0
    end = 0
    for start in tl.range(0, batch, BLOCK_B):
        sequence = start + tl.arange(0, BLOCK_B)
        _, _, tiles = sequence_tiles(
            sequence, batch, cache_seqlens, seqlen_q, seqlen_k, appended, left, HAS_LEFT, TREE, BLOCK_N
        )
        ends = end + tl.cumsum(tiles, 0) * lanes
        passed, first_start = _find(position, tl.where(sequence < batch, ends, 2147483647), first_start)
        first_sequence += passed
        passed, last_start = _find(stop - 1, tl.where(sequence < batch, ends, 2147483647), last_start)
        last_sequence += passed
        end = tl.max(ends, 0)
    _, _, tiles = sequence_tiles(
        first_sequence, batch, cache_seqlens, seqlen_q, seqlen_k, appended, left, HAS_LEFT, TREE, BLOCK_N
    )
    first_lane = first_sequence * lanes + (position - first_start) // tl.maximum(tiles, 1)
    _, _, tiles = sequence_tiles(
        last_sequence, batch, cache_seqlens, seqlen_q, seqlen_k, appended, left, HAS_LEFT, TREE, BLOCK_N
    )
    end_lane = last_sequence * lanes + (stop - 1 - last_start) // tl.maximum(tiles, 1) + 1
    return share, position, stop, first_lane, tl.where(position < stop, end_lane, first_lane), first_start
