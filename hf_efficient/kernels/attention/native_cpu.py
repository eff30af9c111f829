"""Attention over pages by the C++ kernels of `native/pages`, which read full-precision and quantized pages and ring
buffers in place, in one call. `kernels.native.build` says on which CPUs they are compiled."""

import ctypes

import torch

from hf_efficient.kernels.attention.call import AttentionCall
from hf_efficient.kernels.attention.policy import MAX_DIM, MAX_QUERIES
from hf_efficient.kernels.native import build
from hf_efficient.kernels.native.tiers import once_a_tier
from hf_efficient.kernels.replay import instructions
from hf_efficient.kernels.replay.registry import replays


_TYPES = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2}  # NumberType of native/pages/page_call.h
_CODES = {torch.int8: 3, torch.float8_e4m3fn: 4}
_PACKED = {4: 5, 2: 6}  # by bits

_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _Pages(ctypes.Structure):
    """`Pages` of native/pages/page_call.h."""

    _fields_ = [
        ("data", _POINTER), ("scale", _POINTER), ("minimum", _POINTER), ("dim", _INT), ("groups", _INT),
        ("block_bytes", _INT), ("block_scales", _INT),
    ]  # fmt: skip


class _AttentionCall(ctypes.Structure):
    """`AttentionCall` of native/pages/page_call.h: the record of the same name with sizes, types and addresses."""

    _fields_ = [
        ("batch", _INT), ("width", _INT), ("query_heads", _INT), ("heads", _INT), ("query_type", _INT),
        ("page_type", _INT), ("q", _POINTER), ("out", _POINTER), ("lse", _POINTER), ("lse_stride", _INT),
        ("lse_head_stride", _INT), ("k_cache", _Pages), ("v_cache", _Pages), ("num_blocks", _INT),
        ("block_size", _INT), ("wrap", _INT), ("block_table", _POINTER), ("table_width", _INT), ("table_stride", _INT),
        ("cache_seqlens", _POINTER), ("appended", _INT), ("k", _POINTER), ("v", _POINTER), ("token_group", _INT),
        ("k_tail", _Pages), ("v_tail", _Pages), ("ring_size", _INT), ("quantized_seqlens", _POINTER),
        ("ring_rows", _POINTER), ("left", _INT), ("right", _INT), ("tree_mask", _POINTER), ("alibi_slopes", _POINTER),
        ("slopes_stride", _INT), ("distance_bias", _POINTER), ("distances", _INT), ("s_aux", _POINTER),
        ("softmax_scale", ctypes.c_double), ("softcap", ctypes.c_double),
    ]  # fmt: skip


class _RaggedCall(ctypes.Structure):
    """`RaggedCall` of native/pages/page_call.h."""

    _fields_ = [("call", _AttentionCall), ("query_starts", _POINTER), ("tokens", _INT)]


@once_a_tier
def kernel(dtype: torch.dtype, name: str = "hf_attend_pages"):
    """The compiled function for queries of this dtype; compiles it at the first call. None where torch's operators are
    to be used. name: "hf_attend_ragged" for the function that reads a `_RaggedCall`."""
    library = build.load("pages", (_Pages, _AttentionCall, _RaggedCall), QUERY=_TYPES[dtype])
    function = getattr(library, name, None)
    if function is not None:
        function.argtypes = [_POINTER]
    return function


def serves(q, k_cache, v_cache, k_scale=None, v_scale=None, k_min=None, v_min=None, **_) -> bool:
    """Whether the kernels read such pages for such queries. Arguments as of `api.flash_attn_with_kvcache`."""
    dim, page = q.shape[-1], k_cache.shape[:3]
    if q.dtype not in _TYPES or not q.numel() or dim > MAX_DIM:
        return False
    if q.shape[1] > MAX_QUERIES and k_cache.dtype != q.dtype:
        return False
    if v_cache.shape[:3] != page or q.shape[2] % page[2] or k_cache.dtype != v_cache.dtype:
        return False
    pages, scales = [k_cache, v_cache], [x for x in (k_scale, v_scale, k_min, v_min) if x is not None]
    if len(scales) == 4:
        bits, groups, token_groups = 8 * k_cache.shape[-1] // dim, v_scale.shape[-1], k_scale.shape[1]
        value_dim = v_cache.shape[-1] * 8 // max(1, bits)
        fits = (
            bits in _PACKED
            and (groups == 1 or value_dim % (16 * groups) == 0)
            and k_cache.dtype == torch.uint8
            and token_groups
            and page[1] % token_groups == 0
            and k_scale.shape == k_min.shape == (page[0], token_groups, page[2], dim)
            and v_scale.shape == v_min.shape == (*page, groups)
        )
    else:
        value_dim = v_cache.shape[-1]
        fits = k_cache.shape[-1] == dim and (
            k_cache.dtype in _CODES
            and len(scales) == 2
            and k_scale.shape == v_scale.shape == page
            or k_cache.dtype == q.dtype
            and not scales
        )
    return (
        bool(fits)
        and value_dim <= MAX_DIM
        and all(x.is_cpu for x in pages + scales)
        and (all(x.is_contiguous() for x in pages + scales) or _are_apart(pages, scales))
        and all(x.dtype == torch.float16 for x in scales)
        and kernel(q.dtype) is not None
    )


