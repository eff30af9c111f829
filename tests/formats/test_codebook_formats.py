"""Codebook formats: against bitsandbytes' numbers, their definition in float64, and the layouts of CPU and GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from format_checks import check_declared, check_on_a_gpu
from helpers import assert_close

from hf_efficient.formats.codebook import TABLES, CodebookFormat
from hf_efficient.kernels import efficient_linear
from hf_efficient.kernels.linear import codebook
from hf_efficient.kernels.linear.codebook import CodebookCpuLayout, CodebookGridLayout, CodebookTritonLayout
from hf_efficient.kernels.native import tiers
from hf_efficient.methods import kmeans


# bitsandbytes 0.50.2 on a CPU, of torch.linspace(-3, 3, 64) ** 3 in one block: quantize_4bit's codes and
# dequantize_4bit
BITSANDBYTES = {
    "nf4": ("001112223344455566666777777777777777777777788888999aabbccddeeeff", -2.490903377532959),
    "fp4": ("bbaaaaddcccffeeeee9999999999000088881111111111666667744455222233", 0.0),
}


def quantized(format, weight):
    return kmeans.quantize(weight, format) if format.codebook == "kmeans" else format.round(weight)


FORMATS = [
    *(CodebookFormat("nf4", 4, group) for group in (64, 32, 48, -1, None)),
    *(CodebookFormat("nf4", 4, group, True) for group in (32, -1, None)),
    *(CodebookFormat("fp4", 4, group) for group in (64, None)),
    *(CodebookFormat("kmeans", bits, group) for bits in (2, 3, 4) for group in (-1, 64, None)),
    CodebookFormat("kmeans", 3, 32, True),
    CodebookFormat("mxfp4", 4, 32),
    CodebookFormat("nvfp4", 4, 16),
]


def expected_weight(tensors, format, columns):
    """The definition, element by element, in float64."""
    codes, rows = format.unpack(tensors["qweight"], columns), len(tensors["qweight"])
    group = columns if format.group_size in (None, -1) else format.group_size
    if format.double_quantization:
        codes8, mean = tensors["scale_codes"], tensors["scale_mean"].double()
        steps = torch.tensor([tensors["scale_scale"][i // 256] for i in range(codes8.numel())]).double()
        scale = (codes8.double() - 128) * steps.view(codes8.shape) + mean
    elif format.codebook == "mxfp4":
        scale = 2.0 ** (tensors["scale_codes"].double() - 127)
    elif format.codebook == "nvfp4":
        scale = tensors["scale_codes"].double() * tensors["scale_scale"].double()
    else:
        scale = tensors["scale"].double()
    table = tensors["codebook"].double() if format.codebook == "kmeans" else torch.tensor([TABLES[format.codebook]])
    result = torch.empty(rows, columns, dtype=torch.float64)
    for row in range(rows):
        for column in range(columns):
            entry = table[min(row, len(table) - 1), codes[row, column].item()].double()
            result[row, column] = entry * scale[min(row, len(scale) - 1), column // group]
    return result


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("columns", [96, 33])
def test_format_follows_its_definition(format, columns):
    weight = torch.randn(5, columns).bfloat16()
    tensors = quantized(format, weight)
    check_declared(format, tensors, 5, columns)
    expected = expected_weight(tensors, format, columns)
    actual = format.dequantize(tensors, columns, torch.float64)
    assert_close(actual, expected, 1e-6, 1e-5, "8-bit scales are put together in float32")


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_chosen_entries_are_the_nearest(format):
    weight = torch.randn(6, 100)
    tensors = quantized(format, weight)
    scale, table = format.scale(tensors), format.table(tensors)
    scale = codebook.expand_groups(scale, format.group_size, 100).double()
    grid = table.double()[:, None, :] * scale[..., None]
    error = (format.dequantize(tensors, 100, torch.float64) - weight).abs()
    least = (grid - weight[..., None]).abs().amin(-1)
    assert_close(error, least, 1e-5, 1e-5, "ties, and thresholds in float32")


def test_the_tables_are_those_of_the_kernels():
    assert {name: TABLES[name] for name in ("nf4", "fp4")} == {"nf4": efficient_linear.NF4, "fp4": efficient_linear.FP4}


def test_e2m1_is_the_standards():
    """OCP Microscaling Formats 1.0, 5.3.3: a sign, two bits of exponent with bias 1, one of mantissa."""
    for code, entry in enumerate(TABLES["mxfp4"]):
        exponent, mantissa = code >> 1 & 3, code & 1
        magnitude = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
        assert entry == (-magnitude if code & 8 else magnitude)
    assert TABLES["nvfp4"] == TABLES["mxfp4"]


@pytest.mark.parametrize("format", [CodebookFormat("mxfp4", 4, 32), CodebookFormat("nvfp4", 4, 16)], ids=str)
def test_fp4_scales_are_chosen_by_error(format):
    """No group is worse than with its largest weight at 6, and the numbers of E2M1 come back as they are."""
    weight = torch.randn(16, 128) * torch.rand(16, 1).exp()
    plain = format.store_scale(format.absmax(weight) / 6, weight.dtype)
    table = torch.tensor([TABLES[format.codebook]])
    plain["qweight"] = format.pack(format.nearest(weight, format.scale(plain), table))
    error, at_six = (
        format.grouped(format.dequantize(tensors, 128, torch.float32) - weight).square().sum(-1)
        for tensors in (format.round(weight), plain)
    )
    assert error.sum() < 0.97 * at_six.sum()
    assert (error <= at_six * (1 + 1e-5)).all()
    exact = table[0, torch.randint(16, (8, 64))]
    exact[:, ::16] = 6.0
    assert torch.equal(format.dequantize(format.round(exact), 64, torch.float32), exact)


@pytest.mark.parametrize("codebook", ["nf4", "fp4"])
def test_the_same_numbers_as_bitsandbytes(codebook):
    digits, total = BITSANDBYTES[codebook]
    weight = (torch.linspace(-3, 3, 64) ** 3)[None]
    format = CodebookFormat(codebook, 4, 64)
    tensors = format.round(weight)
    codes = format.unpack(tensors["qweight"], 64)[0]
    theirs = torch.tensor([int(digit, 16) for digit in digits], dtype=torch.uint8)
    if codebook == "fp4":  # their two zeros are one here
        theirs[theirs == 8] = 0
    assert torch.equal(codes, theirs)
    values = format.dequantize(tensors, 64, torch.float32)
    assert values.double().sum().item() == pytest.approx(total, abs=1e-9)


def test_bits_per_weight():
    shape = (576, 576, torch.bfloat16)
    assert CodebookFormat("nf4", 4, 64).bits_per_weight(*shape) == 4.25
    double = CodebookFormat("nf4", 4, 64, True).bits_per_weight(*shape)
    assert double == 4 + 8 / 64 + (21 + 1) * 32 / 576**2 < 4.13
    assert CodebookFormat("kmeans", 4, -1).bits_per_weight(*shape) == 4 + (16 + 1) * 16 / 576
    assert CodebookFormat("kmeans", 3, 64).bits_per_weight(*shape) == 3.25 + 8 * 16 / 576**2


@pytest.mark.parametrize(
    "format, part, value",
    [
        (CodebookFormat("mxfp4", 4, 32), "scale_codes", 255),  # NaN in E8M0
        (CodebookFormat("nvfp4", 4, 16), "scale_scale", 1e38),
        (CodebookFormat("nf4", 4, 64, True), "scale_scale", 1e38),
    ],
)
def test_scales_that_are_not_finite_are_refused(format, part, value):
    tensors = format.round(torch.randn(3, 64))
    format.check(tensors, 64)
    tensors[part] = torch.full_like(tensors[part], value)
    with pytest.raises(ValueError, match="scale_codes stand for scales that are not finite"):
        format.check(tensors, 64)


def test_double_quantization_costs_little():
    weight = torch.randn(64, 256) * torch.rand(64, 1).exp()
    errors = []
    for double in (False, True):
        format = CodebookFormat("nf4", 4, 64, double)
        errors.append((format.dequantize(format.round(weight), 256, torch.float32) - weight).square().mean())
    assert errors[1] < 1.01 * errors[0]


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_degenerate_groups(format):
    """Zeros come back as zeros, also where everything else is large; nothing is NaN."""
    weight = torch.zeros(4, 96)
    weight[1], weight[2], weight[3, 5] = 3.0, -2.0, 1e-30
    for w in (weight, torch.zeros(4, 96)):
        back = format.dequantize(quantized(format, w), 96, torch.float32)
        assert torch.isfinite(back).all()
        assert_close(back[1:3], w[1:3], 0.1, 0.2, "constant groups, whose scale is an entry of 8 bits at worst")
        assert back[0].abs().max() <= (0.05 if format.double_quantization else 0)


CASES = [  # format, N, K, the layout that must take it for bfloat16
    (CodebookFormat("nf4", 4, 64), 64, 128, CodebookGridLayout),
    (CodebookFormat("nf4", 4, 128, True), 80, 576, CodebookGridLayout),
    (CodebookFormat("nf4", 4, None), 16, 32, CodebookGridLayout),
    (CodebookFormat("fp4", 4, 64), 48, 64, CodebookGridLayout),
    (CodebookFormat("kmeans", 4, -1), 32, 96, CodebookGridLayout),
    (CodebookFormat("kmeans", 3, 32), 32, 96, CodebookGridLayout),
    (CodebookFormat("kmeans", 2, 64), 32, 96, CodebookGridLayout),
    (CodebookFormat("nf4", 4, 48), 64, 96, CodebookCpuLayout),
    (CodebookFormat("nf4", 4, 64), 30, 99, CodebookCpuLayout),
    (CodebookFormat("kmeans", 3, -1), 30, 44, CodebookCpuLayout),
    (CodebookFormat("kmeans", 2, 64), 30, 45, CodebookCpuLayout),
]


def check_layout(layout, format, tensors, columns, error):
    dtype, rows = layout.dtype, len(tensors["qweight"])
    dense, bias = format.dequantize(tensors, columns, torch.float64), torch.randn(rows, dtype=dtype)
    eps = torch.finfo(dtype).eps
    rms, reason = 2 * eps + error, "weights and results rounded to the dtype; points of an 8-bit grid for entries"
    assert_close(layout.dequantize(), dense, rms, (8 * eps + error) * dense.abs().max().item(), reason)
    assert torch.equal(layout.canonical(), tensors["qweight"])
    for shape in ((1, columns), (2, 3, columns), (140, columns)):
        x = torch.randn(shape, dtype=dtype)
        expected = x.double() @ dense.t()
        largest = expected.abs().max().item()
        assert_close(layout.matmul(x), expected, 3 * rms, 6 * rms * largest, reason)
        assert_close(layout.matmul(x, bias), expected + bias.double(), 3 * rms, 6 * rms * (largest + 4), reason)
    assert layout.matmul(torch.randn(0, columns, dtype=dtype)).shape == (0, rows)


@pytest.mark.parametrize("format, rows, columns, kind", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layouts_of_torchs_operators(format, rows, columns, kind, dtype, monkeypatch):
    monkeypatch.setenv(tiers.VARIABLE, "torch")
    monkeypatch.setattr(codebook, "_ELEMENTS_AT_ONCE", 8 * columns)
    tensors = quantized(format, torch.randn(rows, columns, dtype=dtype))
    layout = format.layout(tensors, columns, dtype)
    assert type(layout) is (CodebookCpuLayout if dtype == torch.float32 else kind)
    check_layout(layout, format, tensors, columns, 0.01 if type(layout) is CodebookGridLayout else 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("format, rows, columns, kind", CASES)
def test_layouts_of_this_cpu(format, rows, columns, kind, dtype):
    tensors = quantized(format, torch.randn(rows, columns, dtype=dtype))
    layout = format.layout(tensors, columns, dtype)
    check_layout(layout, format, tensors, columns, 0.01 if type(layout) is CodebookGridLayout else 0)


def test_entries_that_the_grid_cannot_tell_apart_stay_entries(monkeypatch):
    """FP4 has two zeros; a weight that uses both keeps its codes, in the layout that looks them up."""
    monkeypatch.setenv(tiers.VARIABLE, "torch")
    format = CodebookFormat("fp4", 4, 64)
    codes = torch.arange(16, dtype=torch.uint8).repeat(32, 4)
    tensors = {"qweight": format.pack(codes), "scale": torch.ones(32, 1).bfloat16()}
    layout = format.layout(tensors, 64, torch.bfloat16)
    assert type(layout) is CodebookCpuLayout and torch.equal(layout.canonical(), tensors["qweight"])


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_look_up(bits, rows, dtype):
    table = torch.randint(0, 200, (rows, 2**bits)).to(dtype)
    codes = torch.randint(0, 2**bits, (5, 41), dtype=torch.uint8)
    found = codebook.look_up(codebook.pack_codes(codes, bits), table, bits, 41)
    assert torch.equal(found, table.expand(5, -1).gather(1, codes.long()))


@pytest.mark.parametrize(
    "format",
    [
        CodebookFormat("nf4", 4, 64),
        CodebookFormat("nf4", 4, 96, True),
        CodebookFormat("kmeans", 3, -1),
        CodebookFormat("kmeans", 2, None),
    ],
    ids=str,
)
def test_the_layout_of_the_gpu_on_the_cpu(format):
    """What a GPU would read, through the same op, whose CPU implementation is the kernel's reference."""
    tensors = quantized(format, torch.randn(33, 200).bfloat16())
    canonical = tensors["qweight"], format.table(tensors), format.scale(tensors)
    layout = CodebookTritonLayout(*canonical, format.bits, format.group_size, 200, torch.bfloat16)
    check_layout(layout, format, tensors, 200, 0)
    assert not CodebookTritonLayout.supports(48, torch.bfloat16) and CodebookTritonLayout.supports(96, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("format, rows, columns, kind", CASES)
def test_layouts_on_a_gpu(format, rows, columns, kind):
    tensors = quantized(format, torch.randn(rows, columns).bfloat16())
    check_on_a_gpu(format, tensors, columns, None if format.group_size == 48 else CodebookTritonLayout, 0.012)


def test_a_cpu_needs_no_triton():
    """Codebook and ternary layouts, on a machine like a Mac."""
    code = """
import sys
sys.modules["triton"] = None
import torch
from hf_efficient.formats.codebook import CodebookFormat
from hf_efficient.formats.ternary import TernaryFormat
for format in CodebookFormat("nf4", 4, 64), TernaryFormat():
    for dtype in torch.bfloat16, torch.float32:
        layout = format.layout(format.round(torch.randn(64, 64, dtype=dtype)), 64, dtype)
        assert layout.matmul(torch.randn(3, 64, dtype=dtype)).isfinite().all() and layout.canonical().numel()
"""
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, env={**os.environ})
    assert result.returncode == 0, result.stderr
