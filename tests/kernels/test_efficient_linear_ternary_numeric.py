"""Ternary products against exact integer sums, natively or interpreted."""

import pytest
import torch
from helpers import assert_close
from linear_checks import in_one_part_and_in_several

from hf_efficient.kernels.efficient_linear.ternary import ternary_linear, ternary_linear_reference
from hf_efficient.kernels.efficient_linear.ternary_packing import pack_ternary, pack_trits, unpack_ternary, unpack_trits


pytestmark = pytest.mark.usefixtures("nan_poison")


def layer(device, tokens, out_features, in_features):
    trits = torch.randint(-1, 2, (out_features, in_features), dtype=torch.int8)
    x = torch.randint(-128, 128, (tokens, in_features), dtype=torch.int8, device=device)
    return x, trits, pack_ternary(trits).to(device)


@pytest.mark.parametrize("shape", [(1, 1), (64, 128), (65, 130), (3, 640), (130, 7)])
def test_both_packings_are_exact(shape):
    trits = torch.randint(-1, 2, shape, dtype=torch.int8)
    assert torch.equal(unpack_ternary(pack_ternary(trits), *shape), trits)
    packed = pack_trits(trits)
    assert packed.shape == (shape[0], -(-shape[1] // 5)) and torch.equal(unpack_trits(packed, shape[1]), trits)


@pytest.mark.parametrize("tokens", [1, 17, 40, 130])
@pytest.mark.parametrize("out_features, in_features", [(64, 128), (70, 200), (5, 1100)])
def test_sums_are_exact(kernel_device, tokens, out_features, in_features, monkeypatch):
    x, trits, packed = layer(kernel_device, tokens, out_features, in_features)
    one = torch.ones(1, device=kernel_device)
    exact = (x.cpu().long() @ trits.long().t()).float()
    for _ in in_one_part_and_in_several(monkeypatch):
        actual = ternary_linear(x, packed, one, one, out_features=out_features, out_dtype=torch.float32)
        assert torch.equal(actual.cpu(), exact), "sums below 2^24 are exact in float32 too"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [3, 300])
def test_scales_and_bias(kernel_device, tokens, dtype):
    x, _, packed = layer(kernel_device, tokens, 70, 150)
    x_scale = torch.rand(tokens, 1, device=kernel_device) / 100
    w_scale = torch.rand(1, device=kernel_device)
    bias = torch.randn(70, device=kernel_device).to(dtype)
    arguments = (x, packed, x_scale, w_scale, bias)
    actual = ternary_linear(*arguments, out_features=70, out_dtype=dtype)
    expected = ternary_linear_reference(*arguments, out_features=70)
    precision = torch.finfo(dtype).eps
    assert_close(actual, expected, precision, precision * 50, "rounded once to the output's dtype")


def test_no_tokens(kernel_device):
    x, _, packed = layer(kernel_device, 0, 64, 128)
    one = torch.ones(1, device=kernel_device)
    assert ternary_linear(x, packed, one, one, out_features=64).shape == (0, 64)


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda x, p, s: ternary_linear(x.float(), p, s, s, out_features=64), "x_codes has dtype torch.float32"),
        (lambda x, p, s: ternary_linear(x[:, ::2], p, s, s, out_features=64), "x_codes has shape"),
        (lambda x, p, s: ternary_linear(x, p, s, s, out_features=65), r"packed has shape .* \[65, 200\]"),
        (lambda x, p, s: ternary_linear(x, p, s.double(), s, out_features=64), "x_scale has dtype torch.float64"),
        (lambda x, p, s: ternary_linear(x, p, s, s, s, out_features=64), "bias has shape"),
        (lambda x, p, s: ternary_linear(x, p, s, s, out_features=64, out_dtype=torch.int8), "out_dtype=torch.int8"),
        (lambda x, p, s: pack_ternary(x), "other values than -1, 0 and 1"),
        (lambda x, p, s: pack_trits(x.float()), "trits has dtype torch.float32"),
        (lambda x, p, s: unpack_trits(torch.full((1, 1), 243, dtype=torch.uint8), 5), "byte 243"),
        (lambda x, p, s: unpack_trits(torch.zeros(1, 2, dtype=torch.uint8), 5), r"allowed is \[N, 1\]"),
    ],
)
def test_bad_arguments(kernel_device, call, match):
    x, _, packed = layer(kernel_device, 2, 64, 200)
    with pytest.raises((TypeError, ValueError), match=match):
        call(x, packed, torch.ones(1, device=kernel_device))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 64, 256, 1000])
def test_native_sizes_are_exact_in_every_run(kernel_device, tokens):
    x, trits, packed = layer(kernel_device, tokens, 2560, 6912)
    one = torch.ones(1, device=kernel_device)
    exact = (x.double() @ trits.to(kernel_device).double().t()).float()
    for _ in range(5):
        assert torch.equal(ternary_linear(x, packed, one, one, out_features=2560, out_dtype=torch.float32), exact)
