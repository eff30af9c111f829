"""2:4 sparse products against dense ones in float64, natively or interpreted."""

import pytest
import torch
from linear_checks import check, check_gradients, check_runs, in_one_part_and_in_several

from hf_efficient.kernels.efficient_linear import sparse24
from hf_efficient.kernels.efficient_linear.sparse24 import sparse24_linear, sparse24_linear_reference
from hf_efficient.kernels.efficient_linear.sparse24_packing import pack_sparse24, pack_sparse24_codes, unpack_sparse24


pytestmark = pytest.mark.usefixtures("nan_poison")


def mask24(rows, columns, kept=2):
    """bool [rows, columns]: `kept` random places of every four neighbours."""
    scores = torch.rand(rows, -(-columns // 4), 4)
    return (scores.argsort(-1).argsort(-1) < kept).flatten(1)[:, :columns]


def layer(device, dtype, out_features, in_features, group_size, symmetric=True, kept=2):
    """The arguments (values, places, scale, zero_point) of a random layer; group_size None: 16-bit weights."""
    mask = mask24(out_features, in_features, kept)
    if group_size is None:
        packed = pack_sparse24(torch.randn(out_features, in_features).to(dtype) * mask)
        return *(tensor.to(device) for tensor in packed), None, None
    shape = (out_features, 1 if group_size == -1 else -(-in_features // group_size))
    zero = torch.full(shape, 8, dtype=torch.uint8) if symmetric else torch.randint(0, 16, shape, dtype=torch.uint8)
    repeats = in_features if group_size == -1 else group_size
    zeros = zero.repeat_interleave(repeats, 1)[:, :in_features]
    codes = torch.randint(0, 16, (out_features, in_features), dtype=torch.uint8)
    packed = pack_sparse24_codes(torch.where(mask, codes, zeros), zeros)
    scale = (torch.rand(shape, device=device) + 0.5).to(dtype) / 8
    return *(tensor.to(device) for tensor in packed), scale, None if symmetric else zero.to(device)


@pytest.mark.parametrize("shape", [(1, 1), (64, 128), (65, 130), (3, 515)])
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_packing_is_exact(shape, kept):
    weight = torch.randn(shape).half() * mask24(*shape, kept)
    dense, stored = unpack_sparse24(*pack_sparse24(weight), *shape)
    assert torch.equal(dense, weight) and bool((stored | (weight == 0)).all())
    codes = torch.where(mask24(*shape, kept), torch.randint(0, 16, shape, dtype=torch.uint8), 3)
    dense, stored = unpack_sparse24(*pack_sparse24_codes(codes.to(torch.uint8), 3), *shape)
    assert torch.equal(torch.where(stored, dense, 3), codes)


def test_bits_a_weight():
    values, places = pack_sparse24(torch.zeros(128, 256).half())
    assert (values.nbytes + places.nbytes) * 8 == 9 * 128 * 256
    values, places = pack_sparse24_codes(torch.full((128, 256), 8, dtype=torch.uint8))
    assert (values.nbytes + places.nbytes) * 8 == 3 * 128 * 256


GROUPS = ((None, True), (64, False), (128, True), (-1, False))
SHAPES = ((1, 64, 256), (3, 70, 200), (17, 5, 400), (70, 33, 66))


@pytest.mark.parametrize(  # groups of 64 have every shape, the others every second one
    "tokens, out_features, in_features, group_size, symmetric",
    [
        (*shape, *group)
        for i, group in enumerate(GROUPS)
        for shape in (SHAPES if group == (64, False) else SHAPES[i % 2 :: 2])
    ],
)
def test_products(kernel_device, tokens, out_features, in_features, group_size, symmetric, monkeypatch):
    tensors = layer(kernel_device, torch.float16, out_features, in_features, group_size, symmetric)
    x = torch.randn(tokens, in_features, device=kernel_device).half()
    bias = torch.randn(out_features, device=kernel_device).half()
    layout = dict(group_size=group_size, out_features=out_features, in_features=in_features)
    expected = sparse24_linear_reference(x, *tensors, bias, **layout)
    for _ in in_one_part_and_in_several(monkeypatch):
        check(sparse24_linear(x, *tensors, bias, **layout), expected)
        if in_features <= 128:  # one step, in one part anyway
            break


@pytest.mark.parametrize("group_size", [None, 64])
def test_columns_in_the_order_of_four_neighbours(group_size, monkeypatch):
    """As on compute capabilities 8.x and 12.x; interpreted, both orders compute the same."""
    monkeypatch.setattr(sparse24, "quads", lambda device: True)
    if sparse24.INTERPRETED:
        test_products("cpu", 3, 40, 200, group_size, False, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_size", [None, 64])
def test_other_dtypes(kernel_device, dtype, group_size):
    tensors = layer(kernel_device, dtype, 40, 130, group_size)
    x = torch.randn(5, 130, device=kernel_device).to(dtype)
    layout = dict(group_size=group_size, out_features=40, in_features=130)
    check(sparse24_linear(x, *tensors, **layout), sparse24_linear_reference(x, *tensors, **layout))


@pytest.mark.parametrize("group_size", [None, 64])
def test_gradients(kernel_device, group_size):
    tensors = layer(kernel_device, torch.float32, 24, 130, group_size)
    layout = dict(group_size=group_size, out_features=24, in_features=130)
    both = sparse24_linear, sparse24_linear_reference
    products = (lambda x, bias, product=product: product(x, *tensors, bias, **layout) for product in both)
    check_gradients(*products, torch.randn(3, 130, device=kernel_device), torch.randn(24, device=kernel_device))


def test_a_weight_that_is_not_sparse_enough_is_refused():
    weight = torch.zeros(70, 140)
    weight[66, 136:139] = 1.0
    with pytest.raises(ValueError, match="row 66 keeps more than 2 of the columns from 136"):
        pack_sparse24(weight)


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(x=torch.zeros(2, 131).half()), r"allowed is \[M, 130\]"),
        (dict(x=torch.zeros(2, 130).int()), "x has dtype torch.int32"),
        (dict(group_size=32), "group_size=32"),
        (dict(scale=None), "scale is None"),
        (dict(scale=torch.ones(40, 2)), r"scale is .*\(40, 3\)"),
        (dict(out_features=80), "values has shape"),
        (dict(bias=torch.zeros(41)), "bias has shape"),
        (dict(places=torch.zeros(3, 2, 128, 4, dtype=torch.uint8)), "places has shape"),
    ],
)
def test_bad_arguments(kernel_device, change, match):
    values, places, scale, zero_point = layer(kernel_device, torch.float16, 40, 130, 64, False)
    arguments = dict(x=torch.zeros(2, 130, device=kernel_device).half(), values=values, places=places, scale=scale)
    arguments |= dict(zero_point=zero_point, bias=None, group_size=64, out_features=40, in_features=130)
    change = {name: value.to(kernel_device) if torch.is_tensor(value) else value for name, value in change.items()}
    with pytest.raises((TypeError, ValueError), match=match):
        sparse24_linear(**{**arguments, **change})


@pytest.mark.gpu
@pytest.mark.parametrize("group_size", [None, 64])
@pytest.mark.parametrize("tokens", [1, 16, 64, 300])
def test_native_sizes(kernel_device, tokens, group_size):
    tensors = layer(kernel_device, torch.bfloat16, 2048, 4096, group_size)
    x = torch.randn(tokens, 4096, device=kernel_device).bfloat16()
    layout = dict(group_size=group_size, out_features=2048, in_features=4096)
    actual = check_runs(lambda: sparse24_linear(x, *tensors, **layout), 5)
    check(actual, sparse24_linear_reference(x, *tensors, **layout), (5e-3, 2**-6), "rounded to bfloat16")
    if group_size is None and tokens > 64:
        dense = sparse24.dequantize_sparse24(*tensors, **layout)
        semi = torch.sparse.to_sparse_semi_structured(dense)
        check(sparse24_linear(x, *tensors, **layout, semi_structured=semi), actual, (5e-3, 2**-6), "cuSPARSELt")
