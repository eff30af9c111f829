"""Attention over pages on CPUs whose C++ kernels are worth compiling (see `cpu_build`): reads full-precision and quantized
pages and rings where they lie, in one call."""

import ctypes
import functools

import torch

from hf_efficient.kernels.native import build
from hf_efficient.kernels.replay import instructions
from hf_efficient.kernels.replay.registry import replays


_FEW_QUERIES = 64  # of a row, as a tree has; more are a prompt: causal, over full-precision pages
_MAX_DIM = 256
_TYPES = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2}  # NumberType of native/pages/page_call.h
_CODES = {torch.int8: 3, torch.float8_e4m3fn: 4}
_PACKED = {4: 5, 2: 6}  # by bits


class _Pages(ctypes.Structure):
    """`Pages` of native/pages/page_call.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("minimum", ctypes.c_void_p),
        ("dim", ctypes.c_int64),
        ("groups", ctypes.c_int64),
    ]


_POINTERS = {
    "query",
    "out",
    "lse",
    "table",
    "lengths",
    "new_keys",
    "new_values",
    "stored",
    "ancestors",
    "slopes",
    "sinks",
}
_NAMES = (
    "batch width query_heads heads query_type page_type query out lse lse_row lse_head keys values num_blocks block_size "
    "table table_columns table_stride lengths appended new_keys new_values token_group ring_keys ring_values ring stored left right ancestors "
    "slopes slopes_stride sinks scale softcap"
).split()


class _Call(ctypes.Structure):
    """`Call` of native/pages/page_call.h."""

    _fields_ = [
        (
            name,
            ctypes.c_void_p if name in _POINTERS
            else _Pages if name.endswith(("keys", "values"))
            else ctypes.c_double if name in ("scale", "softcap")
            else ctypes.c_int64,
        )
        for name in _NAMES
    ]  # fmt: skip


@functools.cache
def kernel(dtype: torch.dtype):
    """The compiled function for queries of this dtype, compiled when it is not there; None where torch's operators are to be
    used."""
    library = build.load("pages", (_Pages, _Call), QUERY=_TYPES[dtype])
    if library is None:
        return None
    library.hf_attend_pages.argtypes = [ctypes.c_void_p]
    return library.hf_attend_pages


def serves(q, k_cache, v_cache, k_scale=None, v_scale=None, k_min=None, v_min=None, **_) -> bool:
    """Whether the kernels read such pages for such queries; arguments as of `flash_attn_with_kvcache`."""
    dim, page = q.shape[-1], k_cache.shape[:3]
    if (
        q.dtype not in _TYPES
        or not q.numel()
        or dim > _MAX_DIM
        or (q.shape[1] > _FEW_QUERIES and k_cache.dtype != q.dtype)
    ):
        return False
    if v_cache.shape[:3] != page or q.shape[2] % page[2] or k_cache.dtype != v_cache.dtype:
        return False
    packed, stored = [k_cache, v_cache], [x for x in (k_scale, v_scale, k_min, v_min) if x is not None]
    if len(stored) == 4:
        bits, groups, size = 8 * k_cache.shape[-1] // dim, v_scale.shape[-1], k_scale.shape[1]
        value_dim = v_cache.shape[-1] * 8 // max(1, bits)
        fits = (
            bits in _PACKED
            and (groups == 1 or value_dim % (16 * groups) == 0)
            and k_cache.dtype == torch.uint8
            and size
            and page[1] % size == 0
            and k_scale.shape == k_min.shape == (page[0], size, page[2], dim)
            and v_scale.shape == v_min.shape == (*page, groups)
        )
    else:
        value_dim = v_cache.shape[-1]
        fits = k_cache.shape[-1] == dim and (
            k_cache.dtype in _CODES
            and len(stored) == 2
            and k_scale.shape == v_scale.shape == page
            or k_cache.dtype == q.dtype
            and not stored
        )
    return (
        bool(fits)
        and value_dim <= _MAX_DIM
        and all(x.is_contiguous() and x.is_cpu for x in packed + stored)
        and all(x.dtype == torch.float16 for x in stored)
        and kernel(q.dtype) is not None
    )


def _int32(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.int32 else x.int()


def attend(q, k_cache, v_cache, k, v, *rest):
    """`flash_attn_with_kvcache_cpu` for what `serves`; its arguments. None, and nothing is done, where the other arguments have
    shapes or dtypes that do not belong to it or ask for what prompts do not get, a row has more tokens than there is room for,
    or the table has a block that does not exist."""
    value_dim, return_lse = v_cache.shape[-1] if rest[-2] is None else rest[-2].shape[-1], rest[9]
    q, out = q.contiguous(), q.new_empty(*q.shape[:-1], value_dim)
    lse = torch.empty((len(q), q.shape[2], q.shape[1]) if return_lse else 0)
    k, v = (x if x is None else x.contiguous() for x in (k, v))
    call, _ = describe(out, lse, q, k_cache, v_cache, k, v, *rest)
    torch.get_num_threads()  # gives a new Python thread torch's number of threads: OpenMP keeps one a thread
    return (out, lse) if call is not None and kernel(q.dtype)(ctypes.addressof(call)) else None


def describe(
    out, lse, q, k_cache, v_cache, k, v, cache_seqlens, table, softmax_scale, causal, left, right, softcap, alibi_slopes,
    s_aux, return_lse, tree_mask, k_scale, v_scale, k_min, v_min, k_tail, v_tail, quantized_seqlens,
):  # fmt: skip
    """What the kernel is told to write into `out` and `lse`: a `_Call`, or None as in `attend`, and the tensors that must live
    as long as it. q, k and v are contiguous."""
    batch, width, query_heads, dim = q.shape
    block_size, heads = k_cache.shape[1:3]
    value_dim = out.shape[-1]
    bits = 8 * k_cache.shape[-1] // dim if k_min is not None else 8
    new, ring = (0 if x is None else x.shape[1] for x in (k, k_tail))
    numbers = (
        (k, (batch, new, heads, dim)),
        (v, (batch, new, heads, value_dim)),
        (k_tail, (batch, ring, heads, dim)),
        (v_tail, (batch, ring, heads, value_dim)),
    )
    others = (
        (table, (batch, table.shape[1])),
        (cache_seqlens, (batch,)),
        (quantized_seqlens, (batch,)),
        (tree_mask, (batch, width)),
        (s_aux, (query_heads,)),
        (alibi_slopes, (batch, query_heads)[2 - alibi_slopes.dim() :] if alibi_slopes is not None else ()),
    )
    if (
        any(x is not None and (x.shape != shape or not x.is_cpu) for x, shape in numbers + others)
        or any(x is not None and x.dtype != q.dtype for x, _ in numbers)
        or any(x is not None and not x.is_contiguous() for x in (k_tail, v_tail))
        or (k is None) != (v is None)
        or width > _FEW_QUERIES
        and (not causal or tree_mask is not None)
        or bool(ring) != (bits < 8)
        or k_min is not None
        and v_cache.shape[-1] * 8 // bits != value_dim
    ):
        return None, ()
    table, lengths = _int32(table), _int32(cache_seqlens).contiguous()
    if table.stride(-1) != 1:
        table = table.contiguous()
    sinks = None if s_aux is None else s_aux.float().contiguous()
    slopes = None if alibi_slopes is None else alibi_slopes.float().contiguous()
    tree = None if tree_mask is None else tree_mask.long().contiguous()
    stored = None if quantized_seqlens is None else _int32(quantized_seqlens).contiguous()
    groups = v_scale.shape[-1] if k_min is not None else 1
    if k_min is not None:
        page_type = _PACKED[bits]
    else:
        page_type = _TYPES[q.dtype] if k_cache.dtype == q.dtype else _CODES[k_cache.dtype]

    def at(x):
        return None if x is None else x.data_ptr()

    call = _Call(
        batch, width, query_heads, heads, _TYPES[q.dtype], page_type, at(q), at(out), at(lse) if return_lse else None,
        query_heads * width, width,
        _Pages(at(k_cache), at(k_scale), at(k_min), dim, 1), _Pages(at(v_cache), at(v_scale), at(v_min), value_dim, groups),
        len(k_cache), block_size, at(table), table.shape[1], table.stride(0), at(lengths),
        new, at(k), at(v), 0 if k_min is None else block_size // k_scale.shape[1],
        _Pages(at(k_tail), None, None, dim, 1), _Pages(at(v_tail), None, None, value_dim, groups),
        ring, at(stored), left, 0 if causal else right, at(tree), at(slopes),
        0 if slopes is None or slopes.dim() == 1 else query_heads, at(sinks),
        dim**-0.5 if softmax_scale is None else softmax_scale, softcap,
    )  # fmt: skip
    return call, (table, lengths, sinks, slopes, tree, stored)


@replays("hf_efficient::flash_attn_with_kvcache")
def _instructions(
    out, lse, q, k_cache, v_cache, k, v, cache_seqlens, table, softmax_scale, causal, left, right, softcap, alibi_slopes,
    s_aux, return_lse, tree_mask, k_scale, v_scale, k_min, v_min, k_tail, v_tail, quantized_seqlens,
):  # fmt: skip
    """A captured call of the kernel; None where it would read copies of tensors, which a replay does not fill again."""
    if table is None:
        table = torch.arange(len(q), dtype=torch.int32)[:, None]
    integers = (
        (cache_seqlens, torch.int32), (table, torch.int32), (tree_mask, torch.int64), (quantized_seqlens, torch.int32),
    )  # fmt: skip
    as_they_are = all(x is None or (x.dtype is dtype and x.is_contiguous()) for x, dtype in integers)
    if not as_they_are or not serves(q, k_cache, v_cache, k_scale, v_scale, k_min, v_min):
        return None
    copies, inputs = [], []
    for x in (q, k, v):
        if x is not None and not x.is_contiguous():
            y = torch.empty_like(x, memory_format=torch.contiguous_format)
            copies.append(instructions.elementwise("COPY", y, [x]))
            x = y
        inputs.append(x)
    q, k, v = inputs
    call, tensors = describe(
        out, lse, q, k_cache, v_cache, k, v, cache_seqlens, table, softmax_scale, causal, left, right, softcap,
        alibi_slopes, s_aux, return_lse, tree_mask, k_scale, v_scale, k_min, v_min, k_tail, v_tail, quantized_seqlens,
    )  # fmt: skip
    if call is None:
        return None
    return [*copies, instructions.call(kernel(q.dtype), call, out, inputs, (inputs, tensors))]
