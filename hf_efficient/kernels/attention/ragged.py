"""Attention over pages on a CPU, for concatenated sequences with different numbers of new tokens: one C++ call.

Continuous batching runs prompts and single tokens in one forward. Nothing is padded for each sequence, and a replay of
the call reads lengths, tables and starts from tensors that the host fills before it.
"""

import ctypes

import torch

from hf_efficient.kernels.attention import native_cpu
from hf_efficient.kernels.attention.call import AttentionCall
from hf_efficient.kernels.replay import instructions
from hf_efficient.kernels.replay.registry import replays


def serves(dtype: torch.dtype, query_heads: int, k_cache, v_cache, k_scale=None, v_scale=None, **minima) -> bool:
    """Whether `attend_ragged` takes queries of `dtype` over these pages. minima: k_min and v_min."""
    dim = (k_scale if minima else k_cache).shape[-1]
    q = k_cache.new_empty(1, 1, query_heads, dim, dtype=dtype)
    return native_cpu.serves(q, k_cache, v_cache, k_scale, v_scale, **minima)


def attend_ragged(
    q, k, v, k_cache, v_cache, query_starts, cache_seqlens, block_table, *, wrap=0, softmax_scale=None, left=-1,
    softcap=0.0, s_aux=None, k_scale=None, v_scale=None, k_min=None, v_min=None, k_tail=None, v_tail=None,
    quantized_seqlens=None, ring_rows=None, tree_mask=None,
):  # fmt: skip
    """Appends new tokens to the sequences' pages, then attends with all of them, causally. Has no backward.

    Args:
        q: [T, Hq, D], the sequences end to end; tokens behind the last sequence are padding.
        k, v: [T, Hk, D], [T, Hk, Dv].
        k_cache, v_cache: pages [blocks, block_size, Hk, D], in q's dtype, or int8 and float8_e4m3fn codes with k_scale
            and v_scale, float16 [blocks, block_size, Hk]. They must be what `serves` says. int4 and int2
            pages are those of `flash_paged.kv_formats`, with k_min and v_min, and the last arguments.
        query_starts: int32 [B + 1]. Sequence b has tokens query_starts[b] to query_starts[b + 1]; it may have none.
        cache_seqlens: int32 [B], tokens of each sequence before the new ones.
        block_table: int32 [B, W].
        wrap: token t stands where token t % wrap would, as in the rings of windows; 0 for none. A sequence longer than
            `wrap` takes one new token at a time, and `left` must be less than it.
        left: how many tokens before its own a query sees, -1 for all.
        s_aux: [Hq], sink logits.
        k_tail, v_tail, quantized_seqlens, ring_rows: of int4 and int2 pages. Rings [R, slots, Hk, D] in q's dtype; of
            each ring int32 [R] how many tokens of its sequence are in pages, the others are in slot t % slots; int32
            [B], the ring of each sequence.
        tree_mask: int64 [T], where the new tokens of each sequence, at most 64, are a token tree: bit j of a token says
            that it sees token j of its sequence's new ones.

    Returns:
        [T, Hq, Dv], zeros for padding.

    Raises:
        ValueError: query_starts decrease, or a sequence has more than 64 new tokens beside `tree_mask`; a replay does
            not check that.
        RuntimeError: a sequence does not fit its block table, its ring or `wrap`, or the kernels do not take such
            tensors; nothing is written.
    """
    return torch.ops.hf_efficient.attend_ragged(
        q, k, v, k_cache, v_cache, k_scale, v_scale, query_starts, cache_seqlens, block_table, wrap, softmax_scale,
        left, softcap, s_aux, k_min, v_min, k_tail, v_tail, quantized_seqlens, ring_rows, tree_mask,
    )  # fmt: skip


