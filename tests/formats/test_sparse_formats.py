"""Formats of pruned weights: what they store, its size, and what they refuse."""

import pytest
import torch
from format_checks import check_declared

from hf_efficient.formats import AffineFormat
from hf_efficient.formats.bitmap import BitmapFormat
from hf_efficient.formats.sparse24 import Sparse24Format


INT4 = AffineFormat(4, 64, False)
FORMATS = [
    Sparse24Format(),
    Sparse24Format(INT4),
    Sparse24Format(AffineFormat(4, -1, True)),
    BitmapFormat(sparsity=0.6),
    BitmapFormat(sparsity=0.37, group="layer"),
    BitmapFormat(pattern=(4, 8)),
    BitmapFormat(INT4, sparsity=0.5),
    BitmapFormat(AffineFormat(3, 32, False, zero_point="float"), pattern=(1, 4)),
]


def random_mask(format, rows: int, columns: int) -> torch.Tensor:
    """One that the format holds, of its groups at random."""
    n, m = (2, 4) if isinstance(format, Sparse24Format) else format.pattern or (None, columns)
    if n is None and format.group == "layer":
        m = rows * columns
    n = n or format.kept_shape(rows, columns)[0] * m // (rows * columns)
    return torch.rand(rows * columns // m, m).argsort(-1).lt(n).view(rows, columns)


def sparse_tensors(format, rows: int, columns: int):
    """(canonical tensors of random weights, the dense weight bfloat16 they stand for, the mask)"""
    mask = random_mask(format, rows, columns)
    if format.weights is None:
        weight = torch.randn(rows, columns).bfloat16()
        weight[:, ::3] *= 0.0  # zeros of both signs, some of them kept
        return format.pack(weight, mask), weight.masked_fill(~mask, 0), mask
    affine = format.weights
    codes = torch.randint(0, affine.levels + 1, (rows, columns), dtype=torch.uint8)
    scale = torch.rand(rows, affine.groups(columns)).bfloat16()
    zero_point = None if affine.symmetric else torch.randint(0, affine.levels + 1, scale.shape, dtype=torch.uint8)
    if affine.zero_point == "float":
        zero_point = torch.rand(scale.shape).bfloat16() * affine.levels
    dense = {"qweight": affine.pack(codes), "scale": scale, "zero_point": zero_point}
    weight = affine.dequantize(dense, columns, torch.bfloat16).masked_fill(~mask, 0)
    return format.pack_affine(codes, scale, zero_point, mask), weight, mask


def bits(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.int16)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("columns", [136, 24])
def test_round_trips_are_exact(format, columns):
    tensors, weight, mask = sparse_tensors(format, 7, columns)
    check_declared(format, tensors, 7, columns)
    assert torch.equal(bits(format.dequantize(tensors, columns, torch.bfloat16)), bits(weight))
    assert torch.equal(format.mask(tensors, columns), mask)


def test_sizes():
    """Of 16 and 4 bits: issue 10 asks for 0.56 of bfloat16 and 0.73 of int4."""
    size = (576, 1536, torch.bfloat16)
    assert Sparse24Format().bits_per_weight(*size) / 16 == pytest.approx(0.5417, abs=1e-4)
    assert BitmapFormat().bits_per_weight(*size) / 16 == 9 / 16
    assert Sparse24Format(INT4).bits_per_weight(*size) / INT4.bits_per_weight(*size) == pytest.approx(0.695, abs=1e-3)


def test_what_lies_is_refused():
    with pytest.raises(ValueError, match="2:4 does not divide in_features=6"):
        Sparse24Format().shapes(4, 6)
    with pytest.raises(ValueError, match="3:5 does not divide in_features=8"):
        BitmapFormat(pattern=(3, 5)).shapes(4, 8)
    mask = torch.tensor([[True, False] * 4] * 3)
    tensors = Sparse24Format().pack(torch.randn(3, 8), mask)
    tensors["places"][1, 0] = 216
    with pytest.raises(ValueError, match="places holds 216"):
        Sparse24Format().dequantize(tensors, 8, torch.bfloat16)
    mask[1, 5] = True
    with pytest.raises(ValueError, match="row 1 keeps 3 of the columns from 4 on"):
        Sparse24Format().pack(torch.randn(3, 8), mask)
    with pytest.raises(ValueError, match=r"the mask keeps \[13\] of \(3, 8\) weights"):
        BitmapFormat().pack(torch.randn(3, 8), mask)
    tensors = BitmapFormat(sparsity=0).pack(torch.randn(3, 8), torch.ones_like(mask))
    tensors["bitmap"][2] = 7
    with pytest.raises(ValueError, match=r"the mask keeps \[19\]"):
        BitmapFormat(sparsity=0).dequantize(tensors, 8, torch.bfloat16)
    with pytest.raises(ValueError, match="pack_affine"):
        Sparse24Format(INT4).pack(torch.randn(3, 8), mask)
    with pytest.raises(ValueError, match="without zero points"):
        Sparse24Format(INT4).pack_affine(torch.zeros(3, 8).byte(), torch.ones(3, 1), None, mask)
