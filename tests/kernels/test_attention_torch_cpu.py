"""Attention on CPU by torch's operators against the float64 references of flash_paged: every option, page layout and
cache format. (test_native_pages.py: by the C++ kernels.)"""

import itertools

import pytest
import torch
from helpers import assert_close

from hf_efficient.kernels import flash_paged
from hf_efficient.kernels.attention import api, native_cpu, policy


FLOAT32 = dict(rms=1e-5, maximum=1e-4, reason="float32 sums in another order")
BFLOAT16 = dict(rms=6e-3, maximum=0.05, reason="bfloat16 probabilities or partial sums, and the rounded result")
OPTIONS = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, window_size=(3, 0)),
    "two-sided window": dict(window_size=(130, 1)),
    "scale and softcap": dict(causal=True, softmax_scale=0.7, softcap=1.5),
    "sinks": dict(causal=True, s_aux=4),
    "alibi": dict(causal=True, alibi_slopes=(4,)),
    "alibi by row": dict(alibi_slopes=(5, 4)),
    "all": dict(causal=True, window_size=(140, 0), softcap=2.0, s_aux=4, softmax_scale=0.3, alibi_slopes=(5, 4)),
}
LENGTHS = [0, 1, 129, 256, 300]  # none, one, beyond a segment, the end of a page and of a segment, ragged
FORMATS = [torch.float32, torch.int8, torch.float8_e4m3fn, 4, 2]


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    monkeypatch.setattr(native_cpu, "kernel", lambda dtype: None)


@pytest.fixture(params=["gathered", "in segments"])
def way(request, monkeypatch):
    """Caches as small as those here would always be gathered."""
    if request.param == "in segments":
        monkeypatch.setattr(policy, "SMALL_BATCH", 0)


def options_for(label):
    options = dict(OPTIONS[label])
    for name in ("s_aux", "alibi_slopes"):
        if name in options:
            options[name] = torch.rand(options[name])
    return options


def poisoned(shape, dtype):
    """What must not be read: NaN, or the largest code."""
    if dtype.is_floating_point:
        return torch.full(shape, float("nan")).to(dtype)
    return torch.full(shape, torch.iinfo(dtype).max, dtype=dtype)


