"""Products of up to 8 tokens in registers against the float32 reference: natively on CUDA; elsewhere interpreted, in
plain operations and with the inline assembly of NVIDIA GPUs."""

import ptx
import pytest
import torch
import triton.language as tl
from linear_checks import random_weight
from test_efficient_linear_numeric import check_product

from hf_efficient.kernels import efficient_linear
from hf_efficient.kernels.efficient_linear import launch_configs, weight_only


CASES = [  # bits, group, symmetric, tokens, rows and columns of the weight, tile
    (4, 64, False, 1, 40, 1024, (16, 4, False)),
    (4, 64, False, 8, 40, 1280, (32, 2, True)),  # an odd number of chunks
    (4, 64, True, 2, 16, 512, (16, 2, False)),
    (4, 128, False, 7, 33, 3584, (64, 2, True)),  # the last split is shorter
    (4, 256, False, 3, 70, 512, (16, 1, False)),
    (4, -1, False, 5, 40, 512, (16, 2, True)),
    (2, 64, False, 8, 40, 1024, (32, 2, True)),
    (3, 256, False, 6, 40, 1024, (32, 2, True)),
    (3, None, False, 2, 17, 1024, (32, 4, False)),
]


@pytest.fixture(autouse=True)
def on_hopper(kernel_device):
    if not weight_only.INTERPRETED and not weight_only._on_hopper(torch.device(kernel_device)):
        pytest.skip("for compute capability 9")


def product(case, dtype, device, monkeypatch):
    bits, group, symmetric, tokens, rows, columns, (block_n, warps, exchange) = case
    tile = launch_configs.RegisterTile(block_n, 8, warps, 1, 8, exchange)
    monkeypatch.setattr(weight_only, "IN_REGISTERS", {8: tile})
    packed, scale, zero, layout = random_weight(rows, columns, bits, group, symmetric, dtype, device)
    x = torch.randn(tokens, columns, device=device).to(dtype)
    assert weight_only.few_tokens_tile(x, (scale,), (zero,), bits, group) is tile
    check_product(x, packed, scale, zero, torch.randn(rows, device=device), layout)


@pytest.mark.parametrize(  # interpreted each with one of the dtypes: inline assembly below has the other
    "number, dtype",
    [
        (number, dtype)
        for number in range(len(CASES))
        for place, dtype in enumerate((torch.bfloat16, torch.float16))
        if not weight_only.INTERPRETED or number % 2 == place
    ],
)
def test_product(number, dtype, kernel_device, monkeypatch, nan_poison):
    product(CASES[number], dtype, kernel_device, monkeypatch)


@pytest.mark.skipif(not weight_only.INTERPRETED, reason="runs natively above")
@pytest.mark.parametrize("number", range(len(CASES)))
def test_inline_assembly(number, monkeypatch):
    monkeypatch.setattr(tl, "inline_asm_elementwise", ptx.inline_asm_elementwise)
    options = weight_only._options
    monkeypatch.setattr(weight_only, "_options", lambda *arguments: {**options(*arguments), "PTX": True})
    product(CASES[number], (torch.float16, torch.bfloat16)[number % 2], "cpu", monkeypatch)


def test_k_is_split_and_the_counters_come_back_to_zero(kernel_device, monkeypatch, nan_poison, arrivals):
    product((4, 64, False, 2, 70, 3584, (32, 2, False)), torch.float16, kernel_device, monkeypatch)
    assert len(arrivals) == 1 and arrivals[0].numel() == 3 and not arrivals[0].any()


def test_a_poisoned_neighbour_does_not_reach_other_tokens(kernel_device):
    packed, scale, zero_point, layout = random_weight(40, 1024, 4, 64, False, torch.float16, kernel_device)
    x = torch.randn(3, 1024, device=kernel_device).half()
    x[0], x[2, 1023] = float("nan"), float("inf")
    out = efficient_linear.weight_only_linear(x, packed, scale, zero_point, **layout)
    assert torch.isfinite(out[1]).all() and out[0].isnan().all() and not torch.isfinite(out[2]).any()


def test_products_that_are_slower_in_registers_take_the_other_kernel(kernel_device):
    """Of more tokens than 8, and without zero points of more than 2 or in other groups than of 64."""
    cases = (8, 128, 0, 1), (9, 128, 0, 0), (2, 64, 1, 1), (3, 64, 1, 0), (1, 128, 1, 0)
    for tokens, group, symmetric, expected in cases:
        _, scale, zero, _ = random_weight(40, 1024, 4, group, bool(symmetric), torch.float16, kernel_device)
        x = torch.randn(tokens, 1024, device=kernel_device).half()
        tile = weight_only.few_tokens_tile(x, (scale,), (zero,), 4, group)
        assert isinstance(tile, launch_configs.RegisterTile) is bool(expected), (tokens, group, symmetric)


def test_other_layouts_take_the_other_kernel(kernel_device):
    packed, scale, zero, layout = random_weight(40, 1024, 4, 64, False, torch.float16, kernel_device)
    x = torch.randn(3, 1032, device=kernel_device).half()
    columns = scale.t().contiguous().t()
    for given, scales in ((x[:, 1:1025], scale), (x[:, :1024], columns), (x[:, :1024], scale.float())):
        tile = weight_only.few_tokens_tile(given, (scales,), (zero,), 4, 64)
        assert not isinstance(tile, launch_configs.RegisterTile)
        expected = efficient_linear.weight_only_linear_reference(given, packed, scales, zero, **layout)
        actual = efficient_linear.weight_only_linear(given, packed, scales, zero, **layout)
        assert (actual - expected).abs().max() <= 2e-3 * expected.abs().max()
