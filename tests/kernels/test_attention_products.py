"""Causal attention by matrix products, with which a training in bfloat16 goes on a CPU."""

import pytest
import torch
import torch.nn.functional as F

from hf_efficient.kernels.attention import products


@pytest.mark.parametrize("heads, scale", [((6, 2), None), ((3, 3), 0.3)])
@pytest.mark.parametrize("length", [16, 75])
def test_output_and_gradients_are_those_of_sdpa(heads, scale, length, monkeypatch):
    monkeypatch.setattr(products, "STEP", 32)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads[0], length, 16), (2, heads[1], length, 16), (2, heads[1], length, 8)]
    given = [torch.randn(b, s, h, d, generator=generator).bfloat16().transpose(1, 2) for b, h, s, d in shapes]
    slope = torch.randn(*shapes[0][:3], 8, generator=generator).bfloat16()
    exact = [x.double().requires_grad_() for x in given]
    expected = F.scaled_dot_product_attention(*exact, is_causal=True, scale=scale, enable_gqa=True)
    expected = [expected, *torch.autograd.grad(expected, exact, slope.double())]
    leaves = [x.requires_grad_() for x in given]
    out = products.CausalAttention.apply(*leaves, scale)
    for mine, true in zip([out, *torch.autograd.grad(out, leaves, slope)], expected):
        assert mine.dtype is torch.bfloat16 and mine.shape == true.shape
        assert (mine.double() - true).norm() < 0.01 * true.norm()


def test_scores_are_more_exact_than_bfloat16():
    q = torch.full((1, 1, 16, 2), 16.0).bfloat16()
    k = torch.zeros(1, 1, 16, 2).bfloat16()
    k[0, 0, :, 0] = torch.arange(16) / 128  # scores of 256 to 257.9, where bfloat16 knows every second number
    k[..., 1] = 16
    v = torch.eye(16)[None, None].bfloat16()
    out = products.CausalAttention.apply(q, k, v, 1.0)
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True, scale=1.0)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=4e-3)


def test_other_calls_are_left_to_torch():
    q = torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(16, 16, dtype=torch.bool).tril()
    calls = [((q, q, q), {"is_causal": True}), ((q.bfloat16(),) * 3, {"attn_mask": mask}), ((q.bfloat16(),) * 3, {})]
    for args, options in calls:
        expected = F.scaled_dot_product_attention(*args, **options)
        with products.FastAttention():
            assert F.scaled_dot_product_attention(*args, **options).equal(expected)
    few = (q[:, :, :4].bfloat16(),) * 3
    assert not products.serves(*few, is_causal=True)
    one, two = q.bfloat16(), torch.cat([q, -q]).bfloat16()
    for given in (dict(query=two, key=one, value=one), dict(query=one, key=one, value=one)):  # repeated, named
        expected = F.scaled_dot_product_attention(**given, is_causal=True)
        with products.FastAttention():
            assert F.scaled_dot_product_attention(**given, is_causal=True).equal(expected)
    assert not products.serves(two, one, one, is_causal=True)


def test_inside_the_mode_a_training_goes_by_products():
    if not products.has_bfloat16_products():
        pytest.skip("a processor without instructions for bfloat16")
    q = torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    with products.FastAttention():
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.5)
    assert out.grad_fn.name() == "CausalAttentionBackward"
    out.sum().backward()
    assert q.grad.isfinite().all()
