"""Rotations of inputs by the C++ kernel, in every tier."""

import pytest
import torch

from hf_efficient.kernels import hadamard
from hf_efficient.kernels.linear import native_hadamard
from hf_efficient.kernels.native import tiers
from hf_efficient.kernels.replay.recorder import Capture, interpreter


# Sylvester, Paley and Hartley matrices, one factor and several, blocks (an odd part above 512), a single column
@pytest.mark.parametrize("columns", [1, 7, 64, 96, 192, 576, 1030, 1536, 4864])
def test_the_transform(columns, tier):
    signs = hadamard.random_signs(columns)
    for rows in (1, 3, 9):
        x = torch.randn(rows, columns) * torch.logspace(-2, 2, columns)
        expected = hadamard.rotate(x.double(), signs.double())
        y = native_hadamard.rotate(x, signs.float())
        assert ((y - expected).norm() / expected.norm()).item() < 1e-6
        x = x.bfloat16()
        expected = hadamard.rotate(x.double(), signs.double())
        y = native_hadamard.rotate(x, signs.bfloat16())
        assert y.dtype is torch.bfloat16 and y.shape == x.shape
        assert ((y - expected).norm() / expected.norm()).item() < 2**-9, "one rounding"
        assert torch.equal(y[-1:], native_hadamard.rotate(x[-1:], signs.bfloat16())), "rows do not depend on each other"


def test_inputs_of_any_shape_and_gradients():
    signs = hadamard.random_signs(96).float()
    x = torch.randn(2, 96, 5).transpose(1, 2)
    torch.testing.assert_close(native_hadamard.rotate(x, signs), hadamard.rotate(x, signs), rtol=1e-5, atol=1e-5)
    assert native_hadamard.rotate(x[:0], signs).shape == (0, 5, 96)
    x = x.clone().requires_grad_()
    native_hadamard.rotate(x, signs).sum().backward()
    assert x.grad.shape == x.shape
    with pytest.raises(ValueError, match="do not fit 96 columns"):
        native_hadamard.rotate(x.detach(), signs[:95])


@pytest.mark.skipif(interpreter() is None, reason="no C++ kernels: no compiler, or another CPU")
def test_one_input_is_rotated_once_in_a_captured_forward():
    """q, k and v read one input, and their signs are equal."""
    signs, others = hadamard.random_signs(96).float(), -hadamard.random_signs(96, seed=1).float()
    x = torch.randn(2, 96)

    def forward():
        y = x * 2
        same = [native_hadamard.rotate(y, signs), native_hadamard.rotate(y, signs.clone())]
        other = native_hadamard.rotate(y, others)
        y.add_(1)
        return [*same, other, native_hadamard.rotate(y, signs)]

    capture = Capture(forward)
    assert len({y.data_ptr() for y in capture.output}) == 3
    for _ in range(2):
        x.copy_(torch.randn(2, 96))
        for y, expected in zip(capture.replay(), forward()):
            assert torch.equal(y, expected)


def test_without_a_compiler_torch_rotates(monkeypatch):
    monkeypatch.setenv(tiers.VARIABLE, "torch")
    x, signs = torch.randn(3, 40), hadamard.random_signs(40).float()
    assert torch.equal(native_hadamard.rotate(x, signs), hadamard.rotate(x, signs))
