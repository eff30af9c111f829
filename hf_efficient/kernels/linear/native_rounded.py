"""Linear layers whose inputs are rounded to int8, one scale a row, by the C++ kernels of `native/rounded`: int8 weights
(W8A8, LLM.int8()) and ternary ones (BitNet), on CPUs with a tier of `native.tiers`.

Codes are packed as `lines.pack_lines` does it, in 8 or 2 bits. Results are those of `w8a8_cpu` bit for bit, but
for columns that LLM.int8() does not round, whose products are summed in another order.
"""

import ctypes

import torch

from hf_efficient.kernels.linear import op
from hf_efficient.kernels.linear.layout import FLOATS
from hf_efficient.kernels.linear.lines import LANES, check_shapes, pack_lines, shape_of_lines, unpack_lines
from hf_efficient.kernels.linear.native_cpu import NativeLayout
from hf_efficient.kernels.native import build
from hf_efficient.kernels.native.structs import Product, filled
from hf_efficient.kernels.native.tiers import once_a_tier
from hf_efficient.kernels.replay.instructions import packed_product
from hf_efficient.kernels.replay.registry import replays


class _RoundedWeight(ctypes.Structure):
    """`RoundedWeight` of native/rounded/rounded_rows.h."""

    _fields_ = [
        ("packed", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("offset", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("x_scale", ctypes.c_void_p),
        ("x_zero", ctypes.c_void_p),
        ("out_features", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("asymmetric", ctypes.c_int64),
        ("threshold", ctypes.c_double),
    ]


@once_a_tier
def kernel(bits: int):
    """The product for codes of 8 or 2 bits; None where torch's operators serve instead."""
    library = build.load("rounded", (Product, _RoundedWeight), BITS=bits)
    if library is None:
        return None
    function, pointer, integer = library.hf_rounded_linear, ctypes.c_void_p, ctypes.c_int64
    function.argtypes, function.restype = [pointer, integer, pointer, integer, ctypes.c_int], None
    return function


def _structure(packed, scale, offset, sums, x_scale, x_zero, out_features, in_features, asymmetric, threshold):
    pointers = (None if t is None else t.data_ptr() for t in (packed, scale, offset, sums, x_scale, x_zero))
    return filled(_RoundedWeight, *pointers, out_features, in_features, asymmetric, threshold)


def _lanes(values: torch.Tensor, out_features: int, dtype: torch.dtype) -> torch.Tensor:
    """One value, or one a row -> [blocks * 16]."""
    values = values.flatten().to(dtype).expand(out_features)
    return torch.nn.functional.pad(values, (0, -out_features % LANES)).contiguous()


class NativeRoundedLayout(NativeLayout):
    """A weight [N, K], (code - offset) * scale, whose inputs are rounded to int8.

    Args:
        packed: codes as `pack_lines` makes them, of `bits` bits.
        scale, offset: float32 and int32 [blocks * 16], one a row.
        sums: int32 like them, the sums of code - offset over a row, where inputs have zero points; else None.
        x_scale, x_zero: of static inputs, float32 [1] and int8 [1], or None.
        threshold: columns of the inputs that hold a magnitude of at least this are not rounded; 0: all are.
    """

    def __init__(self, packed, scale, offset, sums, x_scale, x_zero, scheme, dtype):
        self.bits, self.out_features, self.in_features, *rounding = self.scheme = scheme
        self.parts, self.dtype = (packed, scale, offset, sums, x_scale, x_zero), dtype
        shape = shape_of_lines(self.out_features, self.in_features, self.bits)
        lanes = (shape[0] * LANES,)
        check_shapes(
            packed=(packed, shape, (torch.int32,)),
            scale=(scale, lanes, (torch.float32,)),
            offset=(offset, lanes, (torch.int32,)),
            sums=(sums, lanes, (torch.int32,)),
        )
        self.function = kernel(self.bits)
        self.weight, self.address = _structure(*self.parts, self.out_features, self.in_features, *rounding)
        names = ("packed", "packed_scale", "packed_offset", "packed_sums")
        self.tensors = {name: tensor for name, tensor in zip(names, self.parts) if tensor is not None}

    @classmethod
    def pack(
        cls,
        codes,
        offset,
        scale,
        zero_point,
        dtype,
        *,
        bits=8,
        asymmetric=False,
        x_scale=None,
        x_zero=None,
        threshold=0.0,
    ) -> "NativeRoundedLayout | None":
        """From numbers int8 [N, K] that are at least -offset; their scale float32 and zero point int8 or None, each
        one value or one a row. None where the kernels do not serve them or are not compiled."""
        if dtype not in FLOATS or codes.device.type != "cpu" or kernel(bits) is None:
            return None
        out_features, in_features = codes.shape
        packed = pack_lines(codes, 8, in_features, bits, added=offset)
        zero = torch.zeros(1, dtype=torch.int32) if zero_point is None else zero_point.int()
        sums = codes.sum(1, dtype=torch.int32) - in_features * zero.flatten() if asymmetric else None
        lanes = _lanes(scale, out_features, torch.float32), _lanes(zero + offset, out_features, torch.int32)
        sums = None if sums is None else _lanes(sums, out_features, torch.int32)
        scheme = bits, out_features, in_features, asymmetric, threshold
        return cls(packed, *lanes, sums, x_scale, x_zero, scheme, dtype)

    def as_op(self, x, bias):
        return torch.ops.hf_efficient.rounded_linear(x, *self.parts, bias, *self.scheme)

    def numbers(self, offset: int) -> torch.Tensor:
        """The int8 [N, K] that `pack` was given with this offset."""
        codes = unpack_lines(self.parts[0], self.bits, self.out_features, self.in_features)
        return (codes.to(torch.int16) - offset).to(torch.int8)

    def dequantize(self):
        return _dequantized(*self.parts[:3], *self.scheme[:3], self.dtype)


def _dequantized(packed, scale, offset, bits, out_features, in_features, dtype) -> torch.Tensor:
    numbers = unpack_lines(packed, bits, out_features, in_features).float() - offset[:out_features, None]
    return (numbers * scale[:out_features, None]).to(dtype)


def _linear(x, packed, scale, offset, sums, x_scale, x_zero, bias, *scheme):
    layout = NativeRoundedLayout(packed, scale, offset, sums, x_scale, x_zero, scheme, x.dtype)
    return layout.product(x, bias)


def _weight(dtype, _, packed, scale, offset, bits, out_features, in_features, **rounding):
    return _dequantized(packed, scale, offset, bits, out_features, in_features, dtype)


@replays("hf_efficient::rounded_linear")
def _instructions(y, x, packed, scale, offset, sums, x_scale, x_zero, bias, bits, *scheme):
    tensors = packed, scale, offset, sums, x_scale, x_zero
    static = None if x_scale is None else x_scale.data_ptr()
    weight = _structure(*tensors, *scheme)
    return packed_product(y, x, bias, weight, kernel(bits), ("rounded", bits, *scheme[2:], static), tensors)


op.define(
    "rounded_linear(Tensor x, Tensor packed, Tensor scale, Tensor offset, Tensor? sums, Tensor? x_scale, "
    "Tensor? x_zero, Tensor? bias, int bits, int out_features, int in_features, bool asymmetric, float threshold) "
    "-> Tensor",
    cpu=_linear,
    fake=lambda x, packed, scale, offset, sums, x_scale, x_zero, bias, bits, out_features, *_: x.new_empty(
        *x.shape[:-1], out_features
    ),
    weight=_weight,
)
