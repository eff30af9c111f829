"""Weights in 8 bits whose inputs are rounded to 8 bits as well: int8 and float8."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_efficient.formats.base import Format
from hf_efficient.kernels import triton_devices
from hf_efficient.kernels.linear.w8a8_layouts import float8_layout, int8_layout


BLOCK = 128


@dataclass(frozen=True)
class Int8Format(Format):
    """w = (code - zero_point) * scale.

    Canonical tensors: "qweight" int8 [N, K]; "scale" float32, [N, 1] where `per_channel`, else [1, 1]; "zero_point"
    int8 like "scale", where `zero_point`; "activation_scale" float32 [1], where `static`, and "activation_zero_point"
    int8 [1], where `asymmetric` as well; with n = `outlier_columns`, at most K, "outlier_columns" int32 [n] and
    "outlier_weight" [N, n] in the weight's dtype: columns in which neither the weight nor the input is rounded. Their
    codes are 0.

    Inputs that are not `static` have one scale a token. With an `outlier_threshold`, LLM.int8() decides in each call
    which of their columns are not rounded.
    """

    per_channel: bool = True
    zero_point: bool = False
    asymmetric: bool = False
    static: bool = False
    outlier_threshold: float | None = None
    outlier_columns: int = 0
    rounds_inputs: ClassVar[bool] = True
    largest: ClassVar[int] = 127  # code of a symmetric grid
    largest_input: ClassVar[int] = 127

    def shapes(self, out_features, in_features):
        per_row = (out_features if self.per_channel else 1, 1)
        shapes = {"qweight": (out_features, in_features), "scale": per_row}
        if self.zero_point:
            shapes["zero_point"] = per_row
        if self.static:
            shapes.update({name: (1,) for name in self.activation_tensors})
        return {**shapes, **_outlier_shapes(self, out_features, in_features)}

    def dtypes(self, dtype):
        dtypes = {
            "qweight": torch.int8,
            "scale": torch.float32,
            "zero_point": torch.int8,
            "activation_scale": torch.float32,
            "activation_zero_point": torch.int8,
            "outlier_columns": torch.int32,
            "outlier_weight": dtype,
        }
        return {name: dtypes[name] for name in self.shapes(1, 1)}

    @property
    def activation_tensors(self) -> tuple[str, ...]:
        """The canonical tensors of static inputs."""
        return ("activation_scale", "activation_zero_point")[: 1 + self.asymmetric] if self.static else ()

    def check(self, tensors, in_features):
        super().check(tensors, in_features)
        _check_activations(tensors, in_features)

    def dequantize(self, tensors, in_features, dtype):
        numbers = tensors["qweight"].float()
        if self.zero_point:
            numbers -= tensors["zero_point"].float()
        return _with_outliers(numbers.mul_(tensors["scale"]).to(dtype), tensors)

    def layout(self, tensors, in_features, dtype):
        device = tensors["qweight"].device
        if device.type != "cpu" and not triton_devices.serves(device):
            return self.dequantized_layout(tensors, in_features, dtype)
        format = "int8_asymmetric" if self.asymmetric else "int8"
        return int8_layout(tensors, dtype, format, self.outlier_threshold)


@dataclass(frozen=True)
class Float8Format(Format):
    """w = code * scale with codes in float8 E4M3, whose largest number is 448, or in E5M2 (57344) where `is_e5m2`.
    Inputs are rounded to E4M3.

    Canonical tensors: "qweight" float8_e4m3fn or float8_e5m2 [N, K]; "scale" float32 [N, 1] (`weights` "channel"),
    [1, 1] ("tensor") or [ceil(N / 128), ceil(K / 128)] ("block"); "activation_scale" float32 [1], where `static`;
    "outlier_columns" and "outlier_weight" as in `Int8Format`. Inputs that are not `static` have one scale a token, with
    "block" one for each 128 columns of a token.
    """

    weights: str = "channel"
    static: bool = False
    outlier_columns: int = 0
    is_e5m2: bool = False
    rounds_inputs: ClassVar[bool] = True
    largest_input: ClassVar[int] = 448

    @property
    def codes_dtype(self) -> torch.dtype:
        return torch.float8_e5m2 if self.is_e5m2 else torch.float8_e4m3fn

    @property
    def largest(self) -> int:
        """The largest code."""
        return int(torch.finfo(self.codes_dtype).max)

    def shapes(self, out_features, in_features):
        scales = {
            "channel": (out_features, 1),
            "tensor": (1, 1),
            "block": (-(-out_features // BLOCK), -(-in_features // BLOCK)),
        }
        shapes = {"qweight": (out_features, in_features), "scale": scales[self.weights]}
        shapes.update({name: (1,) for name in self.activation_tensors})
        return {**shapes, **_outlier_shapes(self, out_features, in_features)}

    def dtypes(self, dtype):
        dtypes = {"qweight": self.codes_dtype, "outlier_columns": torch.int32, "outlier_weight": dtype}
        return {name: dtypes.get(name, torch.float32) for name in self.shapes(1, 1)}

    @property
    def activation_tensors(self) -> tuple[str, ...]:
        """The canonical tensors of static inputs."""
        return ("activation_scale",) if self.static else ()

    checks_codes = True  # for NaN

    def check(self, tensors, in_features):
        super().check(tensors, in_features)
        _check_activations(tensors, in_features)

    def dequantize(self, tensors, in_features, dtype):
        codes, scale = tensors["qweight"], tensors["scale"]
        if self.weights == "block":
            scale = expand_blocks(scale, codes.shape[-2], in_features)
        return _with_outliers(codes.float().mul_(scale).to(dtype), tensors)

    def layout(self, tensors, in_features, dtype):
        device = tensors["qweight"].device
        if device.type != "cpu" and not triton_devices.serves(device):
            return self.dequantized_layout(tensors, in_features, dtype)
        return float8_layout(tensors, dtype, self.weights == "block")


def _outlier_shapes(format: Format, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
    count = min(format.outlier_columns, in_features)
    return {"outlier_columns": (count,), "outlier_weight": (out_features, count)} if count else {}


def _check_activations(tensors: dict[str, torch.Tensor], in_features: int) -> None:
    """Raises ValueError for a scale of inputs that is not positive, or outlier columns that are not different
    columns."""
    scale, columns = tensors.get("activation_scale"), tensors.get("outlier_columns")
    if scale is not None and not (scale > 0).all():
        raise ValueError(f"activation_scale holds {scale.min().item()}, expected positive numbers")
    if columns is not None:
        ordered = columns.sort(-1).values
        if ordered.min() < 0 or ordered.max() >= in_features or (ordered.diff(dim=-1) == 0).any():
            raise ValueError(f"outlier_columns are not different columns from 0 to {in_features - 1}")


def _with_outliers(weight: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Puts the columns that are not rounded into `weight` [..., N, K], in place."""
    if "outlier_columns" in tensors:
        columns, kept = tensors["outlier_columns"].long(), tensors["outlier_weight"].to(weight.dtype)
        weight.scatter_(-1, columns[..., None, :].expand_as(kept), kept)
    return weight


def expand_blocks(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[..., ceil(rows / 128), ceil(columns / 128)] -> [..., rows, columns]."""
    return values.repeat_interleave(BLOCK, -2)[..., :rows, :].repeat_interleave(BLOCK, -1)[..., :columns]
