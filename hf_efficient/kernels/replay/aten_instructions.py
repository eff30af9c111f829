"""The instructions of torch's own ops: elementwise, reductions, look-ups, dense products, concatenation."""

import functools
import math

import torch

from hf_efficient.kernels.native import tiers
from hf_efficient.kernels.replay.instructions import MOST_DIMS, OPS, TYPES, Instruction, elementwise, operand, sizes
from hf_efficient.kernels.replay.registry import replays
from hf_efficient.kernels.widened_products import computed  # noqa: F401  how the recorder runs these ops


_UNARY = {
    "_to_copy": "COPY", "clone": "COPY", "neg": "NEG", "abs": "ABS", "relu": "RELU", "silu": "SILU", "tanh": "TANH",
    "sigmoid": "SIGMOID", "exp": "EXP", "sqrt": "SQRT", "rsqrt": "RSQRT", "reciprocal": "RECIPROCAL", "cos": "COS",
    "sin": "SIN",
}  # fmt: skip
_BINARY = {"add": "ADD", "sub": "SUB", "mul": "MUL", "div": "DIV"}
# The most rows that the interpreter multiplies by a dense weight, with AMX or without; torch multiplies more. Where a
# CPU has no instructions for bfloat16 products there is no limit, because torch takes several times as long there for
# any number of rows.
_MOST_DENSE_ROWS_OF_BF16, _MOST_DENSE_ROWS_OF_FLOATS = 512, 64

_OF_BF16 = tiers.BF16, tiers.AMX, tiers.NEON_BF16


def _have_types(*tensors: torch.Tensor) -> bool:
    return all(x.dtype in TYPES for x in tensors)


def _unary(name, y, x, **_):
    return [elementwise(name, y, [x])] if _have_types(y, x) else None


def _binary(name, y, a, b, alpha=1, rounding_mode=None):
    inputs = [x for x in (a, b) if isinstance(x, torch.Tensor)]
    if not isinstance(a, torch.Tensor) or rounding_mode or not _have_types(y, *inputs):
        return None
    return [elementwise(name, y, inputs, float(alpha), 0.0 if len(inputs) == 2 else float(b))]


for _op, _name in _UNARY.items():
    replays(f"aten::{_op}")(functools.partial(_unary, _name))
for _op, _name in _BINARY.items():
    replays(f"aten::{_op}")(functools.partial(_binary, _name))


@replays("aten::copy_")
def _copy(y, _, x, non_blocking=False):
    return [elementwise("COPY", y, [x])] if x.shape == y.shape and _have_types(y, x) else None


@replays("aten::gelu")
def _gelu(y, x, approximate="none"):
    return _unary("GELU_TANH" if approximate == "tanh" else "GELU", y, x)


@replays("aten::pow.Tensor_Scalar")
def _pow(y, x, exponent):
    return [elementwise("POW", y, [x], beta=float(exponent))] if _have_types(y, x) else None


def _reduction(name, y, x, dims, keepdim=False, **_):
    """Over the last dimension."""
    served = 0 < x.dim() <= MOST_DIMS and dims and {dim % x.dim() for dim in dims} == {x.dim() - 1}
    if not served or not _have_types(y, x):
        return None
    y = y if keepdim else y.unsqueeze(-1)
    whole = operand(y.expand(*y.shape[:-1], x.shape[-1]))
    return [Instruction(OPS[name], sizes(x.shape), whole, operand(x)).noting(y, [x])]


replays("aten::mean.dim")(functools.partial(_reduction, "MEAN"))
replays("aten::sum.dim_IntList")(functools.partial(_reduction, "SUM"))


@replays("aten::argmax")
def _argmax(y, x, dim=None, keepdim=False):
    if dim is None or x.dim() > MOST_DIMS or dim % x.dim() != x.dim() - 1 or not _have_types(x):
        return None
    instruction = Instruction(OPS["ARGMAX"], sizes(x.shape), a=operand(x))
    instruction.y.data = y.data_ptr()
    return [instruction.noting(y, [x])]


@replays("aten::embedding")
def _embedding(y, weight, index, *_):
    if index.dtype is not torch.int64 or not all(x.is_contiguous() for x in (y, weight, index)):
        return None
    row_bytes = weight.shape[1] * weight.element_size()
    instruction = Instruction(OPS["ROWS"], sizes((len(weight), index.numel(), row_bytes)))
    instruction.y.data, instruction.a.data, instruction.b.data = y.data_ptr(), weight.data_ptr(), index.data_ptr()
    return [instruction.noting(y, [weight, index])]


@replays("aten::addmm")
def _addmm(y, bias, x, weight, **scales):
    return None if scales else _dense(y, x, weight.t(), bias)


@replays("aten::mm")
def _mm(y, x, weight, *dtype):
    return None if dtype else _dense(y, x, weight.t(), None)


def _dense(y, x, weight, bias):
    """y [M, N] <- x [M, K] @ weight [N, K]^T + bias [N]."""
    operands = (x, weight) if bias is None else (x, weight, bias)
    if (
        x.dtype not in (torch.bfloat16, torch.float32)
        or any(t.dtype is not x.dtype or not t.is_contiguous() for t in operands)
        or len(x) > _most_dense_rows(x.dtype)
        or x.dtype is torch.bfloat16
        and x.shape[1] % 2  # which are read in pairs
        or (bias is not None and bias.shape != weight.shape[:1])
    ):
        return None
    instruction = Instruction(OPS["DENSE"], sizes((len(x), *weight.shape)))
    for name, tensor in (("y", y), ("a", x), ("b", weight), ("c", bias)):
        getattr(instruction, name).data = None if tensor is None else tensor.data_ptr()
    instruction.a.type = TYPES[x.dtype]
    instruction.kind = x.data_ptr(), x.shape
    return [instruction.noting(y, [x, weight, bias])]


def _most_dense_rows(dtype: torch.dtype) -> float:
    if dtype is torch.float32:
        return _MOST_DENSE_ROWS_OF_FLOATS
    return _MOST_DENSE_ROWS_OF_BF16 if tiers.tier() in _OF_BF16 else math.inf


@replays("aten::cat")
def _cat(y, parts, dim=0):
    if any(part.dtype not in TYPES or part.dim() != y.dim() for part in parts):
        return None
    slices = y.split([part.shape[dim] for part in parts], dim)
    return [elementwise("COPY", to, [part]) for to, part in zip(slices, parts)]
