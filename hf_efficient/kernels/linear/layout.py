"""Device layouts of weights: their base class, and the layouts that need no kernel of this package."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F


FLOATS = (torch.bfloat16, torch.float16, torch.float32)  # the inputs that kernels take


class Layout:
    """A weight [N, K] as a device multiplies it. It is derived from the canonical tensors of a format and never saved.

    Attributes:
        dtype: of the inputs it takes.
        tensors: what it keeps allocated besides the canonical tensors, by name.
        replaces_qweight: whether the canonical "qweight" may be dropped, because `canonical` gives it back.
        replaces_scale: whether the canonical "scale" may be dropped as well, because `canonical_scale` gives it back.
    """

    dtype: torch.dtype
    tensors: dict[str, torch.Tensor]
    replaces_qweight = True
    replaces_scale = False

    @property
    def native_product(self) -> "Layout | None":
        """The `NativeLayout` whose product is all that `matmul` does; None where there is none."""
        return None

    @property
    def replaced(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Canonical tensor that may be dropped -> what gives it back, bit for bit."""
        scale = {"scale": self.canonical_scale} if self.replaces_scale else {}
        return {"qweight": self.canonical, **scale} if self.replaces_qweight else {}

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] @ W^T + bias [N]: [..., N] in the dtype of x, which is `dtype`."""
        raise NotImplementedError

    def dequantize(self) -> torch.Tensor:
        """The weight [N, K] in `dtype`."""
        raise NotImplementedError

    def canonical(self) -> torch.Tensor:
        """The canonical "qweight", bit for bit."""
        raise NotImplementedError

    def canonical_scale(self) -> torch.Tensor:
        """The canonical "scale", bit for bit."""
        raise NotImplementedError

    def over(self, tensors: dict[str, torch.Tensor]) -> "Layout | None":
        """The layout of another weight of the same scheme, whose `tensors` these are; None where they are not all that
        it reads."""
        return None

    def canonical_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids`, int64 [n], of the canonical "qweight"."""
        return self.canonical()[ids]

    # (ids int64 [...]) -> these rows of the weight, [..., K] in `dtype`, with the bits of `Format.dequantize`; None
    # where the format has to make them of canonical rows
    rows: Callable[[torch.Tensor], torch.Tensor] | None = None


def rows_of(x: torch.Tensor, in_features: int) -> torch.Tensor:
    """x [..., K] as [M, K] with contiguous columns, which the Triton kernels require."""
    rows = x.reshape(-1, in_features)
    return rows if rows.stride(1) == 1 or in_features == 1 else rows.contiguous()


class RowsLayout(Layout):
    """A layout with a `product` of rows: x [M, K], bias -> [M, N]. A subclass sets in_features (K) and out_features
    (N)."""

    def matmul(self, x, bias=None):
        return self.product(rows_of(x, self.in_features), bias).view(*x.shape[:-1], self.out_features)


class TritonRowsLayout(RowsLayout):
    """Codes `packed` in the order of a Triton kernel (CUDA, ROCm). A subclass also sets bits, group_size and dtype."""

    @staticmethod
    def supports(group_size: int | None, dtype: torch.dtype) -> bool:
        return dtype in FLOATS and (group_size in (None, -1) or group_size % 32 == 0)

    @property
    def scheme(self) -> dict[str, int | None]:
        return dict(bits=self.bits, group_size=self.group_size, in_features=self.in_features)


def triton_groups(scale, zero_point, group_size, in_features):
    """(scale, zero_point, group_size) in groups that the Triton kernels serve: a group of another multiple of 32
    becomes several of 32."""
    if group_size is None or group_size <= 64 or group_size % 128 == 0:
        return scale, zero_point, group_size
    repeats, groups = group_size // 32, -(-in_features // 32)
    return *(None if t is None else t.repeat_interleave(repeats, -1)[..., :groups] for t in (scale, zero_point)), 32


class DequantizedLayout(Layout):
    """Serves every device, format and shape: dequantizes the canonical tensors in each call, allocates nothing for
    longer.

    dequantize: () -> the weight [N, K] in dtype.
    """

    replaces_qweight = False
    tensors = {}

    def __init__(self, dequantize: Callable[[], torch.Tensor], dtype: torch.dtype):
        self.dequantize, self.dtype = dequantize, dtype

    def matmul(self, x, bias=None):
        return F.linear(x, self.dequantize(), bias)


class DenseLayout(Layout):
    """A dense weight [N, K] in memory. canonical: () -> the canonical qweight, None where that stays in memory as
    well."""

    def __init__(self, weight: torch.Tensor, canonical: Callable[[], torch.Tensor] | None = None):
        self.weight, self.dtype, self.canonical = weight, weight.dtype, canonical
        self.replaces_qweight, self.tensors = canonical is not None, {"packed": weight}

    def matmul(self, x, bias=None):
        return F.linear(x, self.weight, bias)

    def dequantize(self):
        return self.weight


class RestoredLayout(Layout):
    """The layout of another format with the same scales, and how the canonical tensors of this one come back:
    restore(layout) is the qweight, others[name](layout) another one."""

    def __init__(
        self, layout: Layout, restore: Callable[[Layout], torch.Tensor], **others: Callable[[Layout], torch.Tensor]
    ):
        self.layout, self.restore, self.dtype, self.tensors = layout, restore, layout.dtype, layout.tensors
        self.matmul, self.dequantize, self.others = layout.matmul, layout.dequantize, others
        self.replaces_scale, self.canonical_scale = layout.replaces_scale, layout.canonical_scale

    @property
    def replaced(self):
        others = {name: functools.partial(restore, self.layout) for name, restore in self.others.items()}
        return {**super().replaced, **others}

    @property
    def native_product(self):
        return self.layout.native_product

    def canonical(self):
        return self.restore(self.layout)
