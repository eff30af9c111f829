"""Formats, methods and the layouts of the CPU operators: all on small tensors, against float64 arithmetic."""

import pytest
import torch
from format_checks import check_declared, check_on_a_gpu
from helpers import assert_close

from hf_efficient.formats import AffineFormat
from hf_efficient.kernels.linear import int4_order, native_cpu
from hf_efficient.kernels.linear.layout import DequantizedLayout, RestoredLayout
from hf_efficient.kernels.linear.torch_cpu import Int4CpuLayout, Int8CpuLayout
from hf_efficient.kernels.linear.weight_only import TritonLayout
from hf_efficient.methods import get_method


SCHEMES = [
    (bits, group, symmetric)
    for bits in (2, 3, 4, 6, 8)
    for group in (-1, None, 32, 64, 48)
    for symmetric in (False, True)
]


def weight(rows, columns, dtype=torch.bfloat16, shift=0.3):
    return (torch.randn(rows, columns) + shift * torch.randn(rows, 1)).to(dtype)


def expected_weight(tensors, format, columns):
    """The definition, element by element, in float64."""
    qweight, scale = tensors["qweight"], tensors["scale"].double()
    group = columns if format.group_size in (None, -1) else format.group_size
    result = torch.empty(qweight.shape[0], columns, dtype=torch.float64)
    for row in range(qweight.shape[0]):
        for column in range(columns):
            bit = column * format.bits  # a little-endian stream of bits
            stream = int.from_bytes(bytes(qweight[row, bit // 8 : bit // 8 + 2].tolist()), "little")
            code = stream >> bit % 8 & 2**format.bits - 1
            r, g = min(row, scale.shape[0] - 1), column // group
            zero = 2 ** (format.bits - 1) if format.symmetric else tensors["zero_point"][r, g].item()
            result[row, column] = (code - zero) * scale[r, g]
    return result


@pytest.mark.parametrize("bits, group_size, symmetric", SCHEMES)
@pytest.mark.parametrize("columns", [96, 33, 7])
def test_format_follows_its_definition(bits, group_size, symmetric, columns):
    format = AffineFormat(bits, group_size, symmetric)
    tensors = get_method("rtn").quantize(weight(5, columns), format)
    check_declared(format, tensors, 5, columns)
    assert torch.equal(format.dequantize(tensors, columns, torch.float64), expected_weight(tensors, format, columns))
    if bits == 4 and columns % 2:
        assert (tensors["qweight"][:, -1] >> 4 == 0).all()


@pytest.mark.parametrize("bits, group_size, symmetric", SCHEMES)
def test_rounding_stays_within_half_a_step(bits, group_size, symmetric):
    """Half a step, plus the rounding of the stored scale at the ends of the grid."""
    format, w = AffineFormat(bits, group_size, symmetric), weight(9, 100)
    tensors = get_method("rtn").quantize(w, format)
    error = (format.dequantize(tensors, 100, torch.float64) - w.double()).abs()
    step = tensors["scale"].double()
    if step.shape[1] > 1:
        step = step.repeat_interleave(group_size, 1)[:, :100]
    slack = 0.51 + (2**bits - 1) / 2 * 2**-8 + (0.5 if symmetric else 0.01)
    assert (error <= slack * step).all()


def test_chosen_codes_are_the_nearest():
    format, w = AffineFormat(4, 32, False), weight(6, 64)
    tensors = get_method("rtn").quantize(w, format)
    scale, zero = (tensors[n].double().repeat_interleave(32, 1) for n in ("scale", "zero_point"))
    grid = (torch.arange(16)[:, None, None] - zero) * scale
    nearest = (grid - w.double()).abs().argmin(0)
    chosen = format.unpack(tensors["qweight"], 64)
    gap = (format.dequantize(tensors, 64, torch.float64) - w.double()).abs() - (grid - w.double()).abs().amin(0)
    assert (gap.abs() < 1e-6).all() and (nearest == chosen).float().mean() > 0.99


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_degenerate_groups(bits, symmetric):
    """Zeros come back as zeros; a group of one sign and one value does not overflow its zero point."""
    w = torch.zeros(4, 64)
    w[1], w[2], w[3, 5] = 3.0, -2.0, 1e-30
    tensors = get_method("rtn").quantize(w, AffineFormat(bits, 32, symmetric))
    back = AffineFormat(bits, 32, symmetric).dequantize(tensors, 64, torch.float32)
    assert torch.isfinite(back).all() and (tensors["scale"] > 0).all()
    step = 3 / (2**bits - 1)  # a symmetric grid does not contain its own largest value
    assert (back[0] == 0).all() and (back[1] - 3).abs().max() < 1.1 * step and (back[2] + 2).abs().max() < 0.8 * step


def test_int4_group64_takes_four_and_three_quarter_bits():
    assert AffineFormat(4, 64, False).bits_per_weight(576, 576, torch.bfloat16) == 4 + (16 + 8) / 64


def test_large_weights_are_quantized_in_slices(monkeypatch):
    rtn, w, format = get_method("rtn"), weight(50, 64), AffineFormat(4, None, False)
    whole = rtn.quantize(w, format)
    monkeypatch.setattr(rtn, "_ELEMENTS_AT_ONCE", 64 * 7)
    assert all(torch.equal(whole[name], tensor) for name, tensor in rtn.quantize(w, format).items())


CASES = [  # bits, group, symmetric, N, K, the layout that must take it
    (4, 64, False, 64, 128, Int4CpuLayout),
    (4, 32, True, 48, 96, Int4CpuLayout),  # fewer rows than a block of the packed layout
    (4, 64, False, 144, 576, Int4CpuLayout),  # two blocks and a rest
    (4, 128, False, 64, 576, Int4CpuLayout),  # a short last group, computed in groups of 64
    (4, -1, False, 80, 320, Int4CpuLayout),
    (4, None, True, 64, 64, Int4CpuLayout),
    (4, None, False, 16, 32, Int4CpuLayout),
    (4, 512, False, 32, 1024, Int4CpuLayout),
    (4, 64, False, 30, 128, DequantizedLayout),  # the operator wants 16 rows
    (4, 64, False, 64, 100, DequantizedLayout),
    (4, 48, False, 64, 96, DequantizedLayout),
    (2, 64, False, 48, 128, Int4CpuLayout),
    (2, 32, True, 32, 96, Int4CpuLayout),
    (3, 64, False, 64, 576, Int4CpuLayout),
    (3, -1, True, 16, 64, Int4CpuLayout),
    (3, 64, False, 30, 100, DequantizedLayout),
    (8, -1, True, 33, 64, Int8CpuLayout),
    (8, -1, False, 64, 48, Int8CpuLayout),
    (8, None, True, 7, 32, Int8CpuLayout),
    (8, None, False, 64, 96, Int8CpuLayout),
    (8, 64, False, 16, 48, Int8CpuLayout),  # one short group is the row
    (8, -1, True, 64, 72, DequantizedLayout),  # torch's operator reads out of bounds
    (8, 32, False, 64, 64, Int4CpuLayout),  # groups: two planes of 4 bits
    (8, 64, True, 144, 576, Int4CpuLayout),
    (8, 128, False, 48, 576, Int4CpuLayout),
    (8, 32, False, 40, 64, DequantizedLayout),
    (6, 64, False, 144, 576, RestoredLayout),  # that of 8 bits
    (6, -1, True, 33, 64, RestoredLayout),
    (6, 48, False, 30, 99, DequantizedLayout),
]


@pytest.mark.parametrize("bits, group_size, symmetric, rows, columns, kind", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_layouts_compute_the_product_and_turn_back(
    bits, group_size, symmetric, rows, columns, kind, dtype, monkeypatch
):
    monkeypatch.setattr(native_cpu, "kernel", lambda bits: None)  # test_native_linear.py tests the compiled layout
    format = AffineFormat(bits, group_size, symmetric)
    tensors = get_method("rtn").quantize(weight(rows, columns, dtype), format)
    layout = format.layout(tensors, columns, dtype)
    assert type(layout) is kind and layout.replaces_qweight is (kind is not DequantizedLayout)
    dense = format.dequantize(tensors, columns, torch.float64)
    eps = torch.finfo(dtype).eps
    reason = "the operators round each weight and scale * zero to the dtype, and sum up to 1024 products in float32"
    assert_close(layout.dequantize(), dense, 2 * eps, 8 * eps * dense.abs().max().item(), reason)
    if layout.replaces_qweight:
        ids = torch.randint(rows, (9,))
        assert torch.equal(layout.canonical_rows(ids), tensors["qweight"][ids])
    bias = torch.randn(rows, dtype=dtype)
    for shape in ((1, columns), (2, 3, columns), (70, columns), (2, 40, columns)):
        x = torch.randn(shape, dtype=dtype)
        expected = x.double() @ dense.t()
        scale = expected.abs().max().item()
        assert_close(layout.matmul(x), expected, 6 * eps, 12 * eps * scale, reason)
        assert_close(layout.matmul(x, bias), expected + bias.double(), 6 * eps, 12 * eps * (scale + 4), reason)
        strided = torch.randn(*shape[:-1], 2 * columns, dtype=dtype)[..., ::2]
        assert_close(layout.matmul(strided), strided.double() @ dense.t(), 6 * eps, 12 * eps * scale, reason)
    assert layout.matmul(torch.randn(0, columns, dtype=dtype)).shape == (0, rows)
    if layout.replaces_qweight:
        assert torch.equal(layout.canonical(), tensors["qweight"]), "the inverse must be exact"


def test_int4_order_that_is_not_understood_is_not_used(monkeypatch):
    monkeypatch.setattr(int4_order, "block_rows", lambda: None)
    int4_order.is_known.cache_clear()
    assert not Int4CpuLayout.supports(64, 64, 32, torch.bfloat16)
    int4_order.is_known.cache_clear()


@pytest.mark.parametrize("block", [64, 32, 16])
def test_int4_order_is_inverted_for_any_block(block, monkeypatch):
    """Other instruction sets pack blocks of other heights, with another order of nibbles."""
    order = torch.randperm(block)

    def pack(codes, inner_k_tiles):
        chunks = []
        for rows in codes.split(block):
            columns = rows.t()[:, order] if len(rows) == block else rows.t()
            chunks.append((columns[:, 0::2] | columns[:, 1::2] << 4).flatten())
        return torch.cat(chunks).to(torch.uint8).view(codes.shape[0], -1)

    monkeypatch.setattr(torch, "_convert_weight_to_int4pack_for_cpu", pack)
    caches = (int4_order.block_rows, int4_order.is_known, int4_order.nibble_rows, int4_order.row_order)
    try:
        for cache in caches:
            cache.cache_clear()
        assert int4_order.block_rows() == block and int4_order.is_known(208)
        codes = torch.randint(16, (208, 64), dtype=torch.int32)
        assert torch.equal(int4_order.unpack(pack(codes, 2), 64), codes.to(torch.uint8))
    finally:
        for cache in caches:
            cache.cache_clear()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size, symmetric", [(64, False), (-1, True), (None, False), (96, False), (128, True)])
def test_the_layout_of_the_gpu_on_the_cpu(bits, group_size, symmetric):
    """What a GPU would read, through the same torch op, whose CPU implementation is the kernel's reference."""
    format, w = AffineFormat(bits, group_size, symmetric), weight(33, 200)
    tensors = get_method("rtn").quantize(w, format)
    canonical = tensors["qweight"], tensors["scale"], tensors.get("zero_point")
    layout = TritonLayout.pack(*canonical, bits, group_size, 200, torch.bfloat16)
    assert torch.equal(layout.canonical(), tensors["qweight"])
    dense = format.dequantize(tensors, 200, torch.bfloat16)
    assert torch.equal(layout.dequantize(), dense)
    x, bias = torch.randn(2, 3, 200).bfloat16(), torch.randn(33).bfloat16()
    expected = x.double() @ dense.double().t() + bias.double()
    assert_close(
        layout.matmul(x, bias), expected, 0.01, 0.3, "one rounding of weights and one of the result to bfloat16"
    )
    group = layout.group_size
    arguments = (x.flatten(0, 1), layout.packed, layout.scale, layout.zero_point, bias, bits, group, 200)
    torch.library.opcheck(torch.ops.hf_efficient.weight_only_linear, arguments)
    assert not TritonLayout.supports(48, torch.bfloat16) and TritonLayout.supports(96, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("bits, group_size, symmetric, rows, columns, kind", CASES)
def test_layouts_on_a_gpu(bits, group_size, symmetric, rows, columns, kind):
    format = AffineFormat(bits, group_size, symmetric)
    tensors = get_method("rtn").quantize(weight(rows, columns), format)
    kind = RestoredLayout if bits == 6 else TritonLayout
    check_on_a_gpu(format, tensors, columns, None if group_size == 48 else kind, 0.01, 0.5)
