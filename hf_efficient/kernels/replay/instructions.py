"""Instructions of the C++ interpreter (`native/replay/replay.cpp`), and how they are made from tensors."""

import ctypes

import torch

from hf_efficient.kernels.native import build
from hf_efficient.kernels.native.structs import Product
from hf_efficient.kernels.native.tiers import once_a_tier


NAMES = (
    "COPY NEG ABS RELU SILU GELU GELU_TANH TANH SIGMOID EXP SQRT RSQRT RECIPROCAL COS SIN POW ADD SUB MUL DIV MEAN SUM "
    "ROWS LINEAR DENSE CALL RMS_NORM ROTARY GATED GATHER ARGMAX SOFTMAX TOP"
).split()
OPS = {name: number for number, name in enumerate(NAMES)}  # `Op` of native/replay/instruction.h
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # `Type` of native/common/elementwise.h
MOST_DIMS = 4


class Operand(ctypes.Structure):
    """`Operand` of native/replay/instruction.h: an address, four strides in elements (0 where it is broadcast), one of
    `TYPES`."""

    _fields_ = [("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * MOST_DIMS), ("type", ctypes.c_int64)]


class Instruction(ctypes.Structure):
    """`Instruction` of native/replay/instruction.h, and what only Python needs to know of it.

    Attributes:
        writes: address of the storage of the result.
        reads: addresses of the storages of the operands.
        keep: objects that own the memory behind `weight`, and whatever else must live as long as the instruction.
        pinned: addresses of storages that must stay where they lie, because the instruction holds them in another
            structure.
        kind: of a product, equal for products that may become one instruction or stand next to each other; else None.
        products: of LINEAR, the `Product` of each weight.
    """

    _fields_ = [
        ("op", ctypes.c_int64), ("sizes", ctypes.c_int64 * MOST_DIMS), ("y", Operand), ("a", Operand), ("b", Operand),
        ("c", Operand), ("alpha", ctypes.c_double), ("beta", ctypes.c_double), ("weight", ctypes.c_void_p),
        ("linear", ctypes.c_void_p),
    ]  # fmt: skip
    keep, pinned, kind, products = (), (), None, ()

    def noting(self, y: torch.Tensor, inputs: list[torch.Tensor | None]) -> "Instruction":
        """Notes that it writes `y` and reads `inputs`."""
        self.writes, self.reads = address(y), [address(x) for x in inputs if x is not None]
        return self


@once_a_tier
def interpreter():
    """The compiled `hf_replay(instructions, count)`; None where there is no compiler, or the CPU is not served."""
    library = _library()
    if library is None:
        return None
    library.hf_replay.argtypes, library.hf_replay.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
    return library.hf_replay


@once_a_tier
def word_reader():
    """The compiled `hf_read_words(addresses, count, words)`, which keeps Python's lock; None as in `interpreter`."""
    library = _library()
    if library is None:
        return None
    kind = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    return kind(ctypes.cast(library.hf_read_words, ctypes.c_void_p).value)


def _library() -> ctypes.CDLL | None:
    return build.load("replay", (Operand, Instruction))


def address(x: torch.Tensor) -> int:
    """Of the storage of `x`."""
    return x.untyped_storage().data_ptr()


def sizes(shape) -> ctypes.Array:
    """A shape of at most four dimensions, filled up with ones in front."""
    return (ctypes.c_int64 * MOST_DIMS)(*(1,) * (MOST_DIMS - len(shape)), *shape)


def operand(x: torch.Tensor) -> Operand:
    """A tensor of at most four dimensions and one of `TYPES`."""
    strides = (ctypes.c_int64 * MOST_DIMS)(*(0,) * (MOST_DIMS - x.dim()), *x.stride())
    return Operand(x.data_ptr(), strides, TYPES[x.dtype])


def elementwise(name: str, y: torch.Tensor, inputs: list[torch.Tensor], alpha=1.0, beta=0.0) -> Instruction:
    """y <- the operator of one or two inputs, which broadcast against y; beta stands for the second where it is a
    number."""
    operands = [operand(x.expand(y.shape)) for x in inputs]
    a, b = operands[0], operands[1] if len(operands) == 2 else Operand()
    instruction = Instruction(OPS[name], sizes(y.shape), operand(y), a, b, Operand(), alpha, beta)
    return instruction.noting(y, inputs)


def packed_product(y, x, bias, weight, function, kind: tuple, tensors: list) -> list[Instruction] | None:
    """y [..., N] <- x [..., K] @ W^T + bias [N] by a compiled function; None where it does not take x or the bias.

    Args:
        weight: (the library's structure of W, its address).
        function: the compiled product, `hf_linear` or `hf_sparse`.
        kind: what products must have in common for one call of `function`.
        tensors: those that the structure points to, None among them.
    """
    if not x.is_contiguous() or not y.is_contiguous() or x.dtype not in (torch.float32, torch.bfloat16):
        return None
    if bias is not None and (bias.dtype is not x.dtype or bias.shape != y.shape[-1:] or not bias.is_contiguous()):
        return None
    structure, at = weight
    instruction = Instruction(OPS["LINEAR"], sizes((x.numel() // x.shape[-1], 1)))
    instruction.a.data, instruction.a.type = x.data_ptr(), TYPES[x.dtype]
    instruction.linear = ctypes.cast(function, ctypes.c_void_p).value
    instruction.products = [Product(at, None if bias is None else bias.data_ptr(), y.data_ptr())]
    instruction.kind = x.data_ptr(), x.shape, *kind
    instruction.keep, instruction.pinned = (structure,), [address(tensor) for tensor in tensors if tensor is not None]
    return [instruction.noting(y, [x, *tensors, bias])]


def call(
    function, argument: ctypes.Structure, y: torch.Tensor, inputs: list, keep=(), looks_up: bool = False
) -> Instruction:
    """A call of a compiled function with a structure that says everything: y <- the function of `inputs` (tensors or
    None). The addresses in the structure are not changed later, so these tensors stay where they lie.

    keep: objects that own memory that the structure points to. looks_up: whether what the function refuses is an index
    of an embedding; `alpha` tells it.
    """
    instruction = Instruction(OPS["CALL"], weight=ctypes.addressof(argument), alpha=float(looks_up))
    instruction.linear = ctypes.cast(function, ctypes.c_void_p).value
    instruction.keep = argument, keep
    return instruction.noting(y, inputs)
