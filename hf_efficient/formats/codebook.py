"""Codes that index a table instead of a regular grid: `w = table[code] * scale`."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hf_efficient.formats.base import divide
from hf_efficient.formats.grouped_codes import GroupedCodes
from hf_efficient.kernels.linear.codebook import codebook_layout, dequantize_codebook
from hf_efficient.kernels.linear.codes import packed_width


_FP4_MAGNITUDES = tuple(value / 12 for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = (*_E2M1_MAGNITUDES, *(-value for value in _E2M1_MAGNITUDES))
TABLES = {
    # 4-bit NormalFloat: quantiles of a normal distribution. QLoRA (https://arxiv.org/abs/2305.14314), appendix E
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    # bitsandbytes' 4-bit float: a sign, two bits of exponent, one of mantissa, in an order of its own
    "fp4": (*_FP4_MAGNITUDES, *(-value for value in _FP4_MAGNITUDES)),
    # the OCP Microscaling Formats 1.0 (https://arxiv.org/abs/2310.10537), and NVIDIA's FP4 with the same codes
    "mxfp4": _E2M1,
    "nvfp4": _E2M1,
}
FP4_BLOCKS = ("mxfp4", "nvfp4")  # their scales are not plain floats
# what the largest weight of a group may become, in the units of E2M1: above 6 it is clipped
_LARGEST = {"mxfp4": (6.0, 4.5, 8.5), "nvfp4": (6.0, 4.0, 5.0, 7.0)}
_E8M0_BIAS, _E8M0_LARGEST = 127, 254  # code 255 is NaN
_E4M3_LARGEST = 448.0
SCALES_AT_ONCE = 256  # quantized scales that share one float32 scale
_ELEMENTS_AT_ONCE = 1 << 20  # float32 elements of a weight that are copied at once: 4 MB


@dataclass(frozen=True)
class CodebookFormat(GroupedCodes):
    """Canonical tensors: "qweight" uint8 (see `kernels.linear.codes`), "scale" [N, G] and, where the table is learned,
    "codebook".

    Args:
        codebook: "nf4" or "fp4", fixed tables of 16 entries in [-1, 1]; "mxfp4" or "nvfp4", the numbers of E2M1 up to
            6; or "kmeans", a learned one in the weight's dtype: [N, 2^bits] (one a row) for group_size -1, else [1,
            2^bits]. In place of "scale", "mxfp4" has "scale_codes" uint8 [N, G] for scale = 2^(code - 127), and "nvfp4"
            has "scale_codes" float8_e4m3fn [N, G] and "scale_scale" float32 [1] for their product.
        bits, group_size: see `GroupedCodes`.
        double_quantization: scales in 8 bits (QLoRA): "scale_codes" uint8 [N, G], a float32 "scale_scale" for each 256
            of them and their mean "scale_mean" in place of "scale"; scale = (code - 128) * scale_scale + scale_mean.
        scale_dtype: of "scale", a name like "float32", where it is not the weight's dtype.
    """

    codebook: str
    bits: int
    group_size: int | None
    double_quantization: bool = False
    scale_dtype: str | None = None

    @property
    def adopted(self) -> bool:
        return self.scale_dtype is not None

    def tables(self, out_features: int) -> int:
        """How many tables a weight has: one a row or one."""
        return out_features if self.codebook == "kmeans" and self.group_size == -1 else 1

    def shapes(self, out_features, in_features):
        per_group = self.per_group(out_features, in_features)
        shapes = {"qweight": (out_features, packed_width(in_features, self.bits))}
        if self.codebook in FP4_BLOCKS:
            shapes |= {"scale_codes": per_group} | ({"scale_scale": (1,)} if self.codebook == "nvfp4" else {})
        elif self.double_quantization:
            blocks = -(-per_group[0] * per_group[1] // SCALES_AT_ONCE)
            shapes |= {"scale_codes": per_group, "scale_scale": (blocks,), "scale_mean": (1,)}
        else:
            shapes["scale"] = per_group
        if self.codebook == "kmeans":
            shapes["codebook"] = self.tables(out_features), 2**self.bits
        return shapes

    def dtypes(self, dtype):
        dtypes = {"qweight": torch.uint8}
        if self.codebook == "mxfp4":
            dtypes["scale_codes"] = torch.uint8
        elif self.codebook == "nvfp4":
            dtypes |= {"scale_codes": torch.float8_e4m3fn, "scale_scale": torch.float32}
        elif self.double_quantization:
            dtypes |= {"scale_codes": torch.uint8, "scale_scale": torch.float32, "scale_mean": torch.float32}
        else:
            dtypes["scale"] = getattr(torch, self.scale_dtype) if self.scale_dtype else dtype
        return dtypes if self.codebook != "kmeans" else {**dtypes, "codebook": dtype}

    def store_scale(
        self, scale: torch.Tensor, dtype: torch.dtype, step: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """float [N, G] (or [1, 1]) -> the tensors that hold it in a weight of `dtype`; `scale` reads them. Each scale
        becomes the nearest that can be stored, a power of two by its logarithm. step: "scale_scale" of "nvfp4", by
        default that of which the largest scale is the largest multiple."""
        if self.codebook == "mxfp4":
            exponent = scale.float().clamp_min(2.0**-_E8M0_BIAS).log2().round_() + _E8M0_BIAS
            return {"scale_codes": exponent.clamp_(0, _E8M0_LARGEST).to(torch.uint8)}
        if self.codebook == "nvfp4":
            step = divide(scale.float().amax(), _E4M3_LARGEST).view(1) if step is None else step
            codes = (scale.float() / torch.where(step == 0, 1, step)).clamp_(max=_E4M3_LARGEST)
            return {"scale_codes": codes.to(torch.float8_e4m3fn), "scale_scale": step}
        if not self.double_quantization:
            return {"scale": scale.to(self.dtypes(dtype)["scale"])}
        mean = scale.double().mean().float()
        rest = F.pad(scale.float().flatten() - mean, (0, -scale.numel() % SCALES_AT_ONCE)).view(-1, SCALES_AT_ONCE)
        step = divide(rest.abs().amax(1), 127)
        codes = (rest / torch.where(step == 0, 1, step)[:, None]).round_().add_(128).to(torch.uint8)
        codes = codes.flatten()[: scale.numel()].view(scale.shape)
        return {"scale_codes": codes, "scale_scale": step, "scale_mean": mean.view(1)}

    def check(self, tensors, in_features):
        super().check(tensors, in_features)
        if "scale_codes" in tensors and not self.scale(tensors).isfinite().all():
            raise ValueError("scale_codes stand for scales that are not finite")

    def scale(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The scales as stored: float32 [..., N, G]."""
        if self.codebook == "mxfp4":
            return torch.exp2(tensors["scale_codes"].float() - _E8M0_BIAS)
        if self.codebook == "nvfp4":
            return tensors["scale_codes"].float() * tensors["scale_scale"][..., None]
        if not self.double_quantization:
            return tensors["scale"].float()
        codes, mean = tensors["scale_codes"], tensors["scale_mean"][..., None]
        step = tensors["scale_scale"].repeat_interleave(SCALES_AT_ONCE, -1)[..., : codes.flatten(-2).shape[-1]]
        return (codes.float() - 128) * step.reshape(codes.shape) + mean

    def table(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """The entries: float32 [..., 1 or N, 2^bits]."""
        if self.codebook == "kmeans":
            return tensors["codebook"].float()
        return torch.tensor([TABLES[self.codebook]], device=tensors["qweight"].device, dtype=torch.float32)

    def grouped(self, values: torch.Tensor) -> torch.Tensor:
        """[N, K] -> float32 [N, G, g]; a short last group is filled with zeros."""
        width = values.shape[1] if self.group_size in (None, -1) else self.group_size
        return F.pad(values.float(), (0, -values.shape[1] % width)).unflatten(1, (-1, width))

    def normalised(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """weight [N, K] divided by its scales [N, G] or [1, 1]: float32 [N, K], contiguous, zeros where a scale is
        0."""
        inverse = 1 / scale.float()
        inverse = torch.where(inverse.isfinite(), inverse, 0)
        return (self.grouped(weight) * inverse[..., None]).flatten(1)[:, : weight.shape[1]].contiguous()

    def nearest(self, weight: torch.Tensor, scale: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """The codes uint8 [N, K] of the entries that are nearest to weight [N, K], of equal entries the first. table is
        [1 or N, 2^bits], scale [N, G] or [1, 1]."""
        entries, order = table.float().sort(stable=True)
        order = order.gather(1, torch.searchsorted(entries, entries)).to(torch.uint8)
        between = (entries[:, 1:] + entries[:, :-1]) / 2
        codes = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
        step = max(1, _ELEMENTS_AT_ONCE // weight.shape[1])
        for first in range(0, len(weight), step):
            rows = slice(first, first + step)
            own = slice(None) if len(table) == 1 else rows
            values = self.normalised(weight[rows], scale if len(scale) == 1 else scale[rows])
            places = torch.searchsorted(between[own].expand(len(values), -1).contiguous(), values)
            codes[rows] = order[own].expand(len(values), -1).gather(1, places)
        return codes

    def round(self, weight: torch.Tensor, importance: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """weight [N, K] -> canonical tensors for a fixed table. The largest magnitude of each group becomes the largest
        entry of the table, with E2M1, whose steps grow, also another number where the squared errors, weighted by
        `importance` [K], are smaller. Every weight takes the entry that is nearest with the scale as it is stored. The
        step of NVFP4's scales is the same whatever number is tried."""
        if self.codebook == "kmeans":
            raise ValueError("codebook='kmeans' has no table to round to: method='kmeans' learns one")
        table = torch.tensor([TABLES[self.codebook]], device=weight.device, dtype=torch.float32)
        largest, best, step = self.absmax(weight), None, None
        for entry in _LARGEST.get(self.codebook, (1.0,)):
            tensors = self.store_scale(divide(largest, entry), weight.dtype, step)
            if self.codebook not in _LARGEST:
                break
            step = tensors.get("scale_scale")
            error = self._error(weight, self.scale(tensors), table, importance)
            found = error, divide(largest, entry)
            best = found if best is None else [torch.where(error < best[0], new, old) for new, old in zip(found, best)]
        else:
            tensors = self.store_scale(best[1], weight.dtype, step)
        return {"qweight": self.pack(self.nearest(weight, self.scale(tensors), table)), **tensors}

    def _error(self, weight, scale, table, importance) -> torch.Tensor:
        """The squared error of each group, float32 [N, G]."""
        errors = []
        for rows in torch.arange(len(weight), device=weight.device).split(max(1, _ELEMENTS_AT_ONCE // weight.shape[1])):
            codes = self.nearest(weight[rows], scale[rows], table).int()
            entries = self.grouped(table[0, codes]) * scale[rows][..., None]
            error = (entries - self.grouped(weight[rows])).square_()
            errors.append((error if importance is None else error * self.grouped(importance[None])).sum(-1))
        return torch.cat(errors)

    def absmax(self, weight: torch.Tensor) -> torch.Tensor:
        """The largest magnitude of each group of weight [N, K]: float32 [N, G], [1, 1] for group_size None."""
        if self.group_size is None:
            return weight.abs().amax().float().view(1, 1)
        step = max(1, _ELEMENTS_AT_ONCE // weight.shape[1])
        return torch.cat([self.grouped(rows).abs().amax(-1) for rows in weight.split(step)])

    def dequantize(self, tensors, in_features, dtype):
        qweight = tensors["qweight"]
        if qweight.dim() == 3:
            experts = range(len(qweight))
            each = [{name: tensor[index] for name, tensor in tensors.items()} for index in experts]
            return torch.stack([self.dequantize(expert, in_features, dtype) for expert in each])
        return dequantize_codebook(*self._ordered(tensors), **self._arguments(in_features, dtype))

    def layout(self, tensors, in_features, dtype):
        layout = codebook_layout(*self._ordered(tensors), **self._arguments(in_features, dtype))
        return layout or self.dequantized_layout(tensors, in_features, dtype)

    def _ordered(self, tensors) -> tuple:
        return tensors["qweight"], self.table(tensors), self.scale(tensors)

    def _arguments(self, in_features: int, dtype: torch.dtype) -> dict:
        return dict(bits=self.bits, group_size=self.group_size, in_features=in_features, dtype=dtype)
