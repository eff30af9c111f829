"""Linear layers of 2, 3, 4 and 8-bit codes on CPUs whose C++ kernels are worth compiling (see `cpu_build`).

Their layout: rows of the weight stand 16 to a block, a row to each 32-bit lane of a vector of 64 bytes, neighbouring columns
in the two halves of a lane, so that a look-up in registers turns shifted halves into pairs of bfloat16. A line of one vector
holds 32 / bits columns; three of them hold 32 columns of 3 bits, the last two columns in the bits left over. Codes of 8 bits
are kept as sign and magnitude of `code - 127.5`. Scales and zero points (uint8 or float32): [blocks, G, 16].
"""

import ctypes
import functools

import torch
import torch.nn.functional as F

from hf_efficient.kernels.linear.codes import pack_codes, unpack_codes
from hf_efficient.kernels.native import build
from hf_efficient.kernels.native.structs import Product
from hf_efficient.kernels.replay.instructions import packed_product
from hf_efficient.kernels.replay.registry import replays


LANES = 16
COLUMNS = {2: 16, 3: 32, 4: 8, 8: 4}  # of the weight in a line
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ELEMENTS_AT_ONCE = 1 << 21  # of a weight in float32 on its way to another dtype


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
    ]


@functools.lru_cache(65536)  # the op makes a layout for each call
def _kept_weight(*fields) -> tuple[_Weight, int]:
    weight = _Weight(*fields)
    return weight, ctypes.addressof(weight)


def weight_structure(packed, scale, zero_point, group, out_features, in_features, rounds_inputs) -> tuple[_Weight, int]:
    """(the structure of a weight, its address)"""
    zero = None if zero_point is None else zero_point.data_ptr()
    sizes = out_features, in_features, group
    floats = scale.dtype is torch.float32, zero is not None and zero_point.dtype is torch.float32
    return _kept_weight(packed.data_ptr(), scale.data_ptr(), zero, *sizes, floats[0], rounds_inputs, floats[1])


def _places(bits: int):
    """(column, line, shift in the word, shift in the code, mask) of every piece of a code in the lines of a step."""
    for column in range(COLUMNS[bits]):
        pair, half = divmod(column, 2)
        if bits != 3:
            yield column, 0, 16 * half + bits * pair, 0, 2**bits - 1
        elif pair < 15:
            yield column, pair // 5, 16 * half + pair % 5 * 3, 0, 7
        else:
            yield from ((column, bit, 16 * half + 15, bit, 1) for bit in range(3))


