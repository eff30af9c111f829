"""Linear layers of 2, 3, 4 and 8-bit codes by the C++ kernels of `native/linear`, on the CPUs of `native/tiers.py`.
Codes, scales and zero points (uint8 or float32) lie in the order of `lines.py`.
"""

import ctypes

import torch

from hf_efficient.kernels.linear import op
from hf_efficient.kernels.linear.codes import pack_codes
from hf_efficient.kernels.linear.layout import FLOATS, Layout
from hf_efficient.kernels.linear.lines import (
    COLUMNS,
    LANES,
    check_shapes,
    in_blocks,
    pack_lines,
    shape_of_lines,
    unpack_lines,
)
from hf_efficient.kernels.native import build
from hf_efficient.kernels.native.structs import Product, filled
from hf_efficient.kernels.native.tiers import once_a_tier
from hf_efficient.kernels.replay.instructions import TYPES, call, packed_product
from hf_efficient.kernels.replay.registry import replays


GRID, CODEBOOK, FLOAT8, FLOAT8_E5M2 = range(4)  # kinds of codes, as in native/linear/codes.h
NEVER, ALWAYS, WIDE = range(3)  # which bfloat16 inputs are rounded, as there
_ELEMENTS_AT_ONCE = 1 << 21  # float32 elements that dequantizing to another dtype holds at once: 8 MB


