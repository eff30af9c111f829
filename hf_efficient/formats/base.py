"""The base class of formats."""

import functools

import torch

from hf_efficient.kernels.linear.layout import DequantizedLayout, Layout


def divide(values: torch.Tensor, number: float) -> torch.Tensor:
    """values / number, rounded once on every device. Of a division by a number of Python torch makes a product with its
    reciprocal on CUDA, which is often the float next to the quotient."""
    return values / values.new_full((), number)


class Format:
    """How the weight [N, K] of a linear layer lies in memory and on disk, as named canonical tensors.

    Subclasses are frozen dataclasses. The codes (or values) are called "qweight". Every tensor may have a first
    dimension of experts.

    Attributes:
        rounds_inputs: whether products round their inputs, too, so that the dequantized weight computes something else.
        checks_codes: whether `check` reads "qweight", which is a pass over all weights.
        whole: why a process cannot hold a part of such a weight; None where it can.
        adopted: whether the format occurs only in other libraries' checkpoints, and no method of ours quantizes to it.
        experts: the number of experts whose weights it describes together; None: one weight, or those of any number of
            experts alike.
    """

    rounds_inputs = False
    checks_codes = False
    adopted = False
    whole: str | None = None
    experts: int | None = None

    def shapes(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """The shape of each canonical tensor of a weight [out_features, in_features]; none has 0 dimensions."""
        raise NotImplementedError

    def dtypes(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """The dtype of each canonical tensor of a weight of `dtype`."""
        raise NotImplementedError

    def blank(self, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The canonical tensors of some weight, as far as possible zeros: enough to make a layout of its size."""
        dtypes, shapes = self.dtypes(dtype), self.shapes(out_features, in_features)
        return {name: torch.zeros(shape, dtype=dtypes[name]) for name, shape in shapes.items()}

    def dequantize(self, tensors: dict[str, torch.Tensor], in_features: int, dtype: torch.dtype) -> torch.Tensor:
        """Canonical tensors -> the weight [..., N, in_features] in `dtype`."""
        raise NotImplementedError

    def check(self, tensors: dict[str, torch.Tensor], in_features: int) -> None:
        """Refuses values that no weight of this format has.

        Args:
            tensors: canonical tensors on the CPU, without "qweight" unless `checks_codes`.

        Raises:
            ValueError: with the name of the tensor.
        """
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not _is_finite(tensor):
                raise ValueError(f"{name} holds NaN or infinity")

    def expert(self, index: int) -> "Format":
        """The format of one of several experts."""
        return self

    def stacked_shapes(self, experts: int, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the canonical tensors of `experts` weights [out_features, in_features] together."""
        return {name: (experts, *shape) for name, shape in self.shapes(out_features, in_features).items()}

    def stack(self, each: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """The canonical tensors, or some of them, of all experts together, of those of each."""
        return {name: torch.stack([own[name] for own in each]) for name in each[0]}

    def unstack(self, tensors: dict[str, torch.Tensor], index: int, in_features: int) -> dict[str, torch.Tensor]:
        """Views of the canonical tensors of one expert, of those of all together."""
        return {name: tensor[index] for name, tensor in tensors.items()}

    def layout(self, tensors: dict[str, torch.Tensor], in_features: int, dtype: torch.dtype) -> Layout:
        """What multiplies inputs of `dtype` with this weight on the device of `tensors`."""
        return self.dequantized_layout(tensors, in_features, dtype)

    def dequantized_layout(self, tensors, in_features: int, dtype: torch.dtype) -> Layout:
        """The layout that serves every device and shape and keeps nothing allocated. It rounds no inputs."""
        return DequantizedLayout(functools.partial(self.dequantize, tensors, in_features, dtype), dtype)

    def grouped_layout(self, tensors: dict[str, torch.Tensor], in_features: int, dtype: torch.dtype) -> Layout | None:
        """One layout for all experts of a mixture; None where each expert has a `layout` of its own."""
        return None

    def bits_per_weight(self, out_features: int, in_features: int, dtype: torch.dtype) -> float:
        """Bits on disk for each weight, all canonical tensors included."""
        dtypes, total = self.dtypes(dtype), 0
        for name, shape in self.shapes(out_features, in_features).items():
            total += torch.Size(shape).numel() * dtypes[name].itemsize * 8
        return total / (out_features * in_features)


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.dtype is torch.float8_e4m3fn:  # which has no infinity, and NaN with either sign
        return not tensor.numel() or (tensor.view(torch.uint8) & 127).max().item() < 127
    if tensor.dtype is torch.float8_e5m2:
        return not tensor.numel() or (tensor.view(torch.uint8) & 127).max().item() < 124
    return tensor.isfinite().all().item()


def even_mask(out_features: int, in_features: int, kept: int) -> torch.Tensor:
    """A mask bool [out_features, in_features] that keeps `kept` weights at even distances."""
    count = out_features * in_features
    return (torch.arange(count + 1) * kept // count).diff().bool().view(out_features, in_features)
