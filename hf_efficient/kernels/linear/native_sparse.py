"""Linear layers of pruned bfloat16 weights by the C++ kernels of `native/sparse`.

The layout is a stream of the kept values in the order in which they are read: bands of 4 rows, in a band steps of 32
columns, in a step row after row. `values` is bfloat16 [kept]. `masks` is int32 [bands, steps, 4]: bit i of a word says
whether column i is stored. `starts` is int64 [bands + 1]: where a band begins in `values`. Rows are padded to a
multiple of 16, that is of 4 bands.
"""

import ctypes
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from hf_efficient.kernels.linear import op
from hf_efficient.kernels.linear.codes import pack_codes, unpack_codes
from hf_efficient.kernels.linear.lines import LANES, check_shapes
from hf_efficient.kernels.linear.native_cpu import NativeLayout, product_function
from hf_efficient.kernels.native.structs import filled
from hf_efficient.kernels.native.tiers import once_a_tier
from hf_efficient.kernels.replay.instructions import packed_product
from hf_efficient.kernels.replay.registry import replays


BAND, COLUMNS = 4, 32


class _SparseWeight(ctypes.Structure):
    """`SparseWeight` of native/sparse/sparse.h."""

    _fields_ = [
        ("values", ctypes.c_void_p),
        ("masks", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("out_features", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("two_of_four", ctypes.c_int64),
    ]


def weight_structure(values, masks, starts, out_features, in_features, two_of_four) -> tuple[_SparseWeight, int]:
    """(the structure of a weight, its address)."""
    pointers = values.data_ptr(), masks.data_ptr(), starts.data_ptr()
    return filled(_SparseWeight, *pointers, out_features, in_features, two_of_four)


@once_a_tier
def function():
    """The compiled product, which takes raw pointers; None where other layouts serve instead."""
    return product_function("sparse", _SparseWeight)


def _banded(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> [bands, steps, BAND, COLUMNS], padded with zeros."""
    padded = F.pad(weight, (0, -weight.shape[1] % COLUMNS, 0, -weight.shape[0] % LANES))
    return padded.view(len(padded) // BAND, BAND, -1, COLUMNS).transpose(1, 2).contiguous()


def _dense(values, masks, out_features, in_features) -> tuple[torch.Tensor, torch.Tensor]:
    """(the weight [N, K], which elements are stored: bool [N, K])."""
    kept = unpack_codes(masks.view(torch.uint8).unflatten(-1, (BAND, 4)), 1, COLUMNS).bool()
    weight = values.new_zeros(kept.shape).masked_scatter_(kept, values)
    return tuple(
        t.transpose(1, 2).reshape(t.shape[0] * BAND, t.shape[1] * COLUMNS)[:out_features, :in_features]
        for t in (weight, kept)
    )


class NativeSparseLayout(NativeLayout):
    """A pruned weight [N, K] in the layout of the C++ kernel.

    two_of_four: whether each 4 columns keep 2 and nothing is padded, which is read faster. kept_shape: the shape of the
    canonical qweight. pack_mask: canonical tensor -> what makes it of the mask, bool [N, K]."""

    dtype = torch.bfloat16
    pack_mask: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}

    def __init__(self, values, masks, starts, out_features, in_features, two_of_four, kept_shape=(-1,)):
        self.values, self.masks, self.starts, self.kept_shape = values, masks, starts, kept_shape
        self.sizes = self.out_features, self.in_features, self.two_of_four = out_features, in_features, two_of_four
        bands = -(-out_features // LANES) * LANES // BAND
        check_shapes(
            values=(values, values.shape[:1], (torch.bfloat16,)),
            masks=(masks, (bands, -(-in_features // COLUMNS), BAND), (torch.int32,)),
            starts=(starts, (bands + 1,), (torch.int64,)),
        )
        self.function = function()
        self.weight, self.address = weight_structure(values, masks, starts, *self.sizes)
        self.tensors = {"packed": values, "packed_masks": masks, "packed_starts": starts}

    @classmethod
    def pack(cls, weight: torch.Tensor, mask: torch.Tensor, kept_shape: tuple[int, ...]) -> "NativeSparseLayout | None":
        """From the weight [N, K] and the mask of what is kept, bool [N, K]; None where the kernel does not serve it or
        is not compiled."""
        if weight.dtype is not cls.dtype or weight.device.type != "cpu" or function() is None:
            return None
        kept = _banded(mask)
        starts = F.pad(kept.flatten(1).sum(1).cumsum(0), (1, 0))
        masks = pack_codes(kept.to(torch.uint8), 1).view(torch.int32).squeeze(-1)
        two_of_four = bool((kept.unflatten(-1, (-1, 4)).sum(-1) == 2).all())
        return cls(_banded(weight)[kept], masks, starts, *weight.shape, two_of_four, kept_shape)

    def as_op(self, x, bias):
        tensors = x, self.values, self.masks, self.starts, bias
        return torch.ops.hf_efficient.cpu_sparse_linear(*tensors, *self.sizes)

    @property
    def replaced(self):
        masks = {name: functools.partial(self._mask, pack) for name, pack in self.pack_mask.items()}
        return {**super().replaced, **masks}

    def _mask(self, pack: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return pack(_dense(self.values, self.masks, self.out_features, self.in_features)[1])

    def dequantize(self):
        return _dense(self.values, self.masks, self.out_features, self.in_features)[0]

    def canonical(self):
        weight, kept = _dense(self.values, self.masks, self.out_features, self.in_features)
        return weight[kept].view(self.kept_shape)


def _linear(x, values, masks, starts, bias, *sizes):
    return NativeSparseLayout(values, masks, starts, *sizes).product(x, bias)


def _weight(dtype, _, values, masks, starts, out_features, in_features, two_of_four):
    return _dense(values, masks, out_features, in_features)[0]


@replays("hf_efficient::cpu_sparse_linear")
def _instructions(y, x, values, masks, starts, bias, *sizes):
    weight = weight_structure(values, masks, starts, *sizes)
    return packed_product(y, x, bias, weight, function(), ("sparse",), (values, masks, starts))


op.define(
    "cpu_sparse_linear(Tensor x, Tensor values, Tensor masks, Tensor starts, Tensor? bias, int out_features, "
    "int in_features, bool two_of_four) -> Tensor",
    cpu=_linear,
    fake=lambda x, values, masks, starts, bias, out_features, *_: x.new_empty(*x.shape[:-1], out_features),
    weight=_weight,
)
