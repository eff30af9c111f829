"""Refinement lowers the error of a block's outputs on the calibration set, and never raises it."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_blocks import first_block, stored, stored_error

from hf_efficient import methods
from hf_efficient.calibration import refine
from hf_efficient.calibration.blocks import Block, weight_of
from hf_efficient.calibration.refine import _AffineWeight, _FakeQuantize, refine_block
from hf_efficient.calibration.refine_codebook import CodebookWeight
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
        ("llama", dict(method="hqq", zero_point="float", dtype=torch.bfloat16)),
        ("llama", dict(bits=4, codebook="nf4", group_size=48)),
        ("llama", dict(bits=4, codebook="nvfp4", group_size=16)),
        ("llama", dict(bits=4, codebook="mxfp4", rotate=True)),
        ("llama", dict(codebook="kmeans", method="kmeans", group_size=-1)),
        ("llama", dict(dtype=torch.bfloat16)),
        ("gpt2", {}),  # Conv1D
        ("opt", {}),
    ],
)
def test_the_stored_tensors_have_a_lower_error(name, scheme):
    block, targets = _block(name, batches=4, **scheme)
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
    """A lower error with the same codes; inputs get factors, one for all linears that read the same."""
    block, targets = _block("llama", bits=2, group_size=-1, codebook="trellis", rotate=rotate)
    attention = [name for name in block.linears if "self_attn" in name and "o_proj" not in name]
    block.statistics |= dict.fromkeys(attention, object())
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
    shared = [block.tensors[name]["input_scale"] for name in attention]
    assert len(shared) == 3 and all(torch.equal(own, shared[0]) for own in shared)
    others = [block.tensors[n]["input_scale"] for n in block.linears if n not in attention and len(shared[0]) == 64]
    assert not any(torch.equal(own, shared[0]) for own in others)


def test_same_seed_same_tensors():
    first, second = (_block("llama") for _ in range(2))
    for block, targets in (first, second):
        refine_block(block, targets, seed=3)
    for name, tensors in first[0].tensors.items():
        assert all(torch.equal(tensor, second[0].tensors[name][key]) for key, tensor in tensors.items())


def test_others_keep_their_tensors():
    """Where refine is not asked for."""
    block, targets = _block("llama")
    names = list(block.linears)
    block.schemes[names[0]] = WeightOnlyConfig(bits=3, group_size=32)
    kept = dict(block.tensors[names[0]])
    scale = block.tensors[names[1]]["scale"]
    refine_block(block, targets)
    assert all(torch.equal(tensor, block.tensors[names[0]][key]) for key, tensor in kept.items())
    assert not torch.equal(block.tensors[names[1]]["scale"], scale)


@pytest.mark.parametrize("codebook", ["nf4", "mxfp4", "nvfp4", "kmeans"])
def test_entries_of_a_table_start_as_the_method_chose_them(codebook):
    """And the gradient of a code is the slope of the table there times the scale, by finite differences."""
    generator = torch.Generator().manual_seed(0)
    format = CodebookFormat(codebook, 4, {"nvfp4": 16, "kmeans": -1}.get(codebook, 32))
    linear = torch.nn.Linear(80, 24, bias=False).requires_grad_(False)
    linear.weight.copy_(torch.randn(24, 80, generator=generator))
    linear.weight[0, :16] = torch.tensor([14.0] * 2 + [12.0] * 7 + [8.0] * 7)  # 384 of NVFP4's steps, not 448
    tensors = methods.quantize(linear.weight, format, "kmeans" if codebook == "kmeans" else "rtn")
    tuned = CodebookWeight(linear, format, tensors)
    found, weight = tuned.tensors(), tuned.compute()
    for name, tensor in tensors.items():
        if name != "qweight":  # the zeros of E2M1 are one entry
            assert torch.equal(found[name].float(), tensor.float())
    expected = format.dequantize(tensors, 80, torch.float32)
    assert_close(format.dequantize(found, 80, torch.float32), expected, 1e-7, 1e-6, "scales are put together once more")
    assert_close(weight, expected, 1e-6, 1e-5, "the logarithm of a scale and back")
    weight.sum().backward()
    places, step = tuned.codes.detach(), 1e-2
    interpolated = [_interpolated(tuned.entries.expand(24, -1), places + side) for side in (step, -step)]
    slope = (interpolated[0] - interpolated[1]) / (2 * step)
    inside = ((places - places.round()).abs() > 2 * step) & (places > 0) & (places < tuned.entries.shape[1] - 1)
    scale = format.scale(tensors).expand(24, -1)[..., None]
    filled = format.grouped(torch.ones_like(linear.weight)) > 0
    chosen = inside & filled
    assert chosen.sum() > 100
    torch.testing.assert_close(tuned.codes.grad[chosen], (slope * scale)[chosen], rtol=1e-2, atol=1e-6)


def test_exponents_of_powers_of_two_are_learned():
    """Groups that begin one power of two off find back, and the gradient is the difference of the two weights."""
    generator = torch.Generator().manual_seed(0)
    format = CodebookFormat("mxfp4", 4, 32)
    linear = torch.nn.Linear(80, 24, bias=False).requires_grad_(False)
    linear.weight.copy_(torch.randn(24, 80, generator=generator))
    best = format.round(linear.weight)
    moved = torch.randint(-1, 2, best["scale_codes"].shape, generator=generator)
    codes = (best["scale_codes"].int() + moved).to(torch.uint8)
    scale, table = format.scale({"scale_codes": codes}), format.table(best)
    qweight = format.pack(format.nearest(linear.weight, scale, table))
    tuned = CodebookWeight(linear, format, {"qweight": qweight, "scale_codes": codes})
    x = torch.randn(256, 80, generator=generator)
    factor, exponent = torch.randn(24, 80, generator=generator), tuned.exponent.detach().clone()
    (tuned.compute() * factor).sum().backward()
    beside = []
    for side in (exponent.floor(), exponent.floor() + 1):
        tuned.exponent.data = side
        beside.append(tuned.compute().detach())
    tuned.exponent.data = exponent
    expected = format.grouped((beside[1] - beside[0]) * factor).sum(-1)
    torch.testing.assert_close(tuned.exponent.grad, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(tuned.tensors()["scale_codes"], codes)
    losses = []
    for groups in (tuned.groups()[:1], tuned.groups()):  # codes alone, then exponents with them
        optimizer = torch.optim.Adam([dict(group, lr=4 * group["lr"]) for group in groups])
        for _ in range(60):
            tuned.exponent.grad = tuned.codes.grad = None
            loss = ((tuned.compute() - linear.weight) @ x.t()).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    found, off = tuned.tensors()["scale_codes"], moved != 0
    assert losses[1] < 0.8 * losses[0], losses
    assert (found == best["scale_codes"])[off].float().mean() > 0.6  # where both are nearly as good, either may stay
    assert torch.equal(format.dequantize(tuned.tensors(), 80, torch.float32), tuned.compute())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float_zero_points_are_learned(dtype):
    """They start with the weight that the method chose, are rounded as they are stored, and have the gradient of what
    is stored."""
    generator = torch.Generator().manual_seed(0)
    format = AffineFormat(3, 32, False, zero_point="float")
    linear = torch.nn.Linear(80, 24, bias=False, dtype=dtype).requires_grad_(False)
    linear.weight.copy_(torch.randn(24, 80, generator=generator) + 1)
    tensors = methods.quantize(linear.weight, format, "hqq")
    tuned = _AffineWeight(linear, format, tensors)
    expected, eps = format.dequantize(tensors, 80, torch.float32), torch.finfo(dtype).eps
    assert torch.equal(format.unpack(tuned.tensors()["qweight"], 80), format.unpack(tensors["qweight"], 80))
    torch.testing.assert_close(tuned.compute().float(), expected, rtol=eps, atol=1e-5)
    factor = torch.randn(24, 80, generator=generator)
    (tuned.compute().float() * factor).sum().backward()
    slope = -(F.pad(factor, (0, 16)).unflatten(1, (-1, 32)).sum(-1)) * tensors["scale"].float()
    torch.testing.assert_close(tuned.shift.grad, slope, rtol=4 * eps, atol=20 * eps)
    with torch.no_grad():
        tuned.shift += 0.7
    found = tuned.tensors()
    assert found["zero_point"].dtype == dtype and not torch.equal(found["zero_point"], tensors["zero_point"])
    moved = format.dequantize(found, 80, torch.float32)
    torch.testing.assert_close(tuned.compute().float(), moved, rtol=eps, atol=1e-5)


def _interpolated(entries: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    low = places.floor().clamp(0, entries.shape[1] - 2)
    flat = low.long().flatten(1)
    first, second = entries.gather(1, flat).view(places.shape), entries.gather(1, flat + 1).view(places.shape)
    return first + (second - first) * (places - low)


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
