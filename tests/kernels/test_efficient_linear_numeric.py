"""weight_only_linear against its float32 reference: natively on CUDA, through the Triton interpreter elsewhere."""

import pytest
import torch
from helpers import assert_close

from hf_efficient.kernels import efficient_linear
from hf_efficient.kernels.efficient_linear import launch_configs, weight_only


# (out_features, in_features): odd columns, a short last group, rows that fill no tile, K split over programs (1100),
# one element
SHAPES = [(40, 200), (17, 333), (70, 1100), (64, 576), (1, 1)]

# dtype -> (rms error ratio, largest error relative to the largest output). Inside, products are exact and added in
# float32, so the error is that of rounding the output: half a unit in the last place, at most 2^-11 in float16 and
# 2^-8 in bfloat16 (a whole unit, 2^-7, in the interpreter, which truncates), and 2^-24 times the terms of the sum in
# float32.
BFLOAT16 = 2**-7 if weight_only.INTERPRETED else 2**-8
TOLERANCES = {torch.float16: (4e-4, 2**-10), torch.bfloat16: (BFLOAT16, BFLOAT16), torch.float32: (2e-6, 1e-5)}
REASON = "only the output is rounded"


def problem(out_features, in_features, bits, group_size, symmetric, dtype, device):
    rows = 1 if group_size is None else out_features
    groups = 1 if group_size in (-1, None) else -(-in_features // group_size)
    codes = torch.randint(0, 2**bits, (out_features, in_features), dtype=torch.uint8, device=device)
    qweight = efficient_linear.pack_canonical(codes, bits)
    scale = ((torch.rand(rows, groups, device=device) + 0.5) * 2.0 ** (1 - bits)).to(dtype)
    zero_point = torch.randint(0, 2**bits, (rows, groups), dtype=torch.uint8, device=device)
    layout = dict(bits=bits, group_size=group_size, in_features=in_features)
    packed = efficient_linear.pack_weight(qweight, bits, group_size)
    return packed, scale, None if symmetric else zero_point, layout


def check(x, packed, scale, zero_point, bias, layout, tolerances=None):
    actual = efficient_linear.weight_only_linear(x, packed, scale, zero_point, bias, **layout)
    doubles = [None if t is None else t.double() for t in (x, bias)]
    weight = efficient_linear.dequantize_reference(packed, scale, zero_point, **layout).double()
    expected = torch.nn.functional.linear(doubles[0], weight, doubles[1])
    assert actual.dtype == x.dtype
    rms, maximum = tolerances or TOLERANCES[x.dtype]
    assert_close(actual, expected, rms, maximum * expected.abs().max().item(), REASON)


def few_tokens_case(bits, group_size, symmetric, dtype, number, device):
    """Cases differ in shape, number of tokens and bias by `number`."""
    out_features, in_features = SHAPES[number % len(SHAPES)]
    packed, scale, zero_point, layout = problem(out_features, in_features, bits, group_size, symmetric, dtype, device)
    x = torch.randn((1, 3, 16, 33)[number // 2 % 4], in_features, device=device).to(dtype)
    bias = torch.randn(out_features, device=device).to(dtype) if number % 2 else None
    check(x, packed, scale, zero_point, bias, layout)


GROUPS = [32, 64, 128, 256, -1, None]


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_few_tokens(bits, group_size, symmetric, kernel_device, nan_poison):
    number = bits + 3 * GROUPS.index(group_size) + symmetric
    few_tokens_case(bits, group_size, symmetric, torch.float16, number, kernel_device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_few_tokens_of_other_dtypes(bits, symmetric, dtype, kernel_device, nan_poison):
    number = bits + 2 * symmetric
    few_tokens_case(bits, GROUPS[number % len(GROUPS)], symmetric, dtype, number + 3, kernel_device)


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
    packed, scale, zero_point, layout = problem(140, 333, bits, group_size, False, dtype, kernel_device)
    x = torch.randn(65 if dtype == torch.float32 else 131, 333, device=kernel_device).to(dtype)
    check(x, packed, scale, zero_point, torch.randn(140, device=kernel_device), layout)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("bits, group_size", [(2, 32), (3, 64), (4, None), (8, -1)])
def test_dequantize(bits, group_size, symmetric, kernel_device, nan_poison):
    packed, scale, zero_point, layout = problem(70, 333, bits, group_size, symmetric, torch.float16, kernel_device)
    expected = efficient_linear.dequantize_reference(packed, scale, zero_point, **layout)
    for dtype in (torch.float16, torch.float32):
        actual = efficient_linear.dequantize(packed, scale, zero_point, dtype=dtype, **layout)
        assert torch.equal(actual, expected.to(dtype)), "the same float32 product, rounded once"


def test_more_tokens_than_the_kernel_takes_are_multiplied_by_torch(kernel_device, nan_poison):
    packed, scale, zero_point, layout = problem(40, 200, 4, 64, False, torch.float16, kernel_device)
    x = torch.randn(launch_configs.DEQUANTIZE_ABOVE + 1, 200, device=kernel_device).half()
    # here weights are rounded too, 2^-11 each: the rms error ratio grows by sqrt(2)
    check(x, packed, scale, zero_point, torch.randn(40, device=kernel_device), layout, (6e-4, 2**-9))


def test_strided_rows_and_scales(kernel_device, nan_poison):
    packed, scale, zero_point, layout = problem(40, 200, 4, 64, False, torch.float16, kernel_device)
    x = torch.randn(5, 300, device=kernel_device).half()[:, 50:250]
    check(x, packed, scale.t().contiguous().t(), zero_point.t().contiguous().t(), None, layout)
    check(x[::2], packed, scale.float(), zero_point, None, layout)


def test_no_tokens(kernel_device):
    packed, scale, zero_point, layout = problem(40, 200, 4, 64, False, torch.float16, kernel_device)
    out = efficient_linear.weight_only_linear(
        torch.empty(0, 200, device=kernel_device).half(), packed, scale, zero_point, **layout
    )
    assert out.shape == (0, 40)


def test_k_is_split_and_the_counters_come_back_to_zero(kernel_device, nan_poison, monkeypatch):
    packed, scale, zero_point, layout = problem(150, 1536, 4, 64, False, torch.float16, kernel_device)
    taken = []

    def counters(count, device):
        taken.append(torch.zeros(count, dtype=torch.int32, device=device))
        return taken[-1]

    monkeypatch.setattr(weight_only, "_arrival_counters", counters)
    check(torch.randn(2, 1536, device=kernel_device).half(), packed, scale, zero_point, None, layout)
    assert len(taken) == 1 and taken[0].numel() == 3 and not taken[0].any()


def test_a_poisoned_neighbour_does_not_reach_other_tokens(kernel_device):
    """Infinity and NaN in one row of x stay in that row; columns past K are not read."""
    packed, scale, zero_point, layout = problem(40, 200, 4, 64, False, torch.float16, kernel_device)
    x = torch.full((3, 256), float("nan"), device=kernel_device).half()
    x[1, :200] = torch.randn(200, device=kernel_device).half()
    out = efficient_linear.weight_only_linear(x[:, :200], packed, scale, zero_point, **layout)
    assert torch.isfinite(out[1]).all() and out[0].isnan().all()


def test_gradients_of_input_and_bias(kernel_device):
    packed, scale, zero_point, layout = problem(40, 200, 4, 64, False, torch.float32, kernel_device)
    inputs = [torch.randn(5, 200, device=kernel_device), torch.randn(40, device=kernel_device)]
    grads = []
    for linear in (efficient_linear.weight_only_linear, efficient_linear.weight_only_linear_reference):
        x, bias = (tensor.clone().requires_grad_() for tensor in inputs)
        linear(x, packed, scale, zero_point, bias, **layout).square().sum().backward()
        grads.append((x.grad, bias.grad))
    for actual, expected in zip(*grads):
        assert_close(actual, expected, 2e-6, 1e-5 * expected.abs().max().item(), "float32 all the way")
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
    expected = x.double() @ weight.t()
    rms, maximum = TOLERANCES[torch.float32]
    assert_close(out, expected, rms, maximum * expected.abs().max().item(), "float32 all the way")


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [1, 16, 64, 200])
def test_native_is_deterministic_and_replays_in_a_graph(tokens, bits):
    packed, scale, zero_point, layout = problem(4096, 4096, bits, 64, False, torch.bfloat16, "cuda")
    x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)

    def call():
        return efficient_linear.weight_only_linear(x, packed, scale, zero_point, **layout)

    check(x, packed, scale, zero_point, None, layout)
    first = call()
    assert all(torch.equal(call(), first) for _ in range(20))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for _ in range(5):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, first)


@pytest.mark.gpu
def test_native_more_than_2_31_codes():
    rows, columns = 2**18, 2**13 + 128
    packed = torch.randint(-(2**31), 2**31 - 1, (rows, columns // 8), dtype=torch.int32, device="cuda")
    scale = torch.rand(rows, columns // 128, device="cuda", dtype=torch.bfloat16)
    layout = dict(bits=4, group_size=128, in_features=columns)
    x = torch.randn(2, columns, device="cuda", dtype=torch.bfloat16)
    out = efficient_linear.weight_only_linear(x, packed, scale, **layout)
    tail = efficient_linear.weight_only_linear_reference(x, packed[-64:].contiguous(), scale[-64:], **layout)
    rms, maximum = TOLERANCES[torch.bfloat16]
    assert_close(out[:, -64:], tail, rms, maximum * tail.abs().max().item(), REASON)