def pack_lines(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes [N, K] -> int32 [blocks, steps, lines, 16]."""
    out_features, in_features = codes.shape
    codes = F.pad(codes, (0, -in_features % COLUMNS[bits], 0, -out_features % LANES))
    if bits == 8:
        codes = torch.where(codes < 128, ~codes, codes ^ 128)
    steps = codes.view(-1, LANES, codes.shape[1] // COLUMNS[bits], COLUMNS[bits]).permute(3, 0, 2, 1).contiguous()
    words = codes.new_zeros(*steps.shape[1:3], 3 if bits == 3 else 1, LANES, dtype=torch.int32)
    for column, line, word_shift, code_shift, mask in _places(bits):
        words[:, :, line] |= (steps[column] >> code_shift & mask).int() << word_shift
    return words


def unpack_lines(words: torch.Tensor, bits: int, out_features: int, in_features: int) -> torch.Tensor:
    """The inverse of `pack_lines`."""
    codes = words.new_zeros(COLUMNS[bits], *words.shape[:2], LANES, dtype=torch.uint8)
    for column, line, word_shift, code_shift, mask in _places(bits):
        codes[column] |= ((words[:, :, line] >> word_shift & mask) << code_shift).to(torch.uint8)
    codes = codes.permute(1, 3, 2, 0).reshape(words.shape[0] * LANES, -1)[:out_features, :in_features]
    return torch.where(codes > 127, ~codes, codes ^ 128) if bits == 8 else codes


def _blocks(values: torch.Tensor, out_features: int) -> torch.Tensor:
    """Values per group [N or 1, G] -> [blocks, G, 16]."""
    values = F.pad(values.expand(out_features, -1), (0, 0, 0, -out_features % LANES))
    return values.view(-1, LANES, values.shape[1]).transpose(1, 2).contiguous()


class Kernel:
    """The compiled functions for weights of `bits` bits, on raw pointers."""

    def __init__(self, library: ctypes.CDLL):
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self.linear, self.dequantize = library.hf_linear, library.hf_dequantize
        self.linear.restype = self.dequantize.restype = None
        self.linear.argtypes = [pointer, integer, pointer, integer, ctypes.c_int]
        self.dequantize.argtypes = [pointer, integer, integer, pointer, integer]


@functools.cache
def kernel(bits: int) -> Kernel | None:
    """The kernel for codes of `bits` bits, compiled when it is not there; None where torch's operators are to be used."""
    library = build.load("linear", (Product, _Weight), BITS=bits)
    return library and Kernel(library)


def stored_bits(bits: int, groups: int, group_size: int | None) -> int | None:
    """The bits of a code in memory: the narrowest lines whose borders include those of the groups, None if there are none."""
    return next((b for b in (2, 3, 4, 8) if b >= bits and (groups == 1 or group_size % COLUMNS[b] == 0)), None)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _is_observed(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether something besides autograd wants to see the product: a subclass, a mode, a trace, a functorch transform. They
    see the op; raw pointers would pass them by."""
    return (
        type(x) not in _PLAIN
        or (bias is not None and type(bias) not in _PLAIN)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


class CompiledLayout:
    """A weight [N, K] that a C++ function multiplies: a subclass sets `function`, the `address` of the structure that it
    reads, in_features, out_features and dtype, and has `op`, the product as an operator of torch."""

    replaces_qweight = True

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if (
            torch.compiler.is_compiling()
            or _is_observed(x, bias)
            or (torch.is_grad_enabled() and (x.requires_grad or bias is not None and bias.requires_grad))
        ):
            return self.op(x, bias)
        return self.product(x, bias)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The product without autograd, x in the layout's dtype."""
        dtype = x.dtype
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


class CompiledLinear(CompiledLayout):
    """A weight [N, K] in the layout of the C++ kernels; `packed`, `scale`, `zero_point` in the forms this file tells.
    rounds_inputs: those of bfloat16 are rounded to int8, with a scale for at most 64 columns of a row."""

    def __init__(self, packed, scale, zero_point, stored, group, out_features, in_features, rounds_inputs, bits, dtype):
        self.packed, self.scale, self.zero_point = packed, scale, zero_point
        self.layout = stored, group, out_features, in_features
        self.rounds_inputs = rounds_inputs
        self.out_features, self.in_features, self.bits, self.dtype = out_features, in_features, bits, dtype
        self.function = kernel(stored).linear
        layout = group, out_features, in_features, rounds_inputs
        self.weight, self.address = weight_structure(packed, scale, zero_point, *layout)
        self.tensors = {"packed": packed, "packed_scale": scale}
        if zero_point is not None:
            self.tensors["packed_zero"] = zero_point

    @classmethod
    def pack(
        cls, qweight, scale, zero_point, bits, group_size, in_features, dtype, rounds_inputs=False
    ) -> "CompiledLinear | None":
        """From canonical tensors; None where the kernels do not serve them or are not to be had."""
        out_features, groups = qweight.shape[0], scale.shape[1]
        stored = stored_bits(bits, groups, group_size)
        if dtype not in DTYPES or stored is None or kernel(stored) is None:
            return None
        if zero_point is None and stored != bits:
            zero_point = qweight.new_full(scale.shape, 2 ** (bits - 1))
        packed = pack_lines(unpack_codes(qweight, bits, in_features), stored)
        scale = _blocks(scale if scale.dtype is torch.bfloat16 else scale.float(), out_features)
        zero_point = None if zero_point is None else _blocks(zero_point, out_features)
        group = in_features if groups == 1 else group_size
        layout = stored, group, out_features, in_features
        return cls(packed, scale, zero_point, *layout, rounds_inputs, bits, dtype)

    def op(self, x, bias):
        tensors = x, self.packed, self.scale, self.zero_point, bias
        return torch.ops.hf_efficient.cpu_linear(*tensors, *self.layout, self.rounds_inputs)

    def dequantize(self) -> torch.Tensor:
        """The weight [N, K]."""
        tensors = self.packed, self.scale, self.zero_point
        return torch.ops.hf_efficient.cpu_dequantize(*tensors, *self.layout, self.dtype)

    def decode(self) -> torch.Tensor:
        """The weight [N, K], which no compiler may trace."""
        torch.get_num_threads()  # see _product
        weight = self.packed.new_empty(self.out_features, self.in_features, dtype=self.dtype)
        blocks = len(self.packed)
        step = max(1, _ELEMENTS_AT_ONCE // (LANES * self.in_features))
        for first in range(0, blocks, step):
            rows = weight[first * LANES : (first + step) * LANES]
            tile = self.packed.new_empty(self.in_features, len(rows), dtype=torch.float32)
            kernel(self.layout[0]).dequantize(
                self.address, first, min(blocks, first + step), tile.data_ptr(), len(rows)
            )
            rows.copy_(tile.t())
        return weight

    def qweight(self) -> torch.Tensor:
        """The canonical qweight."""
        codes = unpack_lines(self.packed, self.layout[0], self.out_features, self.in_features)
        return pack_codes(codes, self.bits)


_library = torch.library.Library("hf_efficient", "FRAGMENT")
_library.define(
    "cpu_linear(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? bias, int bits, int group, "
    "int out_features, int in_features, bool rounds_inputs) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "cpu_dequantize(Tensor packed, Tensor scale, Tensor? zero_point, int bits, int group, int out_features, "
    "int in_features, ScalarType dtype) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def _cpu_linear(x, packed, scale, zero_point, bias, bits, group, out_features, in_features, rounds_inputs):
    layout = bits, group, out_features, in_features
    return CompiledLinear(packed, scale, zero_point, *layout, rounds_inputs, bits, x.dtype).product(x, bias)


def _cpu_dequantize(packed, scale, zero_point, bits, group, out_features, in_features, dtype):
    layout = bits, group, out_features, in_features
    return CompiledLinear(packed, scale, zero_point, *layout, False, bits, dtype).decode()


@replays("hf_efficient::cpu_linear")
def _instructions(y, x, packed, scale, zero_point, bias, bits, group, out_features, in_features, rounds_inputs):
    tensors = packed, scale, zero_point
    weight = weight_structure(*tensors, group, out_features, in_features, rounds_inputs)
    return packed_product(y, x, bias, weight, kernel(bits).linear, (bits, group, rounds_inputs), tensors)


_library.impl("cpu_linear", _cpu_linear, "CPU")
_library.impl("cpu_dequantize", _cpu_dequantize, "CPU")


@torch.library.register_fake("hf_efficient::cpu_linear", lib=_library)
def _fake(x, packed, scale, zero_point, bias, bits, group, out_features, in_features, rounds_inputs):
    return x.new_empty(*x.shape[:-1], out_features)


@torch.library.register_fake("hf_efficient::cpu_dequantize", lib=_library)
def _fake_dequantize(packed, scale, zero_point, bits, group, out_features, in_features, dtype):
    return packed.new_empty(out_features, in_features, dtype=dtype)


def _setup(ctx, inputs, output):
    x, packed, scale, zero_point, bias, *ctx.layout, _ = inputs
    ctx.save_for_backward(packed, scale, zero_point)
    ctx.dtypes = x.dtype, None if bias is None else bias.dtype


def _backward(ctx, grad):
    x_dtype, bias_dtype = ctx.dtypes
    grad_x = None
    if ctx.needs_input_grad[0]:
        grad_x = grad @ torch.ops.hf_efficient.cpu_dequantize(*ctx.saved_tensors, *ctx.layout, x_dtype)
    grad_bias = None if bias_dtype is None else grad.reshape(-1, grad.shape[-1]).sum(0).to(bias_dtype)
    return grad_x, None, None, None, grad_bias, None, None, None, None, None


torch.library.register_autograd("hf_efficient::cpu_linear", _backward, setup_context=_setup, lib=_library)
