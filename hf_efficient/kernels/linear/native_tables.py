"""Linear layers by the C++ kernels of `native/linear` whose codes are looked up: in a table of 4, 8 or 16 numbers (NF4,
FP4, k-means) or as float8, E4M3 or E5M2, with inputs that are rounded to E4M3.

The layout of codes and scales is that of `lines.py`; a float8 stands as the byte that it is.
"""

import torch

from hf_efficient.kernels.linear import op
from hf_efficient.kernels.linear.codes import pack_codes
from hf_efficient.kernels.linear.layout import FLOATS
from hf_efficient.kernels.linear.lines import check_shapes, in_blocks, pack_lines, unpack_lines
from hf_efficient.kernels.linear.native_cpu import (
    CODEBOOK,
    FLOAT8,
    FLOAT8_E5M2,
    NativeLayout,
    check_parts,
    kernel,
    stored_bits,
    weight_structure,
)
from hf_efficient.kernels.replay.instructions import packed_product
from hf_efficient.kernels.replay.registry import replays


FLOAT8_DTYPES = {FLOAT8: torch.float8_e4m3fn, FLOAT8_E5M2: torch.float8_e5m2}
FLOAT8_GROUP = 128  # columns of a scale of inputs, where they have several
PER_ROW, PER_GROUP = 1, 2  # what shares a scale of inputs that are rounded to E4M3, as in native/linear/float8_inputs.h


class NativeTableLayout(NativeLayout):
    """A weight [N, K] of codes that stand for the numbers of a table or for float8, times a scale of their group.

    Args:
        packed: the codes, as `pack_lines` makes them.
        scale: [blocks, G, 16], bfloat16 or float32.
        table: float32 [2 ** bits], numbers of the dtype of the inputs; None for float8.
        x_scale: of static inputs, float32 [1], or None.
        scheme: bits, group (columns), N, K, what shares a scale of rounded inputs (0: they are not rounded), and the
            kind of codes.
    """

    def __init__(self, packed, scale, table, x_scale, scheme, dtype):
        self.bits, self.group, self.out_features, self.in_features, _, self.kind = self.scheme = scheme
        self.parts, self.dtype = (packed, scale, table, x_scale), dtype
        check_parts(packed, scale, None, *scheme[:4])
        check_shapes(table=(table, (2**self.bits,), (torch.float32,)))
        self.function = kernel(self.bits, self.kind).linear
        self.weight, self.address = weight_structure(packed, scale, None, *scheme[1:5], table, x_scale)
        self.tensors = {"packed": packed, "packed_scale": scale}
        if table is not None:
            self.tensors["packed_table"] = table

    def as_op(self, x, bias):
        return torch.ops.hf_efficient.table_linear(x, *self.parts, bias, *self.scheme)

    def dequantize(self):
        return _dequantized(*self.parts[:3], *self.scheme[:4], self.kind, self.dtype)


class NativeCodebookLayout(NativeTableLayout):
    """One table for the whole weight."""

    @classmethod
    def pack(cls, qweight, table, scale, bits, group_size, in_features, dtype) -> "NativeCodebookLayout | None":
        """From canonical tensors; None where the kernels do not serve them or are not compiled."""
        serves = dtype in FLOATS and len(table) == 1 and stored_bits(bits, scale.shape[1], group_size) == bits
        if not serves or qweight.device.type != "cpu" or kernel(bits, CODEBOOK) is None:
            return None
        packed = pack_lines(qweight, bits, in_features, bits)
        # a copy: it may be a part of a larger tensor
        scale = in_blocks(scale if scale.dtype is torch.bfloat16 else scale.float(), len(qweight)).clone()
        group = in_features if scale.shape[1] == 1 else group_size
        scheme = bits, group, len(qweight), in_features, 0, CODEBOOK
        return cls(packed, scale, table[0].to(dtype).float(), None, scheme, dtype)

    def canonical(self):
        codes = unpack_lines(self.parts[0], self.bits, self.out_features, self.in_features)
        return pack_codes(codes, self.bits)


class NativeFloat8Layout(NativeTableLayout):
    """float8 codes, E4M3 or E5M2, inputs rounded to E4M3."""

    @classmethod
    def pack(cls, codes, scale, x_scale, dtype, by_block: bool) -> "NativeFloat8Layout | None":
        """From codes [N, K] and scales float32, one value, [N, 1], or `by_block` of 128 x 128; x_scale: of static
        inputs, or None. None where the kernels are not compiled."""
        kind = next(kind for kind, own in FLOAT8_DTYPES.items() if own is codes.dtype)
        if dtype not in FLOATS or codes.device.type != "cpu" or kernel(8, kind) is None:
            return None
        out_features, in_features = codes.shape
        if by_block:
            scale = scale.repeat_interleave(FLOAT8_GROUP, 0)[:out_features]
        packed = pack_lines(codes, 8, in_features, 8, has_signs=False)
        group = FLOAT8_GROUP if by_block else in_features
        scheme = 8, group, out_features, in_features, PER_GROUP if by_block else PER_ROW, kind
        return cls(packed, in_blocks(scale.float(), out_features), None, x_scale, scheme, dtype)

    def canonical(self):
        codes = unpack_lines(self.parts[0], 8, self.out_features, self.in_features)
        return _stored(codes).view(FLOAT8_DTYPES[self.kind])


def _stored(codes: torch.Tensor) -> torch.Tensor:
    """The bytes that were stored as they are, of those that `unpack_lines` gave, as if they had signs."""
    return torch.where(codes < 128, ~codes, codes ^ 128)


def _dequantized(packed, scale, table, bits, group, out_features, in_features, kind, dtype) -> torch.Tensor:
    codes = unpack_lines(packed, bits, out_features, in_features)
    numbers = _stored(codes).view(FLOAT8_DTYPES[kind]).float() if table is None else table[codes.int()]
    scale = scale.float().transpose(1, 2).flatten(0, 1)[:out_features]
    return (numbers * scale.repeat_interleave(group, 1)[:, :in_features]).to(dtype)


def _linear(x, packed, scale, table, x_scale, bias, *scheme):
    return NativeTableLayout(packed, scale, table, x_scale, scheme, x.dtype).product(x, bias)


def _weight(dtype, _, packed, scale, table, x_scale, bits, group, out_features, in_features, rounds, kind):
    return _dequantized(packed, scale, table, bits, group, out_features, in_features, kind, dtype)


@replays("hf_efficient::table_linear")
def _instructions(y, x, packed, scale, table, x_scale, bias, bits, *scheme):
    tensors = packed, scale, table, x_scale
    *scheme, kind = scheme
    static = None if x_scale is None else x_scale.data_ptr()
    weight = weight_structure(packed, scale, None, *scheme, table, x_scale)
    function, group, rounds = kernel(bits, kind).linear, scheme[0], scheme[3]
    return packed_product(y, x, bias, weight, function, ("table", bits, kind, group, rounds, static), tensors)


op.define(
    "table_linear(Tensor x, Tensor packed, Tensor scale, Tensor? table, Tensor? x_scale, Tensor? bias, int bits, "
    "int group, int out_features, int in_features, int rounds, int kind) -> Tensor",
    cpu=_linear,
    fake=lambda x, packed, scale, table, x_scale, bias, bits, group, out_features, *_: x.new_empty(
        *x.shape[:-1], out_features
    ),
    weight=_weight,
)
