"""codebook_linear against its reference in float64: natively on CUDA, through the Triton interpreter elsewhere."""

import pytest
import torch
from linear_checks import check, check_gradients, check_runs, groups_of

from hf_efficient.kernels import efficient_linear
from hf_efficient.kernels.efficient_linear import weight_only


SHAPES = [(40, 200), (17, 333), (70, 600), (1, 1)]  # out_features, in_features


def problem(out_features, in_features, bits, group_size, per_row, device):
    codes = torch.randint(0, 2**bits, (out_features, in_features), dtype=torch.uint8, device=device)
    packed = efficient_linear.pack_codebook_weight(efficient_linear.pack_canonical(codes, bits), bits)
    codebook = torch.randn((out_features, 2**bits) if per_row else (2**bits,), device=device)
    scale = torch.rand(groups_of(out_features, in_features, group_size), device=device) + 0.5
    return packed, codebook, scale, dict(bits=bits, group_size=group_size, in_features=in_features)


def check_product(x, packed, codebook, scale, bias, layout):
    actual = efficient_linear.codebook_linear(x, packed, codebook, scale, bias, **layout)
    weight = efficient_linear.dequantize_codebook_reference(packed, codebook, scale, dtype=x.dtype, **layout)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert actual.dtype == x.dtype
    check(actual, expected)


CASES = [
    (bits, (i + j) % 2 == 0, dtype)
    for i, bits in enumerate((2, 3, 4))
    for j, dtype in enumerate((torch.float16, torch.bfloat16, torch.float32))
]


@pytest.mark.parametrize("bits, per_row, dtype", CASES)
def test_few_tokens(bits, per_row, dtype, kernel_device, nan_poison):
    number = CASES.index((bits, per_row, dtype))
    out_features, in_features = SHAPES[number % len(SHAPES)]
    group_size = (64, 32, 128, None, -1)[number % 5]
    packed, codebook, scale, layout = problem(out_features, in_features, bits, group_size, per_row, kernel_device)
    if dtype == torch.bfloat16 and weight_only.INTERPRETED:
        codebook = codebook.to(dtype)  # the interpreter truncates float32 to bfloat16 instead of rounding it
    x = torch.randn((1, 5, 20)[number % 3], in_features, device=kernel_device).to(dtype)
    bias = torch.randn(out_features, device=kernel_device) if number % 2 else None
    check_product(x, packed, codebook, scale, bias, layout)


@pytest.mark.parametrize("name", ["NF4", "FP4"])
def test_constant_tables(name, kernel_device, nan_poison):
    """Entry by entry: all 16 codes, in both rows of a lane and all places of a word."""
    codebook = torch.tensor(getattr(efficient_linear, name), device=kernel_device)
    assert codebook.abs().max() == 1 and (name == "FP4" or codebook.diff().min() > 0)
    codes = torch.randint(0, 16, (32, 256), dtype=torch.uint8, device=kernel_device)
    packed = efficient_linear.pack_codebook_weight(efficient_linear.pack_canonical(codes, 4), 4)
    layout = dict(bits=4, group_size=64, in_features=256)
    scale = torch.rand(32, 4, device=kernel_device) + 0.5
    check_product(torch.randn(2, 256, device=kernel_device).half(), packed, codebook, scale, None, layout)
    eye = torch.eye(256, device=kernel_device)[:64].half()
    one = efficient_linear.codebook_linear(eye, packed, codebook, scale.fill_(1), **layout)
    assert torch.equal(one, codebook.half()[codes.long()].t()[:64])


@pytest.mark.parametrize("per_row", [False, True])
def test_entries_from_memory(per_row, kernel_device, nan_poison, monkeypatch):
    """As on ROCm."""
    monkeypatch.setattr(weight_only, "_lookup", lambda codebook, dtype: weight_only.GATHER.value)
    packed, codebook, scale, layout = problem(40, 200, 3, 64, per_row, kernel_device)
    check_product(torch.randn(3, 200, device=kernel_device).half(), packed, codebook, scale, None, layout)


@pytest.mark.parametrize("bits, per_row", [(2, True), (3, False), (4, True)])
def test_many_tokens_and_dequantize(bits, per_row, kernel_device, nan_poison):
    packed, codebook, scale, layout = problem(70, 333, bits, 64, per_row, kernel_device)
    for dtype in (torch.float16, torch.float32):
        actual = efficient_linear.dequantize_codebook(packed, codebook, scale, dtype=dtype, **layout)
        expected = efficient_linear.dequantize_codebook_reference(packed, codebook, scale, dtype=dtype, **layout)
        assert torch.equal(actual, expected.to(dtype)), "the same float32 product, rounded once"
    check_product(torch.randn(65, 333, device=kernel_device).half(), packed, codebook, scale, None, layout)


def test_gradient_of_the_input(kernel_device):
    packed, codebook, scale, layout = problem(40, 200, 4, 64, True, kernel_device)
    x = torch.linspace(-1, 1, 1000, device=kernel_device).view(5, 200)

    def product(linear):
        return lambda x: linear(x, packed, codebook, scale, **layout)

    check_gradients(*map(product, (efficient_linear.codebook_linear, efficient_linear.codebook_linear_reference)), x)
    with pytest.raises(RuntimeError, match="codebook requires grad"):
        efficient_linear.codebook_linear(x, packed, codebook.requires_grad_(), scale, **layout)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 64, 200])
@pytest.mark.parametrize("bits, per_row", [(2, False), (3, True), (4, False), (4, True)])
def test_native_is_deterministic(bits, per_row, tokens):
    packed, codebook, scale, layout = problem(4096, 4096, bits, 64, per_row, "cuda")
    x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16)
    check_product(x, packed, codebook, scale, None, layout)
    check_runs(lambda: efficient_linear.codebook_linear(x, packed, codebook, scale, **layout))
