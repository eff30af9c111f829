"""Which implementation of attention runs on a CPU: every threshold of that choice, with its reason.

The op `flash_attn_with_kvcache` runs the first of these that applies:

1. `native_cpu`, one C++ call that appends and attends: for the pages, dtypes and head dims of `native_cpu.serves`, for
   up to `MAX_QUERIES` queries of a sequence, or a causal prompt over full-precision pages.
2. "gather_batch", all sequences padded and attended to at once: for few queries and short contexts (`kvcache_reader`).
3. "flash_decoding", which reads pages in place, segment by segment: for few queries, or a token tree.
4. "gather_each", one sequence after the other copied for SDPA: for what is left.

The stores of a `PagedCache` leave the op out where SDPA over contiguous keys costs less: `reads_in_place` for
full-precision pages, `dequantizes_at_once` for quantized ones. `benchmarks/cpu_attention.py` measures all of them.
"""

from typing import Literal


# What the C++ kernels hold.
MAX_QUERIES = 64  # of a sequence: a token tree is a bit mask of 64 nodes; more queries are a prompt
MAX_DIM = 256  # channels of a head: the kernels' fixed arrays hold 16 vectors of 16 channels

# Where the faster implementation changes.
FEW_QUERIES = 16  # of a sequence: up to here reading pages in place costs less than copying them for SDPA
MAX_DECODE_QUERIES = 16  # new tokens of a sequence that one op appends and attends to, on any device; more are a prompt
SMALL_BATCH = 1 << 20  # numbers of keys with padding: gathering so few costs less than cutting them into segments
SMALL_QUANTIZED = 1 << 22  # numbers of keys with padding: one dequantization costs less than one a segment
MANY_KEYS = 10 << 20  # numbers of keys: copying more costs more than reading them page by page

# How much is held at a time. SEGMENT and CHUNK were chosen with benchmarks/cpu_attention.py.
SEGMENT = 512  # tokens that flash decoding attends to together, or one page if that is longer
CHUNK = 1 << 19  # numbers of keys that flash decoding reads at a time: they stay in the processor's cache
SCORES = 1 << 24  # numbers of a score matrix, 64 MB of float32; longer prompts are attended to in parts


def kvcache_reader(
    width: int, key_numbers: int, has_table: bool, has_rings: bool, has_tree: bool
) -> Literal["gather_batch", "flash_decoding", "gather_each"]:
    """How torch operators read the cache of `flash_attn_with_kvcache`.

    width: queries of a sequence. key_numbers: numbers of all keys, every sequence padded to the longest.
    """
    if has_table and not has_rings and not has_tree and width <= FEW_QUERIES and key_numbers <= SMALL_BATCH:
        return "gather_batch"
    return "flash_decoding" if has_table and (width <= FEW_QUERIES or has_tree) else "gather_each"


def reads_in_place(width: int, copied_numbers: int) -> bool:
    """Whether the op reads full-precision pages rather than SDPA a copy of them. copied_numbers: numbers of the keys in
    that copy, 0 where the pages are contiguous and need none."""
    return width <= MAX_DECODE_QUERIES and copied_numbers > MANY_KEYS


def dequantizes_at_once(key_numbers: int) -> bool:
    """Whether quantized pages that the C++ kernels do not serve are dequantized whole for SDPA."""
    return key_numbers <= SMALL_QUANTIZED
