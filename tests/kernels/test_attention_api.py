"""The attention functions on CPU against one query and head at a time, as transformers calls them: pages of keys and
values that alternate, queries beyond the sequences, empty and negative lengths."""

import inspect
import itertools

import pytest
import torch
from helpers import assert_close

from hf_efficient.kernels.attention import api
from hf_efficient.kernels.attention.ragged import attend_ragged


FLOAT32 = dict(rms=1e-5, maximum=1e-4, reason="float32 sums in another order")
OPTIONS = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, window_size=(2, 2)),
    "two-sided window": dict(window_size=(1, 2)),
    "right window": dict(window_size=(-1, 2)),
    "scale": dict(causal=True, softmax_scale=0.7),
    "softcap": dict(causal=True, softcap=1.5),
    "sinks": dict(causal=True, sinks=True),
    "all": dict(causal=True, window_size=(3, 0), softcap=2.0, sinks=True, softmax_scale=0.3),
}


def naive(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, s_aux=None):
    """[Sq, Hq, D] over [Sk, Hk, D] in float64, one query and head at a time."""
    out = q.new_zeros(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    group, shift = q.shape[1] // k.shape[1], k.shape[0] - q.shape[0]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    for i, head in itertools.product(range(q.shape[0]), range(q.shape[1])):
        at, (left, right) = i + shift, window_size
        first = 0 if left < 0 else max(at - left, 0)
        last = at if causal else (k.shape[0] - 1 if right < 0 else at + right)
        if first > last or first >= k.shape[0]:
            continue
        keys, values = (x[first : last + 1, head // group].double() for x in (k, v))
        scores = keys @ q[i, head].double() * scale
        scores = torch.tanh(scores / softcap) * softcap if softcap else scores
        if s_aux is not None:
            scores = torch.cat([scores, s_aux[head : head + 1].double()])
            values = torch.cat([values, torch.zeros_like(values[:1])])
        out[i, head] = scores.softmax(0) @ values
    return out.to(q.dtype)


def options_for(label, heads):
    options = dict(OPTIONS[label])
    if options.pop("sinks", False):
        options["s_aux"] = torch.randn(heads)
    return options


@pytest.mark.parametrize("label", OPTIONS)
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (4, 1)])
def test_flash_attn_func(label, heads, kv_heads, nan_poison):
    options = options_for(label, heads)
    for queries, keys, value_dim in ((5, 5, 16), (1, 9, 16), (4, 9, 8), (7, 3, 16), (5, 2, 16), (2, 0, 16)):
        q, k = torch.randn(2, queries, heads, 16), torch.randn(2, keys, kv_heads, 16)
        v = torch.randn(2, keys, kv_heads, value_dim)
        expected = torch.stack([naive(*row, **options) for row in zip(q, k, v)])
        actual = api.flash_attn_func(q, k, v, **options)
        assert_close(actual, expected, **FLOAT32)


@pytest.mark.parametrize("label", OPTIONS)
def test_flash_attn_varlen_func(label, nan_poison):
    options = options_for(label, 4)
    lengths = [(3, 3), (0, 4), (1, 8), (5, 11)]  # queries, keys
    starts_q, starts_k = ([0, *itertools.accumulate(pair[i] for pair in lengths)] for i in (0, 1))
    q = torch.randn(starts_q[-1] + 2, 4, 16)  # two queries beyond the sequences, as continuous batching pads
    k, v = torch.randn(starts_k[-1], 2, 16), torch.randn(starts_k[-1], 2, 16)
    pages_k, pages_v = torch.randn(9, 4, 2, 16), torch.randn(9, 4, 2, 16)
    tables, blocks, expected = [], iter([7, 0, 3, 8, 1, 2, 5, 4]), []
    for row in range(len(lengths)):
        keys, values = (x[starts_k[row] : starts_k[row + 1]] for x in (k, v))
        table = [next(blocks) for _ in range(-(-len(keys) // 4))]
        for token in range(len(keys)):
            pages_k[table[token // 4], token % 4] = keys[token]
            pages_v[table[token // 4], token % 4] = values[token]
        tables.append(table + [-1] * (4 - len(table)))
        expected.append(naive(q[starts_q[row] : starts_q[row + 1]], keys, values, **options))
    expected = torch.cat([*expected, torch.zeros(2, 4, 16)])
    cumulative = [torch.tensor(starts, dtype=torch.int32) for starts in (starts_q, starts_k)]
    actual = api.flash_attn_varlen_func(q, k, v, *cumulative, 5, 11, **options)
    assert_close(actual, expected, **FLOAT32)
    table = torch.tensor(tables, dtype=torch.int32)
    actual = api.flash_attn_varlen_func(
        q, pages_k, pages_v, *cumulative, torch.tensor(5), 11, block_table=table, **options
    )
    assert_close(actual, expected, **FLOAT32)


@pytest.mark.parametrize("label", OPTIONS)
@pytest.mark.parametrize("width", [1, 3])
def test_flash_attn_with_kvcache(label, width, nan_poison):
    """Pages of keys and values alternate in one tensor, as in continuous batching; row 1 is padding."""
    options = options_for(label, 4)
    lengths = [5, -1, 0, 11]
    both = torch.randn(10, 2, 4, 2, 16)
    k_cache, v_cache = both[:, 0], both[:, 1]
    table = torch.tensor([[2, 5, -1, -1], [-1] * 4, [9, -1, -1, -1], [1, 3, 0, 8]], dtype=torch.int32)
    q, k, v = torch.randn(4, width, 4, 16), torch.randn(4, width, 2, 16), torch.randn(4, width, 2, 16)
    expected = torch.zeros_like(q)
    for row, length in enumerate(lengths):
        if length >= 0:
            keys, values = (pages[table[row].clamp_min(0)].flatten(0, 1)[:length] for pages in (k_cache, v_cache))
            expected[row] = naive(q[row], torch.cat([keys, k[row]]), torch.cat([values, v[row]]), **options)
    before, seqlens = both.clone(), torch.tensor(lengths, dtype=torch.int32)
    actual = api.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=seqlens, block_table=table, **options)
    assert_close(actual, expected, **FLOAT32)
    changed = (both != before).flatten(3).any(-1).any(1).sum()
    assert changed == 3 * width
    appended = torch.where(seqlens >= 0, seqlens + width, -1)
    again = api.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=appended, block_table=table, **options)
    assert_close(again, expected, **FLOAT32)


def test_reshape_and_cache_skips_negative_slots():
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 4)
    k_cache, v_cache = torch.zeros(4, 4, 2, 8), torch.zeros(4, 4, 2, 4)
    api.reshape_and_cache(k, v, k_cache, v_cache, torch.tensor([6, -1, 15]))
    assert torch.equal(k_cache[1, 2], k[0]) and torch.equal(v_cache[3, 3], v[2])
    assert k_cache.any(-1).any(-1).sum() == 2 and v_cache.any(-1).any(-1).sum() == 2


def test_what_it_cannot_do_is_said():
    q, k = torch.randn(1, 3, 4, 8), torch.randn(1, 3, 2, 8)
    with pytest.raises(ValueError, match=r"dropout_p=0.1.*only 0.0"):
        api.flash_attn_func(q, k, k, dropout_p=0.1)
    with pytest.raises(ValueError, match="4 query heads are not a multiple of 3"):
        api.flash_attn_func(q, k.new_zeros(1, 3, 3, 8), k.new_zeros(1, 3, 3, 8))
    with pytest.raises(ValueError, match="different dtypes.*bfloat16"):
        api.flash_attn_func(q, k, k.bfloat16())
    with pytest.raises(ValueError, match="needs cache_seqlens to append"):
        api.flash_attn_with_kvcache(q, k, k, k, k)

    class Elsewhere(torch.Tensor):
        device = torch.device("mps")

    with pytest.raises(RuntimeError, match='"cuda" and "cpu", not on \'mps\''):
        api.flash_attn_func(q.as_subclass(Elsewhere), k, k)


def test_shapes_that_do_not_fit_are_refused():
    """Else one row is taken for all, or memory behind a tensor is read."""
    q, k, starts = torch.randn(2, 3, 4, 8), torch.randn(2, 5, 2, 8), torch.tensor([0, 3], dtype=torch.int32)
    lengths, table = torch.tensor([4, 4], dtype=torch.int32), torch.tensor([[0], [1]], dtype=torch.int32)
    for wrong, message in (
        (lambda: api.flash_attn_func(q, k, k[:, :2]), r"values of shape \(2, 2, 2, 8\) for keys of"),
        (lambda: api.flash_attn_func(q, k[:1], k[:1]), r"k of shape \(1, 5, 2, 8\): must have 2 rows"),
        (lambda: api.flash_attn_varlen_func(q[0], k[0], k[0, :2], starts, starts, 3, 3), "only D may differ"),
        (lambda: api.flash_attn_with_kvcache(q, k, k[:, :2], cache_seqlens=lengths), "only D may differ"),
        (lambda: api.flash_attn_with_kvcache(q, k, k, cache_seqlens=lengths[:1]), "cache_seqlens.*must have 2 rows"),
        (lambda: api.flash_attn_with_kvcache(q, k, k, None, None, lengths, table[:1]), "block_table.*2 rows"),
        (lambda: api.flash_attn_with_kvcache(q, k[:1], k[:1], cache_seqlens=lengths), "k_cache.*must have 2 rows"),
        (lambda: api.flash_attn_with_kvcache(q, k, k, k[:1], k[:1], lengths), "k of shape.*must have 2 rows"),
        (lambda: attend_ragged(q[0], k[0], k[0], k, k, lengths.flip(0).cumsum(0).flip(0).int(), lengths[:1], table[:1]),
         "query_starts=.*never decrease"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            wrong()


def test_transformers_sees_every_feature():
    """It looks for the names of the parameters."""
    names = {"dropout_p", "softmax_scale", "causal", "window_size", "softcap", "deterministic", "s_aux"}
    assert names <= set(inspect.signature(api.flash_attn_func).parameters)
    varlen = inspect.signature(api.flash_attn_varlen_func).parameters
    assert names | {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "block_table"} <= set(varlen)
    paged = {"k", "v", "cache_seqlens", "block_table", "softmax_scale", "causal", "window_size", "softcap", "s_aux"}
    assert paged <= set(inspect.signature(api.flash_attn_with_kvcache).parameters)
