"""The attention functions as torch.library ops: registered as they should be, compiled, and refusing bad input."""

import functools
from dataclasses import fields

import pytest
import torch
from test_attention_torch_cpu import FORMATS, Cache

from hf_efficient.kernels.attention import api
from hf_efficient.kernels.attention.call import AttentionCall


SETTINGS = (0.25, True, -1, -1, 0.0, None, None)
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
SCALES = ("k_scale", "v_scale", "k_min", "v_min", "k_tail", "v_tail", "quantized_seqlens")


def packed_arguments(cache=None):
    """Five tokens in two rows."""
    cumulative = torch.tensor([0, 3, 5], dtype=torch.int32)
    q, k, v = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 8)
    return (q, k, v, cumulative, cumulative, 3, 3)


@pytest.mark.parametrize("return_lse", [False, True])
def test_attention_is_well_registered(return_lse):
    ops, q = torch.ops.hf_efficient, torch.randn(2, 3, 4, 16)
    k, v, settings = torch.randn(2, 5, 2, 16), torch.randn(2, 5, 2, 8), (*SETTINGS, return_lse)
    torch.library.opcheck(ops.flash_attn, (q, k, v, *settings))
    torch.library.opcheck(ops.flash_attn_varlen, (*packed_arguments(), None, *settings))


def test_the_record_has_the_arguments_of_the_op():
    schema = torch.ops.hf_efficient.flash_attn_with_kvcache.default._schema
    assert [argument.name for argument in schema.arguments] == [field.name for field in fields(AttentionCall)]


@pytest.mark.parametrize("kind", FORMATS)
def test_caches_are_well_registered(kind):
    ops, cache = torch.ops.hf_efficient, Cache([10, 16], 8, kind, ring=16, spare=3)
    # torch cannot compare float8 tensors
    utilities = [*UTILITIES[kind == torch.float8_e4m3fn :]]
    if kind in (torch.int8, 2):  # the same tensors as float8 and 4 bits, where shapes are dynamic
        utilities[-1] = "test_aot_dispatch_static"
    check = functools.partial(torch.library.opcheck, test_utils=utilities)
    for tensor in cache.tensors():
        tensor.copy_(tensor.float().nan_to_num(nan=0.0))  # opcheck compares, and NaN is not equal to itself
    q, k, v = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 2, 16), torch.randn(2, 3, 2, 16)
    extra = [cache.extra.get(name) for name in SCALES]
    check(
        ops.flash_attn_with_kvcache, (q, *cache.pages, k, v, cache.lengths, cache.table, *SETTINGS, True, None, *extra)
    )
    starts = torch.tensor([0, 10, 26], dtype=torch.int32)
    check(ops.gather_cache, (*cache.pages, cache.table, starts, torch.float32, *extra, 26))
    scales = [cache.extra[name] for name in SCALES[:4] if name in cache.extra]
    check(ops.copy_blocks, (*cache.pages, torch.tensor([[0, 1]]), scales))
    if isinstance(kind, int):
        scales = [cache.extra[name] for name in ("k_scale", "k_min", "v_scale", "v_min")]
        groups = torch.randn(1, 8, 2, 16), torch.randn(1, 8, 2, 16), *cache.pages, *scales, torch.tensor([1])
        check(ops.quantize_and_cache, groups)
    else:
        slots = torch.arange(6)
        check(ops.reshape_and_cache, (k.flatten(0, 1), v.flatten(0, 1), *cache.pages, slots, *extra[:2]))


def _decode(q, k, v, cache, **options):
    api.reshape_and_cache(k[:, 0], v[:, 0], *cache.pages, torch.arange(len(k)), **cache.extra)
    mapping = torch.stack([cache.table[:, 1], cache.table[:, 0]], 1).long()
    api.copy_blocks(*cache.pages, mapping, *cache.extra.values())
    out = cache.attend(api.flash_attn_with_kvcache, q, k, v, **options)
    gathered = api.gather_cache(
        *cache.pages, cache.table, torch.tensor([0, 8, 16], dtype=torch.int32), q.dtype, **cache.extra, num_tokens=16
    )
    return *out, *gathered


@pytest.mark.parametrize("kind", [torch.float32, torch.int8])
def test_cache_ops_compile_into_one_graph(kind):
    """Shapes are dynamic: the second number of queries does not compile again."""
    torch.compiler.reset()
    compiled, frames = torch.compile(_decode, backend="aot_eager", fullgraph=True, dynamic=True), []
    cache = Cache([10, 16], 8, kind, spare=8)
    for tensor in cache.tensors():
        tensor.copy_(tensor.float().nan_to_num(nan=0.0))
    for width in (5, 7):
        q, k, v = torch.randn(2, width, 4, 16), torch.randn(2, width, 2, 16), torch.randn(2, width, 2, 16)
        caches = cache.clone(), cache.clone()
        expected = _decode(q, k, v, caches[0], causal=True)
        with torch.compiler.set_stance("default" if not frames else "fail_on_recompile"):
            actual = compiled(q, k, v, caches[1], causal=True)
        frames.append(width)
        for a, b in zip((*actual, *caches[1].tensors()), (*expected, *caches[0].tensors())):
            assert torch.equal(a, b)


