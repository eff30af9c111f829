"""Products with weights that are entries of a table: w = table[code] * scale of its group. The op, and its layouts.

A table is float [1, 2^bits] (one for the weight) or [N, 2^bits] (one a row), a scale float [N, G] or [1, 1]; `qweight`
is what `codes.pack_codes` makes of codes [N, K].
"""

import functools

import torch

from hf_efficient.kernels import triton_devices
from hf_efficient.kernels.linear import op
from hf_efficient.kernels.linear.codes import expand_groups, pack_codes, unpack_codes
from hf_efficient.kernels.linear.layout import Layout, RowsLayout, TritonRowsLayout, triton_groups
from hf_efficient.kernels.linear.native_cpu import NativeCodesLayout
from hf_efficient.kernels.linear.native_tables import NativeCodebookLayout
from hf_efficient.kernels.linear.torch_cpu import Int4CpuLayout
from hf_efficient.kernels.replay.recorder import as_one_step


_ELEMENTS_AT_ONCE = 1 << 19  # dequantized at once: with its codes a tile stays in the processor's cache


def look_up(qweight: torch.Tensor, table: torch.Tensor, bits: int, in_features: int) -> torch.Tensor:
    """Entries [N, K] of the codes in qweight, in the dtype of the table [1 or N, 2^bits]."""
    if len(table) == 1 and bits != 3:  # all codes of a byte by one look-up
        byte = torch.arange(256, dtype=torch.uint8, device=table.device)[:, None]
        tuples = table[0, unpack_codes(byte, bits, 8 // bits).int()]  # [256, 8 / bits]
        word = {4: torch.int32, 8: torch.int64}.get(tuples.element_size() * tuples.shape[1])
        if word is not None:  # one number is found faster than several
            entries = tuples.view(word)[:, 0].index_select(0, qweight.flatten().int()).view(table.dtype)
        else:
            entries = tuples.index_select(0, qweight.flatten().int())
        return entries.view(len(qweight), -1)[:, :in_features]
    index = unpack_codes(qweight, bits, in_features).int()
    if len(table) > 1:
        index += torch.arange(len(table), dtype=torch.int32, device=table.device)[:, None] << bits
    return table.flatten().index_select(0, index.flatten()).view(index.shape)


def dequantize_codebook(qweight, table, scale, *, bits, group_size, in_features, dtype) -> torch.Tensor:
    """The weight [N, K] in `dtype`: products in float32, rounded once, or in float64 for that."""
    work = torch.float64 if dtype == torch.float64 else torch.float32
    weight = torch.empty(len(qweight), in_features, dtype=dtype, device=qweight.device)
    for rows, tile in _tiles(qweight, table.to(work), scale.to(work), bits, group_size, in_features):
        weight[rows] = tile
    return weight


def _tiles(qweight, table, scale, bits, group_size, in_features):
    """(a slice of rows, their weight [n, K] in the dtype of table and scale) until all rows are done."""
    step = max(1, _ELEMENTS_AT_ONCE // in_features)
    for first in range(0, len(qweight), step):
        rows = slice(first, first + step)
        entries = look_up(qweight[rows], _rows(table, rows), bits, in_features)
        yield rows, entries * expand_groups(_rows(scale, rows), group_size, in_features)


def _rows(values: torch.Tensor, rows: slice) -> torch.Tensor:
    return values if len(values) == 1 else values[rows]


class CodebookCpuLayout(RowsLayout):
    """Serves every shape on a CPU: looks up a few rows of the weight at a time, which stay in the processor's cache."""

    replaces_qweight = False

    def __init__(self, qweight, table, scale, bits, group_size, in_features, dtype):
        self.codes, self.table, self.scale = qweight, table.to(dtype), scale.to(dtype)
        self.bits, self.group_size, self.in_features, self.dtype = bits, group_size, in_features, dtype
        self.out_features, self.tensors = len(qweight), {"packed_table": self.table, "packed_scale": self.scale}

    def _tiles(self):
        scheme = self.bits, self.group_size, self.in_features
        return (tile for _, tile in _tiles(self.codes, self.table, self.scale, *scheme))

    def product(self, x, bias):
        return as_one_step(self._product, x, bias)  # captured op by op, the weights would stay in memory

    def _product(self, x, bias):
        y = torch.cat([torch.nn.functional.linear(x, tile) for tile in self._tiles()], 1)
        if bias is not None:
            y += bias
        return y

    def dequantize(self):
        return torch.cat(list(self._tiles()))

    def canonical(self):
        return self.codes


class CodebookGridLayout(Layout):
    """For 16-bit inputs on a CPU: entries become the nearest points of a grid of 8 bits, which the C++ kernels read, or
    torch's int4 operator as two planes of 4 bits.

    Takes 8 bits a weight in memory; one row takes a half to a tenth of the time of looking entries up. Points differ
    from entries by 0.3 % (RMS; bfloat16 does by 0.1 %).
    """

    @classmethod
    def pack(cls, qweight, table, scale, bits, group_size, in_features, dtype) -> "CodebookGridLayout | None":
        """None where the inputs or the groups are not served, or codes do not come back from points: two entries that
        are used are equal."""
        if dtype not in (torch.bfloat16, torch.float16):
            return None
        points, step, start = _fit_known(tuple(table[0].tolist())) if len(table) == 1 else fit_grid(table.float(), 256)
        codes = look_up(qweight, points.to(torch.uint8), bits, in_features)
        zero_point = (-start / step).expand(max(len(table), len(scale)), scale.shape[1])
        grid = codes, scale.float() * step, zero_point, 8, group_size, in_features, dtype
        inner = NativeCodesLayout.pack(*grid)
        if inner is None and Int4CpuLayout.supports(len(qweight), in_features, group_size, dtype):
            inner = Int4CpuLayout(*grid)
        layout = inner and cls(inner, points, bits, in_features)
        return layout if layout and torch.equal(layout.canonical(), qweight) else None

    def __init__(self, inner: Layout, points: torch.Tensor, bits: int, in_features: int):
        self.inner, self.bits, self.in_features, self.dtype = inner, bits, in_features, inner.dtype
        self.matmul, self.dequantize = inner.matmul, inner.dequantize
        codes_of = torch.arange(2**bits - 1, -1, -1, dtype=torch.uint8).expand(len(points), -1)
        inverse = torch.zeros(len(points), 256, dtype=torch.uint8)
        self.inverse = inverse.scatter_(1, points.long().flip(1), codes_of)
        self.tensors = {**inner.tensors, "packed_inverse": self.inverse}

    def canonical(self):
        return pack_codes(look_up(self.inner.canonical(), self.inverse, 8, self.in_features), self.bits)


def fit_grid(table: torch.Tensor, points: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The regular grid that fits tables float [R, E] best, among grids that reach up to 10 % further than the table.

    Returns:
        (integers [R, E] below `points`, step [R, 1], start [R, 1]); an entry is about start + step * integer.
    """
    low, high = table.aminmax(dim=1, keepdim=True)
    best = None
    for margin in torch.linspace(0, 0.1, 21, dtype=torch.float32).tolist():
        for shift in (0.0, 0.25, 0.5, 0.75, 1.0):
            step = ((high - low) * (1 + margin) / (points - 1)).clamp_min(torch.finfo(torch.float32).tiny)
            start = low - (high - low) * margin * shift
            integers = ((table - start) / step).round_().clamp_(0, points - 1)
            error = (integers * step + start - table).square().sum(1, keepdim=True)
            found = error, integers, step, start
            best = found if best is None else [torch.where(error < best[0], new, old) for new, old in zip(found, best)]
    return best[1], best[2], best[3]


@functools.lru_cache(8)
def _fit_known(table: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`fit_grid` with 256 points of one table, which the layers of a model share."""
    return fit_grid(torch.tensor([table], dtype=torch.float32, device="cpu"), 256)


class CodebookTritonLayout(TritonRowsLayout):
    """The layout of the Triton kernel: codes in the order of byte permutations."""

    def __init__(self, qweight, table, scale, bits, group_size, in_features, dtype):
        self.bits, self.in_features, self.dtype, self.out_features = bits, in_features, dtype, len(qweight)
        scale, _, self.group_size = triton_groups(scale, None, group_size, in_features)
        self.packed = op.triton_kernels().pack_codebook_weight(qweight, bits)
        self.table = (table[0] if len(table) == 1 else table).to(dtype).contiguous()
        self.scale = scale.contiguous()
        self.tensors = {"packed": self.packed, "packed_table": self.table, "packed_scale": self.scale}

    def product(self, x, bias):
        tensors = x, self.packed, self.table, self.scale, bias
        return torch.ops.hf_efficient.codebook_linear(*tensors, self.bits, self.group_size, self.in_features)

    def dequantize(self):
        tensors = dict(packed=self.packed, codebook=self.table, scale=self.scale)
        return dequantize_packed(self.dtype, **tensors, **self.scheme)

    def canonical(self):
        return op.triton_kernels().unpack_codebook_weight(self.packed, self.in_features, self.bits)


def codebook_layout(qweight, table, scale, *, bits, group_size, in_features, dtype) -> Layout | None:
    """The fastest layout for inputs of `dtype` on the device of `qweight`; None where no kernel reads these codes."""
    arguments = (qweight, table, scale, bits, group_size, in_features, dtype)
    if CodebookTritonLayout.supports(group_size, dtype) and triton_devices.serves(qweight.device):
        return CodebookTritonLayout(*arguments)
    if qweight.device.type == "cpu":
        if native := NativeCodebookLayout.pack(*arguments):
            return native
        return CodebookGridLayout.pack(*arguments) or CodebookCpuLayout(*arguments)
    return None


def dequantize_packed(dtype, *, packed, codebook, scale, **scheme) -> torch.Tensor:
    """What `pack_codebook_weight` packed -> the weight [N, K] in `dtype`; the entries are rounded to it first. scheme:
    bits, group_size, in_features."""
    kernels = op.triton_kernels()
    if packed.is_cuda:
        return kernels.dequantize_codebook(packed, codebook, scale, dtype=dtype, **scheme)
    return kernels.dequantize_codebook_reference(packed, codebook.to(dtype), scale, **scheme).to(dtype)


def _cpu(x, packed, codebook, scale, bias, bits, group_size, in_features):
    scheme = dict(bits=bits, group_size=group_size, in_features=in_features)
    weight = dequantize_packed(x.dtype, packed=packed, codebook=codebook, scale=scale, **scheme)
    return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


op.define(
    "codebook_linear(Tensor x, Tensor packed, Tensor codebook, Tensor scale, Tensor? bias, int bits, int? group_size, "
    "int in_features) -> Tensor",
    cpu=_cpu,
    cuda="codebook_linear",
    fake=lambda x, packed, *_: x.new_empty(x.shape[0], packed.shape[0]),
    weight=lambda dtype, _, **packed: dequantize_packed(dtype, **packed),
)
