"""Mixture-of-experts products with packed weights against the float32 reference, natively or interpreted."""

import pytest
import torch
from helpers import assert_close

from hf_efficient.kernels import efficient_linear as el
from hf_efficient.kernels.efficient_linear.grouped import grouped_linear, grouped_linear_reference


pytestmark = pytest.mark.usefixtures("nan_poison")

TOLERANCE = {
    torch.float32: (2e-6, 1e-4, "float32: only the order of additions differs"),
    torch.float16: (1e-3, 6e-2, "float16: the output is rounded"),
    torch.bfloat16: (5e-3, 5e-1, "bfloat16: the output is rounded"),
}


def experts(device, dtype, counts, out_features, in_features, bits, group_size, symmetric, bias):
    """(x, tensors, keywords) of a random layer whose expert e has counts[e] rows."""
    number = len(counts)
    codes = torch.randint(0, 2**bits, (number, out_features, in_features), dtype=torch.uint8)
    packed = torch.stack([el.pack_weight(el.pack_canonical(part, bits), bits, group_size) for part in codes]).to(device)
    groups = 1 if group_size in (None, -1) else -(-in_features // group_size)
    shape = (number, 1 if group_size is None else out_features, groups)
    scale = (torch.rand(shape, device=device) + 0.5).to(dtype)
    zero_point = None if symmetric else torch.randint(0, 2**bits, shape, dtype=torch.uint8, device=device)
    offsets = torch.tensor([0, *counts], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    x = torch.randn(sum(counts), in_features, device=device).to(dtype) / 2**bits
    added = torch.randn(number, out_features, device=device).to(dtype) if bias else None
    layout = dict(offsets=offsets, bits=bits, group_size=group_size, in_features=in_features)
    return x, (packed, scale, zero_point, added), layout


@pytest.mark.parametrize(
    "counts",
    [(1, 0, 2), (0, 0, 5), (3,), (17, 1, 0, 40), (0, 16, 0, 0, 33, 1), (130, 3)],
    ids=lambda counts: "-".join(map(str, counts)),
)
@pytest.mark.parametrize(
    "bits, group_size, symmetric", [(4, 64, False), (4, -1, True), (8, 32, True), (8, None, False)]
)
def test_rows_meet_their_expert(kernel_device, counts, bits, group_size, symmetric):
    x, tensors, layout = experts(kernel_device, torch.float16, counts, 40, 150, bits, group_size, symmetric, True)
    actual = grouped_linear(x, *tensors, **layout)
    assert_close(actual, grouped_linear_reference(x, *tensors, **layout), *TOLERANCE[torch.float16])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(kernel_device, dtype):
    x, tensors, layout = experts(kernel_device, dtype, (2, 0, 9), 16, 128, 4, 32, False, False)
    actual = grouped_linear(x, *tensors, **layout)
    assert_close(actual, grouped_linear_reference(x, *tensors, **layout), *TOLERANCE[dtype])


def test_no_rows(kernel_device):
    x, tensors, layout = experts(kernel_device, torch.float16, (0, 0), 16, 128, 4, 32, False, False)
    assert grouped_linear(x, *tensors, **layout).shape == (0, 16)


def test_gradients_of_input_and_bias(kernel_device):
    x, (packed, scale, zero_point, bias), layout = experts(
        kernel_device, torch.float32, (3, 0, 2), 24, 130, 4, 64, False, True
    )
    x, bias = x.requires_grad_(), bias.requires_grad_()
    grad = torch.randn(5, 24, device=kernel_device)
    results = []
    for function in (grouped_linear, grouped_linear_reference):
        x.grad = bias.grad = None
        function(x, packed, scale, zero_point, bias, **layout).backward(grad)
        results.append((x.grad, bias.grad))
    for actual, expected in zip(*results):
        assert_close(actual, expected, *TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(offsets=torch.tensor([0, 1, 2])), "offsets is torch.int64"),
        (dict(offsets=torch.tensor([0, 1], dtype=torch.int32)), r"offsets is .* \[3\]"),
        (dict(in_features=120), r"allowed is \[R, 120\]"),
        (dict(bits=5), "bits=5"),
    ],
)
def test_bad_arguments(kernel_device, change, match):
    x, tensors, layout = experts(kernel_device, torch.float16, (1, 1), 16, 128, 4, 32, False, False)
    change = {name: value.to(kernel_device) if torch.is_tensor(value) else value for name, value in change.items()}
    with pytest.raises((TypeError, ValueError), match=match):
        grouped_linear(x, *tensors, **{**layout, **change})


def test_bad_shapes(kernel_device):
    x, (packed, scale, zero_point, _), layout = experts(
        kernel_device, torch.float16, (1, 1), 16, 128, 4, 32, False, False
    )
    for tensors, match in (
        ((packed[0], scale, zero_point), r"packed has shape .* \[E, N, W\]"),
        ((packed, scale[:1], zero_point), "scale has shape"),
        ((packed, scale, zero_point, torch.zeros(2, 15)), "bias has shape"),
    ):
        with pytest.raises(ValueError, match=match):
            grouped_linear(x, *tensors, **layout)
    with pytest.raises(ValueError, match="x has shape"):
        grouped_linear(x[:, :100], packed, scale, zero_point, **layout)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_native_sizes_are_right_and_the_same_in_every_run(kernel_device, dtype):
    counts = (0, 700, 1, 3, 64, 0, 20, 236)
    x, tensors, layout = experts(kernel_device, dtype, counts, 2048, 4096, 4, 64, False, False)
    actual = grouped_linear(x, *tensors, **layout)
    expected = grouped_linear_reference(x, *tensors, **layout)
    assert_close(actual, expected, 5e-3, 5.0, "rounded to 16 bits")
    assert all(torch.equal(actual, grouped_linear(x, *tensors, **layout)) for _ in range(5))
