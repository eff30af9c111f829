"""Matrix products with a weight of integer codes: the torch implementation, and the layouts a device reads.

Canonical tensors (what is saved) of a weight [N, K] in `bits` bits (2, 3, 4, 8): `qweight` uint8 (see `codes`), `scale` [N, G], `zero_point` uint8 [N, G] or None (the middle of the grid);
`w = (code - zero_point) * scale`. G = ceil(K / group_size), 1 for group_size -1; [1, 1] in all for group_size None. A layout
also takes zero points in float32.

`device_layout` turns them into what the fastest operator of a device reads, and that back, bit for bit.
"""

import importlib

import torch
import torch.nn.functional as F

from hf_efficient.kernels.linear import int4_layout
from hf_efficient.kernels.linear.codes import pack_codes, unpack_codes
from hf_efficient.kernels.linear.native_cpu import CompiledLinear


# Beyond these numbers of rows (tokens) dequantizing the weight for one ordinary matmul beats torch's native operators.
# Measured by benchmarks/cpu_linear.py, see benchmarks/results/cpu_linear.json.
INT4_NATIVE_ROWS = 128
INT8_NATIVE_ROWS = 24

_ELEMENTS_AT_ONCE = (
    1 << 21
)  # of a weight that is dequantized: a larger temporary costs more in page faults than it saves
_int4_mm = torch._weight_int4pack_mm_for_cpu  # the bindings of torch.*: a microsecond less than torch.ops.aten
_int8_mm = torch._weight_int8pack_mm


def expand_groups(values: torch.Tensor, group_size: int | None, in_features: int) -> torch.Tensor:
    """Values per group [..., N, G] -> something that broadcasts against [..., N, in_features]."""
    if values.shape[-1] == 1:
        return values
    return values.repeat_interleave(group_size, -1)[..., :in_features]


def dequantize_weight(
    qweight, scale, zero_point=None, minimum=None, *, bits, group_size, in_features, dtype
) -> torch.Tensor:
    """Canonical tensors (with any leading dimensions) -> the weight [..., N, in_features] in `dtype`, in which it is
    computed; with `minimum`, code * scale + minimum."""
    weight = unpack_codes(qweight, bits, in_features).to(dtype)  # codes up to 255 are exact in bfloat16
    if minimum is not None:
        weight = weight.mul_(expand_groups(scale.to(dtype), group_size, in_features))
        return weight.add_(expand_groups(minimum.to(dtype), group_size, in_features))
    zero = 2 ** (bits - 1) if zero_point is None else expand_groups(zero_point, group_size, in_features).to(dtype)
    return weight.sub_(zero).mul_(expand_groups(scale.to(dtype), group_size, in_features))


class DequantizedLinear:
    """The path of every device, format and shape: dequantize the canonical tensors, then one ordinary matmul."""

    replaces_qweight = False
    tensors = {}

    def __init__(self, dequantize, dtype: torch.dtype):
        self.dequantize = dequantize  # () -> the weight [N, K] in dtype
        self.dtype = dtype

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, self.dequantize(), bias)


class _PackedLinear:
    """A layout that replaces `qweight`: a subclass sets in_features, out_features, dtype, native_rows and `tensors`."""

    replaces_qweight = True

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        y = self.native(rows) if len(rows) <= self.native_rows else self.many_rows(rows)
        if bias is not None:
            y += bias
        return y.view(*x.shape[:-1], self.out_features)


