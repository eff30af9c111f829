"""Packing, the float32 reference and the checks of efficient_linear: no kernel runs here."""

import pytest
import torch

from hf_efficient.kernels import efficient_linear
from hf_efficient.kernels.efficient_linear import launch_configs


SHAPES = [
    (1, 1),
    (1, 2),
    (2, 7),
    (3, 129),
    (15, 64),
    (16, 128),
    (17, 100),
    (33, 575),
    (40, 333),
    (100, 300),
    (64, 1536),
]


def canonical(out_features, in_features, bits):
    """Random codes uint8 in the canonical layout; the padding nibble of an odd row is 0."""
    width = in_features if bits == 8 else (in_features + 1) // 2
    qweight = torch.randint(0, 256, (out_features, width), dtype=torch.uint8)
    if bits == 4 and in_features % 2:
        qweight[:, -1] &= 15
    return qweight


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("out_features, in_features", SHAPES)
def test_round_trip_is_bit_exact(out_features, in_features, bits):
    qweight = canonical(out_features, in_features, bits)
    packed = efficient_linear.pack_weight(qweight, bits, 64)
    assert packed.dtype == torch.int32 and packed.is_contiguous() and packed.shape[0] == out_features
    assert torch.equal(efficient_linear.unpack_weight(packed, in_features, bits, 64), qweight)


def test_full_tiles_take_no_more_than_the_codes():
    for bits in (4, 8):
        packed = efficient_linear.pack_weight(canonical(64, 256, bits), bits, 128)
        assert packed.numel() * 32 == 64 * 256 * bits


@pytest.mark.parametrize(
    "bits, columns",
    [(4, (10, 26, 42, 58, 11, 27, 43, 59)), (8, (10, 26, 11, 27))],
    ids=["4 bits", "8 bits"],
)
def test_words_lie_as_documented(bits, columns):
    """Lane 5, word 2 of the first chunk holds these columns of row 1, from the lowest bits up (packing.py)."""
    codes = torch.zeros(16, 128, dtype=torch.uint8)
    for place, column in enumerate(columns):
        codes[1, column] = place + 1
    qweight = codes if bits == 8 else codes[:, 0::2] | codes[:, 1::2] << 4
    words = efficient_linear.pack_weight(qweight, bits, 128).flatten()
    assert words.nonzero().tolist() == [[5 * 4 + 2]]
    assert words[22].item() & 0xFFFFFFFF == sum((place + 1) << bits * place for place in range(len(columns)))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 128, -1, None])
@pytest.mark.parametrize("bits", [4, 8])
def test_reference_is_explicit_dequantization(bits, group_size, symmetric):
    out_features, in_features = 5, 201
    rows = 1 if group_size is None else out_features
    groups = 1 if group_size in (-1, None) else -(-in_features // group_size)
    codes = torch.randint(0, 2**bits, (out_features, in_features), dtype=torch.uint8)
    padded = torch.nn.functional.pad(codes, (0, 1))
    qweight = codes if bits == 8 else padded[:, 0::2] | padded[:, 1::2] << 4
    scale = torch.rand(rows, groups) + 0.5
    zero_point = None if symmetric else torch.randint(0, 2**bits, (rows, groups), dtype=torch.uint8)
    weight = torch.empty(out_features, in_features)
    for row in range(out_features):
        for column in range(in_features):
            at = (min(row, rows - 1), 0 if groups == 1 else column // group_size)
            centre = 2 ** (bits - 1) if symmetric else zero_point[at].item()
            weight[row, column] = (codes[row, column].item() - centre) * scale[at]
    layout = dict(bits=bits, group_size=group_size, in_features=in_features)
    packed = efficient_linear.pack_weight(qweight, bits, group_size)
    assert torch.equal(efficient_linear.dequantize_reference(packed, scale, zero_point, **layout), weight)
    x, bias = torch.randn(3, in_features), torch.randn(out_features)
    out = efficient_linear.weight_only_linear_reference(x, packed, scale, zero_point, bias, **layout)
    assert torch.equal(out, torch.nn.functional.linear(x, weight, bias))


def arguments(**changes):
    """Good arguments of weight_only_linear but for the device, with `changes`."""
    good = dict(
        x=torch.randn(2, 128),
        packed=efficient_linear.pack_weight(canonical(8, 128, 4), 4, 64),
        scale=torch.ones(8, 2),
        zero_point=torch.full((8, 2), 8, dtype=torch.uint8),
        bias=torch.zeros(8),
        bits=4,
        group_size=64,
        in_features=128,
    )
    return {**good, **changes}


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(bits=3), ValueError, "bits=3"),
        (dict(group_size=48), ValueError, "group_size=48"),
        (dict(group_size=0), ValueError, "group_size=0"),
        (dict(in_features=129), ValueError, "packed has shape"),
        (dict(packed=torch.zeros(8, 16)), TypeError, "packed has dtype torch.float32"),
        (dict(x=torch.randn(2, 64)), ValueError, r"x has shape \(2, 64\): allowed is \[M, 128\]"),
        (dict(x=torch.randn(128)), ValueError, "x has shape"),
        (dict(x=torch.randn(128, 2).t()), ValueError, "x has strides"),
        (dict(x=torch.randn(2, 128).double()), TypeError, "x has dtype torch.float64"),
        (dict(scale=torch.ones(8, 1)), ValueError, "scale has shape"),
        (dict(scale=torch.ones(8, 2, dtype=torch.int32)), TypeError, "scale has dtype"),
        (dict(zero_point=torch.zeros(8, 1, dtype=torch.uint8)), ValueError, "zero_point has shape"),
        (dict(zero_point=torch.zeros(8, 2)), TypeError, "zero_point has dtype"),
        (dict(bias=torch.zeros(4)), ValueError, "bias has shape"),
        (dict(bias=torch.zeros(8, dtype=torch.int8)), TypeError, "bias has dtype"),
        (dict(scale=torch.ones(8, 2, device="meta")), ValueError, "scale is on meta"),
        (dict(bias=torch.ones(8, device="meta")), ValueError, "bias is on meta"),
        (dict(), ValueError, "packed is on cpu: the Triton kernels run on CUDA and ROCm"),
    ],
)
def test_bad_arguments_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        efficient_linear.weight_only_linear(**arguments(**changes))


@pytest.mark.parametrize(
    "qweight, error, message",
    [
        (torch.zeros(2, 2), TypeError, "qweight has dtype torch.float32"),
        (torch.zeros(2, dtype=torch.uint8), ValueError, "qweight has shape"),
        (torch.zeros(0, 2, dtype=torch.uint8), ValueError, "qweight has shape"),
    ],
)
def test_bad_weights_are_named(qweight, error, message):
    with pytest.raises(error, match=message):
        efficient_linear.pack_weight(qweight, 4, 64)


def test_every_number_of_tokens_has_a_tile_and_splits_cover_the_steps():
    for tokens in range(1, launch_configs.DEQUANTIZE_ABOVE + 1):
        for float32 in (True, False):
            tile = launch_configs.choose_tile(tokens, float32)
            assert tile.block_n % 16 == 0 and tile.block_m >= 16
    tile = launch_configs.choose_tile(1, float32=False)
    for steps in range(1, 130):
        for programs in (1, 7, 64, 900):
            per_split = launch_configs.choose_steps_per_split(tile, programs, steps, 132)
            assert 1 <= per_split <= steps and (
                per_split >= launch_configs.FEWEST_STEPS_PER_SPLIT or per_split == steps
            )


def test_public_names_exist():
    for name in efficient_linear.__all__:
        assert callable(getattr(efficient_linear, name))
