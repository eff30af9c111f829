"""gate_up_silu against its reference: natively on CUDA, through the Triton interpreter elsewhere."""

import pytest
import torch
from linear_checks import TOLERANCES, check, check_gradients, check_graph, random_weight

from hf_efficient.kernels import efficient_linear


# Everything is float32 and rounded once; silu's exponential adds a few units in the last place of float32.
TOLERANCES = {**TOLERANCES, torch.float32: (5e-6, 2e-5)}


def problem(out_features, in_features, bits, group_size, symmetric, with_bias, dtype, device):
    def side():
        shape = out_features, in_features, bits, group_size
        packed, scale, zero_point, layout = random_weight(*shape, symmetric, dtype, device)
        bias = torch.randn(out_features, device=device).to(dtype)
        return (packed, scale / in_features**0.5, zero_point, bias if with_bias else None), layout

    (gate, layout), (up, _) = side(), side()
    return gate, up, layout


def check_product(x, gate, up, layout, tolerances):
    actual = efficient_linear.gate_up_silu(x, gate, up, **layout)
    assert actual.dtype == x.dtype
    check(actual, efficient_linear.gate_up_silu_reference(x, gate, up, **layout), tolerances)


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
    check_product(x, gate, up, layout, TOLERANCES[dtype])


def test_many_tokens(kernel_device, nan_poison):
    gate, up, layout = problem(40, 130, 4, 64, False, True, torch.float16, kernel_device)
    # both products, silu and the result are rounded: 2^-11 each, so twice the error of one rounding
    check_product(torch.randn(65, 130, device=kernel_device).half(), gate, up, layout, (8e-4, 2**-9))


def test_no_tokens(kernel_device):
    gate, up, layout = problem(40, 130, 4, 64, False, True, torch.float16, kernel_device)
    assert efficient_linear.gate_up_silu(
        torch.empty(0, 130, device=kernel_device).half(), gate, up, **layout
    ).shape == (0, 40)


def test_gradient_of_the_input(kernel_device):
    gate, up, layout = problem(40, 130, 4, 64, False, True, torch.float32, kernel_device)
    x = torch.linspace(-1, 1, 650, device=kernel_device).view(5, 130)
    both = efficient_linear.gate_up_silu, efficient_linear.gate_up_silu_reference
    products = (lambda x, product=product: product(x, gate, up, **layout) for product in both)
    check_gradients(*products, x, tolerances=TOLERANCES[torch.float32])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_native_is_deterministic_and_replays_in_a_graph(bits, tokens):
    gate, up, layout = problem(14336, 4096, bits, 64, False, False, torch.bfloat16, "cuda")
    x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
    check_product(x, gate, up, layout, TOLERANCES[torch.bfloat16])
    check_graph(lambda: efficient_linear.gate_up_silu(x, gate, up, **layout))
