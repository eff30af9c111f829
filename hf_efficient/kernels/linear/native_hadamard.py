"""The transform of `kernels.hadamard.rotate` for few rows on a CPU, by the C++ kernel of `native/hadamard`: one call in
the place of six torch operators, and captured with the product that follows."""

import ctypes
import functools

import torch
import torch.nn.functional as F

from hf_efficient.kernels import hadamard
from hf_efficient.kernels.linear import op
from hf_efficient.kernels.native import build
from hf_efficient.kernels.native.tiers import once_a_tier
from hf_efficient.kernels.replay import instructions
from hf_efficient.kernels.replay.registry import replays


DTYPES = (torch.bfloat16, torch.float32)
LANES = 16


class _Rotation(ctypes.Structure):
    """`Rotation` of native/hadamard/hadamard.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "signs", "matrices", "orders", "y")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "blocks", "factors", "is_float")),
    ]


@once_a_tier
def function():
    """The compiled transform; None where torch's operators serve instead."""
    library = build.load("hadamard", (_Rotation,))
    if library is None:
        return None
    library.hf_rotate.argtypes, library.hf_rotate.restype = [ctypes.c_void_p], ctypes.c_int
    return library.hf_rotate


def rotate(x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """`hadamard.rotate` of x [..., K] by signs [K] of the same dtype."""
    learns = torch.is_grad_enabled() and (x.requires_grad or signs.requires_grad)
    serves = x.is_cpu and x.dtype in DTYPES and x.numel() and not torch.compiler.is_compiling()
    if learns or not serves or function() is None:
        return hadamard.rotate(x, signs)
    return torch.ops.hf_efficient.rotate(x, signs)


@functools.lru_cache(64)
def _constants(columns: int) -> tuple[int, torch.Tensor, torch.Tensor]:
    """(blocks, the matrices of the transform behind each other, their orders)."""
    blocks, matrices = hadamard.constants(columns, torch.float32, torch.device("cpu"))
    matrices = [torch.eye(1, dtype=torch.float32)] if not matrices else matrices
    padded = [F.pad(matrix, (0, -matrix.shape[1] % LANES)).flatten() for matrix in matrices]
    return blocks, torch.cat(padded), torch.tensor([len(matrix) for matrix in matrices])


@functools.lru_cache(64)
def _shared(values: bytes) -> torch.Tensor:
    """Signs, once for all layers that have the same: what every layer reads stays in the cache."""
    return torch.frombuffer(bytearray(values), dtype=torch.float32)


def _native_call(y, x, signs) -> _Rotation:
    blocks, matrices, orders = _constants(x.shape[-1])
    pointers = [tensor.data_ptr() for tensor in (x, signs, matrices, orders, y)]
    sizes = x.numel() // x.shape[-1], x.shape[-1], blocks, len(orders), x.dtype is torch.float32
    return _Rotation(*pointers, *sizes)


def _cpu(x, signs):
    hadamard.check(x, signs)
    x, signs = x.contiguous(), signs.float()
    y = torch.empty_like(x)
    call = _native_call(y, x, signs)
    torch.get_num_threads()  # gives a new Python thread torch's number of threads: OpenMP keeps one a thread
    function()(ctypes.addressof(call))
    return y


@replays("hf_efficient::rotate", once=True)
def _instructions(y, x, signs):
    if not x.is_contiguous() or not y.is_contiguous():
        return None
    signs = _shared(signs.float().numpy().tobytes())
    keep = signs, _constants(x.shape[-1])
    return [instructions.call(function(), _native_call(y, x, signs), y, [x], keep)]


op.define("rotate(Tensor x, Tensor signs) -> Tensor", cpu=_cpu, fake=lambda x, signs: torch.empty_like(x))