class Int8CpuLinear(_PackedLinear):
    """Signed codes [N, K] for torch's CPU int8 operator: one scale per row; a zero point is a correction of rank one,
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
        """Groups as wide as the row only; other widths than multiples of 16 read out of bounds (torch 2.13, bfloat16)."""
        per_row = group_size is None or group_size == -1 or group_size >= in_features
        return per_row and in_features % 16 == 0 and dtype in (torch.bfloat16, torch.float16, torch.float32)

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

    def qweight(self) -> torch.Tensor:
        """The canonical qweight."""
        return self.codes.view(torch.uint8).bitwise_xor(128)


class Int4CpuLinear(_PackedLinear):
    """Codes in the order of torch's CPU int4 operator (see `int4_layout`). Groups the operator does not know become several
    it does. Codes of 2 and 3 bits are stored in 4, around the middle of that grid. 8-bit codes are two planes of 4 bits, `w = 16 * scale * high + scale * low + zero`: twice the operator, which
    still beats everything else torch has for 8 bits in groups."""

    native_rows = INT4_NATIVE_ROWS

    def __init__(self, qweight, scale, zero_point, bits, group_size, in_features, dtype):
        self.out_features, self.in_features, self.dtype, self.bits = qweight.shape[0], in_features, dtype, bits
        self.group = int4_layout.native_group(group_size, in_features)
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
            and int4_layout.native_group(group_size, in_features) is not None
            and dtype in (torch.bfloat16, torch.float16, torch.float32)
            and int4_layout.layout_is_known(out_features)
        )

    def native(self, x):
        y = None
        for packed, scale_zero in self.planes:
            part = _int4_mm(x, packed, self.group, scale_zero)
            y = part if y is None else y.add_(part)
        return y

    def _tiles(self):
        """(first row, last row + 1, the transposed weight [K, rows]), so few rows at a time that they stay in the cache."""
        for start, end, block in int4_layout.block_runs(self.out_features):
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
        if int4_layout.row_runs(block)[0] != block:
            weight = weight[:, :, torch.argsort(int4_layout.nibble_rows(block))]
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

    def qweight(self) -> torch.Tensor:
        """The canonical qweight."""
        planes = [int4_layout.unpack(packed, self.in_features) for packed, _ in self.planes]
        return planes[0] << 4 | planes[1] if self.bits == 8 else pack_codes(planes[0] - self.shift, self.bits)


def _efficient_linear():
    return importlib.import_module("hf_efficient.kernels.efficient_linear")


def dequantize_packed(packed, scale, zero_point, dtype, **layout) -> torch.Tensor:
    """What `pack_weight` packed -> the weight [N, K], computed in float32 and rounded once to `dtype`."""
    if packed.is_cuda:
        return _efficient_linear().dequantize(packed, scale, zero_point, dtype=dtype, **layout)
    return _efficient_linear().dequantize_reference(packed, scale, zero_point, **layout).to(dtype)


def rows_of(x: torch.Tensor, in_features: int) -> torch.Tensor:
    """x [..., K] as [M, K] with contiguous columns, as the kernels want it."""
    rows = x.reshape(-1, in_features)
    return rows if rows.stride(1) == 1 or in_features == 1 else rows.contiguous()


class TritonLinear(_PackedLinear):
    """The layout of the Triton kernels (CUDA, ROCm); any number of rows goes through them."""

    def __init__(self, packed, scale, zero_point, bits, group_size, in_features, dtype):
        self.out_features, self.in_features, self.dtype = packed.shape[0], in_features, dtype
        self.bits, self.group_size, self.scale, self.zero_point = bits, group_size, scale, zero_point
        self.packed = packed
        self.tensors = {"packed": packed}

    @classmethod
    def pack(cls, qweight, scale, zero_point, bits, group_size, in_features, dtype):
        """From canonical tensors."""
        scale, zero_point, group_size = triton_groups(scale, zero_point, group_size, in_features)
        packed = _efficient_linear().pack_weight(qweight, bits, group_size)
        return cls(packed, scale, zero_point, bits, group_size, in_features, dtype)

    @staticmethod
    def supports(group_size, dtype) -> bool:
        floats = (torch.bfloat16, torch.float16, torch.float32)
        return dtype in floats and (group_size in (None, -1) or group_size % 32 == 0)

    def __call__(self, x, bias=None):
        y = torch.ops.hf_efficient.weight_only_linear(
            rows_of(x, self.in_features),
            self.packed,
            self.scale,
            self.zero_point,
            bias,
            self.bits,
            self.group_size,
            self.in_features,
        )
        return y.view(*x.shape[:-1], self.out_features)

    def dequantize(self):
        arguments = dict(bits=self.bits, group_size=self.group_size, in_features=self.in_features)
        return dequantize_packed(self.packed, self.scale, self.zero_point, self.dtype, **arguments)

    def qweight(self) -> torch.Tensor:
        """The canonical qweight."""
        return _efficient_linear().unpack_weight(self.packed, self.in_features, self.bits, self.group_size)


class FloatZeroTritonLinear(_PackedLinear):
    """`TritonLinear` around the middle of the grid, and what zero points in float32 add to it: the sums of x over each group
    times (middle - zero_point) * scale, a product with 1 / group_size of the weight's columns."""

    def __init__(self, qweight, scale, zero_point, bits, group_size, in_features, dtype):
        self.inner = TritonLinear.pack(qweight, scale, None, bits, group_size, in_features, dtype)
        self.out_features, self.in_features, self.dtype = len(qweight), in_features, dtype
        self.width = in_features if group_size in (None, -1) else group_size
        shift = (2 ** (bits - 1) - zero_point) * scale.float()
        self.shift = shift.expand(self.out_features, -1).t().contiguous()  # [G, N]
        self.tensors = {**self.inner.tensors, "packed_shift": self.shift}

    def __call__(self, x, bias=None):
        y = self.inner(x, bias)
        sums = F.pad(x.float(), (0, -self.in_features % self.width)).unflatten(-1, (-1, self.width)).sum(-1)
        return y + (sums @ self.shift).to(y.dtype)

    def dequantize(self):
        shift = self.shift.t().repeat_interleave(self.width, 1)[:, : self.in_features]
        return (self.inner.dequantize().float() + shift).to(self.dtype)

    def qweight(self) -> torch.Tensor:
        return self.inner.qweight()


