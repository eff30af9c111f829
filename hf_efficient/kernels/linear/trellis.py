"""Products with weights coded along a trellis on a GPU: the op, and the layout of the Triton kernels that calls it."""

import torch

from hf_efficient.kernels import triton_devices
from hf_efficient.kernels.linear import op
from hf_efficient.kernels.linear.layout import FLOATS, RowsLayout


class TrellisTritonLayout(RowsLayout):
    """The layout of the Triton kernels (CUDA, ROCm)."""

    def __init__(self, qweight, scale, bits, in_features, dtype):
        self.out_features, self.in_features, self.bits, self.dtype = len(scale), in_features, bits, dtype
        self.scale = scale
        self.packed, self.places = op.triton_kernels().pack_trellis(qweight, bits=bits, out_features=len(scale))
        self.tensors = {"packed": self.packed, "packed_places": self.places}

    @classmethod
    def pack(cls, qweight, scale, bits, in_features, dtype) -> "TrellisTritonLayout | None":
        """From canonical tensors; None where the kernels do not run."""
        served = dtype in FLOATS and qweight.device.type != "cpu" and triton_devices.serves(qweight.device)
        return cls(qweight, scale, bits, in_features, dtype) if served else None

    def product(self, x, bias):
        return torch.ops.hf_efficient.trellis_linear(x, self.packed, self.places, self.scale, bias, self.bits)

    def dequantize(self):
        return _weight(self.dtype, self.in_features, self.packed, self.places, self.scale, self.bits)

    def canonical(self):
        sizes = dict(out_features=self.out_features, in_features=self.in_features)
        return op.triton_kernels().unpack_trellis(self.packed, bits=self.bits, **sizes)


def _weight(dtype, in_features, packed, places, scale, bits):
    kernels, options = op.triton_kernels(), dict(bits=bits, in_features=in_features)
    if packed.is_cuda:
        return kernels.dequantize_trellis(packed, places, scale, **options, dtype=dtype)
    return kernels.dequantize_trellis_reference(packed, places, scale, **options).to(dtype)


def _cpu(x, packed, places, scale, bias, bits):
    weight = _weight(x.dtype, x.shape[1], packed, places, scale, bits)
    return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


op.define(
    "trellis_linear(Tensor x, Tensor packed, Tensor places, Tensor scale, Tensor? bias, float bits) -> Tensor",
    cpu=_cpu,
    cuda="trellis_linear",
    fake=lambda x, packed, places, scale, bias, bits: x.new_empty(x.shape[0], scale.shape[0]),
    weight=_weight,
)
