"""weight_only_linear against its float32 reference: natively on CUDA, through the Triton interpreter elsewhere."""

import pytest
import torch
from linear_checks import check, check_gradients, check_graph, random_weight

from hf_efficient.kernels import efficient_linear
from hf_efficient.kernels.efficient_linear import launch_configs, split_k, weight_only


# (out_features, in_features): odd columns, a short last group, rows that fill no tile, K split over programs (1100),
# whole steps of an odd number, one element
SHAPES = [(40, 200), (17, 333), (70, 1100), (64, 576), (72, 640), (1, 1)]


def check_product(x, packed, scale, zero_point, bias, layout, tolerances=None):
    actual = efficient_linear.weight_only_linear(x, packed, scale, zero_point, bias, **layout)
    weight = efficient_linear.dequantize_reference(packed, scale, zero_point, **layout).double()
    expected = torch.nn.functional.linear(x.double(), weight, None if bias is None else bias.double())
    assert actual.dtype == x.dtype
    check(actual, expected, tolerances)


def few_tokens_case(bits, group_size, symmetric, dtype, number, device):
    """Cases differ in shape, number of tokens and bias by `number`."""
    out_features, in_features = SHAPES[number % len(SHAPES)]
    packed, scale, zero_point, layout = random_weight(
        out_features, in_features, bits, group_size, symmetric, dtype, device
    )
    x = torch.randn((1, 3, 16, 33)[number // 2 % 4], in_features, device=device).to(dtype)
    bias = torch.randn(out_features, device=device).to(dtype) if number % 2 else None
    check_product(x, packed, scale, zero_point, bias, layout)


GROUPS = [32, 64, 128, 256, -1, None]


@pytest.mark.parametrize(  # every two of the three
    "bits, group_size, symmetric",
    [(bits, group, (i + j) % 2 == 0) for i, bits in enumerate((2, 3, 4, 8)) for j, group in enumerate(GROUPS)],
)
def test_few_tokens(bits, group_size, symmetric, kernel_device, nan_poison):
    number = bits + 3 * GROUPS.index(group_size) + symmetric
    few_tokens_case(bits, group_size, symmetric, torch.float16, number, kernel_device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_few_tokens_of_other_dtypes(bits, dtype, kernel_device, nan_poison):
    symmetric = (bits < 4) == (dtype is torch.float32)
    number = bits + 2 * symmetric
    few_tokens_case(bits, GROUPS[number % len(GROUPS)], symmetric, dtype, number + 3, kernel_device)


def test_tile_of_eight_tokens(kernel_device, nan_poison):
    assert launch_configs.choose_tile(5, False, 8, small=True) is launch_configs.SMALL
    packed, scale, zero_point, layout = random_weight(70, 1100, 8, 64, False, torch.float16, kernel_device)
    check_product(torch.randn(5, 1100, device=kernel_device).half(), packed, scale, zero_point, None, layout)


@pytest.mark.parametrize(
    "bits, group_size, dtype",
    [
        (2, 64, torch.bfloat16),
        (3, 128, torch.float16),
        (4, 128, torch.bfloat16),
        (8, 64, torch.float16),
        (8, -1, torch.float32),
    ],
)
def test_many_tokens(bits, group_size, dtype, kernel_device, nan_poison):
    rows = 70 if dtype == torch.float32 else 140
    packed, scale, zero_point, layout = random_weight(rows, 333, bits, group_size, False, dtype, kernel_device)
    x = torch.randn(70, 333, device=kernel_device).to(dtype)
    check_product(x, packed, scale, zero_point, torch.randn(rows, device=kernel_device), layout)


@pytest.mark.parametrize(
    "bits, group_size, symmetric", [(2, 32, True), (3, 64, False), (4, None, False), (8, -1, True), (4, 128, True)]
)
def test_dequantize(bits, group_size, symmetric, kernel_device, nan_poison):
    packed, scale, zero_point, layout = random_weight(
        70, 333, bits, group_size, symmetric, torch.float16, kernel_device
    )
    expected = efficient_linear.dequantize_reference(packed, scale, zero_point, **layout)
    for dtype in (torch.float16, torch.float32):
        actual = efficient_linear.dequantize(packed, scale, zero_point, dtype=dtype, **layout)
        assert torch.equal(actual, expected.to(dtype)), "the same float32 product, rounded once"


def test_more_tokens_than_the_kernel_takes_are_multiplied_by_torch(kernel_device, nan_poison):
    packed, scale, zero_point, layout = random_weight(40, 200, 4, 64, False, torch.float16, kernel_device)
    x = torch.randn(launch_configs.DEQUANTIZE_ABOVE + 1, 200, device=kernel_device).half()
    # here weights are rounded too, 2^-11 each: the rms error ratio grows by sqrt(2)
    check_product(x, packed, scale, zero_point, torch.randn(40, device=kernel_device), layout, (6e-4, 2**-9))


def test_strided_rows_and_scales(kernel_device, nan_poison):
    packed, scale, zero_point, layout = random_weight(40, 200, 4, 64, False, torch.float16, kernel_device)
    x = torch.randn(5, 300, device=kernel_device).half()[:, 50:250]
    check_product(x, packed, scale.t().contiguous().t(), zero_point.t().contiguous().t(), None, layout)
    check_product(x[::2], packed, scale.float(), zero_point, None, layout)


def test_no_tokens(kernel_device):
    packed, scale, zero_point, layout = random_weight(40, 200, 4, 64, False, torch.float16, kernel_device)
    out = efficient_linear.weight_only_linear(
        torch.empty(0, 200, device=kernel_device).half(), packed, scale, zero_point, **layout
    )
    assert out.shape == (0, 40)


def test_k_is_split_and_the_counters_come_back_to_zero(kernel_device, nan_poison, arrivals):
    packed, scale, zero_point, layout = random_weight(150, 1100, 4, 64, False, torch.float16, kernel_device)
    check_product(torch.randn(2, 1100, device=kernel_device).half(), packed, scale, zero_point, None, layout)
    assert len(arrivals) == 1 and arrivals[0].numel() == 3 and not arrivals[0].any()


def test_a_poisoned_neighbour_does_not_reach_other_tokens(kernel_device):
    """Infinity and NaN in one row of x stay in that row; columns past K are not read."""
    packed, scale, zero_point, layout = random_weight(40, 200, 4, 64, False, torch.float16, kernel_device)
    x = torch.full((3, 256), float("nan"), device=kernel_device).half()
    x[1, :200] = torch.randn(200, device=kernel_device).half()
    out = efficient_linear.weight_only_linear(x[:, :200], packed, scale, zero_point, **layout)
    assert torch.isfinite(out[1]).all() and out[0].isnan().all()


def test_gradients_of_input_and_bias(kernel_device):
    packed, scale, zero_point, layout = random_weight(40, 200, 4, 64, False, torch.float32, kernel_device)
    inputs = [torch.randn(5, 200, device=kernel_device), torch.randn(40, device=kernel_device)]

    def product(linear):
        return lambda x, bias: linear(x, packed, scale, zero_point, bias, **layout)

    both = efficient_linear.weight_only_linear, efficient_linear.weight_only_linear_reference
    check_gradients(*map(product, both), *inputs)
    with pytest.raises(RuntimeError, match="scale requires grad"):
        efficient_linear.weight_only_linear(inputs[0], packed, scale.requires_grad_(), zero_point, **layout)


@pytest.mark.parametrize("bits", [3, 4])
def test_activation_order_is_resolved_when_loading(bits, kernel_device):
    """The product with the weight of the definition: column k has the scale and zero point of group g_idx[k]."""
    n, k, group = 20, 160, 64  # the last group has 32 columns
    order = torch.randperm(k, device=kernel_device)
    g_idx = torch.empty(k, dtype=torch.int32, device=kernel_device)
    g_idx[order] = (torch.arange(k, device=kernel_device) // group).int()
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, device=kernel_device)
    scale = torch.rand(n, 3, device=kernel_device) + 0.5
    zero_point = torch.randint(0, 2**bits, (n, 3), dtype=torch.uint8, device=kernel_device)
    weight = (codes.double() - zero_point[:, g_idx.long()].double()) * scale[:, g_idx.long()].double()
    layout = dict(bits=bits, group_size=group, in_features=k)
    qweight = efficient_linear.pack_canonical(codes, bits)
    permuted, permutation = efficient_linear.resolve_activation_order(qweight, g_idx, **layout)
    packed = efficient_linear.pack_weight(permuted, bits, group)
    x = torch.randn(2, k, device=kernel_device)
    out = efficient_linear.weight_only_linear(x[:, permutation], packed, scale, zero_point, **layout)
    check(out, x.double() @ weight.t(), reason="float32 all the way")


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [1, 16, 64, 200])
def test_native_is_deterministic_and_replays_in_a_graph(tokens, bits):
    packed, scale, zero_point, layout = random_weight(4096, 4096, bits, 64, False, torch.bfloat16, "cuda")
    x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)

    check_product(x, packed, scale, zero_point, None, layout)
    check_graph(lambda: efficient_linear.weight_only_linear(x, packed, scale, zero_point, **layout))


@pytest.mark.gpu
def test_native_more_than_2_31_codes():
    rows, columns = 2**18, 2**13 + 128
    packed = torch.randint(-(2**31), 2**31 - 1, (rows, columns // 8), dtype=torch.int32, device="cuda")
    scale = torch.rand(rows, columns // 128, device="cuda", dtype=torch.bfloat16)
    layout = dict(bits=4, group_size=128, in_features=columns)
    x = torch.randn(2, columns, device="cuda", dtype=torch.bfloat16)
    out = efficient_linear.weight_only_linear(x, packed, scale, **layout)
    tail = efficient_linear.weight_only_linear_reference(x, packed[-64:].contiguous(), scale[-64:], **layout)
    check(out[:, -64:], tail)


def test_a_graph_owns_its_counters(kernel_device):
    """Launches whose work is split count in the memory that they are given, and leave it zero; larger ones make their
    own."""
    packed, scale, zero_point, layout = random_weight(40, 1100, 4, 64, False, torch.float16, kernel_device)
    x = torch.randn(3, 1100, device=kernel_device).half()
    expected = efficient_linear.weight_only_linear(x, packed, scale, zero_point, **layout)
    for size, is_used in ((64, True), (1, False)):
        buffer = torch.zeros(size, dtype=torch.int32, device=kernel_device)
        with efficient_linear.counters_in(buffer):
            counters = split_k.arrival_counters(2, buffer.device)
            assert (counters is buffer) == is_used and not counters.any()
            for _ in range(2):
                actual = efficient_linear.weight_only_linear(x, packed, scale, zero_point, **layout)
                assert torch.equal(actual, expected)
        assert not buffer.any()
        assert split_k.arrival_counters(1, buffer.device) is not buffer


@pytest.mark.skipif(not weight_only.INTERPRETED, reason="a GPU has the one or the other order")
@pytest.mark.parametrize("bits, group_size", [(2, 64), (3, 32), (4, 64), (4, 256), (8, None)])
def test_columns_in_the_order_of_four_neighbours(bits, group_size, monkeypatch):
    """As on compute capabilities 8.x and 12.x."""
    monkeypatch.setattr(weight_only, "quads", lambda *_: True)
    packed, scale, zero_point, layout = random_weight(70, 330, bits, group_size, False, torch.bfloat16, "cpu")
    x = torch.randn(5, 330).bfloat16()
    expected = efficient_linear.weight_only_linear_reference(x, packed, scale, zero_point, **layout)
    check(efficient_linear.weight_only_linear(x, packed, scale, zero_point, **layout), expected)
