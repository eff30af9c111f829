"""Captured on a GPU, several operators of a layer are one kernel. A fake capture on the CPU stands for CUDA's."""

import launch_counts
import pytest
import torch
from helpers import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from hf_efficient.kernels.replay import operator_fusion
from hf_efficient.kernels.replay.operator_fusion import fused
from hf_efficient.kernels.replay.operators import Operators


WEIGHTS = ("bf16", "int4", "W8A8")
MOST_LAUNCHES, MOST_LAUNCHES_OF_LLAMA_8B = 8, 270


@pytest.mark.parametrize("weights", WEIGHTS)
def test_kernels_of_a_layer(weights):
    few, more = (launch_counts.kernels_of(weights, layers) for layers in (1, 2))
    assert more[0] - few[0] <= MOST_LAUNCHES < more[1] - few[1] <= more[2] - few[2]
    assert few[0] + 31 * (more[0] - few[0]) <= MOST_LAUNCHES_OF_LLAMA_8B


@pytest.mark.parametrize("weights", WEIGHTS)
def test_fewer_kernels_give_the_same_logits(weights):
    with launch_counts.layouts_of_a_gpu():
        model = launch_counts.tiny(weights, 2)
        found, expected = (launch_counts.capture_of(model, is_fused, 5).output for is_fused in (True, False))
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-5 * expected[0].abs().max().item())
    assert torch.equal(found[1], expected[1])


def test_in_bfloat16_the_difference_is_that_of_another_order_of_sums():
    """The reference is float32; fused may be no farther from it than unfused by more than a fifth."""
    model = launch_counts.tiny("bf16", 4)
    exact = launch_counts.capture_of(model, False, 5).output[0]
    model = model.to(torch.bfloat16)
    found, plain = (
        (launch_counts.capture_of(model, is_fused, 5).output[0].float() - exact).norm() for is_fused in (True, False)
    )
    assert found <= 1.2 * plain


@pytest.mark.parametrize(
    "name, overrides, most",
    [("llama", dict(attention_bias=True, mlp_bias=True), 8), ("mistral", {}, 8), ("qwen3", {}, 10)],
)
def test_other_models_like_llama(name, overrides, most):
    """Qwen 3 also has a norm of queries and one of keys."""
    models = [tiny_model(name, num_hidden_layers=layers, **overrides) for layers in (1, 2)]
    few, more = (launch_counts.kernels_in(launch_counts.capture_of(model, True)._calls) for model in models)
    assert more - few <= most


def _names(forward) -> list[str]:
    names = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    with Names():
        forward()
    return names


def test_operators_run_again_on_what_their_inputs_hold():
    x, total = torch.ones(3), torch.zeros(3)
    operators = Operators(lambda: (x.mul(2).view(3, 1), total.copy_(x + 1)))
    x.fill_(4)
    product, written = operators()
    assert product.flatten().tolist() == [8.0] * 3 and written is total and total.tolist() == [5.0] * 3


def test_what_reads_numbers_on_the_host_stays_as_it_is():
    def forward():
        x = torch.ones(2, 4)
        return x * 2 if x.sum().item() > 0 else x

    assert fused(forward) is forward


@pytest.mark.parametrize("change", ["weight changes", "read twice", "kept", "other exponent"])
def test_what_only_looks_like_a_norm_stays_as_it_is(change):
    weight, x = torch.rand(8) + 0.5, torch.randn(2, 8)

    def forward():
        if change == "weight changes":
            weight.mul_(1.0)
        squares = x.pow(3 if change == "other exponent" else 2)
        scale = torch.rsqrt(squares.mean(-1, keepdim=True) + 1e-6)
        norm = x * scale
        y = weight * norm
        if change == "read twice":
            y = y + norm.sum()
        return (y, scale) if change == "kept" else y

    assert "hf_efficient::add_rms_norm" not in _names(fused(forward))


def test_a_norm_is_found():
    weight, a, b = torch.rand(8), torch.randn(2, 8), torch.randn(2, 8)

    def forward():
        x = a + b
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), x

    names = _names(fused(forward))
    assert names == ["hf_efficient::add_rms_norm"]


def test_what_differs_is_not_captured(monkeypatch):
    """Whatever a pattern makes of a forward is run and compared."""
    said = []
    monkeypatch.setattr(operator_fusion.logger, "warning_once", said.append)

    forward = lambda: (torch.full((3, 4), 3.0) * x).neg().abs()  # noqa: E731
    x = torch.full((3, 4), 3.0)
    monkeypatch.setattr(operator_fusion, "_PATTERNS", [(0, _add_for_mul)])
    assert fused(forward) is forward and len(said) == 1


def _add_for_mul(operators):
    (product,) = [operator for operator in operators.list if operator.name == "aten::mul.Tensor"]
    (minus,) = [operator for operator in operators.list if operator.name == "aten::neg"]
    operators.replace([product, minus], torch.ops.aten.add.Tensor, product.args, [minus.result])
