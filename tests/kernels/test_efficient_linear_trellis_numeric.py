"""Products of trellis codes against a float64 reference, natively or interpreted."""

import pytest
import torch
from linear_checks import check, check_errors, check_gradients, check_graph, in_one_part_and_in_several

from hf_efficient.kernels import efficient_linear
from hf_efficient.kernels.efficient_linear import trellis, trellis_packing
from hf_efficient.kernels.linear import trellis_codes


pytestmark = pytest.mark.usefixtures("nan_poison")
BITS = 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5


def layer(device, bits, out_features, in_features, dtype=torch.bfloat16):
    """(canonical qweight, packed, places, scale)."""
    rows = int(trellis_codes.bands(out_features) * 4 * bits)
    qweight = torch.randint(0, 256, (rows, in_features), dtype=torch.uint8)
    packed, places = efficient_linear.pack_trellis(qweight.to(device), bits=bits, out_features=out_features)
    return qweight, packed, places, (torch.rand(out_features, device=device) / 100).to(dtype)


def test_every_state_has_the_value_of_the_format():
    states = torch.arange(1 << trellis_codes.STATE_BITS, dtype=torch.int32)
    assert torch.equal(trellis_packing.trellis_values(states), trellis_codes.table().int())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(1, 1), (96, 64), (288, 130), (520, 7)])
def test_packing_is_exact_and_the_reference_reads_the_format(shape, bits):
    """Sequences of 1, 3, 4 and 5, and 5 and 6 bands."""
    qweight, packed, places, scale = layer("cpu", bits, *shape, torch.float32)
    back = efficient_linear.unpack_trellis(packed, bits=bits, out_features=shape[0], in_features=shape[1])
    assert torch.equal(back, qweight)
    options = dict(bits=bits, in_features=shape[1])
    weight = efficient_linear.dequantize_trellis_reference(packed, places, scale, **options)
    expected = trellis_codes.unpack_trellis(qweight, bits, shape[0]).double() * scale.double()[:, None]
    assert torch.equal(weight, expected)


DTYPES = torch.float16, torch.bfloat16, torch.float32
SHAPES = (1, 96, 320), (20, 288, 130), (40, 33, 70), (70, 64, 64)


@pytest.mark.parametrize(
    "bits, quads, tokens, out_features, in_features, dtype",
    [
        (*codes, *shape, DTYPES[(i + j) % 3])
        for i, shape in enumerate(SHAPES)
        for j, codes in enumerate(((2, False), (3.5, True)))
    ],
)
def test_products(kernel_device, bits, quads, tokens, out_features, in_features, dtype, monkeypatch):
    if trellis.INTERPRETED:  # a GPU has the one or the other order of columns
        monkeypatch.setattr(trellis, "quads", lambda device: quads)
    _, packed, places, scale = layer(kernel_device, bits, out_features, in_features, dtype)
    x = torch.randn(tokens, in_features, device=kernel_device).to(dtype)
    bias = torch.randn(out_features, device=kernel_device).to(dtype) if tokens > 1 else None
    expected = efficient_linear.trellis_linear_reference(x, packed, places, scale, bias, bits=bits)
    for _ in in_one_part_and_in_several(monkeypatch):
        actual = efficient_linear.trellis_linear(x, packed, places, scale, bias, bits=bits)
        # above 64 tokens the weight is rounded too
        tolerances = None if tokens <= 64 or dtype == torch.float32 else (2**-7, 2**-6)
        check(actual, expected, tolerances)


@pytest.mark.parametrize("bits", BITS)
def test_dequantized_weights_are_rounded_once(kernel_device, bits):
    _, packed, places, scale = layer(kernel_device, bits, 296, 130, torch.float16)
    options = dict(bits=bits, in_features=130)
    actual = efficient_linear.dequantize_trellis(packed, places, scale, **options, dtype=torch.float32)
    expected = efficient_linear.dequantize_trellis_reference(packed, places, scale, **options)
    assert torch.equal(actual.cpu(), expected.float().cpu())


def test_gradients(kernel_device):
    _, packed, places, scale = layer(kernel_device, 3, 40, 70, torch.float32)
    x, bias = torch.randn(3, 70, device=kernel_device), torch.randn(40, device=kernel_device)
    weight = efficient_linear.dequantize_trellis_reference(packed, places, scale, bits=3, in_features=70).float()
    check_gradients(
        lambda x, bias: efficient_linear.trellis_linear(x, packed, places, scale, bias, bits=3),
        lambda x, bias: torch.nn.functional.linear(x, weight, bias),
        x, bias,
    )  # fmt: skip


def test_no_tokens(kernel_device):
    _, packed, places, scale = layer(kernel_device, 2, 64, 64)
    x = torch.empty(0, 64, dtype=torch.bfloat16, device=kernel_device)
    assert efficient_linear.trellis_linear(x, packed, places, scale, bits=2).shape == (0, 64)


def test_bad_arguments(kernel_device):
    qweight, packed, places, scale = layer(kernel_device, 2, 64, 100)
    x = torch.randn(2, 100, device=kernel_device).bfloat16()
    product, pack = efficient_linear.trellis_linear, efficient_linear.pack_trellis
    check_errors(
        (ValueError, "bits=6", lambda: product(x, packed, places, scale, bits=6)),
        (ValueError, "packed has shape", lambda: product(x, packed, places, scale, bits=3)),
        (ValueError, "packed has shape", lambda: product(x[:, :40], packed, places, scale, bits=2)),
        (ValueError, r"x has shape \(100,\)", lambda: product(x[0], packed, places, scale, bits=2)),
        (ValueError, "x has strides", lambda: product(x.t().contiguous().t(), packed, places, scale, bits=2)),
        (ValueError, "bias has shape", lambda: product(x, packed, places, scale, scale[:3], bits=2)),
        (ValueError, "places has shape", lambda: product(x, packed, places[:1], scale, bits=2)),
        (TypeError, "places has dtype", lambda: product(x, packed, places.long(), scale, bits=2)),
        (TypeError, "scale has dtype", lambda: product(x, packed, places, scale.double(), bits=2)),
        (TypeError, "x has dtype", lambda: product(x.double(), packed, places, scale, bits=2)),
        (TypeError, "qweight has dtype", lambda: pack(qweight.int(), bits=2, out_features=64)),
        (ValueError, "qweight has shape", lambda: pack(qweight, bits=2, out_features=65)),
        (ValueError, "allowed are sizes", lambda: pack(qweight, bits=2, out_features=0)),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_native_sizes_give_the_same_bits_in_every_run_and_in_a_graph(kernel_device, tokens):
    _, packed, places, scale = layer(kernel_device, 2, 4096, 4096)
    x = torch.randn(tokens, 4096, device=kernel_device).bfloat16()
    actual = check_graph(lambda: efficient_linear.trellis_linear(x, packed, places, scale, bits=2))
    check(actual, efficient_linear.trellis_linear_reference(x, packed, places, scale, bits=2))
