"""Products with weights in NF4, FP4, k-means and float8 by the C++ kernels, in every tier."""

import pytest
import torch

from hf_efficient.formats.codebook import TABLES
from hf_efficient.formats.w8a8 import Float8Format
from hf_efficient.kernels.linear import w8a8_cpu
from hf_efficient.kernels.linear.codebook import codebook_layout, dequantize_codebook
from hf_efficient.kernels.linear.codes import pack_codes
from hf_efficient.kernels.linear.native_tables import NativeCodebookLayout, NativeFloat8Layout
from hf_efficient.kernels.linear.w8a8_layouts import float8_layout


ROWS = (1, 2, 5, 40)
# one rounding of the result to bfloat16 (2 ** -9) and of what is summed in float32
LIMITS = {torch.bfloat16: 0.003, torch.float32: 1e-6, torch.float16: 0.003 / 8}


def error(y, expected) -> float:
    return ((y.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(("n", "k", "group"), [(70, 192, 64), (64, 64, 32), (33, 130, -1), (48, 1000, 32)])
@pytest.mark.parametrize(("name", "bits"), [("nf4", 4), ("fp4", 4), ("kmeans", 3), ("kmeans", 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_codebooks(dtype, name, bits, n, k, group, tier):
    table = torch.tensor([TABLES[name]]) if name in TABLES else torch.randn(1, 2**bits).sort().values
    qweight = pack_codes(torch.randint(0, 2**bits, (n, k), dtype=torch.uint8), bits)
    scale = (torch.rand(n, 1 if group == -1 else -(-k // group)) * 0.1 + 0.01).to(dtype)
    scheme = dict(bits=bits, group_size=group, in_features=k)
    layout = codebook_layout(qweight, table, scale, **scheme, dtype=dtype)
    assert type(layout) is NativeCodebookLayout and torch.equal(layout.canonical(), qweight)
    numbers = table.to(dtype).float(), scale.float()
    assert torch.equal(layout.dequantize(), dequantize_codebook(qweight, *numbers, **scheme, dtype=dtype))
    weight = dequantize_codebook(qweight, *numbers, **scheme, dtype=torch.float64)
    for rows in ROWS:
        x, bias = torch.randn(rows, k).to(dtype), torch.randn(n).to(dtype)
        assert error(layout.matmul(x, bias), x.double() @ weight.t() + bias.double()) < LIMITS[dtype]


def test_inputs_that_begin_between_two_words(tier):
    """Where bfloat16 is read in pairs, the sanitizers would see them."""
    codes, scale = torch.randint(16, (70, 64), dtype=torch.uint8), torch.rand(70, 1).bfloat16()
    layout = codebook_layout(
        pack_codes(codes, 4), torch.randn(1, 16), scale, bits=4, group_size=-1, in_features=64, dtype=torch.bfloat16
    )
    for rows in ROWS:
        x = torch.randn(rows * 64 + 1).bfloat16()[1:].view(rows, 64)
        assert torch.equal(layout.matmul(x), layout.matmul(x.clone()))


def float8_tensors(format: Float8Format, n: int, k: int) -> dict[str, torch.Tensor]:
    """Canonical tensors with codes of all sizes, subnormal ones among them."""
    weight = torch.randn(n, k) * torch.logspace(-4, 2, k)
    codes = weight.clamp(-448, 448).to(format.codes_dtype)
    tensors = {"qweight": codes, "scale": torch.rand(format.shapes(n, k)["scale"]) * 0.01 + 0.001}
    return tensors | ({"activation_scale": torch.tensor([0.01])} if format.static else {})


@pytest.mark.parametrize(
    "format",
    [
        *(Float8Format(), Float8Format("tensor"), Float8Format("block"), Float8Format(static=True)),
        *(Float8Format(is_e5m2=True), Float8Format("block", is_e5m2=True)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_float8(dtype, format, tier):
    by_block = format.weights == "block"
    for n, k in ((70, 192), (64, 64), (33, 130), (300, 384)):
        tensors = float8_tensors(format, n, k)
        layout = float8_layout(tensors, dtype, by_block)
        assert type(layout.native) is NativeFloat8Layout
        assert torch.equal(layout.canonical().view(torch.uint8), tensors["qweight"].view(torch.uint8))
        assert torch.equal(layout.dequantize(), format.dequantize(tensors, k, dtype))
        weight = format.dequantize(tensors, k, torch.float64)
        for rows in ROWS:
            x, bias = (torch.randn(rows, k) * 2).to(dtype), torch.randn(n).to(dtype)
            kind, static = "fp8_block" if by_block else "fp8", tensors.get("activation_scale")
            codes, *scale = w8a8_cpu.quantize(x, kind, static, None)
            # 16-bit models multiply what codes stand for in bfloat16, as the reference does; others in float32
            work = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
            rounded = w8a8_cpu.dequantize(codes, *(scale or [static]), None, work).double()
            assert error(layout.matmul(x, bias), rounded @ weight.t() + bias.double()) < LIMITS[dtype], (n, k, rows)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_float8_is_itself(dtype, tier):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    codes = codes[codes.float().isfinite()].view(1, -1)
    layout = NativeFloat8Layout.pack(codes, torch.ones(1, 1), torch.ones(1), torch.float32, by_block=False)
    y = layout.matmul(torch.eye(codes.shape[1]))
    assert torch.equal(y[:, 0], codes[0].float())


def test_inputs_take_the_nearest_float8(tier):
    identity = torch.eye(64).to(torch.float8_e4m3fn)
    layout = NativeFloat8Layout.pack(identity, torch.ones(1, 1), torch.ones(1), torch.float32, by_block=False)
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (every[1:] + every[:-1]) / 2  # ties go to the even code
    x = torch.cat([every, middles, middles * 1.001, middles * 0.999, torch.tensor([500.0, 0.0])])
    x = torch.nn.functional.pad(torch.cat([x, -x]), (0, -2 * len(x) % 64)).view(-1, 64)
    assert torch.equal(layout.matmul(x), x.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    nans = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert not layout.matmul(torch.nn.functional.pad(nans[:, None], (0, 63))).isfinite().any()
    largest = torch.tensor([[torch.inf], [-torch.inf]])
    codes = torch.full((1, 1), 1.0).to(torch.float8_e4m3fn)
    alone = NativeFloat8Layout.pack(codes, torch.ones(1, 1), torch.ones(1), torch.float32, by_block=False)
    assert torch.equal(alone.matmul(largest), largest.clamp(-448, 448))
