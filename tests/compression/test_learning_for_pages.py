"""Training that sees keys and values as quantized pages give them back."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import tiny_model

from hf_efficient import recover
from hf_efficient.compression.recovery.quantized_pages import QuantizedPages
from hf_efficient.kernels.attention import pages


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_tokens_are_what_pages_give_back(dtype):
    k, v = random(32, 2, 8), random(32, 2, 16, seed=1)
    both = [
        pages.Pages(torch.zeros(2, 16, 2, x.shape[2]).to(dtype), x.shape[2], torch.zeros(2, 16, 2).half())
        for x in (k, v)
    ]
    pages.write_tokens(k, v, *both, torch.arange(32))
    for x, stored in zip((k, v), both):
        read, _ = pages.read_sequence(stored, torch.tensor([[0, 1]]), 0, 32)
        assert torch.equal(pages.stored_tokens(x, dtype), read.float())


@pytest.mark.parametrize("bits, group", [(4, 64), (2, 32)])
def test_groups_are_what_pages_give_back(bits, group):
    k, v = random(128, 2, 64), random(128, 2, 128, seed=1)
    blocks, parts = 128 // group, 128 // group
    data = [torch.zeros(blocks, group, 2, x.shape[2] * bits // 8, dtype=torch.uint8) for x in (k, v)]
    ends = [torch.zeros(shape).half() for shape in [(blocks, 1, 2, 64)] * 2 + [(blocks, group, 2, parts)] * 2]
    grouped = [x.unflatten(0, (-1, group)) for x in (k, v)]
    pages.quantize_and_cache_cpu(*grouped, *data, *ends, torch.arange(blocks))
    both = pages.Pages.of_cache(*data, ends[0], ends[2], ends[1], ends[3])
    read = [pages.read_sequence(stored, torch.arange(blocks)[None], 0, 128)[0].float() for stored in both]
    own = pages.stored_keys(k.transpose(0, 1), bits, group), pages.stored_values(v.transpose(0, 1), bits, group)
    assert all(torch.equal(mine.transpose(0, 1), theirs) for mine, theirs in zip(own, read))


def test_attention_reads_old_tokens_from_pages():
    q, k, v = random(1, 4, 260, 16), random(1, 2, 260, 16, seed=1), random(1, 2, 260, 32, seed=2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with QuantizedPages("int2"):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mask = torch.ones(260, 260, dtype=torch.bool).tril()[None, None]
        assert torch.allclose(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True), out, atol=1e-6)
    stored = [pages.stored_keys(k[:, :, :256], 2, 32), pages.stored_values(v[:, :, :256], 2, 32)]
    # tokens 32 to count are in pages
    for t, count in ((100, 0), (190, 0), (191, 64), (222, 64), (223, 96), (259, 128)):
        both = [x[:, :, : t + 1].detach().clone() for x in (k, v)]
        for x, old in zip(both, stored):
            x[:, :, 32:count] = old[:, :, 32:count]
        expected = F.scaled_dot_product_attention(q[:, :, t : t + 1], *both, enable_gqa=True)
        assert torch.allclose(out[:, :, t : t + 1], expected, atol=1e-6), t
    gradients = torch.autograd.grad(out.square().sum(), leaves[1:])
    assert all(gradient.abs().sum((0, 1, 3)).gt(0).all() for gradient in gradients)  # they pass the rounding


def test_the_student_learns_with_pages_and_the_teacher_has_none(monkeypatch):
    teacher = tiny_model("llama", torch.float32)
    tokens = torch.randint(3, 128, (8, 24), generator=torch.Generator().manual_seed(0))
    how, losses, calls = dict(steps=2, batch_size=4, learning_rate=1e-9), {}, []
    rounded = pages.stored_tokens
    monkeypatch.setattr(pages, "stored_tokens", lambda x, dtype: calls.append(x) or rounded(x, dtype))
    for kv_format in ("auto", "fp8", "int2"):
        losses[kv_format] = recover(copy.deepcopy(teacher), teacher, tokens, kv_format=kv_format, **how)["loss"]
    layers = teacher.config.num_hidden_layers
    assert len(calls) == 2 * layers * 2  # keys and values of the student, two steps
    assert losses["auto"] == losses["int2"] < 1e-9 < losses["fp8"]  # 24 tokens are all new ones
    how |= {"kv_format": "fp8", "gradient_checkpointing": True}
    again = recover(copy.deepcopy(teacher), teacher, tokens, **how)["loss"]
    assert abs(again - losses["fp8"]) < 0.05 * losses["fp8"]  # layers are computed again under the same rounding
    eager = copy.deepcopy(teacher)
    eager.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="kv_format='int8': LlamaForCausalLM has attn_implementation='eager'"):
        recover(eager, teacher, tokens, **{**how, "kv_format": "int8"})
