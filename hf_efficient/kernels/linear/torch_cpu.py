"""Layouts of integer codes for torch's CPU operators, where no C++ kernel is compiled."""

import torch
import torch.nn.functional as F

from hf_efficient.kernels.linear import int4_order
from hf_efficient.kernels.linear.codes import pack_codes, unpack_codes
from hf_efficient.kernels.linear.layout import FLOATS, Layout


# With more rows (tokens) than these, dequantizing the weight for one ordinary product is faster than torch's operators.
# Measured by benchmarks/cpu_linear.py, see benchmarks/results/cpu_linear.json.
INT4_NATIVE_ROWS = 128
INT8_NATIVE_ROWS = 24

_ELEMENTS_AT_ONCE = 1 << 21  # dequantized at once: the page faults of a larger temporary cost more than it saves
_int4_mm = torch._weight_int4pack_mm_for_cpu  # the bindings of torch.*: a microsecond less than torch.ops.aten
_int8_mm = torch._weight_int8pack_mm


class _TorchLayout(Layout):
    """A subclass sets in_features, out_features, dtype, tensors and native_rows: `native(x)` multiplies as many rows
    and fewer, `many_rows(x)` more."""

    def matmul(self, x, bias=None):
        rows = x.reshape(-1, self.in_features).contiguous()
        y = self.native(rows) if len(rows) <= self.native_rows else self.many_rows(rows)
        if bias is not None:
            y += bias
        return y.view(*x.shape[:-1], self.out_features)


