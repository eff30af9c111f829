"""Linear layers of two binary terms in 2 bits (`formats.binary`: BiLLM, DB-LLM) by the C++ kernels of `native/binary`.

Codes lie in the order of `lines.py`. A weight is `scale * sum(TABLES[term][code] * factor)` over two terms. Factors are
int8 [blocks, G, parts, 2, 16]. With two parts, columns that are marked take the factors of the first one.
"""

import ctypes

import torch
import torch.nn.functional as F

from hf_efficient.kernels.linear import op
from hf_efficient.kernels.linear.codes import expand_groups, pack_codes
from hf_efficient.kernels.linear.layout import FLOATS
from hf_efficient.kernels.linear.lines import COLUMNS, LANES, check_shapes, pack_lines, shape_of_lines, unpack_lines
from hf_efficient.kernels.linear.native_cpu import NativeLayout, product_function, stored_bits
from hf_efficient.kernels.native.structs import filled
from hf_efficient.kernels.native.tiers import once_a_tier
from hf_efficient.kernels.replay.instructions import packed_product
from hf_efficient.kernels.replay.registry import replays


_BITS = 2
# parts of the columns -> how often each term's factor counts for the four codes, as in native/binary/binary.h
TABLES = {1: ((0, 1, 0, 1), (0, 0, 1, 1)), 2: ((1, -1, 0, 0), (0, 0, 1, -1))}


class _BinaryWeight(ctypes.Structure):
    """`BinaryWeight` of native/binary/binary.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("packed", "factors", "scale", "marks")),
        *((name, ctypes.c_int64) for name in ("out_features", "in_features", "group")),
    ]


def weight_structure(packed, factors, scale, marks, group, out_features, in_features) -> tuple[_BinaryWeight, int]:
    """(the structure of a weight, its address)."""
    pointers = [None if t is None else t.data_ptr() for t in (packed, factors, scale, marks)]
    return filled(_BinaryWeight, *pointers, out_features, in_features, group)


@once_a_tier
def function():
    """The compiled product, which takes raw pointers; None where other layouts serve instead."""
    return product_function("binary", _BinaryWeight)


class NativeBinaryLayout(NativeLayout):
    """A weight [N, K] in the layout of the C++ kernels.

    Args:
        packed: the codes, as `pack_lines` makes them.
        factors: int8 [blocks, G, parts, 2, 16].
        scale: float32 [blocks * 16], of rows.
        marks: uint8 [K, up to whole lines], 1 in columns of the first part; None where there is one part.
        group, out_features, in_features: columns of a group, N and K.
    """

    def __init__(self, packed, factors, scale, marks, group, out_features, in_features, dtype):
        self.parts, self.dtype = (packed, factors, scale, marks), dtype
        self.scheme, self.out_features, self.in_features = (group, out_features, in_features), out_features, in_features
        shape = shape_of_lines(out_features, in_features, _BITS)
        check_shapes(
            packed=(packed, shape, (torch.int32,)),
            factors=(factors, (shape[0], -(-in_features // group), 1 if marks is None else 2, 2, LANES), (torch.int8,)),
            scale=(scale, (shape[0] * LANES,), (torch.float32,)),
            marks=(marks, (shape[1] * COLUMNS[_BITS],), (torch.uint8,)),
        )
        if group % COLUMNS[_BITS] and group < in_features:
            raise ValueError(f"group is {group}: allowed are multiples of {COLUMNS[_BITS]}, and all of the columns")
        self.function = function()
        self.weight, self.address = weight_structure(*self.parts, *self.scheme)
        self.tensors = {"packed": packed, "packed_factors": factors, "packed_scale": scale}
        if marks is not None:
            self.tensors["packed_marks"] = marks

    @classmethod
    def pack(cls, qweight, factors, scale, marked, group_size, in_features, dtype) -> "NativeBinaryLayout | None":
        """From canonical tensors; None where the kernels do not serve them or are not compiled.

        Args:
            factors: int8 [N, parts * 2 * G], those of a part and term for all groups, then of the next term.
            scale: [N, 1].
            marked: bool [K], or None with one part.
        """
        parts, out_features = 1 if marked is None else 2, len(qweight)
        groups = factors.shape[1] // (2 * parts)
        serves = dtype in FLOATS and qweight.device.type == "cpu" and stored_bits(_BITS, groups, group_size) == _BITS
        if not serves or function() is None:
            return None
        rows = -out_features % LANES
        factors = F.pad(factors, (0, 0, 0, rows)).view(-1, LANES, parts, 2, groups).permute(0, 4, 2, 3, 1).contiguous()
        scale = F.pad(scale[:, 0].float(), (0, rows))
        marks = None if marked is None else F.pad(marked.to(torch.uint8), (0, -in_features % COLUMNS[_BITS]))
        group = in_features if groups == 1 else group_size
        packed = pack_lines(qweight, _BITS, in_features, _BITS)
        return cls(packed, factors, scale, marks, group, out_features, in_features, dtype)

    def as_op(self, x, bias):
        return torch.ops.hf_efficient.cpu_binary_linear(x, *self.parts, bias, *self.scheme)

    def dequantize(self):
        return _dense(*self.parts, *self.scheme, self.dtype)

    def canonical(self):
        return pack_codes(unpack_lines(self.parts[0], _BITS, self.out_features, self.in_features), _BITS)


def _dense(packed, factors, scale, marks, group, out_features, in_features, dtype) -> torch.Tensor:
    codes = unpack_lines(packed, _BITS, out_features, in_features).int()
    each = factors.permute(2, 3, 0, 4, 1).flatten(2, 3)[:, :, :out_features]  # [parts, 2, N, G]
    parts = expand_groups(each, group, in_features)
    chosen = parts[0] if marks is None else torch.where(marks[:in_features].bool(), *parts)
    tables = torch.tensor(TABLES[len(parts)], dtype=torch.int8)
    integers = sum(table[codes] * factor for table, factor in zip(tables, chosen))
    return integers.to(dtype).mul_(scale[:out_features, None].to(dtype))


def _linear(x, packed, factors, scale, marks, bias, *scheme):
    return NativeBinaryLayout(packed, factors, scale, marks, *scheme, x.dtype).product(x, bias)


def _weight(dtype, _, packed, factors, scale, marks, group, out_features, in_features):
    return _dense(packed, factors, scale, marks, group, out_features, in_features, dtype)


@replays("hf_efficient::cpu_binary_linear")
def _instructions(y, x, packed, factors, scale, marks, bias, *scheme):
    tensors = packed, factors, scale, marks
    kind = "binary", scheme[0], None if marks is None else marks.data_ptr()
    return packed_product(y, x, bias, weight_structure(*tensors, *scheme), function(), kind, tensors)


op.define(
    "cpu_binary_linear(Tensor x, Tensor packed, Tensor factors, Tensor scale, Tensor? marks, Tensor? bias, int group, "
    "int out_features, int in_features) -> Tensor",
    cpu=_linear,
    fake=lambda x, packed, factors, scale, marks, bias, group, out_features, _: x.new_empty(
        *x.shape[:-1], out_features
    ),
    weight=_weight,
)