def triton_groups(scale, zero_point, group_size, in_features):
    """(scale, zero_point, group_size) in groups that the Triton kernels serve: several groups of 32 for one of another
    multiple."""
    if group_size is None or group_size <= 64 or group_size % 128 == 0:
        return scale, zero_point, group_size
    repeats, groups = group_size // 32, -(-in_features // 32)
    return *(None if t is None else t.repeat_interleave(repeats, -1)[..., :groups] for t in (scale, zero_point)), 32


def device_layout(qweight, scale, zero_point, *, bits, group_size, in_features, dtype, int8_on_cpu=False):
    """The layout for `dtype` inputs on the device of `qweight`, or None where no kernel reads these codes: an object to call
    with (x [..., K], bias [N] or None), with `tensors` (what it keeps allocated), `replaces_qweight`, `qweight()` (its
    inverse) and `dequantize()`."""
    out_features = qweight.shape[0]
    if qweight.device.type == "cuda" and TritonLinear.supports(group_size, dtype):
        if zero_point is not None and zero_point.is_floating_point():
            return FloatZeroTritonLinear(qweight, scale, zero_point, bits, group_size, in_features, dtype)
        return TritonLinear.pack(qweight, scale, zero_point, bits, group_size, in_features, dtype)
    if qweight.device.type == "cpu":
        compiled = CompiledLinear.pack(qweight, scale, zero_point, bits, group_size, in_features, dtype, int8_on_cpu)
        if compiled is not None:
            return compiled
        if bits == 8 and Int8CpuLinear.supports(out_features, in_features, group_size, dtype):
            return Int8CpuLinear(qweight, scale, zero_point, dtype)
        if Int4CpuLinear.supports(out_features, in_features, group_size, dtype):
            return Int4CpuLinear(qweight, scale, zero_point, bits, group_size, in_features, dtype)
    return None


_library = torch.library.Library("hf_efficient", "FRAGMENT")
_library.define(
    "weight_only_linear(Tensor x, Tensor packed, Tensor scale, Tensor? zero_point, Tensor? bias, int bits, "
    "int? group_size, int in_features) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


def _triton_linear(x, packed, scale, zero_point, bias, bits, group_size, in_features):
    arguments = dict(bits=bits, group_size=group_size, in_features=in_features)
    return _efficient_linear().weight_only_linear(x, packed, scale, zero_point, bias, **arguments)


def _reference_linear(x, packed, scale, zero_point, bias, bits, group_size, in_features):
    arguments = dict(bits=bits, group_size=group_size, in_features=in_features)
    reference = _efficient_linear().weight_only_linear_reference
    return reference(x, packed, scale, zero_point, bias, **arguments).to(x.dtype)


_library.impl("weight_only_linear", _triton_linear, "CUDA")
_library.impl("weight_only_linear", _reference_linear, "CPU")


@torch.library.register_fake("hf_efficient::weight_only_linear", lib=_library)
def _fake_linear(x, packed, scale, zero_point, bias, bits, group_size, in_features):
    return x.new_empty(x.shape[0], packed.shape[0])


def _setup(ctx, inputs, output):
    x, packed, scale, zero_point, bias, *layout = inputs
    ctx.save_for_backward(packed, scale, zero_point)
    ctx.layout = dict(zip(("bits", "group_size", "in_features"), layout))
    ctx.dtypes = x.dtype, None if bias is None else bias.dtype


def _backward(ctx, grad):
    x_dtype, bias_dtype = ctx.dtypes
    grad_x = None
    if ctx.needs_input_grad[0]:
        grad_x = grad @ dequantize_packed(*ctx.saved_tensors, x_dtype, **ctx.layout)
    grad_bias = None if bias_dtype is None else grad.sum(0).to(bias_dtype)
    return grad_x, None, None, None, grad_bias, None, None, None


torch.library.register_autograd("hf_efficient::weight_only_linear", _backward, setup_context=_setup, lib=_library)
