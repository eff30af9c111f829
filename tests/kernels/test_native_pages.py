"""The C++ attention over pages against the float64 references of flash_paged, what it leaves to torch's operators, and
what happens where it cannot be compiled."""

import logging

import pytest
import torch
from helpers import assert_close
from test_attention_torch_cpu import BFLOAT16, FLOAT32, LENGTHS, OPTIONS, Cache, options_for, same_attention

from hf_efficient.kernels import flash_paged
from hf_efficient.kernels.attention import api, native_cpu
from hf_efficient.kernels.native import build


pytestmark = pytest.mark.usefixtures("two_threads", "tier")
FORMATS = [None, torch.int8, torch.float8_e4m3fn, 4, 2]  # None: the queries' dtype
SCALED_QUERIES = dict(rms=8e-3, maximum=0.08, reason="bfloat16 weights and scaled queries, and the rounded result")
SCALED_QUERIES_LSE = dict(rms=1e-3, maximum=0.02, reason="scores of scaled queries rounded to bfloat16")
TREE = [0b00001, 0b00011, 0b00101, 0b01011, 0b10101]  # 0 - 1 - 3, 0 - 2 - 4


@pytest.fixture
def calls(monkeypatch):
    """How often the kernels were called."""
    made = []
    attend = native_cpu.attend
    monkeypatch.setattr(native_cpu, "attend", lambda *args: made.append(1) or attend(*args))
    return made


class TypedCache(Cache):
    """A `Cache` for queries of `dtype`, with values grouped by 16 channels or more."""

    def __init__(self, lengths, size, kind, dtype, dim=32, value_dim=32, **kwargs):
        super().__init__(lengths, size, dtype if kind is None else kind, dim=dim, value_dim=value_dim, **kwargs)
        for name in ("k_tail", "v_tail"):
            if name in self.extra:
                self.extra[name] = self.extra[name].to(dtype)


def tolerance(kind, dtype):
    if dtype == torch.float32:
        return FLOAT32
    return SCALED_QUERIES if isinstance(kind, int) and dtype == torch.bfloat16 else BFLOAT16


def compare(cache, q, tolerance, **options):
    """Attention by the kernels and by the reference, which is given the same numbers in float32."""
    actual = cache.attend(api.flash_attn_with_kvcache, q, **options)
    other = cache.clone()
    if other.pages[0].dtype == q.dtype:
        other.pages = [pages.float() for pages in other.pages]
    other.extra = {name: x.float() if name.endswith("tail") else x for name, x in other.extra.items()}
    expected = other.attend(flash_paged.flash_attn_with_kvcache_reference, q.float(), **options)
    assert actual[0].dtype == q.dtype
    if tolerance is SCALED_QUERIES:
        assert_close(*(lse.clamp_min(-99) for lse in (actual[1], expected[1])), **SCALED_QUERIES_LSE)
        actual = actual[0], expected[1]
    same_attention((actual[0].float(), actual[1]), expected, tolerance)


DTYPES = torch.float32, torch.bfloat16, torch.float16
HEADS = (7, 1, 80, 48), (9, 3, 64, 64), (8, 2, 128, 128), (2, 2, 256, 192), (4, 2, 16, 32)


@pytest.mark.parametrize(  # odd heads with all dtypes, the others with one in turn
    "heads, kv_heads, dim, value_dim, kind, dtype",
    [
        (*heads, kind, dtype)
        for i, heads in enumerate(HEADS)
        for j, kind in enumerate(FORMATS)
        for k, dtype in enumerate(DTYPES)
        if i == 0 or k == (i + j) % 3
    ],
    ids=lambda value: str(value) if value in DTYPES else None,  # the Makefile chooses by it
)
def test_formats_and_heads(kind, dtype, heads, kv_heads, dim, value_dim, calls, nan_poison):
    """Rows without tokens, of one, and beyond a span; padding; some blocks absent."""
    cache = TypedCache([0, 1, 129, 700, -1], 16, kind, dtype, dim, value_dim, heads=kv_heads, group=16)
    cache.table[3, 2] = -1
    q = torch.randn(5, 1, heads, dim).to(dtype)
    served = not isinstance(kind, int) or value_dim % 32 == 0
    compare(cache, q, tolerance(kind, dtype), causal=True)
    assert len(calls) == served