class Cache:
    """Random tokens of rows in scattered pages of any format; whatever holds no token is poison. `group` tokens share a
    key scale and `ring` tokens have room in a tail."""

    def __init__(self, lengths, size, kind=torch.float32, heads=2, dim=16, value_dim=16, group=8, ring=24, spare=0):
        self.kind, self.lengths = kind, torch.tensor(lengths, dtype=torch.int32)
        self.packed = isinstance(kind, int)
        per_row = [-(-(max(length, 0) + spare) // size) for length in lengths]
        blocks = iter(torch.randperm(sum(per_row) + 2).tolist())
        table = [[next(blocks) for _ in range(n)] for n in per_row]
        self.table = torch.tensor([row + [-1] * (max(per_row) - len(row)) for row in table], dtype=torch.int32)
        tokens = [torch.randn(2, max(length, 0), heads, max(dim, value_dim)) for length in lengths]
        count, self.extra = sum(per_row) + 2, {}
        dims = (dim, value_dim)
        if self.packed:
            bits, stored = kind, [max(length, 0) // group * group for length in lengths]
            self.pages = [poisoned((count, size, heads, d * bits // 8), torch.uint8) for d in dims]
            scales = [(count, size // group, heads, dim), (count, size, heads, 2)]
            names = (("k_scale", "k_min"), ("v_scale", "v_min"))
            self.extra = {n: poisoned(shape, torch.float16) for pair, shape in zip(names, scales) for n in pair}
            for name, d, x in (("k_tail", dim, 0), ("v_tail", value_dim, 1)):
                tail = self.extra[name] = poisoned((len(lengths), ring, heads, d), torch.float32)
                for row, (length, start) in enumerate(zip(lengths, stored)):
                    for token in range(start, length):
                        tail[row, token % ring] = tokens[row][x, token, :, :d]
            self.extra["quantized_seqlens"] = torch.tensor(stored, dtype=torch.int32)
            for row, start in enumerate(stored):
                slots = [table[row][t // size] * (size // group) + t % size // group for t in range(0, start, group)]
                k, v = (tokens[row][x, :start, :, :d].unflatten(0, (-1, group)) for x, d in enumerate(dims))
                if slots:
                    scales = [self.extra[n] for n in ("k_scale", "k_min", "v_scale", "v_min")]
                    api.quantize_and_cache(k, v, *self.pages, *scales, torch.tensor(slots))
            return
        self.pages = [poisoned((count, size, heads, d), kind) for d in dims]
        if kind in (torch.int8, torch.float8_e4m3fn):
            self.extra = {name: poisoned((count, size, heads), torch.float16) for name in ("k_scale", "v_scale")}
        for row, length in enumerate(lengths):
            slots = [table[row][t // size] * size + t % size for t in range(length)]
            dtype = torch.float32 if self.extra else kind
            k, v = (tokens[row][x, ..., :d].to(dtype) for x, d in enumerate(dims))
            api.reshape_and_cache(k, v, *self.pages, torch.tensor(slots, dtype=torch.long), **self.extra)

    def tensors(self):
        return [*self.pages, *self.extra.values()]

    def clone(self):
        other = object.__new__(Cache)
        other.__dict__.update(self.__dict__)
        other.pages = [page.clone() for page in self.pages]
        other.extra = {name: tensor.clone() for name, tensor in self.extra.items()}
        return other

    def attend(self, function, q, k=None, v=None, **options):
        """(out, log-sum-exp) of `function`: attention.flash_attn_with_kvcache or the reference."""
        return function(
            q, *self.pages, k, v, cache_seqlens=self.lengths, block_table=self.table, return_softmax_lse=True,
            **self.extra,
            **options,
        )  # fmt: skip


def same_attention(actual, expected, tolerance):
    """(out, log-sum-exp) of both; the log-sum-exp may be -inf in both."""
    assert_close(actual[0], expected[0], **tolerance)
    lse, expected_lse = actual[1], expected[1]
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    assert_close(lse.nan_to_num(neginf=0), expected_lse.nan_to_num(neginf=0), 1e-5, 1e-3, "float32 log-sum-exp")


@pytest.mark.parametrize("label", OPTIONS)
@pytest.mark.parametrize("width", [1, 3])
def test_pages(label, width, way, nan_poison):
    options = options_for(label)
    cache = Cache(LENGTHS, size=16)
    q = torch.randn(len(LENGTHS), width, 4, 16)
    same_attention(
        cache.attend(api.flash_attn_with_kvcache, q, **options),
        cache.attend(flash_paged.flash_attn_with_kvcache_reference, q, **options),
        FLOAT32,
    )


# pages shorter and longer than a segment, and that do not divide one
@pytest.mark.parametrize("size", [8, 48, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_page_sizes_and_dtypes(size, dtype, way, nan_poison):
    cache = Cache([700, 0, 33], size, dtype, value_dim=8 if size == 48 else 16)
    q = torch.randn(3, 2, 6, 16).to(dtype)
    same_attention(
        cache.attend(api.flash_attn_with_kvcache, q, causal=True),
        cache.attend(flash_paged.flash_attn_with_kvcache_reference, q, causal=True),
        FLOAT32 if dtype == torch.float32 else BFLOAT16,
    )


def test_many_chunks_and_blocks_in_order(nan_poison, monkeypatch):
    """Several chunks a call, of which some are read in place because their blocks follow one another."""
    monkeypatch.setattr(policy, "SMALL_BATCH", 0)
    monkeypatch.setattr(policy, "CHUNK", 2 * 128 * 2 * 16)
    cache = Cache([1500, 700], 64)
    cache.table[0, :9] = torch.arange(9)
    cache.pages = [torch.randn_like(pages) for pages in cache.pages]
    q = torch.randn(2, 1, 4, 16)
    same_attention(
        cache.attend(api.flash_attn_with_kvcache, q),
        cache.attend(flash_paged.flash_attn_with_kvcache_reference, q),
        FLOAT32,
    )


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("width", [1, 18])
def test_formats_append_and_attend(kind, width, way, nan_poison):
    """New tokens go into the pages (int8 and fp8 quantized) or the ring; row 1 is padding and row 4 crosses a page."""
    cache = Cache([40, -1, 0, 257, 30], 16, kind, spare=width)
    other = cache.clone()
    q, k, v = torch.randn(5, width, 4, 16), torch.randn(5, width, 2, 16), torch.randn(5, width, 2, 16)
    options = dict(causal=True, s_aux=torch.randn(4))
    actual = cache.attend(api.flash_attn_with_kvcache, q, k, v, **options)
    same_attention(actual, other.attend(flash_paged.flash_attn_with_kvcache_reference, q, k, v, **options), FLOAT32)
    for tensor, expected in zip(cache.tensors(), other.tensors()):
        assert torch.equal(tensor.float().nan_to_num(nan=9e4), expected.float().nan_to_num(nan=9e4))


@pytest.mark.parametrize("window", [(-1, -1), (5, -1)])
@pytest.mark.parametrize("kind", [torch.float32, torch.int8, 4])
def test_trees(window, kind, nan_poison):
    """A drafted tree of five nodes: 0 - 1 - 3, 0 - 2 - 4, in rows that end in and behind a segment."""
    tree = torch.tensor([0b00001, 0b00011, 0b00101, 0b01011, 0b10101]).repeat(3, 1)
    cache = Cache([5, 130, 280], 16, kind)
    q, options = torch.randn(3, 5, 4, 16), dict(causal=True, window_size=window, alibi_slopes=torch.rand(4))
    same_attention(
        cache.attend(api.flash_attn_with_kvcache, q, tree_mask=tree, **options),
        cache.attend(flash_paged.flash_attn_with_kvcache_reference, q, tree_mask=tree, **options),
        FLOAT32,
    )


@pytest.mark.parametrize("tree", [None, [0b00001, 0b00011, 0b00101, 0b01011, 0b10101]])
def test_a_bias_by_distance(tree, way):
    """ALiBi as a table; and one whose last number is for all that is farther away."""
    cache, q, slopes = Cache([5, 130, 280], 16), torch.randn(3, 5, 4, 16), torch.rand(4)
    tree = None if tree is None else torch.tensor(tree).repeat(3, 1)
    options, attend = dict(causal=True, tree_mask=tree), api.flash_attn_with_kvcache
    table = -slopes[None, :, None] * torch.arange(300)
    expected = cache.attend(flash_paged.flash_attn_with_kvcache_reference, q, alibi_slopes=slopes, **options)
    same_attention(cache.attend(attend, q, alibi_slopes=table, **options), expected, FLOAT32)
    short = torch.randn(1, 4, 9)
    long = torch.cat([short, short[..., -1:].expand(-1, -1, 291)], -1)
    outputs = [cache.attend(attend, q, alibi_slopes=each, **options) for each in (short, long)]
    same_attention(*outputs, FLOAT32)


@pytest.mark.parametrize("width", [2, 18])
def test_evicted_blocks_are_never_looked_up(width, way, nan_poison):
    """Behind a window the table may hold anything."""
    cache = Cache([100, 300], 16)
    q, options = torch.randn(2, width, 4, 16), dict(causal=True, window_size=(20, 0), s_aux=torch.randn(4))
    expected = cache.attend(flash_paged.flash_attn_with_kvcache_reference, q, **options)
    cache.table[0, :3] = cache.table[1, :16] = 10**6
    same_attention(cache.attend(api.flash_attn_with_kvcache, q, **options), expected, FLOAT32)


@pytest.mark.parametrize("width", [1, 18])
def test_missing_blocks_are_not_seen(width, way, nan_poison):
    cache = Cache([100, 200], 16)
    cache.table[0, 2] = cache.table[1, 0] = -1
    q = torch.randn(2, width, 4, 16)
    same_attention(
        cache.attend(api.flash_attn_with_kvcache, q),
        cache.attend(flash_paged.flash_attn_with_kvcache_reference, q),
        FLOAT32,
    )


@pytest.mark.parametrize("lengths", [7, None, torch.tensor([3, 20], dtype=torch.int32)])
@pytest.mark.parametrize("kind", [torch.float32, torch.int8])
def test_without_a_block_table(lengths, kind, nan_poison):
    """Row b is page b; cache_seqlens may be one number, or None for a full cache."""
    cache = Cache([20, 20], 20, kind)
    pages, extra = [p[:2] for p in cache.pages], {name: scale[:2] for name, scale in cache.extra.items()}
    for tensor in (*pages, *extra.values()):
        tensor.copy_(torch.randint(-9, 9, tensor.shape))
    q = torch.randn(2, 2, 4, 16)
    options = dict(cache_seqlens=lengths, causal=True, return_softmax_lse=True, **extra)
    same_attention(
        api.flash_attn_with_kvcache(q, *pages, **options),
        flash_paged.flash_attn_with_kvcache_reference(q, *pages, **options),
        FLOAT32,
    )


@pytest.mark.parametrize("label", OPTIONS)
def test_contiguous_and_packed_with_log_sum_exp(label, nan_poison, monkeypatch):
    monkeypatch.setattr(policy, "SCORES", 1000)  # a few queries at a time
    options = options_for(label)
    lengths = [(3, 3), (0, 4), (1, 8), (2, 0), (9, 150)]  # queries, keys
    q, k, v = torch.randn(5, 9, 4, 16), torch.randn(5, 150, 2, 16), torch.randn(5, 150, 2, 8)
    options["return_attn_probs"] = True
    same_attention(
        api.flash_attn_func(q, k, v, **options), flash_paged.flash_attn_func_reference(q, k, v, **options), FLOAT32
    )
    starts_q, starts_k = ([0, *itertools.accumulate(pair[i] for pair in lengths)] for i in (0, 1))
    cumulative = [torch.tensor(starts, dtype=torch.int32) for starts in (starts_q, starts_k)]
    packed = (q.flatten(0, 1)[: starts_q[-1]], k.flatten(0, 1)[: starts_k[-1]], v.flatten(0, 1)[: starts_k[-1]])
    same_attention(
        api.flash_attn_varlen_func(*packed, *cumulative, 9, 150, **options),
        flash_paged.flash_attn_varlen_func_reference(*packed, *cumulative, 9, 150, **options),
        FLOAT32,
    )
    cache = Cache([keys for _, keys in lengths], 16, value_dim=8)
    cache.table[4, 3] = -1
    paged = (packed[0], *cache.pages, *cumulative, 9, 150)
    same_attention(
        api.flash_attn_varlen_func(*paged, block_table=cache.table, **options),
        flash_paged.flash_attn_varlen_func_reference(*paged, block_table=cache.table, **options),
        FLOAT32,
    )


@pytest.mark.parametrize("kind", FORMATS)
def test_gather_and_copy(kind):
    cache = Cache([40, 0, 25], 16, kind)
    starts = torch.tensor([0, 40, 40, 65], dtype=torch.int32)
    cache.table[0, 1] = -1
    for dtype in (torch.float32, torch.bfloat16):
        arguments = (*cache.pages, cache.table, starts, dtype)
        actual = api.gather_cache(*arguments, **cache.extra, num_tokens=70)
        expected = flash_paged.gather_cache_reference(*arguments, **cache.extra, num_tokens=70)
        for a, b in zip(actual, expected):
            assert a.dtype == dtype
            assert_close(a, b, 1e-6 if dtype == torch.float32 else 4e-3, 0.03, "one rounding to dtype")
    other, mapping = cache.clone(), torch.tensor([[1, 4], [-1, 3], [0, 2]])
    names = [name for name in cache.extra if name.endswith(("scale", "min"))]
    api.copy_blocks(*cache.pages, mapping, *(cache.extra[name] for name in names))
    flash_paged.copy_blocks_reference(*other.pages, mapping, *(other.extra[name] for name in names))
    for a, b in zip(cache.tensors(), other.tensors()):
        assert torch.equal(a.float().nan_to_num(nan=9e4), b.float().nan_to_num(nan=9e4))


@pytest.mark.parametrize("kind", FORMATS)
def test_written_codes_are_the_reference_codes(kind):
    """Bit for bit, with tokens of zeros and of constants, and slots that are skipped."""
    ours, theirs = (Cache([32], 16, kind) for _ in range(2))
    for a, b in zip(ours.tensors(), theirs.tensors()):
        b.copy_(a)
    k, v = torch.randn(2, 8, 2, 16), torch.randn(2, 8, 2, 16) * 30
    k[0], v[1, 3], k[1, :, 1, 2] = 0, 0, 5.5
    if isinstance(kind, int):
        scales, slots = ("k_scale", "k_min", "v_scale", "v_min"), torch.tensor([3, 0])
        for cache, write in ((ours, api.quantize_and_cache), (theirs, flash_paged.quantize_and_cache_reference)):
            write(k, v, *cache.pages, *(cache.extra[name] for name in scales), slots)
    else:
        slots = torch.tensor([3, -1, *range(16, 30)])
        api.reshape_and_cache(k.flatten(0, 1), v.flatten(0, 1), *ours.pages, slots, **ours.extra)
        flash_paged.reshape_and_cache_reference(k.flatten(0, 1), v.flatten(0, 1), *theirs.pages, slots, **theirs.extra)
    for a, b in zip(ours.tensors(), theirs.tensors()):
        assert torch.equal(a.float().nan_to_num(nan=9e4), b.float().nan_to_num(nan=9e4))
