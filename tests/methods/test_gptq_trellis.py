"""GPTQ along a trellis (LDLQ)."""

from types import SimpleNamespace

import pytest
import torch

from hf_efficient import methods
from hf_efficient.formats.trellis import TrellisFormat
from hf_efficient.methods import gptq
from hf_efficient.methods._error_feedback import output_error


def case():
    """(a weight, the Hessian of inputs that depend on each other)"""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(512, 24, generator=generator) @ torch.randn(24, 64, generator=generator)
    x = mixed + torch.randn(512, 64, generator=generator)
    return torch.randn(96, 64, generator=generator), x.t() @ x


@pytest.mark.parametrize("bits", [2, 3.5])
def test_feedback_lowers_the_output_error(bits):
    weight, hessian = case()
    format = TrellisFormat(bits)
    plain = methods.quantize(weight, format, "rtn")
    fed_back = methods.quantize(weight, format, "gptq", SimpleNamespace(hessian=hessian))
    errors = [output_error(weight, format.dequantize(t, 64, torch.float32), hessian).sum() for t in (fed_back, plain)]
    assert errors[0] < 0.6 * errors[1]


def test_without_dependence_it_is_the_nearest_path_with_the_scales_of_least_squares():
    weight, _ = case()
    format = TrellisFormat(2)
    tensors = gptq.quantize(weight, format, SimpleNamespace(hessian=torch.eye(64)), damping=0.0)
    plain = format.round(weight)
    assert torch.equal(tensors["qweight"], plain["qweight"])
    values = format.dequantize({**plain, "scale": torch.ones(96, 1)}, 64, torch.float32)
    expected = (values * weight).sum(1, keepdim=True) / values.square().sum(1, keepdim=True)
    torch.testing.assert_close(tensors["scale"], expected, rtol=1e-5, atol=0)


def test_weights_and_inputs_of_zeros():
    weight, hessian = case()
    weight[5], hessian[:, 7], hessian[7] = 0, 0, 0
    format = TrellisFormat(3)
    tensors = gptq.quantize(weight, format, SimpleNamespace(hessian=hessian))
    decoded = format.dequantize(tensors, 64, torch.float32)
    assert decoded.isfinite().all() and (decoded[5] == 0).all()