class _Weight(ctypes.Structure):
    """`Weight` of native/linear/codes.h."""

    _fields_ = [
        ("packed", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("out_features", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("scale_is_float", ctypes.c_int64),
        ("rounds_inputs", ctypes.c_int64),
        ("zero_is_float", ctypes.c_int64),
        ("table", ctypes.c_void_p),
        ("x_scale", ctypes.c_void_p),
    ]


class _Rows(ctypes.Structure):
    """`Rows` of native/linear/linear.cpp."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("type", ctypes.c_int64),
    ]


def check_parts(packed, scale, zero_point, bits, group, out_features, in_features) -> None:
    """Raises ValueError for tensors that are not those of a weight whose groups have `group` columns."""
    numbers = -(-out_features // LANES), -(-in_features // group), LANES
    check_shapes(
        packed=(packed, shape_of_lines(out_features, in_features, bits), (torch.int32,)),
        scale=(scale, numbers, (torch.float32, torch.bfloat16)),
        zero_point=(zero_point, numbers, (torch.float32, torch.uint8)),
    )


def weight_structure(
    packed, scale, zero_point, group, out_features, in_features, rounds_inputs, table=None, x_scale=None
) -> tuple[_Weight, int]:
    """(the structure of a weight, its address)."""
    pointers = [None if t is None else t.data_ptr() for t in (packed, scale, zero_point, table, x_scale)]
    sizes = out_features, in_features, group
    floats = (t is not None and t.dtype is torch.float32 for t in (scale, zero_point))
    scale_is_float, zero_is_float = floats
    return filled(_Weight, *pointers[:3], *sizes, scale_is_float, rounds_inputs, zero_is_float, *pointers[3:])


class Kernel:
    """The functions of a library, which take raw pointers."""

    def __init__(self, library: ctypes.CDLL):
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self.linear, self.dequantize = library.hf_linear, library.hf_dequantize
        self.linear.restype = self.dequantize.restype = None
        self.linear.argtypes = [pointer, integer, pointer, integer, ctypes.c_int]
        self.dequantize.argtypes = [pointer, integer, integer, pointer, integer]
        self.rows = library.hf_rows
        self.rows.argtypes, self.rows.restype = [pointer], ctypes.c_int


@once_a_tier
def kernel(bits: int, kind: int = GRID) -> Kernel | None:
    """The kernel for codes of `bits` bits that stand for what `kind` tells; None where torch's operators serve
    instead."""
    library = build.load("linear", (Product, _Rows, _Weight), BITS=bits, KIND=kind)
    return library and Kernel(library)


def product_function(name: str, structure: type[ctypes.Structure], **definitions: int):
    """The product `hf_<name>` of the library of that name, whose weights are a `structure`. It takes raw pointers. None
    where other layouts serve instead."""
    library = build.load(name, (Product, structure), **definitions)
    if library is None:
        return None
    function, pointer, integer = getattr(library, f"hf_{name}"), ctypes.c_void_p, ctypes.c_int64
    function.argtypes, function.restype = [pointer, integer, pointer, integer, ctypes.c_int], None
    return function


def stored_bits(bits: int, groups: int, group_size: int | None) -> int | None:
    """The bits of a code in memory: the fewest for which every group begins and ends with a line; None where there are
    none."""
    return next((b for b in (2, 3, 4, 8) if b >= bits and (groups == 1 or group_size % COLUMNS[b] == 0)), None)


_UNWATCHED = (torch.Tensor, torch.nn.Parameter)


def is_observed(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether a tensor subclass, a dispatch mode, a trace or a functorch transform must see the product. They see an
    op, and no call on raw pointers."""
    return (
        type(x) not in _UNWATCHED
        or (bias is not None and type(bias) not in _UNWATCHED)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


class NativeLayout(Layout):
    """A weight [N, K] that a C++ function multiplies.

    A subclass sets `function`, the `address` of the structure that it reads, in_features, out_features and dtype. It
    has `as_op`, the product as an op of torch.
    """

    @property
    def native_product(self):
        return self

    def matmul(self, x, bias=None):
        if (
            torch.compiler.is_compiling()
            or is_observed(x, bias)
            or (torch.is_grad_enabled() and (x.requires_grad or bias is not None and bias.requires_grad))
        ):
            return self.as_op(x, bias)
        return self.product(x, bias)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`matmul` without autograd.

        Raises:
            ValueError: x has another dtype, width or device.
        """
        dtype = x.dtype
        if dtype not in FLOATS:
            raise ValueError(f"x is {dtype}: allowed is one of {FLOATS}")
        if dtype is not self.dtype or x.shape[-1] != self.in_features or not x.is_cpu:
            given = f"{dtype} {tuple(x.shape)} on {x.device}"
            raise ValueError(f"x is {given}, the layout is for {self.dtype} [..., {self.in_features}] on a CPU")
        if bias is not None and (
            bias.dtype is not dtype or not bias.is_cpu or bias.shape != (self.out_features,) or not bias.is_contiguous()
        ):
            return self.product(x, None).add_(bias)
        if dtype is torch.float16:
            return self._product(x.float(), None if bias is None else bias.float()).half()
        return self._product(x, bias)

    def _product(self, x, bias):
        torch.get_num_threads()  # gives a new Python thread torch's number of threads: OpenMP keeps one a thread
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], self.out_features)
        product = Product(self.address, None if bias is None else bias.data_ptr(), y.data_ptr())
        rows, is_float = x.numel() // self.in_features, x.dtype is torch.float32
        self.function(ctypes.addressof(product), 1, x.data_ptr(), rows, is_float)
        return y


class NativeCodesLayout(NativeLayout):
    """A weight [N, K] of codes in the layout of the C++ kernels.

    Args:
        packed: the codes in `stored` bits, as `pack_lines` makes them. `bits` are those of the canonical codes.
        scale, zero_point: [blocks, G, 16], a group being `group` columns; no zero point is the middle of the grid.
        rounds_inputs: which bfloat16 inputs are rounded to int8, with a scale for at most 64 columns of a row: NEVER,
            ALWAYS, or WIDE, those of so many rows that this is faster.
    """

    def __init__(self, packed, scale, zero_point, stored, group, out_features, in_features, rounds_inputs, bits, dtype):
        self.packed, self.scale, self.zero_point = packed, scale, zero_point
        self.scheme = stored, group, out_features, in_features
        self.rounds_inputs = rounds_inputs
        self.out_features, self.in_features, self.bits, self.dtype = out_features, in_features, bits, dtype
        check_parts(packed, scale, zero_point, *self.scheme)
        self.function = kernel(stored).linear
        scheme = group, out_features, in_features, rounds_inputs
        self.weight, self.address = weight_structure(packed, scale, zero_point, *scheme)
        self.tensors = {"packed": packed, "packed_scale": scale}
        if zero_point is not None:
            self.tensors["packed_zero"] = zero_point

    @classmethod
    def pack(
        cls, qweight, scale, zero_point, bits, group_size, in_features, dtype, rounds_inputs=NEVER
    ) -> "NativeCodesLayout | None":
        """From canonical tensors; None where the kernels do not serve them or are not compiled."""
        out_features, groups = qweight.shape[0], scale.shape[1]
        stored = stored_bits(bits, groups, group_size)
        if dtype not in FLOATS or stored is None or kernel(stored) is None:
            return None
        if zero_point is None and stored != bits:
            zero_point = qweight.new_full(scale.shape, 2 ** (bits - 1))
        packed, given = pack_lines(qweight, bits, in_features, stored), scale
        scale = in_blocks(scale if scale.dtype is torch.bfloat16 else scale.float(), out_features)
        zero_point = None if zero_point is None else in_blocks(zero_point, out_features)
        group = in_features if groups == 1 else group_size
        scheme = stored, group, out_features, in_features
        layout = cls(packed, scale, zero_point, *scheme, rounds_inputs, bits, dtype)
        layout.replaces_scale = given.dtype is scale.dtype and len(given) == out_features
        return layout

    def over(self, tensors):
        own = tensors["packed"], tensors["packed_scale"], tensors.get("packed_zero")
        layout = type(self)(*own, *self.scheme, self.rounds_inputs, self.bits, self.dtype)
        layout.replaces_scale = self.replaces_scale
        return layout

    def as_op(self, x, bias):
        tensors = x, self.packed, self.scale, self.zero_point, bias
        return torch.ops.hf_efficient.cpu_linear(*tensors, *self.scheme, self.rounds_inputs)

    def dequantize(self):
        tensors = self.packed, self.scale, self.zero_point
        return torch.ops.hf_efficient.cpu_dequantize(*tensors, *self.scheme, self.dtype)

    def decode(self) -> torch.Tensor:
        """`dequantize` as the op computes it; torch.compile cannot trace it."""
        torch.get_num_threads()  # as in _product
        weight = self.packed.new_empty(self.out_features, self.in_features, dtype=self.dtype)
        blocks = len(self.packed)
        step = max(1, _ELEMENTS_AT_ONCE // (LANES * self.in_features))
        for first in range(0, blocks, step):
            rows = weight[first * LANES : (first + step) * LANES]
            tile = self.packed.new_empty(self.in_features, len(rows), dtype=torch.float32)
            kernel(self.scheme[0]).dequantize(
                self.address, first, min(blocks, first + step), tile.data_ptr(), len(rows)
            )
            rows.copy_(tile.t())
        return weight

    def canonical(self):
        codes = unpack_lines(self.packed, self.scheme[0], self.out_features, self.in_features)
        return pack_codes(codes, self.bits)

    def canonical_scale(self):
        return self.scale.transpose(1, 2).flatten(0, 1)[: self.out_features].contiguous()

    def rows(self, ids):
        tensors = self.packed, self.scale, self.zero_point
        return torch.ops.hf_efficient.cpu_rows(ids, *tensors, *self.scheme, self.dtype)


def _linear(x, packed, scale, zero_point, bias, bits, group, out_features, in_features, rounds_inputs):
    scheme = bits, group, out_features, in_features
    return NativeCodesLayout(packed, scale, zero_point, *scheme, rounds_inputs, bits, x.dtype).product(x, bias)


def _dequantize(packed, scale, zero_point, bits, group, out_features, in_features, dtype):
    scheme = bits, group, out_features, in_features
    return NativeCodesLayout(packed, scale, zero_point, *scheme, NEVER, bits, dtype).decode()


def _weight(dtype, _, packed, scale, zero_point, bits, group, out_features, in_features, rounds_inputs):
    scheme = bits, group, out_features, in_features
    return torch.ops.hf_efficient.cpu_dequantize(packed, scale, zero_point, *scheme, dtype)


def _rows(ids, packed, scale, zero_point, bits, group, out_features, in_features, dtype):
    torch.get_num_threads()  # as in _product
    check_parts(packed, scale, zero_point, bits, group, out_features, in_features)
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"ids are {ids.dtype}: allowed is torch.int64 or torch.int32")
    ids, y = ids.long().contiguous(), packed.new_empty(*ids.shape, in_features, dtype=dtype)
    weight, address = weight_structure(packed, scale, zero_point, group, out_features, in_features, NEVER)
    rows = _Rows(address, ids.data_ptr(), y.data_ptr(), ids.numel(), TYPES[dtype])
    if not kernel(bits).rows(ctypes.addressof(rows)):
        raise IndexError("index out of range in self")  # torch's words for an embedding on a CPU
    return y


@replays("hf_efficient::cpu_rows")
def _row_instructions(y, ids, packed, scale, zero_point, bits, group, out_features, in_features, dtype):
    if not ids.is_contiguous() or ids.dtype is not torch.long:
        return None
    tensors = packed, scale, zero_point
    weight, address = weight_structure(*tensors, group, out_features, in_features, NEVER)
    rows = _Rows(address, ids.data_ptr(), y.data_ptr(), ids.numel(), TYPES[dtype])
    return [call(kernel(bits).rows, rows, y, [ids, *tensors], keep=weight, looks_up=True)]


@replays("hf_efficient::cpu_linear")
def _instructions(y, x, packed, scale, zero_point, bias, bits, group, out_features, in_features, rounds_inputs):
    tensors = packed, scale, zero_point
    weight = weight_structure(*tensors, group, out_features, in_features, rounds_inputs)
    return packed_product(y, x, bias, weight, kernel(bits).linear, (bits, group, rounds_inputs), tensors)


op.define(
    "cpu_linear(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? bias, int bits, int group, "
    "int out_features, int in_features, int rounds_inputs) -> Tensor",
    cpu=_linear,
    fake=lambda x, packed, scale, zero, bias, bits, group, out_features, *_: x.new_empty(*x.shape[:-1], out_features),
    weight=_weight,
)
op.define(
    "cpu_dequantize(Tensor packed, Tensor scale, Tensor? zero_point, int bits, int group, int out_features, "
    "int in_features, ScalarType dtype) -> Tensor",
    cpu=_dequantize,
    fake=lambda packed, scale, zero, bits, group, rows, columns, dtype: packed.new_empty(rows, columns, dtype=dtype),
)
op.define(
    "cpu_rows(Tensor ids, Tensor packed, Tensor scale, Tensor? zero_point, int bits, int group, int out_features, "
    "int in_features, ScalarType dtype) -> Tensor",
    cpu=_rows,
    fake=lambda ids, packed, scale, zero, bits, group, rows, columns, dtype: packed.new_empty(
        *ids.shape, columns, dtype=dtype
    ),
)