def test_packed_and_grouped_ops_compile_into_one_graph():
    def function(q, k, v, starts_q, starts_k, max_q, max_k, cache):
        out, lse, _ = api.flash_attn_varlen_func(
            q, k, v, starts_q, starts_k, max_q, max_k, causal=True, return_attn_probs=True
        )
        dense = api.flash_attn_func(q[None], k[None], v[None], window_size=(2, 2))
        scales = [cache.extra[name] for name in ("k_scale", "k_min", "v_scale", "v_min")]
        groups = torch.ones(1, 8, 2, 16) * q.sum()
        api.quantize_and_cache(groups, groups, *cache.pages, *scales, torch.tensor([1]))
        return out, lse, dense

    arguments, cache = packed_arguments(), Cache([16], 8, 4)
    other = cache.clone()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for a, b in zip(compiled(*arguments, cache), function(*arguments, other)):
        assert torch.equal(a, b)
    for a, b in zip(cache.tensors(), other.tensors()):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_numbers_out_of_range_are_named():
    """On CPU they are checked always: nothing is read or written."""
    cache = Cache([40, 9], 16, spare=1)
    q, k = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16)
    before = [tensor.clone() for tensor in cache.pages]
    for wide in (q, q.repeat(1, 20, 1, 1)):
        cache.lengths = torch.tensor([40, 48], dtype=torch.int32)
        with pytest.raises(ValueError, match=r"cache_seqlens\[1\] = 48 \+ 1 new tokens: block_table has room for 48"):
            cache.attend(api.flash_attn_with_kvcache, wide, k, k)
        cache.lengths, cache.table[0, 1] = torch.tensor([40, 9], dtype=torch.int32), 77
        with pytest.raises(ValueError, match=r"block_table.* 77: allowed are -1 to 5"):
            cache.attend(api.flash_attn_with_kvcache, wide)
        cache.table[0, 1] = 1
    with pytest.raises(ValueError, match=r"slot_mapping\[1\] is 96: allowed are -1 to 95, the slots of the cache"):
        api.reshape_and_cache(k[:, 0], k[:, 0], *cache.pages, torch.tensor([-1, 96]))
    with pytest.raises(ValueError, match=r"mapping\[0, 1\] is 6: allowed are -1 to 5, the blocks of the cache"):
        api.copy_blocks(*cache.pages, torch.tensor([[0, 6]]))
    starts = torch.tensor([0, 49, 50], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"sequence 0 has 49 tokens: allowed are 48, 3 blocks of 16"):
        api.gather_cache(*cache.pages, cache.table, starts, torch.float32)
    with pytest.raises(ValueError, match=r"sequence 0 has 49 tokens: allowed are 48, 3 blocks of 16"):
        api.flash_attn_varlen_func(q[:, 0], *cache.pages, starts, starts, 49, 49, block_table=cache.table)
    for tensor, expected in zip(cache.pages, before):
        assert torch.equal(tensor.nan_to_num(), expected.nan_to_num())
    cache = Cache([40, 9], 16, 4, ring=8)
    cache.extra["quantized_seqlens"][0] = 16
    with pytest.raises(ValueError, match=r"cache_seqlens\[0\] = 40 \+ 0 new minus quantized_seqlens.*room for 8"):
        cache.attend(api.flash_attn_with_kvcache, q)


def test_what_a_cache_lacks_is_said():
    q, pages = torch.randn(2, 1, 4, 16), torch.zeros(3, 8, 2, 16, dtype=torch.int8)
    lengths, table = torch.tensor([1, 1], dtype=torch.int32), torch.zeros(2, 1, dtype=torch.int32)
    where = dict(cache_seqlens=lengths, block_table=table)
    with pytest.raises(ValueError, match="cache of torch.int8 needs k_scale and v_scale"):
        api.flash_attn_with_kvcache(q, pages, pages, **where)
    scale = torch.zeros(3, 8, 2, dtype=torch.float16)
    with pytest.raises(ValueError, match="int4 and int2 caches need k_min"):
        api.flash_attn_with_kvcache(
            q, pages.to(torch.uint8), pages.to(torch.uint8), k_scale=scale, v_scale=scale, **where
        )
    pages = pages.float()
    with pytest.raises(ValueError, match="tree_mask of shape"):
        api.flash_attn_with_kvcache(q, pages, pages, tree_mask=torch.ones(2, 2, dtype=torch.long), **where)
    with pytest.raises(ValueError, match="needs cache_seqlens to append"):
        api.flash_attn_with_kvcache(q, pages, pages, q[:, :, :2], q[:, :, :2], block_table=table)
