"""Linear layers of bfloat16 weights of which only some are stored, on CPUs with AVX-512 VBMI2 (see `cpu_build`).

Their layout is one stream in the order in which it is read: bands of 4 rows, in a band steps of 32 columns, in a step row
after row. `masks` int32 [bands, steps, 4]: bit i of a word says whether column i is stored; `starts` int64 [bands + 1]: where
a band begins in `values` bfloat16 [kept]. There are 4 bands for every 16 rows or less.
"""

import ctypes
import functools

import torch
import torch.nn.functional as F

from hf_efficient.kernels.linear.codes import pack_codes, unpack_codes
from hf_efficient.kernels.linear.native_cpu import LANES, CompiledLayout
from hf_efficient.kernels.native import build
from hf_efficient.kernels.native.structs import Product
from hf_efficient.kernels.replay.instructions import packed_product
from hf_efficient.kernels.replay.registry import replays


BAND, COLUMNS = 4, 32
FEATURE = "avx512_vbmi2"  # what other C++ kernels do without


class _SparseWeight(ctypes.Structure):
    """`SparseWeight` of native/sparse/sparse.h."""

    _fields_ = [
        ("values", ctypes.c_void_p),
        ("masks", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("out_features", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
    ]


@functools.lru_cache(65536)  # the op makes a layout for each call
def _kept_weight(*fields) -> tuple[_SparseWeight, int]:
    weight = _SparseWeight(*fields)
    return weight, ctypes.addressof(weight)


def weight_structure(values, masks, starts, out_features, in_features) -> tuple[_SparseWeight, int]:
    """(the structure of a weight, its address)"""
    return _kept_weight(values.data_ptr(), masks.data_ptr(), starts.data_ptr(), out_features, in_features)


@functools.cache
def function():
    """The compiled product, on raw pointers; None where other layouts are to be used."""
    library = build.load("sparse", (Product, _SparseWeight)) if FEATURE in build.cpu_features() else None
    if library is None:
        return None
    library.hf_sparse.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    library.hf_sparse.restype = None
    return library.hf_sparse


def _banded(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> [bands, steps, BAND, COLUMNS], padded with zeros."""
    padded = F.pad(weight, (0, -weight.shape[1] % COLUMNS, 0, -weight.shape[0] % LANES))
    return padded.view(len(padded) // BAND, BAND, -1, COLUMNS).transpose(1, 2).contiguous()


def _dense(values, masks, out_features, in_features) -> tuple[torch.Tensor, torch.Tensor]:
    """(the weight [N, K], bool [N, K] of what is stored)"""
    kept = unpack_codes(masks.view(torch.uint8).unflatten(-1, (BAND, 4)), 1, COLUMNS).bool()
    weight = values.new_zeros(kept.shape).masked_scatter_(kept, values)
    return tuple(
        t.transpose(1, 2).reshape(t.shape[0] * BAND, t.shape[1] * COLUMNS)[:out_features, :in_features]
        for t in (weight, kept)
    )


class SparseLinear(CompiledLayout):
    """A weight [N, K] in the layout of the C++ kernel, in the form this file tells. kept_shape: of the canonical qweight."""

    dtype = torch.bfloat16

    def __init__(self, values, masks, starts, out_features, in_features, kept_shape=(-1,)):
        self.values, self.masks, self.starts, self.kept_shape = values, masks, starts, kept_shape
        self.out_features, self.in_features = out_features, in_features
        self.function = function()
        self.weight, self.address = weight_structure(values, masks, starts, out_features, in_features)
        self.tensors = {"packed": values, "packed_masks": masks, "packed_starts": starts}

    @classmethod
    def pack(cls, weight: torch.Tensor, mask: torch.Tensor, kept_shape: tuple[int, ...]) -> "SparseLinear | None":
        """From the weight [N, K] and what of it is kept, bool alike; None where the kernel does not serve it or is not to be
        had."""
        if weight.dtype is not cls.dtype or weight.device.type != "cpu" or function() is None:
            return None
        kept = _banded(mask)
        starts = F.pad(kept.flatten(1).sum(1).cumsum(0), (1, 0))
        masks = pack_codes(kept.to(torch.uint8), 1).view(torch.int32).squeeze(-1)
        return cls(_banded(weight)[kept], masks, starts, *weight.shape, kept_shape)

    def op(self, x, bias):
        tensors = x, self.values, self.masks, self.starts, bias
        return torch.ops.hf_efficient.cpu_sparse_linear(*tensors, self.out_features, self.in_features)

    def dequantize(self) -> torch.Tensor:
        """The weight [N, K]."""
        return _dense(self.values, self.masks, self.out_features, self.in_features)[0]

    def qweight(self) -> torch.Tensor:
        """The canonical qweight: kept values, row after row."""
        weight, kept = _dense(self.values, self.masks, self.out_features, self.in_features)
        return weight[kept].view(self.kept_shape)


_library = torch.library.Library("hf_efficient", "FRAGMENT")
_library.define(
    "cpu_sparse_linear(Tensor x, Tensor values, Tensor masks, Tensor starts, Tensor? bias, int out_features, "
    "int in_features) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def _cpu_sparse_linear(x, values, masks, starts, bias, out_features, in_features):
    return SparseLinear(values, masks, starts, out_features, in_features).product(x, bias)


@replays("hf_efficient::cpu_sparse_linear")
def _instructions(y, x, values, masks, starts, bias, out_features, in_features):
    weight = weight_structure(values, masks, starts, out_features, in_features)
    return packed_product(y, x, bias, weight, function(), ("sparse",), (values, masks, starts))


_library.impl("cpu_sparse_linear", _cpu_sparse_linear, "CPU")


@torch.library.register_fake("hf_efficient::cpu_sparse_linear", lib=_library)
def _fake(x, values, masks, starts, bias, out_features, in_features):
    return x.new_empty(*x.shape[:-1], out_features)


def _setup(ctx, inputs, output):
    _, values, masks, _, bias, *ctx.layout = inputs
    ctx.save_for_backward(values, masks)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx, grad):
    grad_x = grad @ _dense(*ctx.saved_tensors, *ctx.layout)[0] if ctx.needs_input_grad[0] else None
    grad_bias = None if ctx.bias_dtype is None else grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
    return grad_x, None, None, None, grad_bias, None, None


torch.library.register_autograd("hf_efficient::cpu_sparse_linear", _backward, setup_context=_setup, lib=_library)
