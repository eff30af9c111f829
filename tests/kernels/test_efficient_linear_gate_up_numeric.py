"""gate_up_silu against its reference: natively on CUDA, through the Triton interpreter elsewhere."""

import pytest
import torch
from helpers import assert_close

from hf_efficient.kernels import efficient_linear
from hf_efficient.kernels.efficient_linear import weight_only


# Up to 64 tokens everything is float32 and rounded once, as in test_efficient_linear_numeric.py. In float32 silu's
# exponential adds an error of a few units in the last place.
BFLOAT16 = 2**-7 if weight_only.INTERPRETED else 2**-8
TOLERANCES = {torch.float16: (4e-4, 2**-10), torch.bfloat16: (BFLOAT16, BFLOAT16), torch.float32: (5e-6, 2e-5)}


def problem(out_features, in_features, bits, group_size, symmetric, with_bias, dtype, device):
    groups = 1 if group_size == -1 else -(-in_features // group_size)

    def weight():
        codes = torch.randint(0, 2**bits, (out_features, in_features), dtype=torch.uint8, device=device)
        packed = efficient_linear.pack_weight(efficient_linear.pack_canonical(codes, bits), bits, group_size)
        scale = ((torch.rand(out_features, groups, device=device) + 0.5) * 2.0 ** (1 - bits) / in_features**0.5).to(
            dtype
        )
        zero_point = torch.randint(0, 2**bits, (out_features, groups), dtype=torch.uint8, device=device)
        bias = torch.randn(out_features, device=device).to(dtype)
        return packed, scale, None if symmetric else zero_point, bias if with_bias else None

    return weight(), weight(), dict(bits=bits, group_size=group_size, in_features=in_features)


def check(x, gate, up, layout, tolerances):
    actual = efficient_linear.gate_up_silu(x, gate, up, **layout)
    expected = efficient_linear.gate_up_silu_reference(x, gate, up, **layout)
    assert actual.dtype == x.dtype
    rms, maximum = tolerances
    assert_close(actual, expected, rms, maximum * expected.abs().max().item(), "only the output is rounded")


@pytest.mark.parametrize(
    "bits, group_size, symmetric, dtype, shape, tokens",
    [
        (4, 64, False, torch.float16, (20, 1100), 2),  # K split over programs
        (4, 128, True, torch.bfloat16, (17, 333), 20),
        (8, -1, True, torch.float16, (40, 200), 1),
        (8, 32, False, torch.float32, (40, 200), 3),
        (2, 64, False, torch.float16, (33, 130), 5),
        (3, 32, True, torch.float16, (40, 300), 16),
    ],
)
def test_few_tokens(bits, group_size, symmetric, dtype, shape, tokens, kernel_device, nan_poison):
    with_bias = bits in (3, 4)
    gate, up, layout = problem(*shape, bits, group_size, symmetric, with_bias, dtype, kernel_device)
    x = torch.randn(tokens, shape[1], device=kernel_device).to(dtype)
    check(x, gate, up, layout, TOLERANCES[dtype])


def test_many_tokens(kernel_device, nan_poison):
    gate, up, layout = problem(40, 130, 4, 64, False, True, torch.float16, kernel_device)
    # both products, silu and the result are rounded: 2^-11 each, so twice the error of one rounding
    check(torch.randn(65, 130, device=kernel_device).half(), gate, up, layout, (8e-4, 2**-9))


def test_no_tokens(kernel_device):
    gate, up, layout = problem(40, 130, 4, 64, False, True, torch.float16, kernel_device)
    assert efficient_linear.gate_up_silu(
        torch.empty(0, 130, device=kernel_device).half(), gate, up, **layout
    ).shape == (0, 40)


def test_gradient_of_the_input(kernel_device):
    gate, up, layout = problem(40, 130, 4, 64, False, True, torch.float32, kernel_device)
    grads = []
    for product in (efficient_linear.gate_up_silu, efficient_linear.gate_up_silu_reference):
        x = torch.linspace(-1, 1, 650, device=kernel_device).view(5, 130).requires_grad_()
        product(x, gate, up, **layout).square().sum().backward()
        grads.append(x.grad)
    assert_close(*grads, 5e-6, 2e-5 * grads[1].abs().max().item(), "float32 all the way")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_native_is_deterministic_and_replays_in_a_graph(bits, tokens):
    gate, up, layout = problem(14336, 4096, bits, 64, False, False, torch.bfloat16, "cuda")
    x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
    check(x, gate, up, layout, TOLERANCES[torch.bfloat16])
    first = efficient_linear.gate_up_silu(x, gate, up, **layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = efficient_linear.gate_up_silu(x, gate, up, **layout)
    for _ in range(10):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, first)