def _native_call(
    out, q, k, v, k_cache, v_cache, k_scale, v_scale, starts, seqlens, table, wrap, scale, left, softcap, s_aux, k_min,
    v_min, k_tail, v_tail, quantized, rows, tree,
):  # fmt: skip
    """(the `_RaggedCall`, what must live as long as it), or None where arguments do not belong together. q, k and v are
    contiguous."""
    tokens = len(q)
    integers = [x for x in (starts, seqlens, table, quantized, rows) if x is not None]
    if any(x.dtype is not torch.int32 or x.stride(-1) != 1 for x in integers) or len(starts) != len(table) + 1:
        return None
    if not (len(k) == len(v) == tokens and len(seqlens) == len(table)):
        return None
    if tree is not None and (tree.dtype is not torch.int64 or tree.shape != (tokens,) or not tree.is_contiguous()):
        return None
    if (k_tail is None) != (rows is None) or (rows is not None and len(rows) != len(table)):
        return None
    # as a batch of one sequence, whose sizes hf_attend_ragged replaces for each stretch of sequences
    call = AttentionCall(
        q[None], k_cache, v_cache, k[None], v[None], None, table[:1], scale, True, left, 0, softcap, None, s_aux, False,
        k_scale=k_scale, v_scale=v_scale, k_min=k_min, v_min=v_min,
    )  # fmt: skip
    if k_tail is not None:
        call.k_tail, call.v_tail, call.quantized_seqlens = k_tail[:1], v_tail[:1], quantized[:1]
    call.cache_seqlens = seqlens[:1]
    native, alive = native_cpu.native_call(call, out, q.new_empty(0, dtype=torch.float32))
    if native is None:
        return None
    native.batch, native.wrap = len(table), wrap
    native.block_table, native.table_stride = table.data_ptr(), table.stride(0)
    native.cache_seqlens = seqlens.data_ptr()
    if rows is not None:
        native.ring_rows = rows.data_ptr()
    if tree is not None:
        native.tree_mask = tree.data_ptr()
    alive = alive, starts, seqlens, table, k_tail, v_tail, quantized, rows, tree
    return native_cpu._RaggedCall(native, starts.data_ptr(), tokens), alive


def _cpu(q, k, v, k_cache, v_cache, k_scale, v_scale, starts, *args):
    *_, tree = args
    if (places := starts.tolist()) != sorted(places) or places[0] < 0:
        raise ValueError(f"query_starts={places}: must begin at 0 or later and never decrease")
    if tree is not None and int(starts.diff().max()) > 64:
        raise ValueError(
            f"tree_mask with {int(starts.diff().max())} new tokens of a sequence (query_starts): allowed are at most "
            "64, one for each bit"
        )
    q, k, v = (x.contiguous() for x in (q, k, v))
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    native = _native_call(out, q, k, v, k_cache, v_cache, k_scale, v_scale, starts, *args)
    torch.get_num_threads()  # gives a new Python thread torch's number of threads
    if native is None or not native_cpu.kernel(q.dtype, "hf_attend_ragged")(ctypes.addressof(native[0])):
        raise RuntimeError("attend_ragged: lengths beyond the pages, or tensors that the kernels do not take")
    return out


@replays("hf_efficient::attend_ragged")
def _instructions(out, q, k, v, *args):
    inputs, copies = [], []
    for x in (q, k, v):
        if not x.is_contiguous():
            copy = torch.empty_like(x, memory_format=torch.contiguous_format)
            copies.append(instructions.elementwise("COPY", copy, [x]))
            x = copy
        inputs.append(x)
    found = _native_call(out, *inputs, *args)
    if found is None:
        return None
    native, alive = found
    kernel = native_cpu.kernel(q.dtype, "hf_attend_ragged")
    return [*copies, instructions.call(kernel, native, out, inputs, (inputs, alive))]


_LIBRARY = torch.library.Library("hf_efficient", "FRAGMENT")
_LIBRARY.define(
    "attend_ragged(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!)? k_scale, "
    "Tensor(d!)? v_scale, Tensor query_starts, Tensor cache_seqlens, Tensor block_table, int wrap, "
    "float? softmax_scale, int left, float softcap, Tensor? s_aux, Tensor? k_min, Tensor? v_min, Tensor(e!)? k_tail, "
    "Tensor(f!)? v_tail, Tensor? quantized_seqlens, Tensor? ring_rows, Tensor? tree_mask) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_LIBRARY.impl("attend_ragged", _cpu, "CPU")