@pytest.mark.parametrize("label", OPTIONS)
@pytest.mark.parametrize("kind", [None, torch.int8, 4])
def test_options(kind, label, calls, nan_poison):
    for width in (1, 3):
        cache = TypedCache(LENGTHS, 16, kind, torch.float32, spare=width)
        compare(cache, torch.randn(len(LENGTHS), width, 4, 32), FLOAT32, **options_for(label))
    assert len(calls) == 2


@pytest.mark.parametrize("softcap", [0, 0.5])
def test_scores_far_beyond_the_range_of_exponentials(softcap, calls, nan_poison):
    """Weights below the smallest float32, and scores a thousand times their cap."""
    cache = TypedCache(LENGTHS, 16, None, torch.float32, spare=3)
    compare(cache, 1000 * torch.randn(len(LENGTHS), 3, 4, 32), FLOAT32, causal=True, softcap=softcap)
    assert len(calls) == 1


@pytest.mark.parametrize("size", [8, 48, 64, 256])
@pytest.mark.parametrize("kind", [None, torch.float8_e4m3fn, 2])
def test_page_sizes(kind, size, calls, nan_poison):
    """Pages shorter and longer than a tile, and that do not divide one; groups of 8 and 16 tokens."""
    for dtype in (torch.float32, torch.bfloat16):
        cache = TypedCache([700, 0, 33], size, kind, dtype, group=8 if size == 8 else 16)
        compare(cache, torch.randn(3, 2, 6, 32).to(dtype), tolerance(kind, dtype), causal=True)
    assert len(calls) == 2


@pytest.mark.parametrize("kind", FORMATS)
def test_many_queries(kind, calls, nan_poison):
    """64 new tokens, some of which come before the first token of their row."""
    for dtype in (torch.float32, torch.bfloat16):
        cache = TypedCache([300, 40, 64], 16, kind, dtype)
        q = torch.randn(3, 64, 6, 32).to(dtype)
        compare(cache, q, tolerance(kind, dtype), causal=True, window_size=(70, 0))
        compare(cache, q, tolerance(kind, dtype))
    assert len(calls) == 4


@pytest.mark.parametrize("label", OPTIONS)
def test_prompts(label, calls, nan_poison):
    """More queries than are attended at once, a part of a block of them too; some come before the first token of their
    row."""
    options = {**options_for(label), "causal": True}
    for dtype, widths in ((torch.float32, (65, 128, 200)), (torch.bfloat16, (100,))):
        for width in widths:
            cache = TypedCache([300, 40, -1, width, 0], 16, None, dtype)
            compare(cache, torch.randn(5, width, 4, 32).to(dtype), tolerance(None, dtype), **options)
    assert len(calls) == 4


def test_a_long_prompt(calls, nan_poison):
    """More blocks of queries than are attended at once."""
    cache = TypedCache([1200], 16, None, torch.float32, heads=1)
    compare(cache, torch.randn(1, 1100, 2, 32), FLOAT32, causal=True)
    assert calls


