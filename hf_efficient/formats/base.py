"""What every format answers."""

import functools

import torch

from hf_efficient.kernels.linear.layout import DequantizedLayout


class Format:
    """How the weight [N, K] of a linear layer lies in memory and on disk, as named tensors. Subclasses are frozen
    dataclasses. The codes are called "qweight"; the first dimension of every tensor may stand for experts."""

    checks_codes = False  # whether `check` looks at "qweight", which takes a pass over all weights
    adopted = False  # whether only other libraries' checkpoints hold it, and no method of ours chooses its numbers

    def shapes(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """The shape of each canonical tensor of a weight [out_features, in_features]; none has 0 dimensions."""
        raise NotImplementedError

    def dtypes(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """The dtype of each canonical tensor of a weight of `dtype`."""
        raise NotImplementedError

    def dequantize(self, tensors: dict[str, torch.Tensor], in_features: int, dtype: torch.dtype) -> torch.Tensor:
        """Canonical tensors -> the weight [..., N, in_features] in `dtype`."""
        raise NotImplementedError

    def check(self, tensors: dict[str, torch.Tensor], in_features: int) -> None:
        """Raises ValueError, naming the tensor, for values that no weight of this format has. tensors: those of a weight (on the
        CPU), without "qweight" unless `checks_codes`."""
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not _is_finite(tensor):
                raise ValueError(f"{name} holds NaN or infinity")

    def layout(self, tensors: dict[str, torch.Tensor], in_features: int, dtype: torch.dtype):
        """What computes with these tensors on the device they are on, for inputs of `dtype`: an object to call with (x
        [..., K], bias [N] or None). Its `tensors` are what it keeps allocated; `replaces_qweight` says that they stand for
        "qweight", which `qweight()` gives back bit for bit; `dequantize()` gives the weight [N, K]."""
        return self.dequantized_layout(tensors, in_features, dtype)

    def dequantized_layout(self, tensors, in_features: int, dtype: torch.dtype) -> DequantizedLayout:
        """The layout that serves every device and shape, and allocates nothing."""
        return DequantizedLayout(functools.partial(self.dequantize, tensors, in_features, dtype), dtype)

    def grouped_layout(self, tensors: dict[str, torch.Tensor], in_features: int, dtype: torch.dtype):
        """One layout for all experts of a mixture, or None: one `layout` for each expert then."""
        return None

    def bits_per_weight(self, out_features: int, in_features: int, dtype: torch.dtype) -> float:
        """Bits a weight takes on disk, scales and everything else included."""
        dtypes, total = self.dtypes(dtype), 0
        for name, shape in self.shapes(out_features, in_features).items():
            total += torch.Size(shape).numel() * dtypes[name].itemsize * 8
        return total / (out_features * in_features)


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.dtype is torch.float8_e4m3fn:  # which has no infinity, and NaN with either sign
        return not tensor.numel() or (tensor.view(torch.uint8) & 127).max().item() < 127
    return tensor.isfinite().all().item()
