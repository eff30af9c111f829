"""Compressed linear layers while they are trained: what they compute is what their packed form will compute."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from hf_efficient.bit_linear import StraightThrough
from hf_efficient.compression.recovery.coded_weights import SCALE_RATE, coded_weight
from hf_efficient.formats.trellis import TrellisFormat
from hf_efficient.formats.w8a8 import BLOCK, Float8Format
from hf_efficient.kernels.hadamard import rotate
from hf_efficient.kernels.linear.w8a8 import quantize
from hf_efficient.layers import BiasApartLinear, EfficientLinear
from hf_efficient.methods import inner_format


class CodedLinear(nn.Linear):
    """Takes the place of an `EfficientLinear` with codes while it is trained. Computes in the dtype of its input.

    Attributes:
        coded: `CodedWeight` or `TrellisFactors`, with the parameters.
        log_input_scale: parameter [K], for trellis weights whose inputs are scaled: the logarithm of what these
            factors are multiplied by. Else None.
        norm_weight: parameter [K], the float32 weight of the norm before the layer, where it has one.

    Args:
        exact, keeps_codes: see `CodedWeight`.
    """

    def __init__(self, origin: EfficientLinear, exact: torch.Tensor | None = None, keeps_codes: bool = True):
        nn.Module.__init__(self)
        self._origin = (origin,)  # a tuple, so that it does not become a submodule
        self.in_features, self.out_features = origin.in_features, origin.out_features
        self.transposed = origin.transposed
        self.format, self.inner = origin.format, inner_format(origin.format)
        self.bias, dtype = origin.bias, origin.weight.dtype
        tensors = {name: tensor.detach() for name, tensor in origin.canonical().items()}
        own = self.inner.shapes(self.out_features, self.in_features)
        self.transform = {name: tensor for name, tensor in tensors.items() if name not in own}
        stored = {name: tensors[name] for name in own}
        self.coded = coded_weight(self.inner, stored, self.in_features, dtype, self._stored(exact), keeps_codes)
        self.inputs = {name: stored[name] for name in getattr(self.inner, "activation_tensors", ())}
        learns = isinstance(self.inner, TrellisFormat) and "input_scale" in self.transform
        start = torch.zeros_like(self.transform["input_scale"], dtype=torch.float32) if learns else None
        self.register_parameter("log_input_scale", None if start is None else nn.Parameter(start))
        self.rounds_inputs = self.inner.rounds_inputs
        norm = getattr(origin, "rms_norm", None)
        weight = None if norm is None else nn.Parameter(norm.weight.detach().float())
        self.register_parameter("norm_weight", weight)
        self.train(origin.training)

    @property
    def weight(self) -> torch.Tensor:
        """The weight [N, K] that acts on the transformed input, without a gradient: other code reads its dtype."""
        return getattr(self.coded, "weight", self.coded.log_scale).detach()

    def groups(self, rate: float) -> list[dict]:
        """Parameters with their learning rates."""
        groups = self.coded.groups(rate)
        own = [parameter for parameter in (self.log_input_scale, self.norm_weight) if parameter is not None]
        return [*groups, {"params": own, "lr": rate * SCALE_RATE}] if own else groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.norm_weight is not None:
            x = functional_call(self._origin[0].rms_norm, {"weight": self.norm_weight.to(x.dtype)}, (x,))
        x = self._transformed(x)
        if self.rounds_inputs:
            rounded = StraightThrough.apply(x, self._rounded)
            x = rounded if self.coded.share == 1 else torch.lerp(x, rounded, self.coded.share)
        weight = self.coded(x.dtype)
        if isinstance(self._origin[0], BiasApartLinear) and self.bias is not None:
            return F.linear(x, weight) + self.bias
        return F.linear(x, weight, self.bias)

    def dtype(self) -> torch.dtype:
        """Dtype of the layer before and after training."""
        return self._origin[0].weight.dtype

    def is_finite(self) -> bool:
        return all(parameter.isfinite().all() for name, parameter in self.named_parameters() if name != "bias")

    @torch.no_grad()
    def packed(self) -> EfficientLinear:
        """The original layer with this weight."""
        origin = self._origin[0].to(self.coded.log_scale.device)
        origin.restore_canonical()
        tensors = self.coded.canonical()
        if self.log_input_scale is not None:
            tensors["input_scale"] = self._input_scale()
        for name, tensor in tensors.items():
            if origin._parameters[name] is not tensor:
                origin._parameters[name] = nn.Parameter(tensor, requires_grad=False)
        if self.norm_weight is not None:
            origin.rms_norm.weight.copy_(self.norm_weight)
        return origin.train(self.training)

    def _stored(self, exact: torch.Tensor | None) -> torch.Tensor | None:
        """A weight [N, K] that acts on the plain input -> the one that acts on the transformed input."""
        if exact is None:
            return None
        if "input_order" in self.transform:
            exact = exact[:, self.transform["input_order"].long()]
        if "input_scale" in self.transform:
            scale = self.transform["input_scale"].float()
            exact = exact / torch.where(scale == 0, 1, scale)
        return rotate(exact, self.transform["rotation_signs"]) if "rotation_signs" in self.transform else exact

    def _input_scale(self) -> torch.Tensor:
        """The factors of the inputs [K], in the dtype that they are stored in."""
        scale = self.transform["input_scale"]
        if self.log_input_scale is None:
            return scale
        exact = scale.float() * self.log_input_scale.exp()
        return StraightThrough.apply(exact, lambda exact: exact.to(scale.dtype).float()).to(scale.dtype)

    def _transformed(self, x: torch.Tensor) -> torch.Tensor:
        if "input_order" in self.transform:
            x = x.index_select(-1, self.transform["input_order"].long())
        if "input_scale" in self.transform:
            x = x * self._input_scale().to(x.dtype)
        if "rotation_signs" in self.transform:
            x = rotate(x, self.transform["rotation_signs"].to(x.dtype))
        rounded = getattr(self.format, "rounded", None)
        return x if rounded is None else rounded(x)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K], rounded to 8 bits as the format rounds it; columns that it does not round stay."""
        rows, format = x.flatten(0, -2), self.inner
        kept = self.coded.kept
        threshold = getattr(format, "outlier_threshold", None)
        if threshold is not None:
            kept = (rows.abs() >= threshold).any(0).nonzero()[:, 0]
        kind = "int8_asymmetric" if getattr(format, "asymmetric", False) else "int8"
        if isinstance(format, Float8Format):
            kind = "fp8_block" if format.weights == "block" else "fp8"
        given = rows if kept is None else rows.index_fill(1, kept, 0)
        static = self.inputs.get("activation_scale"), self.inputs.get("activation_zero_point")
        codes, scale, zero = quantize(given, kind, *static)
        values = codes.float()
        if zero is not None:
            values -= zero.float()
        if kind == "fp8_block":
            scale = scale.repeat_interleave(BLOCK, 1)[:, : rows.shape[1]]
        values = (values * scale).to(x.dtype)
        if kept is not None:
            values[:, kept] = rows[:, kept]
        return values.view(x.shape)