@pytest.mark.parametrize("width", [1, 100])
def test_sums_of_weights_in_bfloat16(width, calls):
    """Weights are rounded to bfloat16 for the products with values only."""
    cache = TypedCache([300, 100], 16, None, torch.bfloat16)
    q = torch.randn(2, width, 6, 32).bfloat16()
    lse = cache.attend(api.flash_attn_with_kvcache, q, causal=True)[1]
    cache.pages = [pages.float() for pages in cache.pages]
    expected = cache.attend(flash_paged.flash_attn_with_kvcache_reference, q.float(), causal=True)[1]
    assert_close(lse, expected, rms=2e-6, maximum=2e-5, reason="2 ** x within 2.6e-6, and sums in another order")
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seen", [1, 17, 40, 80, 131])
def test_a_prompt_has_the_bits_of_its_beginning(seen, dtype, calls, nan_poison):
    """Queries are multiplied with the keys of a tile up to the last one that some of them see. What comes later changes
    nothing."""
    cache = TypedCache([132], 16, None, dtype)
    q = torch.randn(1, 132, 6, 32).to(dtype)
    whole = cache.attend(api.flash_attn_with_kvcache, q, causal=True)
    for pages in cache.pages:
        for token in range(seen, 132):
            pages[cache.table[0, token // 16], token % 16] = 1e4
    changed = cache.attend(api.flash_attn_with_kvcache, q, causal=True)
    assert torch.equal(whole[0][:, :seen], changed[0][:, :seen])
    assert torch.equal(whole[1][..., :seen], changed[1][..., :seen])
    assert not torch.equal(whole[0][:, seen:], changed[0][:, seen:])
    assert len(calls) == 2


@pytest.mark.parametrize("window", [(-1, -1), (5, -1)])
@pytest.mark.parametrize("kind", FORMATS)
def test_trees(kind, window, calls, nan_poison):
    cache = TypedCache([5, 130, 280], 16, kind, torch.float32)
    options = dict(causal=True, window_size=window, alibi_slopes=torch.rand(4))
    compare(cache, torch.randn(3, 5, 4, 32), FLOAT32, tree_mask=torch.tensor(TREE).repeat(3, 1), **options)
    parents = [-1, *(int(torch.randint(-1, node, ())) for node in range(1, 64))]
    masks = []
    for node, parent in enumerate(parents):
        bits = (masks[parent] if parent >= 0 else 0) | 1 << node
        masks.append(bits)
    tree = torch.tensor([bits - (1 << 64) if bits >> 63 else bits for bits in masks]).repeat(3, 1)
    cache = TypedCache([64, 130, 280], 16, kind, torch.float32)
    compare(cache, torch.randn(3, 64, 4, 32), FLOAT32, tree_mask=tree, **options)
    assert len(calls) == 2


@pytest.mark.parametrize("kind", FORMATS)
def test_a_bias_by_distance(kind, calls, monkeypatch):
    """As T5 has it, over chains and trees; most keys are farther away than the table is long."""
    cache, q, table = TypedCache([5, 130, 280], 16, kind, torch.float32), torch.randn(3, 5, 4, 32), torch.randn(1, 4, 9)
    for more in ({}, dict(tree_mask=torch.tensor(TREE).repeat(3, 1))):
        options = dict(causal=True, alibi_slopes=table, **more)
        actual = cache.attend(api.flash_attn_with_kvcache, q, **options)
        with monkeypatch.context() as patch:
            patch.setattr(native_cpu, "kernel", lambda dtype: None)
            same_attention(actual, cache.attend(api.flash_attn_with_kvcache, q, **options), FLOAT32)
    assert len(calls) == 2


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_appended_tokens_are_those_of_torch(kind, dtype, calls, monkeypatch):
    """Bit for bit, with tokens of zeros, of large and of tiny numbers; row 1 is padding and row 4 crosses a page."""
    cache = TypedCache([40, -1, 0, 257, 30], 16, kind, dtype, dim=48, value_dim=32, spare=4)
    other = cache.clone()
    q, k, v = (torch.randn(5, 4, heads, dim).to(dtype) for heads, dim in ((4, 48), (2, 48), (2, 32)))
    k[0, 0], v[0, 1], k[2, 1, 0], v[3, 2, 1] = (
        0,
        v[0, 1] * 1000,
        k[2, 1, 0] * 1e-6,
        torch.linspace(-1, 1, 32).to(dtype) ** 5,
    )
    actual = cache.attend(api.flash_attn_with_kvcache, q, k, v, causal=True)
    monkeypatch.setattr(native_cpu, "kernel", lambda dtype: None)
    expected = other.attend(api.flash_attn_with_kvcache, q, k, v, causal=True)
    assert len(calls) == 1
    for tensor, same in zip(cache.tensors(), other.tensors()):
        assert torch.equal(tensor.float().nan_to_num(nan=9e4), same.float().nan_to_num(nan=9e4))
    size = expected[0].float().abs().max().item()
    assert_close(actual[0].float(), expected[0].float(), 1e-2, 0.02 * size, "bfloat16 weights in both")


@pytest.mark.parametrize("width", [2, 18])
def test_blocks_that_nobody_looks_up(width, calls, nan_poison):
    """Behind a window the table may hold anything."""
    cache = TypedCache([100, 300], 16, None, torch.float32)
    q, options = torch.randn(2, width, 4, 32), dict(causal=True, window_size=(20, 0), s_aux=torch.randn(4))
    expected = cache.attend(flash_paged.flash_attn_with_kvcache_reference, q, **options)
    cache.table[0, :3] = cache.table[1, :16] = 10**6
    same_attention(cache.attend(api.flash_attn_with_kvcache, q, **options), expected, FLOAT32)
    assert calls


@pytest.mark.parametrize("kind", [None, torch.int8, 4])
def test_errors_come_before_anything_is_written(kind):
    cache = TypedCache([40, 30], 16, kind, torch.float32)
    before = cache.clone()
    q, k = torch.randn(2, 40, 4, 32), torch.randn(2, 40, 2, 32)
    with pytest.raises(ValueError, match="new minus quantized_seqlens" if kind == 4 else "block_table has room"):
        cache.attend(api.flash_attn_with_kvcache, q, k, k)
    cache.table[1, 0] = 10**6
    with pytest.raises(ValueError, match="allowed are -1 to"):
        cache.attend(api.flash_attn_with_kvcache, q[:, :1])
    for tensor, same in zip(cache.tensors(), before.tensors()):
        assert torch.equal(tensor.float().nan_to_num(nan=9e4), same.float().nan_to_num(nan=9e4))


@pytest.mark.parametrize("lengths", [7, None, torch.tensor([3, 20], dtype=torch.int64)])
def test_without_a_block_table(lengths, calls, nan_poison):
    pages, q = torch.randn(2, 2, 20, 2, 32).unbind(), torch.randn(2, 2, 4, 32)
    options = dict(cache_seqlens=lengths, causal=True, return_softmax_lse=True)
    same_attention(
        api.flash_attn_with_kvcache(q, *pages, **options),
        flash_paged.flash_attn_with_kvcache_reference(q, *pages, **options),
        FLOAT32,
    )
    assert calls


def test_spans_grow_with_the_queries(calls):
    """So many queries that the results of all spans would take too much memory."""
    cache = TypedCache([4096, 4000], 256, None, torch.bfloat16, 256, 256, heads=1)
    compare(cache, torch.randn(2, 64, 8, 256).bfloat16(), BFLOAT16, causal=True)
    assert calls


@pytest.mark.parametrize("kind", FORMATS)
def test_results_do_not_depend_on_the_number_of_threads(kind, calls):
    cache = TypedCache([1500, 3, 0, 700], 16, kind, torch.bfloat16)
    q, threads, results = torch.randn(4, 3, 4, 32).bfloat16(), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(cache.attend(api.flash_attn_with_kvcache, q, causal=True))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other)) and len(calls) == 3


