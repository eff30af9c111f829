"""The values that the weights of a format can have: the `nearest` codes of weights in units of their scales, and the
`weights` that codes stand for. What quantization-aware training rounds to.

Grids are those of the formats: symmetric ones, ones with integer or float zero points (with a zero point of 1.5 the
balanced grid of 2 bits of ParetoQ, https://arxiv.org/abs/2502.02631), ternary ones, tables, and float8."""

import math
from dataclasses import dataclass

import torch

from hf_efficient.formats.affine import AffineFormat
from hf_efficient.formats.codebook import CodebookFormat
from hf_efficient.formats.ternary import TernaryFormat
from hf_efficient.formats.w8a8 import BLOCK, Float8Format, Int8Format


MARGIN = 0.49  # largest distance of a weight from its code at the start, in steps


@dataclass
class Blocks:
    """How the weights of [rows, columns] that share a scale are brought together: `split` gives a view that the
    `scale` broadcasts against.

    Args:
        height, width: of a block; None: all rows, all columns.
    """

    rows: int
    columns: int
    height: int | None = 1
    width: int | None = None

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """[N, K] -> [N / height, height, K / width, width]; blocks at the edges are filled with zeros."""
        height, width = self.height or self.rows, min(self.width or self.columns, self.columns)
        if self.rows % height or self.columns % width:
            x = torch.nn.functional.pad(x, (0, -self.columns % width, 0, -self.rows % height))
        return x.unflatten(1, (-1, width)).unflatten(0, (-1, height))

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `split`."""
        joined = x.flatten(2).flatten(0, 1)
        is_whole = joined.shape == (self.rows, self.columns)
        return joined if is_whole else joined[: self.rows, : self.columns].contiguous()

    @staticmethod
    def scale(values: torch.Tensor) -> torch.Tensor:
        """What there is one of a block, [rows of blocks, columns of blocks] -> what broadcasts against `split`."""
        return values[:, None, :, None]


class StepGrid:
    """Codes low to high in steps of the scale around `zero`, which broadcasts against `Blocks.split` (or a float). In
    `work` the levels are computed, as the format does when it dequantizes.

    minimum: weights are code * scale + minimum; `zero` is then -minimum / scale.
    """

    table = None

    def __init__(self, low: int, high: int, zero, work: torch.dtype | None = None, minimum=None):
        self.low, self.high, self.zero, self.work, self.minimum = low, high, zero, work, minimum
        self.bounds = low - 0.5, high + 0.5

    def shifted(self, x: torch.Tensor) -> torch.Tensor:
        """x, which is not used any more, as positions on the grid, of which `bounds` cut some off."""
        return x.add_(self.zero)

    def nearest(self, x: torch.Tensor) -> torch.Tensor:
        """x -> codes, as floats."""
        return x.add_(self.zero).round_().clamp_(self.low, self.high)

    def weights(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What the codes stand for, in `dtype`."""
        work = self.work or dtype
        codes = codes.to(work)
        if self.minimum is not None:
            return codes.mul_(scale.to(work)).add_(self.minimum.to(work)).to(dtype)
        zero = self.zero.to(work) if isinstance(self.zero, torch.Tensor) else self.zero
        return codes.sub_(zero).mul_(scale.to(work)).to(dtype)

    def step(self, scale: torch.Tensor, weight: torch.Tensor) -> float:
        """The mean distance between two neighbouring values of a weight with these scales."""
        return scale.mean().item()

    def start(self, codes: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """x, moved to where it rounds to `codes`."""
        middle = codes - self.zero
        return middle + (x - middle).clamp_(-MARGIN, MARGIN)


class Float8Grid:
    """The numbers of a float8 dtype."""

    table = None

    def __init__(self, dtype: torch.dtype):
        self.dtype, self.most = dtype, torch.finfo(dtype).max
        self.neighbours = 2 ** (3 if dtype is torch.float8_e4m3fn else 2)  # numbers between two powers of 2
        # from here on a number is nearer to the next one, which is cut off: 464, 61440
        largest = self.most + 2 ** math.floor(math.log2(self.most)) / self.neighbours / 2
        self.bounds = -largest, largest

    def shifted(self, x):
        return x

    def nearest(self, x):
        return x.clamp_(-self.most, self.most).to(self.dtype)

    def weights(self, codes, scale, dtype):
        return codes.float().mul_(scale).to(dtype)

    def step(self, scale, weight):
        return weight.abs().mean().item() / (1.5 * self.neighbours)  # of E4M3 between an 8th and a 16th of a number


class TableGrid:
    """Entries of a `table`, float32 [1 or N, 2^bits], in any order."""

    def __init__(self, format: CodebookFormat, table: torch.Tensor):
        self.format, self.table = format, table
        self.bounds = -1.2, 1.2  # in units of the entry of the largest magnitude

    def shifted(self, x):
        largest = self.table.abs().amax(1).clamp_min(torch.finfo(x.dtype).tiny)
        return x.div_(largest[:, None, None, None])

    @torch.no_grad()
    def nearest(self, x):
        flat = x.flatten(2).flatten(0, 1)
        unit = x.new_ones(1, 1)
        return self.format.nearest(flat, unit, self.table).view(x.shape)

    def entries(self, codes: torch.Tensor) -> torch.Tensor:
        flat = codes.flatten(2).flatten(0, 1).long()
        return self.table.expand(len(flat), -1).gather(1, flat).view(codes.shape)

    def weights(self, codes, scale, dtype):
        return (self.entries(codes) * scale).to(dtype)

    def step(self, scale, weight):
        lowest, highest = self.table.aminmax(dim=1)
        return (highest - lowest).mean().item() / (self.table.shape[1] - 1) * scale.mean().item()


def blocks_of(format, rows: int, columns: int) -> Blocks:
    """Which weights of [rows, columns] share a scale in `format`."""
    if isinstance(format, (AffineFormat, CodebookFormat)):
        if format.group_size is None:
            return Blocks(rows, columns, None, None)
        return Blocks(rows, columns, 1, None if format.group_size == -1 else format.group_size)
    if isinstance(format, Float8Format):
        height, width = {"channel": (1, None), "tensor": (None, None), "block": (BLOCK, BLOCK)}[format.weights]
        return Blocks(rows, columns, height, width)
    return Blocks(rows, columns, 1 if format.per_channel else None, None)


def grid_of(format, tensors: dict[str, torch.Tensor]):
    """The grid of a weight with the canonical `tensors` in `format`: an affine one, a codebook, ternary, int8 or
    float8."""
    if isinstance(format, CodebookFormat):
        return TableGrid(format, format.table(tensors))
    if isinstance(format, Float8Format):
        return Float8Grid(format.codes_dtype)
    if isinstance(format, TernaryFormat):
        return StepGrid(0, 2, 1.0, torch.float32)
    zero, minimum = tensors.get("zero_point"), tensors.get("minimum")
    zero = None if zero is None else Blocks.scale(zero.float())
    if isinstance(format, Int8Format):
        return StepGrid(-128, 127, 0.0 if zero is None else zero, torch.float32)
    work = getattr(torch, format.scale_dtype) if format.scale_dtype else None
    if minimum is not None:
        minimum, scale = Blocks.scale(minimum.float()), Blocks.scale(tensors["scale"].float())
        return StepGrid(0, format.levels, torch.where(scale == 0, 0, -minimum / scale), work, minimum)
    return StepGrid(0, format.levels, (format.levels + 1) / 2 if zero is None else zero, work)
