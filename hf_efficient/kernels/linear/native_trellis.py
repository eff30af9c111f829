"""Linear layers of weights coded along a trellis, with bfloat16 inputs, by the C++ kernels of `native/trellis`.

The layout: a band of 32 rows takes `2 * bits` words of 16 bits of each column. `packed` is int16 [bands, steps,
2 * bits, 32], a step being 32 columns, `scale` float32 [bands * 32]. `next` is int32 [bands]: the band where the bits
of a band's columns go on, which is the next one, or behind the last of a sequence its first one.

A product with at most 8 rows rounds them to 16 bits, with a scale a row, and sums integers. Values are exact.
"""

import ctypes

import torch
import torch.nn.functional as F

from hf_efficient.kernels.linear import op
from hf_efficient.kernels.linear.lines import check_shapes
from hf_efficient.kernels.linear.native_cpu import NativeLayout, product_function
from hf_efficient.kernels.linear.trellis_codes import BAND, sequences, unpack_trellis
from hf_efficient.kernels.native.structs import filled
from hf_efficient.kernels.native.tiers import once_a_tier
from hf_efficient.kernels.replay.instructions import packed_product
from hf_efficient.kernels.replay.registry import replays


COLUMNS = 32


class _TrellisWeight(ctypes.Structure):
    """`TrellisWeight` of native/trellis/trellis.h."""

    _fields_ = [
        ("packed", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
        ("out_features", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
    ]


def weight_structure(packed, scale, following, out_features, in_features) -> tuple[_TrellisWeight, int]:
    """(the structure of a weight, its address)."""
    pointers = packed.data_ptr(), scale.data_ptr(), following.data_ptr()
    return filled(_TrellisWeight, *pointers, out_features, in_features)


@once_a_tier
def function(half_bits: int):
    """The compiled product for codes of `half_bits` / 2 bits, which takes raw pointers; None where other layouts serve
    instead."""
    return product_function("trellis", _TrellisWeight, HALF_BITS=half_bits)


def _following(out_features: int) -> torch.Tensor:
    """`next` of a weight."""
    starts = sequences(out_features)
    following = torch.arange(1, starts[-1] + 1, dtype=torch.int32)
    following[torch.tensor(starts[1:]) - 1] = torch.tensor(starts[:-1], dtype=torch.int32)
    return following


def _qweight(packed: torch.Tensor, in_features: int) -> torch.Tensor:
    """The canonical qweight from `packed`."""
    words = packed.permute(0, 2, 1, 3).flatten(2)[..., :in_features].contiguous()
    return words.view(torch.uint8).unflatten(-1, (-1, 2)).movedim(-1, 2).flatten(0, 2).contiguous()


def _dense(packed, scale, out_features, in_features, dtype) -> torch.Tensor:
    values = unpack_trellis(_qweight(packed, in_features), packed.shape[2] / 2, out_features)
    return (values.float() * scale[:out_features, None]).to(dtype)


class NativeTrellisLayout(NativeLayout):
    """A weight [N, K] in the layout of the C++ kernels."""

    dtype = torch.bfloat16

    def __init__(self, packed, scale, following, out_features, in_features):
        self.packed, self.scale, self.following = packed, scale, following
        self.out_features, self.in_features = out_features, in_features
        bands, half_bits = -(-out_features // BAND), packed.shape[2]
        check_shapes(
            packed=(packed, (bands, -(-in_features // COLUMNS), half_bits, COLUMNS), (torch.int16,)),
            scale=(scale, (bands * BAND,), (torch.float32,)),
            following=(following, (bands,), (torch.int32,)),
        )
        self.function = function(half_bits)
        self.weight, self.address = weight_structure(packed, scale, following, out_features, in_features)
        self.tensors = {"packed": packed, "packed_scale": scale, "packed_next": following}

    @classmethod
    def pack(cls, qweight, scale, bits, in_features, dtype) -> "NativeTrellisLayout | None":
        """From canonical tensors; None where the kernels do not serve them or are not compiled."""
        half_bits, out_features = int(2 * bits), len(scale)
        if dtype is not cls.dtype or qweight.device.type != "cpu" or function(half_bits) is None:
            return None
        bytes_of = F.pad(qweight, (0, -in_features % COLUMNS)).view(
            -1, half_bits, 2, -(-in_features // COLUMNS), COLUMNS
        )
        packed = bytes_of.permute(0, 3, 1, 4, 2).contiguous().view(torch.int16).squeeze(-1)
        scale = F.pad(scale[:, 0].float(), (0, -out_features % BAND))
        return cls(packed, scale, _following(out_features), out_features, in_features)

    def as_op(self, x, bias):
        tensors = x, self.packed, self.scale, self.following, bias
        return torch.ops.hf_efficient.cpu_trellis_linear(*tensors, self.out_features, self.in_features)

    def dequantize(self):
        return _dense(self.packed, self.scale, self.out_features, self.in_features, self.dtype)

    def canonical(self):
        return _qweight(self.packed, self.in_features)


def _linear(x, packed, scale, following, bias, out_features, in_features):
    return NativeTrellisLayout(packed, scale, following, out_features, in_features).product(x, bias)


def _weight(dtype, _, packed, scale, following, out_features, in_features):
    return _dense(packed, scale, out_features, in_features, dtype)


@replays("hf_efficient::cpu_trellis_linear")
def _instructions(y, x, packed, scale, following, bias, out_features, in_features):
    tensors = packed, scale, following
    weight = weight_structure(*tensors, out_features, in_features)
    return packed_product(y, x, bias, weight, function(packed.shape[2]), ("trellis", packed.shape[2]), tensors)


op.define(
    "cpu_trellis_linear(Tensor x, Tensor packed, Tensor scale, Tensor following, Tensor? bias, int out_features, "
    "int in_features) -> Tensor",
    cpu=_linear,
    fake=lambda x, packed, scale, following, bias, out_features, _: x.new_empty(*x.shape[:-1], out_features),
    weight=_weight,
)
