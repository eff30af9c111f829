"""Inputs in 4 and 6 bits: what is rounded, and what refuses it."""

import pytest
import torch

from hf_efficient import SparseConfig, WeightOnlyConfig
from hf_efficient.calibration.refine_trellis import TrellisWeight
from hf_efficient.calibration.transformed_weight import product
from hf_efficient.formats import AffineFormat
from hf_efficient.formats.transformed import TransformedFormat
from hf_efficient.kernels.linear.rounded_inputs import round_inputs


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("columns", [64, 20])
def test_sixteen_columns_have_a_grid_of_their_range(bits, columns):
    x = torch.randn(3, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rounded = round_inputs(x, bits)
    for part, own in zip(x.split(16, 1), rounded.split(16, 1)):
        step = (part.amax(1) - part.amin(1)) / (2**bits - 1)
        assert ((own - part).abs() <= step[:, None] * 0.5001).all()
        assert all(len(row.unique()) <= 2**bits for row in own)
        torch.testing.assert_close(own.aminmax(dim=1).max, part.amax(1), rtol=1e-6, atol=0)
    assert torch.equal(round_inputs(torch.full((2, 32), 3.0), bits), torch.full((2, 32), 3.0))
    assert round_inputs(x.bfloat16(), bits).dtype is torch.bfloat16


@pytest.mark.parametrize("rotation", [True, False])
def test_layers_and_refinement_compute_the_same(rotation):
    generator = torch.Generator().manual_seed(0)
    x, linear = torch.randn(5, 48, generator=generator), torch.nn.Linear(48, 24)
    inner = AffineFormat(8, 16, False)
    format = TransformedFormat(inner, input_scale=True, rotation=rotation, input_bits=4)
    config = WeightOnlyConfig(bits=8, group_size=16, method="rtn", activation_bits=4)
    scale = torch.rand(48, generator=generator) + 0.5
    tensors = config.compress(linear.weight.detach(), format, None, {"input_scale": scale})
    served = format.layout(tensors, 48, torch.float32).matmul(x, linear.bias)
    offloaded = format.dequantized_layout(tensors, 48, torch.float32).matmul(x, linear.bias)
    torch.testing.assert_close(offloaded, served, rtol=1e-4, atol=1e-4)
    weight = format.dequantize(tensors, 48, torch.float32).requires_grad_()
    x.requires_grad_()
    tuned = product(x, weight, linear, format, tensors)
    torch.testing.assert_close(tuned, served, rtol=1e-4, atol=1e-4)
    tuned.sum().backward()
    torch.testing.assert_close(x.grad, weight.detach().sum(0).expand_as(x), rtol=1e-5, atol=1e-5)
    seen = x.detach().requires_grad_()
    format.layout(tensors, 48, torch.float32).matmul(seen).sum().backward()
    torch.testing.assert_close(seen.grad, x.grad, rtol=1e-4, atol=1e-4)
    exact = torch.nn.functional.linear(x, weight, linear.bias)
    assert 1e-3 < (tuned - exact).norm() / exact.norm() < 0.2


def test_refinement_of_a_trellis_rounds_what_is_served():
    generator = torch.Generator().manual_seed(0)
    x, linear = torch.randn(5, 256, generator=generator), torch.nn.Linear(256, 64)
    config = WeightOnlyConfig(bits=4, codebook="trellis", method="rtn", activation_bits=4)
    tuned = TrellisWeight(linear, config.format(), config.compress(linear.weight.detach(), config.format(), None, {}))
    for logarithms in (tuned.log_rows, tuned.log_inputs):
        logarithms.data.copy_(torch.randn(logarithms.shape, generator=generator) * 0.3)
    served = tuned.format.layout(tuned.tensors(), 256, torch.float32).matmul(x, linear.bias)
    torch.testing.assert_close(tuned.product(x, linear), served, rtol=1e-3, atol=1e-3)  # sums in another order


def test_the_config_says_what_goes_with_it():
    config = WeightOnlyConfig(activation_bits=4, method="rtn")
    assert config.rotate and config.int8_on_cpu is False and config.format().input_bits == 4
    assert WeightOnlyConfig.from_dict(config.to_dict()) == config
    assert not WeightOnlyConfig(activation_bits=6, rotate=False, method="rtn").format().rotation
    for arguments, message in (
        (dict(activation_bits=8), "activation_bits=8 is not supported"),
        (dict(activation_bits=4, int8_on_cpu=True), "int8_on_cpu=True.*activation_bits"),
        (dict(embeddings=True, overrides={"*embed_tokens": {"activation_bits": 4}}), "activation_bits=4.*embedding"),
    ):
        with pytest.raises(ValueError, match=message):
            WeightOnlyConfig(**{"method": "rtn", **arguments}).for_embedding("model.embed_tokens")
    with pytest.raises(ValueError, match="activation_bits=4"):
        SparseConfig(pattern="2:4", weights={"bits": 4, "activation_bits": 4})