@pytest.mark.parametrize(
    "change",
    [
        dict(dtype=torch.float64),
        dict(width=65, causal=False),
        dict(width=65, kind=torch.int8),
        dict(dim=264),
        dict(pages=lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
    ],
)
def test_what_is_left_to_torch(change, calls):
    """Other dtypes, more queries, wider heads, pages with gaps."""
    dtype, dim = change.get("dtype", torch.float32), change.get("dim", 32)
    cache = TypedCache([40, 7], 16, change.get("kind"), dtype, dim, dim)
    cache.pages = [change.get("pages", lambda x: x)(pages) for pages in cache.pages]
    q = torch.randn(2, change.get("width", 1), 4, dim, dtype=dtype)
    options = dict(causal=change.get("causal", True))
    compare_to = cache.attend(flash_paged.flash_attn_with_kvcache_reference, q, **options)
    same_attention(cache.attend(api.flash_attn_with_kvcache, q, **options), compare_to, FLOAT32)
    assert not calls or not options["causal"], "what is not causal is seen too late to be left alone"


@pytest.mark.parametrize("wrong", ["heads", "lengths", "sinks", "tree"])
def test_arguments_that_do_not_belong(wrong):
    """No kernel reads what is not there: torch's operators raise."""
    cache, q, options = TypedCache([40, 7], 16, torch.int8, torch.float32), torch.randn(2, 1, 4, 32), {}
    if wrong == "heads":
        q = torch.randn(2, 1, 5, 32)
    elif wrong == "lengths":
        cache.lengths = torch.tensor([40, 7, 3], dtype=torch.int32)
    elif wrong == "sinks":
        options = dict(s_aux=torch.randn(3))
    else:
        options = dict(tree_mask=torch.ones(3, 1, dtype=torch.int64))
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        cache.attend(api.flash_attn_with_kvcache, q, **options)


def test_a_compiler_that_fails(monkeypatch, caplog):
    """Torch's operators serve, and one warning says so."""
    cache, q = TypedCache([40, 7], 16, torch.int8, torch.float32), torch.randn(2, 1, 4, 32)
    monkeypatch.setenv("CXX", "/bin/false")
    loaders = build.load, native_cpu.kernel, build._say_once
    try:
        for function in loaders:
            function.cache_clear()
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                compare(cache, q, FLOAT32, causal=True)
        assert native_cpu.kernel(torch.float32) is None
        assert sum("torch's slower operators" in record.message for record in caplog.records) == 1
    finally:
        for function in loaders:
            function.cache_clear()
