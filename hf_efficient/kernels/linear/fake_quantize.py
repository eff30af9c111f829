"""Fake quantization (Jacob et al., https://arxiv.org/abs/1712.05877): a weight rounded to the values of its codes, and
the gradients of LSQ (https://arxiv.org/abs/1902.08153), each in one pass by a C++ kernel on a CPU, by a Triton kernel
on CUDA and ROCm. The definition, in torch, is `compression.recovery.coded_weights`."""

import ctypes
from dataclasses import dataclass

import torch

from hf_efficient.kernels import triton_devices
from hf_efficient.kernels.linear import op
from hf_efficient.kernels.native import build
from hf_efficient.kernels.native.tiers import once_a_tier


_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _FakeQuantization(ctypes.Structure):
    """`FakeQuantization` of native/fake_quantize/fake_quantize.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "scale", "zero", "rounded", "gradient", "passed", "of_scale")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "width", "type", "works_in_type")),
        *((name, ctypes.c_int64) for name in ("low", "high", "passes_all")),
    ]


@once_a_tier
def _function():
    """The compiled kernel; None where torch's operators serve instead."""
    library = build.load("fake_quantize", (_FakeQuantization,))
    if library is None:
        return None
    library.hf_fake_quantize.argtypes, library.hf_fake_quantize.restype = [ctypes.c_void_p], None
    return library.hf_fake_quantize


def _by_triton(weight: torch.Tensor) -> bool:
    return triton_devices.why_not(weight.device) is None


def _float(*given):
    """Tensors among them in float32, numbers as they are."""
    return (each.float() if isinstance(each, torch.Tensor) else each for each in given)


@dataclass(frozen=True)
class FakeQuantizer:
    """Codes `low` to `high`, in steps of a scale around a zero point, that groups of columns share.

    Args:
        width: columns of a group; the last group of a row may have fewer.
        work: dtype in which codes become weights, the weights' own or float32.
        passes_all: whether the gradient passes where a weight is cut off, too.
    """

    low: int
    high: int
    width: int
    work: torch.dtype
    passes_all: bool = False

    def serves(self, weight: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether a kernel rounds `weight` to values in `dtype`."""
        is_plain = weight.dtype is torch.float32 and weight.dim() == 2 and weight.is_contiguous()
        if not is_plain or dtype not in _TYPES or self.work not in (dtype, torch.float32):
            return False
        return _by_triton(weight) or (weight.device.type == "cpu" and _function() is not None)

    def rounded(self, weight: torch.Tensor, scale: torch.Tensor, zero, dtype: torch.dtype) -> torch.Tensor:
        """weight float32 [N, K] -> the values of its nearest codes [N, K] in `dtype`.

        Args:
            scale: float32, broadcasts to [N, groups]; a weight whose scale is 0 gets the code of its zero point.
            zero: float32 tensor that broadcasts alike, or a number.

        Raises:
            ValueError: shapes that do not fit each other.
        """
        if _by_triton(weight):
            scheme = self._scheme() | {"dtype": dtype, "work": self.work}
            return op.triton_kernels().fake_quantize_weight(weight, *_float(scale, zero), **scheme)
        rounded = torch.empty_like(weight, dtype=dtype)
        self._run(weight, scale, zero, rounded)
        return rounded

    def gradients(
        self, weight: torch.Tensor, scale: torch.Tensor, zero, rounded: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From the gradient of `rounded`, [N, K] in its dtype, those of the weight, float32 [N, K], and of the
        logarithms of the scales, float32 [N, groups].

        Raises:
            ValueError: shapes that do not fit each other.
        """
        if gradient.shape != rounded.shape or gradient.dtype != rounded.dtype:
            given = f"{gradient.dtype} {list(gradient.shape)}"
            raise ValueError(f"gradient {given}: it must be {rounded.dtype} {list(rounded.shape)}")
        gradient = gradient.contiguous()
        if _by_triton(weight):
            scheme = self._scheme() | {"passes_all": self.passes_all}
            arguments = weight, *_float(scale, zero), rounded, gradient
            return op.triton_kernels().fake_quantize_gradients(*arguments, **scheme)
        passed = torch.empty_like(weight)
        of_scale = weight.new_empty(len(weight), self._groups(weight))
        self._run(weight, scale, zero, rounded, gradient, passed, of_scale)
        return passed, of_scale

    def _scheme(self) -> dict[str, int]:
        return {"low": self.low, "high": self.high, "group_size": self.width}

    def _groups(self, weight: torch.Tensor) -> int:
        return -(-weight.shape[1] // self.width)

    def _run(self, weight, scale, zero, rounded, gradient=None, passed=None, of_scale=None) -> None:
        rows, columns = weight.shape
        shape = rows, self._groups(weight)
        zero = zero if isinstance(zero, torch.Tensor) else weight.new_tensor([[zero]])
        for name, given in (("scale", scale), ("zero", zero)):
            if given.dim() != 2 or any(own not in (1, asked) for own, asked in zip(given.shape, shape)):
                raise ValueError(f"{name} {list(given.shape)} does not broadcast to {list(shape)}")
        if rounded.shape != weight.shape or not rounded.is_contiguous():
            raise ValueError(f"rounded {list(rounded.shape)}: it must be {list(weight.shape)}, without gaps")
        scale, zero = (given.float().expand(shape).contiguous() for given in (scale, zero))
        tensors = weight, scale, zero, rounded, gradient, passed, of_scale
        kind = _TYPES[rounded.dtype], self.work is not torch.float32
        torch.get_num_threads()  # gives a new Python thread torch's number of threads: OpenMP keeps one a thread
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        call = _FakeQuantization(*pointers, rows, columns, self.width, *kind, self.low, self.high, self.passes_all)
        _function()(ctypes.addressof(call))
