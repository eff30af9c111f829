"""Mixture-of-experts products with packed weights against the float32 reference, natively or interpreted."""

import pytest
import torch
from linear_checks import check, check_errors, check_gradients, check_runs, groups_of

from hf_efficient.kernels import efficient_linear as el
from hf_efficient.kernels.efficient_linear.grouped import grouped_linear, grouped_linear_reference


pytestmark = pytest.mark.usefixtures("nan_poison")


def experts(device, dtype, counts, out_features, in_features, bits, group_size, symmetric, bias):
    """(x, tensors, keywords) of a random layer whose expert e has counts[e] rows."""
    number = len(counts)
    codes = torch.randint(0, 2**bits, (number, out_features, in_features), dtype=torch.uint8)
    packed = torch.stack([el.pack_weight(el.pack_canonical(part, bits), bits, group_size) for part in codes]).to(device)
    shape = (number, *groups_of(out_features, in_features, group_size))
    scale = (torch.rand(shape, device=device) + 0.5).to(dtype)
    zero_point = None if symmetric else torch.randint(0, 2**bits, shape, dtype=torch.uint8, device=device)
    offsets = torch.tensor([0, *counts], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    x = torch.randn(sum(counts), in_features, device=device).to(dtype) / 2**bits
    added = torch.randn(number, out_features, device=device).to(dtype) if bias else None
    layout = dict(offsets=offsets, bits=bits, group_size=group_size, in_features=in_features)
    return x, (packed, scale, zero_point, added), layout


COUNTS = (1, 0, 2), (0, 0, 5), (3,), (17, 1, 0, 40), (0, 16, 0, 0, 33, 1), (130, 3)
WEIGHTS = (4, 64, False), (8, 32, True), (4, -1, True), (8, None, False)


@pytest.mark.parametrize(  # each with one of 4 bits and one of 8
    "counts, bits, group_size, symmetric",
    [(counts, *WEIGHTS[place]) for i, counts in enumerate(COUNTS) for place in (i // 2 % 2 * 2, i % 2 * 2 + 1)],
    ids=str,
)
def test_rows_meet_their_expert(kernel_device, counts, bits, group_size, symmetric):
    x, tensors, layout = experts(kernel_device, torch.float16, counts, 40, 150, bits, group_size, symmetric, True)
    actual = grouped_linear(x, *tensors, **layout)
    check(actual, grouped_linear_reference(x, *tensors, **layout))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(kernel_device, dtype):
    x, tensors, layout = experts(kernel_device, dtype, (2, 0, 9), 16, 128, 4, 32, False, False)
    actual = grouped_linear(x, *tensors, **layout)
    check(actual, grouped_linear_reference(x, *tensors, **layout))


def test_no_rows(kernel_device):
    x, tensors, layout = experts(kernel_device, torch.float16, (0, 0), 16, 128, 4, 32, False, False)
    assert grouped_linear(x, *tensors, **layout).shape == (0, 16)


def test_gradients_of_input_and_bias(kernel_device):
    shape = (3, 0, 2), 24, 130, 4, 64
    x, (*tensors, bias), layout = experts(kernel_device, torch.float32, *shape, False, True)
    both = grouped_linear, grouped_linear_reference
    products = (lambda x, bias, product=product: product(x, *tensors, bias, **layout) for product in both)
    check_gradients(*products, x, bias)


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(offsets=torch.tensor([0, 1, 2])), "offsets is torch.int64"),
        (dict(offsets=torch.tensor([0, 1], dtype=torch.int32)), r"offsets is .* \[3\]"),
        (
            dict(offsets=torch.tensor([[0, 1], [1, 1], [2, 1]], dtype=torch.int32)[:, 0]),
            r"strides \(2,\): .*contiguous",
        ),
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
    tensors = packed, scale, zero_point
    check_errors(
        (ValueError, r"packed has shape .* \[E, N, W\]", lambda: grouped_linear(x, packed[0], *tensors[1:], **layout)),
        (ValueError, "scale has shape", lambda: grouped_linear(x, packed, scale[:1], zero_point, **layout)),
        (ValueError, "bias has shape", lambda: grouped_linear(x, *tensors, torch.zeros(2, 15), **layout)),
        (ValueError, "x has shape", lambda: grouped_linear(x[:, :100], *tensors, **layout)),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_native_sizes_are_right_and_the_same_in_every_run(kernel_device, dtype):
    counts = (0, 700, 1, 3, 64, 0, 20, 236)
    x, tensors, layout = experts(kernel_device, dtype, counts, 2048, 4096, 4, 64, False, False)
    actual = check_runs(lambda: grouped_linear(x, *tensors, **layout), 5)
    check(actual, grouped_linear_reference(x, *tensors, **layout), (5e-3, 2**-6), "rounded to 16 bits")
