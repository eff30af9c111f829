"""Products with 2:4 sparse weights: the op, and the layout of the Triton kernels that calls it. Elsewhere than on a GPU
the op expands the weight for an ordinary product."""

import torch

from hf_efficient.kernels.linear import op
from hf_efficient.kernels.linear.layout import FLOATS, RowsLayout


class Sparse24TritonLayout(RowsLayout):
    """The layout of the Triton kernels (CUDA, ROCm): kept values or 4-bit codes, and their places in each group of
    four. scale and zero_point are the canonical tensors. `RestoredLayout` adds what makes the canonical qweight of
    `kept()` and the canonical places of `mask()`."""

    def __init__(self, values, places, scale, zero_point, group_size, out_features, in_features, dtype):
        self.stored = dict(values=values, places=places, scale=scale, zero_point=zero_point)
        self.scheme = dict(group_size=group_size, out_features=out_features, in_features=in_features)
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        self.tensors = {"packed": values, "packed_places": places}

    @classmethod
    def pack(
        cls, values, mask, scale=None, zero_point=None, group_size=None, *, dtype
    ) -> "Sparse24TritonLayout | None":
        """From the weight or its 4-bit codes [N, K] and the mask of what is kept, bool [N, K], exactly two of four;
        None where the kernels do not serve it."""
        served = values.dtype is dtype if scale is None else group_size == -1 or (group_size and group_size % 64 == 0)
        if dtype not in FLOATS or not served:
            return None
        kernels = op.triton_kernels()
        pack = kernels.pack_sparse24 if scale is None else kernels.pack_sparse24_codes
        return cls(*pack(values, kept=mask), scale, zero_point, group_size, *values.shape, dtype)

    def product(self, x, bias):
        return torch.ops.hf_efficient.sparse24_linear(x, *self.stored.values(), bias, *self.scheme.values())

    def dequantize(self):
        return op.triton_kernels().dequantize_sparse24(**self.stored, **self.scheme, dtype=self.dtype)

    def kept(self) -> torch.Tensor:
        """The kept values or codes [N, K / 2]."""
        weight, mask = self._unpacked()
        return weight[mask].view(self.out_features, -1)

    def mask(self) -> torch.Tensor:
        """Which weights are kept: bool [N, K]."""
        return self._unpacked()[1]

    def _unpacked(self) -> tuple[torch.Tensor, torch.Tensor]:
        stored = self.stored["values"], self.stored["places"], self.out_features, self.in_features
        return op.triton_kernels().unpack_sparse24(*stored)


def _weight(dtype, _, **stored_and_scheme):
    return op.triton_kernels().dequantize_sparse24(**stored_and_scheme, dtype=dtype)


def _cpu(x, values, places, scale, zero_point, bias, group_size, out_features, in_features):
    scheme = dict(group_size=group_size, out_features=out_features, in_features=in_features)
    weight = op.triton_kernels().dequantize_sparse24(values, places, scale, zero_point, **scheme, dtype=x.dtype)
    return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


op.define(
    "sparse24_linear(Tensor x, Tensor values, Tensor places, Tensor? scale, Tensor? zero_point, Tensor? bias, "
    "int? group_size, int out_features, int in_features) -> Tensor",
    cpu=_cpu,
    cuda="sparse24_linear",
    fake=lambda x, values, places, scale, zero, bias, group, out_features, _: x.new_empty(x.shape[0], out_features),
    weight=_weight,
)