class Int8CpuLayout(_TorchLayout):
    """Signed codes [N, K] for torch's int8 operator: one scale per row; a zero point is a correction of rank one,
    `y = (x @ (code - 128)^T + sum(x) * (128 - zero_point)) * scale`."""

    native_rows = INT8_NATIVE_ROWS

    def __init__(self, qweight, scale, zero_point, dtype):
        self.out_features, self.in_features = qweight.shape
        self.dtype = dtype
        self.codes = qweight.bitwise_xor(128).view(torch.int8)
        self.row_scale = scale.to(dtype).flatten().expand(self.out_features).contiguous()
        self.tensors = {"packed": self.codes, "packed_scale": self.row_scale}
        self.correction = None
        if zero_point is not None:
            self.correction = ((128 - zero_point.float()) * scale.float()).to(dtype).flatten()
            self.correction = self.correction.expand(self.out_features)[None].contiguous()
            self.tensors["packed_zero"] = self.correction

    @staticmethod
    def supports(out_features, in_features, group_size, dtype) -> bool:
        """Groups as wide as the row. With widths that are no multiple of 16 the operator reads out of bounds (torch
        2.13, bfloat16)."""
        per_row = group_size is None or group_size == -1 or group_size >= in_features
        return per_row and in_features % 16 == 0 and dtype in FLOATS

    def native(self, x):
        y = _int8_mm(x, self.codes, self.row_scale)
        return y if self.correction is None else y.addmm_(x.sum(-1, keepdim=True), self.correction)

    def many_rows(self, x):
        step = max(1, _ELEMENTS_AT_ONCE // self.in_features)
        parts = [F.linear(x, codes.to(self.dtype)) for codes in self.codes.split(step)]
        y = (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).mul_(self.row_scale)
        return y if self.correction is None else y.addmm_(x.sum(-1, keepdim=True), self.correction)

    def dequantize(self):
        weight = self.codes.to(self.dtype).mul_(self.row_scale[:, None])
        return weight if self.correction is None else weight.add_(self.correction.t())

    def canonical(self):
        return self.codes.view(torch.uint8).bitwise_xor(128)

    def canonical_rows(self, ids):
        return self.codes[ids].view(torch.uint8).bitwise_xor(128)


class Int4CpuLayout(_TorchLayout):
    """Codes in the order of torch's int4 operator (see `int4_order`).

    Groups that the operator does not know become several that it does. Codes of 2 and 3 bits are stored in 4, around
    the middle of that grid. Codes of 8 bits are two planes of 4 bits, `w = 16 * scale * high + scale * low + zero`: two
    calls of the operator, still faster than anything else in torch for 8 bits in groups.
    """

    native_rows = INT4_NATIVE_ROWS

    def __init__(self, qweight, scale, zero_point, bits, group_size, in_features, dtype):
        self.out_features, self.in_features, self.dtype, self.bits = qweight.shape[0], in_features, dtype, bits
        self.group = int4_order.native_group(group_size, in_features)
        self.block = int4_order.block_rows()  # found here, as torch.compile cannot trace how, and so is the order
        runs = int4_order.block_runs(self.out_features, self.block)
        self.orders = {size: int4_order.row_order(size) for *_, size in runs}
        codes = unpack_codes(qweight, bits, in_features)
        self.shift = max(0, 8 - 2 ** (bits - 1))
        planes = [codes >> 4, codes & 15] if bits == 8 else [codes + self.shift]
        scale = self._native_groups(scale.float(), group_size)
        if zero_point is None:
            zero_point = torch.full_like(scale, 2 ** (bits - 1))
        else:
            zero_point = self._native_groups(zero_point.float(), group_size)
        centre = sum(8 * 16**digit for digit in range(len(planes)))  # the operator subtracts 8 from each plane
        rest = (centre - self.shift - zero_point) * scale
        self.planes, self.tensors = [], {}
        for index, plane in enumerate(planes):
            packed = torch._convert_weight_to_int4pack_for_cpu(plane.int(), 2)
            zero = rest.to(dtype)
            rest = rest - zero.float()  # what the rounding lost; the low plane, if there is one, adds it
            scale_zero = torch.stack([(scale * 16 ** (len(planes) - 1 - index)).to(dtype), zero], -1)
            self.planes.append((packed, scale_zero))  # w = (code - 8) * scale + zero, [K / group, N, 2]
            self.tensors |= {f"packed{index or ''}": packed, f"packed_scale{index or ''}": scale_zero}

    def _native_groups(self, values: torch.Tensor, group_size: int | None) -> torch.Tensor:
        """float [N or 1, G] -> contiguous [K / group, N] with the operator's groups."""
        groups = self.in_features // self.group
        if values.shape[1] > 1:
            values = values.repeat_interleave(group_size // self.group, 1)[:, :groups]
        return values.expand(self.out_features, groups).t().contiguous()

    @staticmethod
    def supports(out_features, in_features, group_size, dtype) -> bool:
        return (
            out_features % 16 == 0
            and int4_order.native_group(group_size, in_features) is not None
            and dtype in FLOATS
            and int4_order.is_known(out_features)
        )

    def native(self, x):
        y = None
        for packed, scale_zero in self.planes:
            part = _int4_mm(x, packed, self.group, scale_zero)
            y = part if y is None else y.add_(part)
        return y

    def _tiles(self):
        """(first row, last row + 1, the transposed weight [K, rows]) for runs of rows that stay in the processor's
        cache."""
        for start, end, block in int4_order.block_runs(self.out_features, self.block):
            step = block * max(1, _ELEMENTS_AT_ONCE // (block * self.in_features))
            for first in range(start, end, step):
                last = min(end, first + step)
                weight = self._plane_tile(*self.planes[0], first, last, block)
                for plane in self.planes[1:]:
                    weight += self._plane_tile(*plane, first, last, block)
                yield first, last, weight

    def _plane_tile(self, packed, scale_zero, first, last, block):
        bytes_ = packed.view(-1)[first * self.in_features // 2 : last * self.in_features // 2]
        bytes_ = bytes_.view(-1, self.in_features, block // 2)
        weight = bytes_.new_empty(self.in_features, len(bytes_), 2, block // 2, dtype=self.dtype)
        for half, codes in enumerate((bytes_ & 15, bytes_ >> 4)):
            weight[:, :, half].copy_(codes.view(torch.int8).sub_(8).transpose(0, 1))
        weight = weight.view(self.in_features, -1, block)
        if (order := self.orders[block]) is not None:
            weight = weight[:, :, order]
        scale, zero = scale_zero[:, first:last].permute(2, 0, 1).unsqueeze(2).contiguous()  # [K / group, 1, rows] each
        weight = weight.view(-1, self.group, last - first)
        return torch.addcmul(zero, weight, scale, out=weight).view(self.in_features, last - first)

    def many_rows(self, x):
        y = x.new_empty(x.shape[0], self.out_features)
        for first, last, weight in self._tiles():
            torch.mm(x, weight, out=y[:, first:last])
        return y

    def dequantize(self):
        weight = torch.empty(self.out_features, self.in_features, dtype=self.dtype)
        for first, last, tile in self._tiles():
            weight[first:last] = tile.t()
        return weight

    def canonical(self):
        return self._packed(int4_order.unpack(packed, self.in_features, self.block) for packed, _ in self.planes)

    def canonical_rows(self, ids):
        return self._packed(
            int4_order.unpack_rows(packed, self.in_features, ids, self.block) for packed, _ in self.planes
        )

    def _packed(self, planes):
        """Canonical codes of the codes in each plane."""
        first, *rest = planes
        return first << 4 | rest[0] if rest else pack_codes(first - self.shift, self.bits)
