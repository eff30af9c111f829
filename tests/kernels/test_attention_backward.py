"""Gradients of attention without pages against autograd over one query and head at a time, and over SDPA."""

import pytest
import torch
from helpers import assert_close
from test_attention_api import FLOAT32, OPTIONS, naive, options_for

from hf_efficient.kernels.attention import api, policy


SHAPES = ((5, 5, 16), (1, 9, 16), (4, 9, 8), (7, 3, 16), (5, 2, 16), (2, 0, 16))  # queries, keys, channels of a value


def leaves(*tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors if tensor is not None]


def gradients(function, grad, *tensors):
    """What `function` of copies of `tensors` gives them; zeros where it does not read one."""
    inputs = leaves(*tensors)
    found = torch.autograd.grad(function(*inputs), inputs, grad, allow_unused=True)
    return [torch.zeros_like(x) if own is None else own for own, x in zip(found, inputs)]


@pytest.mark.parametrize(
    "label, heads, kv_heads", [(label, *[(4, 4), (6, 2)][i % 2]) for i, label in enumerate(OPTIONS)]
)
@pytest.mark.parametrize("part", [1 << 24, 64])  # scores at once: all, and a query or two
def test_of_batches(label, heads, kv_heads, part, monkeypatch):
    monkeypatch.setattr(policy, "SCORES", part)
    options = options_for(label, heads)
    sinks = options.pop("s_aux", None)
    for queries, keys, value_dim in SHAPES:
        q, k, v = torch.randn(2, queries, heads, 16), torch.randn(2, keys, kv_heads, 16), None
        v, grad = torch.randn(2, keys, kv_heads, value_dim), torch.randn(2, queries, heads, value_dim)

        def ours(q, k, v, s_aux=None):
            return api.flash_attn_func(q, k, v, s_aux=s_aux, **options)

        def by_hand(q, k, v, s_aux=None):
            return torch.stack([naive(*one, s_aux=s_aux, **options) for one in zip(q, k, v)])

        if queries and keys:
            for own, expected in zip(*(gradients(each, grad, q, k, v, sinks) for each in (ours, by_hand))):
                assert_close(own, expected, **FLOAT32)
        else:
            assert not any(own.any() for own in gradients(ours, grad, q, k, v, sinks))


@pytest.mark.parametrize("label", OPTIONS)
def test_of_packed_sequences(label):
    options = options_for(label, 4)
    sinks = options.pop("s_aux", None)
    starts_q, starts_k = [0, 3, 3, 8], [0, 5, 9, 14]
    q, k, v = torch.randn(8, 4, 16), torch.randn(14, 2, 16), torch.randn(14, 2, 8)
    lengths = [torch.tensor(starts, dtype=torch.int32) for starts in (starts_q, starts_k)]

    def ours(q, k, v, s_aux=None):
        return api.flash_attn_varlen_func(q, k, v, *lengths, 5, 5, s_aux=s_aux, **options)

    def by_hand(q, k, v, s_aux=None):
        ends = zip(starts_q, starts_q[1:], starts_k, starts_k[1:])
        return torch.cat([naive(q[a:b], k[c:d], v[c:d], s_aux=s_aux, **options) for a, b, c, d in ends])

    grad = torch.randn(8, 4, 8)
    for own, expected in zip(*(gradients(each, grad, q, k, v, sinks) for each in (ours, by_hand))):
        assert_close(own, expected, **FLOAT32)


@pytest.mark.parametrize("is_packed", [False, True])
def test_of_the_log_sum_exp_and_of_slopes(is_packed):
    slopes, grad, grad_lse = torch.rand(2, 4), torch.randn(2, 6, 4, 8), torch.randn(2, 4, 6)
    q, k, v = torch.randn(2, 6, 4, 16), torch.randn(2, 6, 4, 16), torch.randn(2, 6, 4, 8)
    starts = torch.tensor([0, 6, 12], dtype=torch.int32)

    def ours(q, k, v):
        options = dict(causal=True, alibi_slopes=slopes, return_attn_probs=True)
        if not is_packed:
            out, lse, _ = api.flash_attn_func(q, k, v, **options)
            return out, lse
        rows = [x.flatten(0, 1) for x in (q, k, v)]
        out, lse, _ = api.flash_attn_varlen_func(*rows, starts, starts, 6, 6, **options)
        return out.unflatten(0, (2, 6)), lse.unflatten(1, (2, 6)).transpose(0, 1)

    def by_hand(q, k, v):
        distance = (torch.arange(6)[:, None] - torch.arange(6)).abs()
        scores = torch.einsum("bshd,bnhd->bhsn", q, k) / 4 - slopes[..., None, None] * distance
        scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), float("-inf"))
        return torch.einsum("bhsn,bnhd->bshd", scores.softmax(-1), v), scores.logsumexp(-1)

    for own, expected in zip(*(gradients(each, (grad, grad_lse), q, k, v) for each in (ours, by_hand))):
        assert_close(own, expected, **FLOAT32)


@pytest.mark.parametrize("window", [(-1, -1), (100, 0)])
def test_half_precision_is_as_exact_as_sdpa(window):
    """bfloat16 against float32, beside the error of torch's own: sums are float32 in both, the outputs are rounded."""
    q, k, v = (torch.randn(1, 300, heads, 64) for heads in (4, 2, 2))
    grad = torch.randn(1, 300, 4, 64)
    distance = torch.arange(300)[:, None] - torch.arange(300)
    seen = (distance >= 0) if window[0] < 0 else (distance >= 0) & (distance <= window[0])

    def sdpa(q, k, v):
        rows = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=seen, enable_gqa=True)
        return out.transpose(1, 2)

    def ours(q, k, v):
        return api.flash_attn_func(q, k, v, causal=True, window_size=window)

    exact = gradients(sdpa, grad, q, k, v)
    rounded = [x.bfloat16() for x in (q, k, v)]
    results = (gradients(each, grad.bfloat16(), *rounded) for each in (ours, sdpa))
    for own, other, true in zip(*results, exact):
        assert own.dtype == torch.bfloat16
        assert (own.float() - true).norm() <= 1.1 * (other.float() - true).norm()


def test_are_well_registered():
    ops, settings = torch.ops.hf_efficient, (0.25, True, -1, -1, 2.0, None)
    q, k, v, s_aux = leaves(*(torch.randn(2, 5, heads, 16) for heads in (4, 2, 2)), torch.randn(4))
    for return_lse in (False, True):
        torch.library.opcheck(ops.flash_attn, (q, k, v, *settings, s_aux, return_lse))
        starts = torch.tensor([0, 4, 10], dtype=torch.int32)
        rows = [x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v)]
        torch.library.opcheck(ops.flash_attn_varlen, (*rows, starts, starts, 6, 6, None, *settings, s_aux, return_lse))


def test_pages_have_none():
    q, pages = torch.randn(1, 1, 4, 8).requires_grad_(), torch.randn(3, 4, 2, 8)
    table, lengths = torch.tensor([[0, 1, 2]], dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="over pages has no backward.*use_cache=False"):
        api.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lengths, block_table=table)
    starts = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 9], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="over pages has no backward"):
        api.flash_attn_varlen_func(q[0], pages, pages, *starts, 1, 9, block_table=table)
    with torch.no_grad():
        assert api.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lengths, block_table=table).isfinite().all()
