"""Refinement lowers the error of a block's outputs on the calibration set, and never raises it."""

import pytest
import torch
from helpers import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_blocks import first_block, stored, stored_error

from hf_efficient import methods
from hf_efficient.calibration import refine
from hf_efficient.calibration.blocks import Block, weight_of
from hf_efficient.calibration.refine import _AffineWeight, _FakeQuantize, refine_block
from hf_efficient.configs import WeightOnlyConfig
from hf_efficient.formats import AffineFormat
from hf_efficient.formats.codebook import CodebookFormat
from hf_efficient.formats.trellis import TrellisFormat


def _block(name: str, method: str = "rtn", dtype=torch.float32, batches: int = 8, **scheme) -> tuple[Block, list]:
    """The first block of a tiny model with the codes and scales of `method`, and its original outputs."""
    config = WeightOnlyConfig(**{"bits": 3, "group_size": 32, "refine": True, **scheme})
    block = first_block(tiny_model(name, dtype), config, batches, statistics=False)
    for linear, module in block.linears.items():
        block.tensors[linear] = methods.quantize(weight_of(module), config.format(), method)
    with torch.no_grad():
        return block, [block.run(batch) for batch in range(batches)]


@pytest.mark.parametrize(
    "name, scheme",
    [
        ("llama", {}),
        ("llama", dict(bits=2, group_size=-1)),
        ("llama", dict(bits=4, group_size=48, symmetric=True)),  # 64 and 96 columns: a short last group
        ("llama", dict(rotate=True)),
        ("llama", dict(dtype=torch.bfloat16)),
        ("gpt2", {}),  # Conv1D
        ("opt", {}),
    ],
)
def test_the_stored_tensors_have_a_lower_error(name, scheme):
    block, targets = _block(name, **scheme)
    before, weights = stored_error(block, targets), {n: m.weight.clone() for n, m in block.linears.items()}
    start = stored(block)
    refine_block(block, targets, epochs=8)
    assert stored_error(block, targets) < 0.9 * before  # with a few steps; the real model's is halved
    for name, module in block.linears.items():
        assert torch.equal(module.weight, weights[name]) and module.weight.grad is None
        assert "forward" not in vars(module)
        for key, tensor in block.tensors[name].items():
            assert tensor.dtype == start[name][key].dtype and tensor.shape == start[name][key].shape


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1000), rate=st.sampled_from([1e-3, 0.1, 10.0]), bits=st.sampled_from([2, 4]))
def test_the_error_is_never_above_the_start(seed, rate, bits):
    block, targets = _block("llama", bits=bits, batches=3)
    before, start = stored_error(block, targets), stored(block)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CODE_RATE", "SCALE_RATE"):
            patch.setattr(refine, name, rate)
        refine_block(block, targets, epochs=1, seed=seed)
    after = stored_error(block, targets)
    unchanged = all(torch.equal(block.tensors[n][k], start[n][k]) for n in start for k in start[n])
    assert after < before or unchanged


@pytest.mark.parametrize("rotate", [True, False])
def test_factors_of_a_trellis(rotate):
    """A lower error with the same codes; inputs get factors of their own."""
    block, targets = _block("llama", bits=2, group_size=-1, codebook="trellis", rotate=rotate)
    before, start = stored_error(block, targets), stored(block)
    refine_block(block, targets, epochs=8)
    assert stored_error(block, targets) < 0.95 * before
    for name, tensors in block.tensors.items():
        format = block.formats[name]
        assert format.input_scale and format.rotation == rotate and isinstance(format.inner, TrellisFormat)
        assert torch.equal(tensors["qweight"], start[name]["qweight"])
        shapes, dtypes = format.shapes(*block.linears[name].weight.shape), format.dtypes(torch.float32)
        assert {key: (tuple(t.shape), t.dtype) for key, t in tensors.items()} == {
            k: (shapes[k], dtypes[k]) for k in shapes
        }


def test_same_seed_same_tensors():
    first, second = (_block("llama") for _ in range(2))
    for block, targets in (first, second):
        refine_block(block, targets, seed=3)
    for name, tensors in first[0].tensors.items():
        assert all(torch.equal(tensor, second[0].tensors[name][key]) for key, tensor in tensors.items())


def test_others_keep_their_tensors():
    """Where refine is not asked for, and in formats without a grid."""
    block, targets = _block("llama")
    names = list(block.linears)
    block.schemes[names[0]] = WeightOnlyConfig(bits=3, group_size=32)
    codebook = CodebookFormat("kmeans", 4, 32)
    block.formats[names[1]] = codebook
    block.tensors[names[1]] = methods.quantize(block.linears[names[1]].weight, codebook, "kmeans")
    kept = [dict(block.tensors[name]) for name in names[:2]]
    refine_block(block, targets)
    for name, tensors in zip(names[:2], kept):
        assert all(torch.equal(tensor, block.tensors[name][key]) for key, tensor in tensors.items())
    assert not torch.equal(block.tensors[names[2]]["scale"], kept[0]["scale"])


@pytest.mark.parametrize("symmetric", [True, False])
def test_starts_from_the_methods_codes_and_scales(symmetric):
    generator, format = torch.Generator().manual_seed(0), AffineFormat(3, 32, symmetric)
    linear = torch.nn.Linear(80, 24, bias=False).requires_grad_(False)
    linear.weight.copy_(torch.randn(24, 80, generator=generator))
    tensors = methods.quantize(linear.weight, format, "mse")  # clips: some weights lie beyond the range
    for key, tensor in _AffineWeight(linear, format, tensors).tensors().items():
        assert torch.equal(tensor, tensors[key])


def test_gradients():
    """Straight through the rounding, none for what the range cuts off; that of the scale is exact."""
    codes = torch.tensor([[[-3.2, -0.4, 1.3, 9.0]]], requires_grad=True)
    scale = torch.tensor([[0.5]], requires_grad=True)
    gradient = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    weight = _FakeQuantize.apply(codes, scale, torch.tensor([[2.0]]), 7, torch.float32)
    assert weight.flatten().tolist() == [-1.0, 0.0, 0.5, 2.5]  # -2, 0, 1, 5 steps
    weight.backward(gradient)
    assert codes.grad.flatten().tolist() == [0.0, 1.0, 1.5, 0.0]
    assert scale.grad.item() == (gradient * weight.detach() / 0.5).sum().item()
