"""Products of all experts of a mixture on a CPU: one call of the C++ interpreter of `native/replay`, which runs the
product of each expert that has rows."""

import ctypes
import functools

import torch

from hf_efficient.kernels.linear.layout import Layout, rows_of
from hf_efficient.kernels.linear.native_cpu import NativeLayout, is_observed
from hf_efficient.kernels.native.structs import Product
from hf_efficient.kernels.replay.instructions import OPS, TYPES, Instruction, interpreter


_WORD = 8  # bytes of every field of both structures
_ROWS = Instruction.sizes.offset // _WORD + 2
_X, _WEIGHT = Instruction.a.offset // _WORD, Instruction.weight.offset // _WORD
_BIAS, _Y = Product.bias.offset // _WORD, Product.y.offset // _WORD


class NativeExperts:
    """The layouts of all experts, of one dtype and shape; their C++ functions may differ. Use `of`.

    dtype: of the inputs.
    """

    def __init__(self, layouts: list[NativeLayout]):
        first = layouts[0]
        self._layouts, self.dtype, self.in_features = layouts, first.dtype, first.in_features
        self.out_features = first.out_features
        self._in = torch.bfloat16 if first.dtype is torch.bfloat16 else torch.float32  # what the function reads
        described = [_described(layout, TYPES[self._in]) for layout in layouts]
        self._products, self._calls = (torch.stack(words) for words in zip(*described))

    @classmethod
    def of(cls, layouts: list[Layout]) -> "NativeExperts | None":
        """None where an expert is multiplied by anything else than a C++ function, and where experts differ."""
        native = [layout.native_product for layout in layouts]
        if None in native or interpreter() is None:
            return None
        kinds = {(x.dtype, x.in_features, x.out_features) for x in native}
        return cls(native) if len(kinds) == 1 else None

    def serves(self, x: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Whether `matmul` takes x and bias [E, N]: no gradient passes, and no mode has to see the products."""
        tensors = [t for t in (x, bias) if t is not None]
        needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        return (
            all(t.dtype is self.dtype and t.is_cpu for t in tensors)
            and not needs_gradient
            and not torch.compiler.is_compiling()
            and not is_observed(x, bias)
        )

    def matmul(self, x: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [R, K], whose rows offsets[e] to offsets[e + 1] (int32 [E + 1]) belong to expert e; bias [E, N] -> [R, N],
        with the bits of one product an expert."""
        torch.get_num_threads()  # gives a new Python thread torch's number of threads: OpenMP keeps one a thread
        x, dtype = rows_of(x, self.in_features).to(self._in).contiguous(), x.dtype
        bias = None if bias is None else bias.to(self._in).contiguous()
        counts = offsets.long().diff()
        y, active = x.new_empty(len(x), self.out_features), counts.nonzero()[:, 0]
        rows, products = counts[active], self._products[active]
        before = (rows.cumsum(0) - rows) * self._in.itemsize
        products[:, _Y] = y.data_ptr() + before * self.out_features
        if bias is not None:
            products[:, _BIAS] = bias.data_ptr() + active * (self.out_features * self._in.itemsize)
        calls = self._calls[active]
        calls[:, _ROWS], calls[:, _X] = rows, x.data_ptr() + before * self.in_features
        calls[:, _WEIGHT] = products.data_ptr() + torch.arange(len(active)) * ctypes.sizeof(Product)
        interpreter()(calls.data_ptr(), len(active))
        return y.to(dtype)


def is_available() -> bool:
    """Whether this CPU runs all experts in one call, where their formats have C++ products."""
    return interpreter() is not None


def _described(layout: NativeLayout, type: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `Product` and the `Instruction` of a layout as int64 words, made once."""
    if "words" not in layout.__dict__:
        call = Instruction(OPS["LINEAR"])
        call.sizes[1], call.a.type = 1, type
        call.linear = ctypes.cast(layout.function, ctypes.c_void_p).value
        structures = Product(layout.address), call
        layout.words = tuple(torch.frombuffer(bytearray(each), dtype=torch.int64) for each in structures)
    return layout.words


class ExpertLayouts(list):
    """The layout of each expert."""

    @functools.cached_property
    def grouped(self) -> NativeExperts | None:
        """All of them in one call, where a CPU has that."""
        return NativeExperts.of(self)
