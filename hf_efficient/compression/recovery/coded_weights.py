"""Weights that are learned under their codes: the forward rounds them as they will be stored, the gradient passes the
rounding straight through, and the scales are learned along (LSQ, https://arxiv.org/abs/1902.08153; LLM-QAT,
https://arxiv.org/abs/2305.17888)."""

import torch
from torch import nn

from hf_efficient.compression.recovery.grids import Blocks, StepGrid, blocks_of, grid_of
from hf_efficient.formats.binary import BinaryFormat
from hf_efficient.formats.codebook import SCALES_AT_ONCE, CodebookFormat
from hf_efficient.formats.group_bits import GroupBitsFormat
from hf_efficient.formats.masked import MaskedFormat
from hf_efficient.formats.ternary import TernaryFormat
from hf_efficient.formats.trellis import TrellisFormat
from hf_efficient.kernels.linear.fake_quantize import FakeQuantizer


FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)  # codes of these have no operators
SCALE_RATE = 2.0  # learning rate of the logarithm of a scale, in units of the weights' rate


class CodedWeight(nn.Module):
    """The weight of one layer, float32 [N, K], as it is learned.

    Attributes:
        weight: the parameter that is rounded, [N, K], in the place where the format multiplies (after the transforms of
            a `TransformedFormat`).
        log_scale: parameter, the logarithm of the scales relative to those of the start; one a block. It does not learn
            where weights have a minimum, and where scales are E4M3 (NVFP4).
        table: parameter of a learned codebook, [1 or N, 2^bits], else None.
        share: how much of the rounding is in effect, 0 to 1; below 1 only while quantization warms up.

    Args:
        format: of the weight itself, without transforms.
        tensors: its canonical tensors.
        dtype: dtype of the layer.
        exact: float32 [N, K], the weight before it was rounded, or None, from which learning starts.
        keeps_codes: whether `exact` is moved to where it rounds to the codes in `tensors`.
    """

    def __init__(self, format, tensors: dict, columns: int, dtype: torch.dtype, exact=None, keeps_codes: bool = True):
        super().__init__()
        self.format, self.dtype, self.share = format, dtype, 1.0
        self.start = {name: tensor.detach() for name, tensor in tensors.items()}
        codes_format, mask = format, None
        if isinstance(format, MaskedFormat):
            codes_format = format.weights
            codes, mask = format.codes(tensors, columns)
        else:
            codes = _unpacked(format, tensors, columns)
        self.codes_format = codes_format
        self.passes_all = isinstance(codes_format, TernaryFormat)  # as BitNet does: a third of the weights is cut off
        self.blocks = blocks_of(codes_format, len(codes), columns)
        self.grid = grid_of(codes_format, tensors)
        is_codebook = isinstance(codes_format, CodebookFormat)
        scale = codes_format.scale(tensors) if is_codebook else tensors["scale"].float()
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("mask", mask, persistent=False)
        columns_kept = tensors.get("outlier_columns")
        self.register_buffer("kept", None if columns_kept is None else columns_kept.long(), persistent=False)
        is_float8 = codes.dtype in FLOAT8
        codes = self.blocks.split(codes.view(torch.uint8)).view(codes.dtype) if is_float8 else self.blocks.split(codes)
        spread = Blocks.scale(scale)
        if isinstance(self.grid, StepGrid):
            codes = codes.float()
        if exact is None:
            start = self.grid.weights(codes, spread, torch.float32)
        elif not keeps_codes:
            start = self.blocks.split(exact)
        elif isinstance(self.grid, StepGrid):
            start = self.grid.start(codes, _divided(self.blocks.split(exact), spread)) * spread
        else:
            start = self.blocks.split(exact)
            found = self.grid.nearest(_divided(start, spread))
            start = torch.where(found.float() == codes.float(), start, self.grid.weights(codes, spread, torch.float32))
        start = self.blocks.join(start).clone()
        if mask is not None:
            start.mul_(mask)
        if self.kept is not None:
            start[:, self.kept] = tensors["outlier_weight"].float()
        self.weight = nn.Parameter(start)
        # E4M3 steps by an eighth: small models came closer to the teacher where these scales stayed
        self.has_fixed_scale = is_codebook and codes_format.codebook == "nvfp4"
        has_minimum = getattr(self.grid, "minimum", None) is not None  # it would move with the scale
        self.log_scale = nn.Parameter(torch.zeros_like(scale), requires_grad=not (has_minimum or self.has_fixed_scale))
        learns_table = is_codebook and codes_format.codebook == "kmeans"
        self.register_parameter("table", nn.Parameter(self.grid.table.clone()) if learns_table else None)

    def groups(self, rate: float) -> list[dict]:
        """Parameters with their learning rates. That of weights counts relative to their root mean square, or to the
        step between two codes where that is smaller: what codes can tell apart is what learning moves."""
        weight = self.weight.detach()
        size = min(weight.square().mean().sqrt().item(), self.grid.step(self.scale, weight))
        groups = [{"params": [self.weight], "lr": rate * size}]
        if self.log_scale.requires_grad:
            groups.append({"params": [self.log_scale], "lr": rate * SCALE_RATE})
        if self.table is not None:
            groups.append({"params": [self.table], "lr": rate * SCALE_RATE * self.table.detach().abs().mean().item()})
        return groups

    def forward(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [N, K] in `dtype`, rounded to the values that it will be stored with."""
        rounded = _Rounded.apply(self.weight, self.log_scale, self.table, self, dtype)
        if self.share < 1:
            exact = self.weight if self.mask is None else self.weight * self.mask
            return torch.lerp(exact.to(dtype), rounded, self.share)
        return rounded

    @torch.no_grad()
    def canonical(self) -> dict[str, torch.Tensor]:
        """The canonical tensors of the weight."""
        self._use_table()
        scale, codes = self.stored_scale(), self.codes()
        dtypes = self.codes_format.dtypes(self.dtype)
        if isinstance(self.codes_format, CodebookFormat):
            own = self._scale_tensors()
            if self.table is not None:
                own["codebook"] = self.table.detach().to(self.dtype)
            return {**self.start, **own, "qweight": self.codes_format.pack(codes)}
        scale = scale.to(dtypes["scale"])
        if isinstance(self.format, MaskedFormat):
            return self.format.pack_affine(codes.to(torch.uint8), scale, self.start.get("zero_point"), self.mask)
        if codes.dtype not in FLOAT8 and dtypes["qweight"] is torch.int8:
            codes = codes.to(torch.int8)
        elif codes.dtype not in FLOAT8:
            codes = codes.to(torch.uint8)
        if self.kept is not None:
            codes = _cleared(codes, self.kept)
        packed = self.codes_format.pack(codes) if hasattr(self.codes_format, "pack") else codes
        tensors = {**self.start, "qweight": packed, "scale": scale}
        if self.kept is not None:
            tensors["outlier_weight"] = self.weight[:, self.kept].to(self.dtype)
        return tensors

    def codes(self) -> torch.Tensor:
        """The nearest codes [N, K]."""
        x = _divided(self.blocks.split(self.weight.detach()), Blocks.scale(self.stored_scale()))
        codes = self.grid.nearest(x)
        if codes.dtype in FLOAT8:
            return self.blocks.join(codes.view(torch.uint8)).view(codes.dtype)
        return self.blocks.join(codes)

    def stored_scale(self) -> torch.Tensor:
        """The scales as they will be stored, in float32."""
        if isinstance(self.codes_format, CodebookFormat):
            return self.codes_format.scale({**self.start, **self._scale_tensors()})
        scale = self.scale * self.log_scale.detach().exp()
        return scale.to(self.codes_format.dtypes(self.dtype)["scale"]).float()

    def quantizer(self, dtype: torch.dtype) -> tuple[FakeQuantizer | None, torch.Tensor | float]:
        """What rounds to values in `dtype` in one pass, with its zero points; None where torch's operators do."""
        grid, blocks = self.grid, self.blocks
        if not isinstance(grid, StepGrid) or grid.minimum is not None or blocks.height not in (1, None):
            return None, 0.0
        zero = grid.zero[:, 0, :, 0] if isinstance(grid.zero, torch.Tensor) else grid.zero
        width = min(blocks.width or blocks.columns, blocks.columns)
        made = FakeQuantizer(grid.low, grid.high, width, grid.work or dtype, self.passes_all)
        return (made if made.serves(self.weight, dtype) else None), zero

    def _scale_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that hold the scales of a codebook. Scales in 8 bits stay on the grid that they had."""
        if self.has_fixed_scale:
            return {}
        scale = self.scale * self.log_scale.detach().exp()
        if not self.codes_format.double_quantization:
            return self.codes_format.store_scale(scale, self.dtype)
        step = self.start["scale_scale"].repeat_interleave(SCALES_AT_ONCE)[: scale.numel()].view(scale.shape)
        codes = (scale - self.start["scale_mean"]) / torch.where(step == 0, 1, step)
        return {"scale_codes": codes.round_().add_(128).clamp_(0, 255).to(torch.uint8)}

    def _use_table(self) -> None:
        if self.table is not None:
            self.grid.table = self.table.detach().to(self.dtype).float()


class _Rounded(torch.autograd.Function):
    """weight float32 [N, K] -> the same in `dtype`, rounded to the grid of `coded`. The gradient of a weight that the
    grid cuts off is 0, but for ternary weights. That of the logarithm of a scale is the sum over its block of gradient
    * (rounded - weight), and gradient * rounded where cut off, which is LSQ's times the scale."""

    @staticmethod
    def forward(ctx, weight, log_scale, table, coded, dtype):
        coded._use_table()
        blocks, grid, scale, codes = coded.blocks, coded.grid, coded.stored_scale(), None
        ctx.quantizer, ctx.zero = coded.quantizer(dtype)
        if ctx.quantizer is not None:
            rounded = ctx.quantizer.rounded(weight, scale, ctx.zero, dtype)
        else:
            spread = Blocks.scale(scale)
            codes = grid.nearest(_divided(blocks.split(weight), spread))
            rounded = blocks.join(grid.weights(codes, spread, dtype))
        if coded.mask is not None:
            rounded = rounded * coded.mask
        if coded.kept is not None:
            rounded[:, coded.kept] = weight[:, coded.kept].to(dtype)
        ctx.coded, ctx.scale = coded, scale
        ctx.save_for_backward(weight, rounded, codes if table is not None else None)
        return rounded

    @staticmethod
    def backward(ctx, gradient):
        weight, rounded, codes = ctx.saved_tensors
        coded, scale, blocks, grid, table = ctx.coded, ctx.scale, ctx.coded.blocks, ctx.coded.grid, None
        gradient = gradient if ctx.quantizer is not None else gradient.float()
        if coded.mask is not None:
            gradient = gradient * coded.mask
        own = gradient if coded.kept is None else gradient.index_fill(1, coded.kept, 0)
        if ctx.quantizer is not None:
            passed, log_scale = ctx.quantizer.gradients(weight, scale, ctx.zero, rounded, own)
        else:
            spread, split = Blocks.scale(scale), blocks.split(own)
            position = grid.shifted(_divided(blocks.split(weight), spread))
            inside = torch.ops.aten.hardtanh_backward(split, position, *grid.bounds)
            error = blocks.split(rounded.float() * own)
            log_scale = error.addcmul_(inside, blocks.split(weight), value=-1).sum((1, 3))
            passed = blocks.join(split if coded.passes_all else inside)
        if codes is not None:
            rows = len(coded.table)
            flat = codes.flatten(2).flatten(0, 1).long()
            each = (split * spread).flatten(2).flatten(0, 1)
            table = torch.zeros(len(flat), coded.table.shape[1], device=flat.device, dtype=torch.float32).scatter_add_(
                1, flat, each
            )
            table = table if rows > 1 else table.sum(0, keepdim=True)
        if coded.kept is not None:
            passed[:, coded.kept] = gradient[:, coded.kept].float()
        return passed, log_scale.sum_to_size(coded.scale.shape), table, None, None


class TrellisFactors(nn.Module):
    """What of a weight along a trellis, or of binary codes, is no code: a factor a row, of which the logarithm is
    learned (as QTIP, https://arxiv.org/abs/2406.11235, tunes its signs). The codes stay."""

    share = 1.0

    def __init__(self, format, tensors: dict[str, torch.Tensor], columns: int, dtype: torch.dtype):
        super().__init__()
        self.start, self.dtype = {name: tensor.detach() for name, tensor in tensors.items()}, dtype
        ones = torch.ones_like(tensors["scale"])
        values = format.dequantize({**tensors, "scale": ones}, columns, torch.float32)
        self.register_buffer("values", values, persistent=False)
        self.register_buffer("scale", tensors["scale"].float(), persistent=False)
        self.log_scale = nn.Parameter(torch.zeros_like(self.scale))

    def groups(self, rate: float) -> list[dict]:
        return [{"params": [self.log_scale], "lr": rate * SCALE_RATE}]

    def forward(self, dtype: torch.dtype) -> torch.Tensor:
        exact = self.scale * self.log_scale.exp()
        scale = exact + (exact.to(self.dtype).float() - exact).detach()
        return (self.values * scale).to(dtype)

    @torch.no_grad()
    def canonical(self) -> dict[str, torch.Tensor]:
        return {**self.start, "scale": (self.scale * self.log_scale.exp()).to(self.dtype)}


def coded_weight(format, tensors: dict, columns: int, dtype: torch.dtype, exact=None, keeps_codes: bool = True):
    """The `CodedWeight` of a weight in `format`, or what takes its place along a trellis and for binary codes.

    Raises:
        ValueError: a format with bits a group."""
    if isinstance(format, GroupBitsFormat):
        raise ValueError("layers with bits a group (method='slim_llm') are not trained: train adapters on them")
    if isinstance(format, (TrellisFormat, BinaryFormat)):
        return TrellisFactors(format, tensors, columns, dtype)
    return CodedWeight(format, tensors, columns, dtype, exact, keeps_codes)


def _unpacked(format, tensors: dict[str, torch.Tensor], columns: int) -> torch.Tensor:
    return format.unpack(tensors["qweight"], columns) if hasattr(format, "unpack") else tensors["qweight"]


def _divided(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x / scale, 0 where the scale is 0; new memory."""
    inverse = 1 / scale
    return x * torch.where(inverse.isfinite(), inverse, 0)


def _cleared(codes: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """`codes` with 0 in `columns`."""
    if codes.dtype in FLOAT8:
        return codes.view(torch.uint8).index_fill(1, columns, 0).view(codes.dtype)
    return codes.index_fill(1, columns, 0)