def _are_apart(pages: list[torch.Tensor], scales: list[torch.Tensor]) -> bool:
    """Whether quantized pages and their scales are contiguous in themselves, and stand at one distance each."""
    whole = all(x[0].is_contiguous() for x in pages + scales if len(x))
    return whole and len(scales) > 0 and all(len({x.stride(0) for x in alike}) == 1 for alike in (pages, scales))


def _distance(x: torch.Tensor | None) -> int:
    """Elements from page to page where pages do not lie end to end; else 0."""
    return 0 if x is None or x.is_contiguous() else x.stride(0)


def _int32(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.int32 else x.int()


def attend(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`flash_attn_with_kvcache` for pages that the kernels serve, with a call.block_table.

    Returns None, with nothing done, where `native_call` does, where a sequence has more tokens than there is room
    for, or where the table names a block that does not exist.
    """
    call.q, out = call.q.contiguous(), call.q.new_empty(*call.q.shape[:-1], call.value_dim)
    batch, width, heads = call.q.shape[:3]
    lse = torch.empty((batch, heads, width) if call.return_lse else 0, dtype=torch.float32)
    call.k, call.v = (x if x is None else x.contiguous() for x in (call.k, call.v))
    native, _alive = native_call(call, out, lse)
    torch.get_num_threads()  # gives a new Python thread torch's number of threads: OpenMP has one for each thread
    return (out, lse) if native is not None and kernel(call.q.dtype)(ctypes.addressof(native)) else None


def _belong_together(call: AttentionCall, value_dim: int, slopes, bias) -> bool:
    """Whether the kernels read arguments of these shapes and dtypes. value_dim: of the output. slopes, bias: what
    `call.alibi_slopes` gives, [query heads] or [B, query heads], or for each distance [1, query heads, distances]."""
    q, k_tail, packed = call.q, call.k_tail, call.k_min is not None
    batch, width, query_heads, dim = q.shape
    heads = call.k_cache.shape[2]
    appended, ring_size = (0 if x is None else x.shape[1] for x in (call.k, k_tail))
    numbers = (
        (call.k, (batch, appended, heads, dim)),
        (call.v, (batch, appended, heads, value_dim)),
        (k_tail, (batch, ring_size, heads, dim)),
        (call.v_tail, (batch, ring_size, heads, value_dim)),
    )
    others = (
        (call.block_table, (batch, call.block_table.shape[1])),
        (call.cache_seqlens, (batch,)),
        (call.quantized_seqlens, (batch,)),
        (call.tree_mask, (batch, width)),
        (call.s_aux, (query_heads,)),
        (slopes, () if slopes is None else (batch, query_heads)[2 - slopes.dim() :]),
        (bias, (1, query_heads, 0 if bias is None else bias.shape[-1])),
    )
    if any(x is not None and (x.shape != shape or not x.is_cpu) for x, shape in numbers + others):
        return False
    if any(x is not None and x.dtype != q.dtype for x, _ in numbers):
        return False
    if width > MAX_QUERIES and (not call.causal or call.tree_mask is not None):
        return False
    if (call.k is None) != (call.v is None) or bool(ring_size) != packed:
        return False
    if not packed:
        return True
    bits = 8 * call.k_cache.shape[-1] // dim
    return call.v_cache.shape[-1] * 8 // bits == value_dim and k_tail.is_contiguous() and call.v_tail.is_contiguous()


def native_call(call: AttentionCall, out: torch.Tensor, lse: torch.Tensor) -> tuple[_AttentionCall | None, tuple]:
    """`call`, whose q, k and v are contiguous, as the kernels read it, with results in `out` and `lse`.

    Returns the `_AttentionCall` and the tensors that must live as long as it; (None, ()) where arguments have shapes or
    dtypes that do not belong together, or a prompt asks for more than causal attention.
    """
    q, k_cache, v_cache, table = call.q, call.k_cache, call.v_cache, call.block_table
    batch, width, query_heads, dim = q.shape
    block_size, heads = k_cache.shape[1:3]
    value_dim, packed = out.shape[-1], call.k_min is not None
    appended, ring_size = (0 if x is None else x.shape[1] for x in (call.k, call.k_tail))
    slopes, bias = call.alibi_slopes, None
    if slopes is not None:
        slopes, bias = (None, slopes) if slopes.dim() == 3 else (slopes, None)
        slopes, bias = (x if x is None else x.float().contiguous() for x in (slopes, bias))
    if not _belong_together(call, value_dim, slopes, bias):
        return None, ()
    table, seqlens = _int32(table), _int32(call.cache_seqlens).contiguous()
    if table.stride(-1) != 1:
        table = table.contiguous()
    s_aux = None if call.s_aux is None else call.s_aux.float().contiguous()
    tree = None if call.tree_mask is None else call.tree_mask.long().contiguous()
    quantized = None if call.quantized_seqlens is None else _int32(call.quantized_seqlens).contiguous()
    groups = call.v_scale.shape[-1] if packed else 1
    if packed:
        page_type = _PACKED[8 * k_cache.shape[-1] // dim]
    else:
        page_type = _TYPES[q.dtype] if k_cache.dtype == q.dtype else _CODES[k_cache.dtype]

    def at(x):
        return None if x is None else x.data_ptr()

    native = _AttentionCall(
        batch=batch, width=width, query_heads=query_heads, heads=heads, query_type=_TYPES[q.dtype],
        page_type=page_type, q=at(q), out=at(out), lse=at(lse) if call.return_lse else None,
        lse_stride=query_heads * width, lse_head_stride=width,
        k_cache=_Pages(at(k_cache), at(call.k_scale), at(call.k_min), dim, 1, *map(_distance, (k_cache, call.k_scale))),
        v_cache=_Pages(
            at(v_cache), at(call.v_scale), at(call.v_min), value_dim, groups, *map(_distance, (v_cache, call.v_scale))
        ),
        num_blocks=len(k_cache), block_size=block_size, wrap=0, block_table=at(table), table_width=table.shape[1],
        table_stride=table.stride(0), cache_seqlens=at(seqlens), appended=appended, k=at(call.k), v=at(call.v),
        token_group=block_size // call.k_scale.shape[1] if packed else 0,
        k_tail=_Pages(at(call.k_tail), None, None, dim, 1),
        v_tail=_Pages(at(call.v_tail), None, None, value_dim, groups),
        ring_size=ring_size, quantized_seqlens=at(quantized), left=call.left, right=0 if call.causal else call.right,
        tree_mask=at(tree), alibi_slopes=at(slopes),
        slopes_stride=0 if slopes is None or slopes.dim() == 1 else query_heads, distance_bias=at(bias),
        distances=0 if bias is None else bias.shape[-1], s_aux=at(s_aux),
        softmax_scale=dim**-0.5 if call.softmax_scale is None else call.softmax_scale, softcap=call.softcap,
    )  # fmt: skip
    return native, (table, seqlens, s_aux, slopes, bias, tree, quantized)


@replays("hf_efficient::flash_attn_with_kvcache")
def _instructions(out, lse, *args) -> list | None:
    """A captured call of the kernel; None where it would read copies of tensors, which a replay does not fill again."""
    call = AttentionCall(*args)
    if call.block_table is None:
        call.block_table = torch.arange(len(call.q), dtype=torch.int32)[:, None]
    integers = (
        (call.cache_seqlens, torch.int32), (call.block_table, torch.int32), (call.tree_mask, torch.int64),
        (call.quantized_seqlens, torch.int32),
    )  # fmt: skip
    needs_no_copy = all(x is None or (x.dtype is dtype and x.is_contiguous()) for x, dtype in integers)
    scales = call.k_scale, call.v_scale, call.k_min, call.v_min
    if not needs_no_copy or not serves(call.q, call.k_cache, call.v_cache, *scales):
        return None
    copies = []
    for name in ("q", "k", "v"):
        x = getattr(call, name)
        if x is not None and not x.is_contiguous():
            setattr(call, name, torch.empty_like(x, memory_format=torch.contiguous_format))
            copies.append(instructions.elementwise("COPY", getattr(call, name), [x]))
    native, alive = native_call(call, out, lse)
    if native is None:
        return None
    inputs = [call.q, call.k, call.v]
    return [*copies, instructions.call(kernel(call.q.dtype), native, out, inputs, (inputs, alive))]
