"""Packing, the float32 reference and the checks of efficient_linear: no kernel runs here."""

import pytest
import torch

from hf_efficient.kernels import efficient_linear
from hf_efficient.kernels.efficient_linear import launch_configs
from hf_efficient.kernels.linear.weight_only import TritonLayout


SHAPES = [
    (1, 1), (1, 2), (2, 7), (3, 129), (15, 64), (16, 128), (17, 100), (33, 575), (40, 333), (100, 300), (64, 1536),
]  # fmt: skip


def canonical(out_features, in_features, bits):
    """Random codes uint8 in the canonical layout; what fills the last bytes is 0."""
    codes = torch.randint(0, 2**bits, (out_features, in_features), dtype=torch.uint8)
    return efficient_linear.pack_canonical(codes, bits)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_canonical_is_a_little_endian_stream_of_bits(bits):
    codes = torch.randint(0, 2**bits, (3, 13), dtype=torch.uint8)
    qweight = efficient_linear.pack_canonical(codes, bits)
    assert qweight.shape == (3, {2: 4, 3: 6, 4: 7, 8: 13}[bits])
    for row, stream in zip(codes.tolist(), qweight.tolist()):
        value = int.from_bytes(bytes(stream), "little")
        assert [value >> bits * i & 2**bits - 1 for i in range(13)] == row
    assert torch.equal(efficient_linear.unpack_canonical(qweight, bits)[:, :13], codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("out_features, in_features", SHAPES)
def test_round_trip_is_bit_exact(out_features, in_features, bits):
    qweight = canonical(out_features, in_features, bits)
    packed = efficient_linear.pack_weight(qweight, bits, 64)
    assert packed.dtype == torch.int32 and packed.is_contiguous() and packed.shape[0] == out_features
    assert torch.equal(efficient_linear.unpack_weight(packed, in_features, bits, 64), qweight)
    if bits < 8:
        packed = efficient_linear.pack_codebook_weight(qweight, bits)
        assert packed.dtype == torch.int32 and packed.is_contiguous() and packed.shape[0] == out_features
        assert torch.equal(efficient_linear.unpack_codebook_weight(packed, in_features, bits), qweight)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("out_features, in_features", SHAPES)
def test_single_rows_of_a_layout(out_features, in_features, bits):
    qweight, ids = canonical(out_features, in_features, bits), torch.randint(out_features, (7,))
    layout = TritonLayout.pack(qweight, torch.ones(out_features, 1), None, bits, -1, in_features, torch.float32)
    assert torch.equal(layout.canonical_rows(ids), qweight[ids])


def test_full_tiles_take_no_more_than_the_codes():
    for bits in (2, 3, 4, 8):
        packed = efficient_linear.pack_weight(canonical(64, 256, bits), bits, 128)
        assert packed.numel() * 32 == 64 * 256 * bits


@pytest.mark.parametrize(
    "bits, columns",
    [
        (2, [16 * j + 10 + h for h in range(2) for j in range(8)]),
        (4, [10, 26, 42, 58, 11, 27, 43, 59]),
        (8, [10, 26, 11, 27]),
    ],
)
def test_words_lie_as_documented(bits, columns):
    """Lane 5, word 2 of the first block holds these columns of row 1, from the lowest bits up (packing.py)."""
    codes = torch.zeros(16, 128, dtype=torch.uint8)
    places = [place % (2**bits - 1) + 1 for place in range(len(columns))]
    for place, column in zip(places, columns):
        codes[1, column] = place
    words = efficient_linear.pack_weight(efficient_linear.pack_canonical(codes, bits), bits, 128).flatten()
    assert words.nonzero().tolist() == [[5 * 4 + 2]]
    assert words[22].item() & 0xFFFFFFFF == sum(code << bits * place for place, code in enumerate(places))


def test_words_of_three_bits_lie_as_documented():
    """Lane 5, word 2: plane j < 5 h = 0 from bit 3 j of the first block, plane 7 h = 1 from bit 16 + 6 of the second,
    and plane 15 h = 1 in bit 31 of all three."""
    for column, words in (
        (16 * 4 + 10, {22: 7 << 12}),
        (16 * 7 + 11, {128 + 22: 7 << 22}),
        (16 * 15 + 11, {22: -(1 << 31), 128 + 22: -(1 << 31), 256 + 22: -(1 << 31)}),
    ):
        codes = torch.zeros(16, 256, dtype=torch.uint8)
        codes[1, column] = 7
        packed = efficient_linear.pack_weight(efficient_linear.pack_canonical(codes, 3), 3, 128).flatten()
        assert {at: packed[at].item() for (at,) in packed.nonzero().tolist()} == words


@pytest.mark.parametrize(
    "bits, column, words",
    [
        (4, 27, {22: 15 << 12}),
        (2, 16 * 6 + 11, {22: 3 << 22}),
        (3, 16 * 13 + 10, {128 + 22: 3 << 10, 256 + 22: 1 << 11}),
    ],
)
def test_words_of_codebooks_lie_as_documented(bits, column, words):
    """Digit d = 2 * (j % 4) + h: plane 1 h = 1 is digit 3; plane 6 h = 1 is bits 2 and 3 of digit 5; plane 13 h = 0 is
    bits 2 and 3 of digit 2 of the second block and bit 3 of digit 2 of the third."""
    codes = torch.zeros(16, 256, dtype=torch.uint8)
    codes[1, column] = 2**bits - 1
    packed = efficient_linear.pack_codebook_weight(efficient_linear.pack_canonical(codes, bits), bits).flatten()
    assert {at: packed[at].item() for (at,) in packed.nonzero().tolist()} == words


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits, group_size", [(4, 32), (8, 128), (2, -1), (3, None)])
def test_reference_is_explicit_dequantization(bits, group_size, symmetric):
    out_features, in_features = 5, 201
    rows = 1 if group_size is None else out_features
    groups = 1 if group_size in (-1, None) else -(-in_features // group_size)
    codes = torch.randint(0, 2**bits, (out_features, in_features), dtype=torch.uint8)
    qweight = efficient_linear.pack_canonical(codes, bits)
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
        (dict(bits=5), ValueError, "bits=5"),
        (dict(bits=3), ValueError, "packed has shape"),
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


@pytest.mark.parametrize(
    "codebook, error, message",
    [
        (torch.zeros(8), ValueError, r"codebook has shape \(8,\): allowed is a contiguous \(16,\)"),
        (torch.zeros(4, 16), ValueError, r"codebook has shape \(4, 16\)"),
        (torch.zeros(16).double(), TypeError, "codebook has dtype torch.float64"),
        (torch.zeros(16, device="meta"), ValueError, "codebook is on meta"),
    ],
)
def test_bad_codebooks_are_named(codebook, error, message):
    packed = efficient_linear.pack_codebook_weight(canonical(8, 128, 4), 4)
    layout = dict(bits=4, group_size=64, in_features=128)
    with pytest.raises(error, match=message):
        efficient_linear.codebook_linear(torch.randn(2, 128), packed, codebook, torch.ones(8, 2), **layout)


def test_gate_and_up_must_be_alike():
    good = arguments()
    gate = tuple(good[name] for name in ("packed", "scale", "zero_point", "bias"))
    layout = dict(bits=4, group_size=64, in_features=128)
    with pytest.raises(ValueError, match="bias of gate has shape .*, of up None"):
        efficient_linear.gate_up_silu(good["x"], gate, (*gate[:3], None), **layout)
    with pytest.raises(ValueError, match="up has 3 elements"):
        efficient_linear.gate_up_silu(good["x"], gate, gate[:3], **layout)


def test_activation_order():
    qweight = canonical(8, 100, 4)
    layout = dict(bits=4, group_size=32, in_features=100)
    natural = torch.arange(100) // 32
    same, permutation = efficient_linear.resolve_activation_order(qweight, natural, **layout)
    assert permutation is None and same is qweight
    permuted, permutation = efficient_linear.resolve_activation_order(qweight, natural.flip(0), **layout)
    codes = efficient_linear.unpack_canonical(qweight, 4)[:, permutation]
    assert torch.equal(permuted, efficient_linear.pack_canonical(codes, 4))
    assert torch.equal(natural.flip(0)[permutation], natural)
    with pytest.raises(ValueError, match="g_idx has other groups"):
        efficient_linear.resolve_activation_order(qweight, torch.zeros(100, dtype=torch.long), **layout)
    with pytest.raises(ValueError, match=r"allowed are integers \[100\]"):
        efficient_linear.resolve_activation_order(qweight, natural[:50], **layout)


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
                per_split >= launch_configs.FEWEST_STEPS_PER_SPLIT // 2 or per_split == steps
            )


def test_public_names_exist():
    for name in efficient_linear.__all__:
        assert callable(getattr(efficient_linear, name)) or name in ("FP4", "NF4")
