"""Bits by sensitivity: the allocator against all assignments, what one backward pass sees against autograd by hand."""

import gc
import itertools

import pytest
import torch
from helpers import assert_close, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import BertConfig, BertModel, FalconConfig, FalconForCausalLM

from hf_efficient import methods
from hf_efficient.calibration.sensitivity import Sensitivity, allocate, choose_bits, sensitivities
from hf_efficient.formats import AffineFormat
from hf_efficient.formats.trellis import TrellisFormat
from hf_efficient.observers.hooks import watching_inputs, watching_outputs


WIDTHS = (2, 3, 4, 8)
SHAPE = dict(vocab_size=128, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
TOKENS = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(0))


def language_loss(model, window) -> torch.Tensor:
    logits = model(window[None]).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum")


def brute_force(losses, sizes, budget) -> float:
    """The least sum of losses over all assignments within the budget."""
    return min(
        sum(losses[name][bits] for name, bits in zip(losses, choice))
        for choice in itertools.product(*(losses[name] for name in losses))
        if sum(sizes[name][bits] for name, bits in zip(losses, choice)) <= budget
    )


def total(table, bits) -> float:
    return sum(table[name][width] for name, width in bits.items())


@st.composite
def problems(draw):
    losses, sizes = {}, {}
    for index in range(draw(st.integers(1, 5))):
        parameters, scale = draw(st.integers(1, 40)) * 64, draw(st.floats(1e-6, 1e3))
        falls = draw(st.lists(st.floats(1, 8), min_size=4, max_size=4))
        losses[f"l{index}"] = {
            w: scale * torch.tensor(falls[: i + 1]).prod().reciprocal().item() for i, w in enumerate(WIDTHS)
        }
        sizes[f"l{index}"] = {w: parameters * w + parameters // 64 * (16 + w) for w in WIDTHS}
    least = sum(by_width[2] for by_width in sizes.values())
    return losses, sizes, least + draw(st.integers(0, 7 * 64 * 200))


@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_allocation_is_the_best_of_all_and_within_the_budget(problem):
    losses, sizes, budget = problem
    bits = allocate(losses, sizes, budget)
    assert list(bits) == list(losses)
    assert total(sizes, bits) <= budget
    assert total(losses, bits) == pytest.approx(brute_force(losses, sizes, budget), rel=1e-12)


@settings(max_examples=30, deadline=None)
@given(problems(), st.integers(0, 7 * 64 * 100))
def test_a_larger_budget_never_loses_more(problem, more):
    losses, sizes, budget = problem
    small, large = (total(losses, allocate(losses, sizes, b)) for b in (budget, budget + more))
    assert large <= small * (1 + 1e-12)


def test_totals_too_many_to_tell_apart_stay_within_the_budget():
    generator = torch.Generator().manual_seed(0)
    losses, sizes = {}, {}
    for index in range(40):  # sizes without a common divisor
        rise = torch.rand((), generator=generator).item()
        parameters = torch.randint(10**6, 10**7, (), generator=generator).item() * 2 + 1
        losses[str(index)] = {w: rise * 4.0**-w for w in WIDTHS}
        sizes[str(index)] = {w: parameters * w + index for w in WIDTHS}
    budget = sum(by_width[3] for by_width in sizes.values())
    bits = allocate(losses, sizes, budget)
    assert 0.998 * budget < total(sizes, bits) <= budget
    assert total(losses, bits) < total(losses, dict.fromkeys(losses, 3))


def test_a_budget_below_the_smallest_widths_is_refused():
    with pytest.raises(ValueError, match="a budget of 100 bits is less than .* 128"):
        allocate({"a": {2: 1.0, 3: 0.5}}, {"a": {2: 128, 3: 192}}, 100)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_one_backward_pass_sees_squared_inputs_and_gradients(name, recomputed):
    model = tiny_model(name)
    blocks = model.model.layers if name == "llama" else model.transformer.h
    target = "model.layers.0.self_attn.v_proj" if name == "llama" else "transformer.h.0.mlp.c_fc"
    found = sensitivities(model, [target], TOKENS, blocks if recomputed else ())[target]
    inputs, gradients = [], []

    def keep(name, args, kwargs, output):
        output.retain_grad()
        inputs.append(args[0].detach())
        gradients.append(output)

    with watching_outputs({target: model.get_submodule(target)}, keep):
        for window in TOKENS:
            language_loss(model, window).backward()
    reason = "float32 sums in another order"
    expected = torch.cat([y.grad for y in gradients]).double().square().sum((0, 1))
    assert_close(found.outputs, expected.float(), rms=1e-5, maximum=1e-4 * expected.max().item(), reason=reason)
    expected = torch.cat(inputs).double().square().sum((0, 1))
    assert_close(found.inputs, expected.float(), rms=1e-5, maximum=1e-4 * expected.max().item(), reason=reason)
    assert found.count == TOKENS.numel()


def test_only_one_block_keeps_its_activations(monkeypatch):
    model, alive, counts = tiny_model("llama"), [], []

    def seen(name, x):
        alive.append(StorageWeakRef(x.untyped_storage()))

    def loss(*args, **kwargs):
        gc.collect()
        counts.append(sum(not storage.expired() for storage in alive))
        return cross_entropy(*args, **kwargs)

    cross_entropy = torch.nn.functional.cross_entropy
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", loss)
    names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    with watching_inputs({name: model.get_submodule(name) for name in names}, seen):
        for blocks, kept in (((), len(names)), (model.model.layers, 0)):
            alive.clear()
            sensitivities(model, names, TOKENS[:1], blocks)
            assert counts.pop() == kept


@pytest.mark.parametrize("recomputed", [False, True])
def test_models_that_change_outputs_in_place(recomputed):
    model = FalconForCausalLM(FalconConfig(**SHAPE)).eval()  # adds the attention to what its last linear gave
    blocks, target = model.transformer.h, "transformer.h.0.mlp.dense_4h_to_h"
    found = sensitivities(model, [target], TOKENS[:1], blocks if recomputed else ())[target]
    weight = model.get_submodule(target).weight
    bias = torch.zeros(TOKENS.shape[1], len(weight), requires_grad=True)
    with watching_outputs({target: model.get_submodule(target)}, lambda name, args, kwargs, y: y + bias):
        language_loss(model, TOKENS[0]).backward()
    expected = bias.grad.square().sum(0)
    assert_close(found.outputs, expected, 1e-5, 1e-4 * expected.max().item(), "sums in another order")


def test_the_model_is_left_as_it_was(llama):
    llama.model.norm.weight.requires_grad_(False)
    before = {name: p.requires_grad for name, p in llama.named_parameters()}
    sensitivities(llama, ["model.layers.0.mlp.up_proj"], TOKENS, llama.model.layers)
    assert {name: p.requires_grad for name, p in llama.named_parameters()} == before
    assert all(p.grad is None for p in llama.parameters())
    assert not any(module._forward_hooks or "forward" in module.__dict__ for module in llama.modules())


def test_the_expected_loss_is_the_weighted_squared_error():
    generator = torch.Generator().manual_seed(0)
    x, g, error = (torch.randn(shape, generator=generator) for shape in ((50, 6), (50, 4), (4, 6)))
    found = Sensitivity(x.square().sum(0), g.square().sum(0), 50).loss(error)
    pairs = itertools.product(range(4), range(6))
    explicit = sum(0.5 * (g[:, n] ** 2).mean() * error[n, k] ** 2 * (x[:, k] ** 2).mean() for n, k in pairs)
    assert found == pytest.approx(explicit.item(), rel=1e-5)


def test_bits_are_chosen_within_the_size_of_the_uniform_formats(llama):
    names = [name for name, module in llama.named_modules() if isinstance(module, torch.nn.Linear) and "layers" in name]
    with torch.no_grad():  # one layer that nothing depends on, one that all depends on
        llama.model.layers[0].mlp.down_proj.weight.mul_(1e-4)
        llama.model.layers[0].self_attn.o_proj.weight.mul_(30)
    formats = {name: AffineFormat(3, 32, False) for name in names}
    bits = choose_bits(llama, formats, TOKENS, llama.model.layers)

    def size(widths):
        formats = {name: AffineFormat(widths[name], 32, False) for name in names}
        weights = {name: llama.get_submodule(name).weight for name in names}
        return sum(formats[n].bits_per_weight(*w.shape, w.dtype) * w.numel() for n, w in weights.items())

    assert set(bits) == set(names) and set(bits.values()) <= set(WIDTHS)
    assert size(bits) <= size(dict.fromkeys(names, 3))
    assert bits["model.layers.0.mlp.down_proj"] == 2
    assert bits["model.layers.0.self_attn.o_proj"] > bits["model.layers.0.mlp.down_proj"]
    assert min(bits.values()) < max(bits.values())


def test_bits_of_grids_with_float_zero_points_are_chosen_alike(llama):
    names = [name for name, module in llama.named_modules() if isinstance(module, torch.nn.Linear) and "layers" in name]
    floats, integers = (AffineFormat(3, 32, False, zero_point=zero) for zero in ("float", "integer"))
    bits = choose_bits(llama, dict.fromkeys(names, floats), TOKENS, llama.model.layers)
    assert min(bits.values()) < max(bits.values())
    expected = choose_bits(llama, dict.fromkeys(names, integers), TOKENS, llama.model.layers)
    assert sum(bits[name] != expected[name] for name in names) <= 4, "their errors are nearly the same"


def test_bits_along_a_trellis_keep_to_any_average(llama):
    names = [name for name, module in llama.named_modules() if isinstance(module, torch.nn.Linear) and "layers" in name]
    bits = choose_bits(llama, dict.fromkeys(names, TrellisFormat(3.3)), TOKENS, llama.model.layers)
    sizes = {name: llama.get_submodule(name).weight.numel() for name in names}
    mean = sum(bits[name] * size for name, size in sizes.items()) / sum(sizes.values())
    assert 3.1 < mean <= 3.3 and set(bits.values()) <= set(TrellisFormat.WIDTHS) and len(set(bits.values())) > 1


def test_the_error_expected_of_a_trellis_is_about_what_it_is():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 64, generator=generator) * torch.rand(64, 1, generator=generator)
    found = Sensitivity(torch.rand(64, generator=generator), torch.rand(64, generator=generator), 1)
    for bits in (1.5, 4):
        format = TrellisFormat(bits)
        error = weight - format.dequantize(format.round(weight), 64, torch.float32)
        expected = found.loss_of_noise(format.expected_error * weight.square().mean(1))
        assert found.loss(error) == pytest.approx(expected, rel=0.1)


def test_more_bits_lose_less():
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    sensitivity = Sensitivity(torch.rand(64) + 0.1, torch.rand(32) + 0.1, 1)
    losses = []
    for bits in WIDTHS:
        format = AffineFormat(bits, 32, False)
        restored = format.dequantize(methods.quantize(weight, format, "rtn"), 64, weight.dtype)
        losses.append(sensitivity.loss(weight - restored))
    assert losses == sorted(losses, reverse=True) and losses[-1] > 0


def test_a_model_without_next_token_logits_is_refused():
    config = BertConfig(**SHAPE, intermediate_size=32)
    with pytest.raises(ValueError, match="need a causal language model, not BertModel"):
        sensitivities(BertModel(config).eval(), [], TOKENS)
