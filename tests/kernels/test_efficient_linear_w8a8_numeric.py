"""int8 activations against the reference: natively on CUDA, through the Triton interpreter elsewhere."""

import linear_checks
import pytest
import torch
from linear_checks import codes_and_scale

from hf_efficient.kernels import efficient_linear
from hf_efficient.kernels.efficient_linear import activation_quant, activation_reference, w8a8, w8a8_configs
from hf_efficient.kernels.linear import w8a8 as ops
from hf_efficient.kernels.linear.op import by_name


FORMATS = activation_quant.FORMATS
REFERENCE = activation_reference.quantize_reference
# integer sums are exact and float32 scales add 3 * 2^-24
FLOAT32 = (3e-7, 1e-6)


def check(actual, expected, tolerances=None, reason="exact integer sums, float32 scales, one rounding of the output"):
    linear_checks.check(actual, expected, tolerances or (FLOAT32 if actual.dtype == torch.float32 else None), reason)


def same(actual, expected):
    """Codes, scales and zero points bit for bit; None where the reference has None."""
    for name, one, other in zip(actual._fields, actual, expected):
        assert (one is None) == (other is None), name
        assert one is None or (one.dtype == other.dtype and torch.equal(one.float(), other.float())), name


def rows(number, columns, dtype, device):
    """Rows of magnitudes from 1e-30 to 1e4, and one of zeros."""
    magnitudes = torch.tensor([1.0, 0.0, 1e-30, 1e4, 3e-6], device=device)[torch.arange(number, device=device) % 5]
    return (torch.randn(number, columns, device=device) * magnitudes[:, None]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_codes_are_those_of_the_reference(format, dtype, kernel_device, nan_poison):
    for number, columns in ((5, 333), (1, 1), (3, 1024)):
        x = rows(number, columns + 7, dtype, kernel_device)[:, 3 : columns + 3]
        same(efficient_linear.quantize(x, format), REFERENCE(x, format))


@pytest.mark.parametrize("format", FORMATS[:3])
def test_static_scales(format, kernel_device, nan_poison):
    x = torch.randn(3, 333, device=kernel_device)
    if format == "fp8":
        x[1, 5] = float("nan")  # codes have one, too
    scale = torch.tensor([[0.01]], device=kernel_device)
    zero = torch.tensor([[-9]], dtype=torch.int8, device=kernel_device) if format == "int8_asymmetric" else None
    actual = efficient_linear.quantize(x, format, scale, zero)
    codes, expected = actual.codes.float(), REFERENCE(x, format, scale, zero)[0].float()
    assert torch.equal(codes.isnan(), x.isnan()) and torch.equal(codes.nan_to_num(), expected.nan_to_num())
    assert actual.scale is scale and actual.zero_point is zero


def test_halves_are_rounded_to_even(kernel_device):
    x = torch.arange(-127, 128, device=kernel_device)[None] / 2
    x[0, 0] = 127  # the scale is 1
    expected = x.round().to(torch.int8)
    assert torch.equal(efficient_linear.quantize(x, "int8").codes, expected)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("residual", [False, True])
def test_rms_norm(format, residual, kernel_device, nan_poison):
    x, weight = torch.randn(4, 333, device=kernel_device), torch.rand(333, device=kernel_device) + 0.5
    other = torch.randn(4, 333, device=kernel_device) if residual else None
    quantized, total, normalised = efficient_linear.rms_norm_quantize(
        x, weight, 1e-6, other, format=format, normalised=True
    )
    expected_total, expected = activation_reference.rms_norm_reference(x, weight, 1e-6, other)
    check(normalised, expected, (1e-6, 1e-6), "float32, sums in another order")
    same(quantized, REFERENCE(normalised, format))
    assert total is None if other is None else torch.equal(total, expected_total)
    half = efficient_linear.rms_norm_quantize(x.half(), weight, 1e-6, format=format)
    check(activation_reference.dequantize_codes(*half[0]), expected if other is None else
          activation_reference.rms_norm_reference(x, weight, 1e-6)[1], (0.04, 0.04), "8 bits")  # fmt: skip
    assert half[1] is None and half[2] is None


@pytest.mark.parametrize("format", FORMATS)
def test_silu_mul(format, kernel_device, nan_poison):
    both = torch.randn(4, 400, device=kernel_device).half()
    gate, up = both.chunk(2, dim=1)
    quantized = efficient_linear.silu_mul_quantize(gate, up, format=format)
    expected = activation_reference.silu_mul_reference(gate, up)
    codes, scale, zero_point = REFERENCE(expected, format)
    check(quantized.scale, scale, (1e-6, 2e-6), "exp and the quotient are 2 ulp on a GPU")
    steps = (quantized.codes.view(torch.int8).int() - codes.view(torch.int8).int()).abs()
    assert steps.max() <= 1 and (steps > 0).float().mean() < 0.01, "other codes only where a rounding was close"
    assert zero_point is None or (quantized.zero_point.int() - zero_point.int()).abs().max() <= 1


@pytest.mark.parametrize("format", FORMATS)
def test_rows_that_are_not_finite_have_products_that_are_not(format, kernel_device):
    x = torch.randn(3, 200, device=kernel_device)
    x[0, 3], x[2, 190] = float("nan"), float("inf")
    weight = torch.randn(8, 200, device=kernel_device)
    quantized = efficient_linear.quantize(x, format)
    if "fp8" in format:
        w_codes, w_scale, _ = REFERENCE(weight, "fp8")
        if format == "fp8_block":
            w_scale = torch.ones(1, 2, device=kernel_device)
        y = efficient_linear.fp8_linear(quantized.codes, w_codes, quantized.scale, w_scale)
    else:
        w_codes, w_scale, _ = REFERENCE(weight, "int8")
        y = efficient_linear.w8a8_linear(
            quantized.codes, w_codes, quantized.scale, w_scale, x_zero_point=quantized.zero_point
        )
    assert torch.isfinite(y[1]).all() and not torch.isfinite(y[0]).any() and not torch.isfinite(y[2]).any()


# tokens, out_features, in_features, zero points of x and w, one scale for the tensor
PRODUCTS = [
    (1, 40, 301, False, False, False),
    (3, 37, 256, True, False, True),
    (17, 70, 333, False, True, False),
    (33, 150, 144, True, True, False),
    (100, 130, 272, False, False, False),
    (130, 140, 208, True, True, False),
    (130, 37, 301, True, True, False),
    (300, 140, 128, True, False, False),
    (2, 1, 1, True, True, True),
]


@pytest.mark.parametrize("tokens, out_features, in_features, x_zero, w_zero, per_tensor", PRODUCTS)
def test_product(tokens, out_features, in_features, x_zero, w_zero, per_tensor, kernel_device, nan_poison):
    x, x_scale = codes_and_scale(tokens, in_features, per_tensor, kernel_device)
    w, w_scale = codes_and_scale(out_features, in_features, per_tensor, kernel_device)
    zeros = {}
    if x_zero:
        zeros["x_zero_point"] = torch.randint_like(x[: len(x_scale), :1], -128, 128)
    if w_zero:
        zeros["w_zero_point"] = torch.randint_like(w[: len(w_scale), :1], -128, 128)
    bias = torch.randn(out_features, device=kernel_device).half() if tokens != 3 else None
    sums = w.sum(1, dtype=torch.int32) if tokens > 2 else None
    expected = activation_reference.w8a8_linear_reference(x, w, x_scale, w_scale, bias, **zeros)
    dtypes = (torch.float32, torch.bfloat16) if tokens < 100 else (torch.float32,)
    for dtype in dtypes:
        check(
            efficient_linear.w8a8_linear(x, w, x_scale, w_scale, bias, w_sums=sums, out_dtype=dtype, **zeros), expected
        )


@pytest.mark.parametrize("processors", [1, 10**6], ids=["many tiles", "few tiles"])
def test_tiles_of_many_tokens(processors, kernel_device, nan_poison, monkeypatch):
    """Those of the table, and those where the table's would be fewer than multiprocessors."""
    monkeypatch.setattr(w8a8, "processors", lambda device: processors)
    x, x_scale = codes_and_scale(140, 304, False, kernel_device)
    w, w_scale = codes_and_scale(150, 304, False, kernel_device)
    tile = w8a8_configs.choose_tile(140, False, True, 150, processors)
    assert (tile is w8a8_configs.FEW_ROWS_TILE) == (processors > 1)
    zeros = dict(x_zero_point=torch.randint(-9, 9, (140, 1), dtype=torch.int8, device=kernel_device))
    actual = efficient_linear.w8a8_linear(x, w, x_scale, w_scale, out_dtype=torch.float32, **zeros)
    check(actual, activation_reference.w8a8_linear_reference(x, w, x_scale, w_scale, **zeros))


@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("by_block", [False, True])
def test_weights_in_e5m2(by_block, tokens, kernel_device, nan_poison):
    out_features, in_features = 150, 304
    x = torch.randn(tokens, in_features, device=kernel_device).clamp(-2, 2)
    x_codes, x_scale, _ = REFERENCE(x, "fp8_block" if by_block else "fp8")
    every = torch.arange(256, dtype=torch.uint8, device=kernel_device)
    every = every[(every & 127) < 124].repeat(1 + out_features * in_features // 248)[: out_features * in_features]
    w_codes = every.view(torch.float8_e5m2).view(out_features, in_features)
    w_scale = torch.rand(2, 3, device=kernel_device) if by_block else torch.rand(out_features, 1, device=kernel_device)
    bias = torch.randn(out_features, device=kernel_device)
    actual = efficient_linear.fp8_linear(x_codes, w_codes, x_scale, w_scale, bias, out_dtype=torch.float32)
    check(actual, activation_reference.fp8_linear_reference(x_codes, w_codes, x_scale, w_scale, bias), (2**-12, 2**-11))
    with pytest.raises(TypeError, match="x_codes has dtype torch.float8_e5m2: allowed is torch.float8_e4m3fn$"):
        efficient_linear.fp8_linear(w_codes, w_codes, w_scale, w_scale)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_tiles_through_the_tensor_memory_accelerator(kind, kernel_device, nan_poison, monkeypatch):
    if not w8a8.INTERPRETED and torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("this GPU has no tensor memory accelerator")
    monkeypatch.setattr(w8a8_configs, "TMA_FROM", {kind: 1})
    monkeypatch.setattr(w8a8, "processors", lambda device: 1)
    tokens, out_features, in_features = 260, 150, 304
    x, x_scale = codes_and_scale(tokens, in_features, False, kernel_device)
    w, w_scale = codes_and_scale(out_features, in_features, False, kernel_device)
    if kind == "fp8":
        x, w = ((codes.float() / 8).to(torch.float8_e4m3fn) for codes in (x, w))
    served = []
    serves = w8a8._serves_tma
    monkeypatch.setattr(w8a8, "_serves_tma", lambda *arguments: served.append(serves(*arguments)) or served[-1])
    if kind == "int8":
        actual = efficient_linear.w8a8_linear(x, w, x_scale, w_scale, out_dtype=torch.float32)
        check(actual, activation_reference.w8a8_linear_reference(x, w, x_scale, w_scale))
    else:
        actual = w8a8.launch("fp8", x, w, x_scale, w_scale, None, torch.float32)
        check(actual, activation_reference.fp8_linear_reference(x, w, x_scale, w_scale), (2**-12, 2**-11))
    assert served == [True]
    assert w8a8._are_aligned(x, w) and not w8a8._are_aligned(x[:, :303], w) and not w8a8._are_aligned(x[:, 1:289], w)


def test_sums_are_those_of_int64(kernel_device, nan_poison):
    """Sums past 2^24, where float32 is no longer exact, come out as the float32 nearest to the int64 sum."""
    x = torch.full((2, 4000), 127, dtype=torch.int8, device=kernel_device)
    x[:, ::7] = torch.randint(-128, 128, x[:, ::7].shape, dtype=torch.int8, device=kernel_device)
    w = torch.full((40, 4000), 127, dtype=torch.int8, device=kernel_device)
    w[:, ::5] = torch.randint(-128, 128, w[:, ::5].shape, dtype=torch.int8, device=kernel_device)
    zeros = dict(x_zero_point=torch.full((2, 1), -128, dtype=torch.int8, device=kernel_device))
    one = torch.ones(1, device=kernel_device)
    for arguments in ({}, zeros):
        expected = activation_reference.int8_accumulate_reference(
            x.cpu(), w.cpu(), *(t.cpu() for t in arguments.values())
        )
        assert expected.abs().max() > 2**24
        actual = efficient_linear.w8a8_linear(x, w, one, one, out_dtype=torch.float32, **arguments)
        assert torch.equal(actual.cpu(), expected.float())


def test_k_is_split_and_the_counters_come_back_to_zero(kernel_device, nan_poison, arrivals):
    x, x_scale = codes_and_scale(3, 1536, False, kernel_device)
    w, w_scale = codes_and_scale(100, 1536, False, kernel_device)
    actual = efficient_linear.w8a8_linear(x, w, x_scale, w_scale, out_dtype=torch.float32)
    check(actual, activation_reference.w8a8_linear_reference(x, w, x_scale, w_scale))
    assert len(arrivals) == 1 and arrivals[0].numel() == 2 and not arrivals[0].any()


def test_no_tokens(kernel_device):
    x = torch.empty(0, 200, device=kernel_device)
    w, w_scale = codes_and_scale(40, 200, False, kernel_device)
    codes = efficient_linear.quantize(x, "int8")
    assert codes.codes.shape == (0, 200) and codes.scale.shape == (0, 1)
    assert efficient_linear.w8a8_linear(codes.codes, w, codes.scale, w_scale).shape == (0, 40)
    assert efficient_linear.llm_int8_linear(x, w, w_scale).shape == (0, 40)


def test_bad_arguments_are_named(kernel_device):
    x, x_scale = codes_and_scale(3, 200, False, kernel_device)
    w, w_scale = codes_and_scale(40, 200, False, kernel_device)
    rows = torch.randn(3, 200, device=kernel_device)
    wide = torch.zeros(1, 65794, dtype=torch.int8, device=kernel_device)
    linear, quantize = efficient_linear.w8a8_linear, efficient_linear.quantize
    linear_checks.check_errors(
        (TypeError, "x_codes has dtype", lambda: linear(rows, w, x_scale, w_scale)),
        (ValueError, "x_codes has 100 columns", lambda: linear(x[:, :100], w, x_scale, w_scale)),
        (ValueError, "x_codes has strides", lambda: linear(x[:, ::2], w[:, :100], x_scale, w_scale)),
        (ValueError, "w_scale has shape", lambda: linear(x, w, x_scale, x_scale)),
        (TypeError, "x_scale has dtype", lambda: linear(x, w, x_scale.half(), w_scale)),
        (TypeError, "x_zero_point has dtype", lambda: linear(x, w, x_scale, w_scale, x_zero_point=x_scale)),
        (ValueError, "w_sums is", lambda: linear(x, w, x_scale, w_scale, w_sums=w_scale)),
        (ValueError, "bias has shape", lambda: linear(x, w, x_scale, w_scale, x_scale[:, 0])),
        (TypeError, "out_dtype=torch.int8", lambda: linear(x, w, x_scale, w_scale, out_dtype=torch.int8)),
        (ValueError, "overflows", lambda: linear(wide, wide, w_scale[:1], w_scale[:1], x_zero_point=wide[:, :1])),
        (ValueError, "format='int4'", lambda: quantize(rows, "int4")),
        (ValueError, "scale must be None", lambda: quantize(rows, "fp8_block", x_scale[:1])),
        (ValueError, "zero_point belongs", lambda: quantize(rows, "int8", zero_point=x[:1, :1])),
        (ValueError, "scale is", lambda: quantize(rows, "int8", x_scale)),
        (ValueError, "columns: allowed", lambda: quantize(rows.expand(3, 200)[:, :0], "int8")),
        (ValueError, "up has shape", lambda: efficient_linear.silu_mul_quantize(rows, rows[:, :9], format="int8")),
        (ValueError, "weight is", lambda: efficient_linear.rms_norm_quantize(rows, rows[0, :9], 1e-6, format="int8")),
        (ValueError, "threshold=0", lambda: efficient_linear.llm_int8_linear(rows, w, w_scale, threshold=0)),
        (ValueError, "x has 100 columns", lambda: efficient_linear.llm_int8_linear(rows[:, :100], w, w_scale)),
    )


def op(name, device):
    """The op on CUDA; interpreted, its CUDA implementation."""
    if device == "cuda":
        return getattr(torch.ops.hf_efficient, name)
    return getattr(ops, f"_{name}_cuda", None) or by_name(name, name)


@pytest.mark.parametrize("format", FORMATS)
def test_ops_on_cuda_and_cpu_agree(format, kernel_device, nan_poison):
    """What an op gives on CUDA is bit for bit what it gives on a CPU; products and norms to float32 accuracy."""
    x, weight = torch.randn(3, 200), torch.rand(200)
    scale = torch.tensor([0.02]) if format != "fp8_block" else None
    zero = torch.tensor([5], dtype=torch.int8) if format == "int8_asymmetric" else None
    if format == "fp8_block":
        w, w_scale = REFERENCE(torch.randn(40, 200), "fp8")[0], torch.rand(1, 2)
    else:
        w, w_scale, _ = REFERENCE(torch.randn(40, 200), "fp8" if format == "fp8" else "int8")
    rows = ops.quantize(x, format)
    calls = [
        ("quantize_activation", (x, format, None, None)),
        ("quantize_activation", (x, format, scale, zero)),
        ("rms_norm_quantize", (x, weight, x, 1e-6, format, scale, zero, True)),
        ("silu_mul_quantize", (x, x, format, scale, zero)),
    ]
    calls.append(("quantized_linear", (x, w, w_scale, None, format, None, None, None, None)))
    if "fp8" in format:
        calls.append(("fp8_linear", (rows.codes, w, rows.scale, w_scale, None, torch.float32)))
    else:
        arguments = (rows.codes, w, rows.scale, w_scale, None, rows.zero_point, None, None, torch.float32)
        calls += [("w8a8_linear", arguments), ("llm_int8_linear", (x, w, w_scale, None, 2.5))]
    for name, arguments in calls:
        on_device = [t.to(kernel_device) if isinstance(t, torch.Tensor) else t for t in arguments]
        actual, expected = op(name, kernel_device)(*on_device), getattr(torch.ops.hf_efficient, name)(*arguments)
        if isinstance(expected, torch.Tensor):
            check(actual.cpu(), expected, FLOAT32 if "fp8" not in format else (2**-12, 2**-11))
            continue
        assert [(t.dtype, t.shape) for t in actual] == [(t.dtype, t.shape) for t in expected]
        if name == "quantize_activation":
            assert all(torch.equal(one.cpu().float(), other.float()) for one, other in zip(actual, expected))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 64, 4096])
def test_native_is_deterministic_and_replays_in_a_graph_with_other_outliers(tokens):
    w, w_scale = codes_and_scale(4096, 4096, False, "cuda")
    w_scale *= 2**-13
    x = torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16).clamp(-5, 5)

    def call():
        return efficient_linear.llm_int8_linear(x, w, w_scale)

    def expected():
        return activation_reference.llm_int8_reference(x, w, w_scale).cpu()

    first = call()
    assert all(torch.equal(call(), first) for _ in range(20))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for outliers in (0, 1, 100):
        x[0, torch.randperm(4096, device="cuda")[:outliers]] = 15.0
        graph.replay()
        check(captured.cpu(), expected())


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["plain", "rms_norm", "silu_mul"])
@pytest.mark.parametrize("format", FORMATS)
def test_native_codes_of_real_sizes(format, source):
    x = rows(64, 14336, torch.bfloat16, "cuda")
    if source == "plain":
        same(efficient_linear.quantize(x, format), REFERENCE(x, format))
        return
    if source == "rms_norm":
        weight = torch.ones(14336, device="cuda")
        actual, _, expected = efficient_linear.rms_norm_quantize(
            x.float(), weight, 1e-6, format=format, normalised=True
        )
        same(actual, REFERENCE(expected, format))
        return
    actual = efficient_linear.silu_mul_quantize(x, x, format=format)
    codes = REFERENCE(activation_reference.silu_mul_reference(x, x), format)[0]
    steps = (actual.codes.view(torch.int8).int() - codes.view(torch.int8).int()).abs()
    assert steps.max() <= 1 and (steps > 0).float().mean() < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 64, 128, 2000])
def test_native_int8_sums_of_real_sizes(tokens):
    x, _ = codes_and_scale(tokens, 14336, False, "cuda")
    w, _ = codes_and_scale(4096, 14336, False, "cuda")
    one = torch.ones(1, device="cuda")
    first = efficient_linear.w8a8_linear(x, w, one, one, out_dtype=torch.float32)
    # float64 sums of these integers are exact
    assert torch.equal(first, (x.double() @ w.double().t()).float())
    assert all(
        torch.equal(efficient_linear.w8a8_linear(x, w, one, one, out_dtype=torch.float32), first) for _ in range(10)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("out_features, in_features", [(70, 333), (64, 5120), (1, 1)])
def test_one_token_is_rounded_by_the_product(out_features, in_features, dtype, kernel_device, nan_poison, monkeypatch):
    """The bits of two launches; K in one part and in several."""
    w_codes = torch.randint(-128, 128, (out_features, in_features), dtype=torch.int8, device=kernel_device)
    w_scale = torch.rand(out_features, 1, device=kernel_device)
    bias = torch.randn(out_features, device=kernel_device).to(dtype) if in_features > 1 else None
    for x in rows(3, in_features, dtype, kernel_device)[:, None]:
        codes, scale, _ = efficient_linear.quantize(x, "int8")
        expected = efficient_linear.w8a8_linear(codes, w_codes, scale, w_scale, bias, out_dtype=dtype)
        up = torch.randn_like(x)
        codes, scale, _ = efficient_linear.silu_mul_quantize(x, up, format="int8")
        gated = efficient_linear.w8a8_linear(codes, w_codes, scale, w_scale, bias, out_dtype=dtype)
        for _ in linear_checks.in_one_part_and_in_several(monkeypatch):
            assert torch.equal(efficient_linear.rounded_w8a8_linear(x, w_codes, w_scale, bias), expected)
            assert torch.equal(efficient_linear.rounded_w8a8_linear(x, w_codes, w_scale, bias, up), gated)


def test_what_the_product_that_rounds_refuses(kernel_device):
    w_codes, w_scale = torch.zeros(4, 8, dtype=torch.int8, device=kernel_device), torch.ones(4, device=kernel_device)
    with pytest.raises(ValueError, match=r"allowed is a contiguous \[1, 8\]"):
        efficient_linear.rounded_w8a8_linear(torch.zeros(2, 8, device=kernel_device), w_codes, w_scale)
    with pytest.raises(ValueError, match="w_scale has shape"):
        efficient_linear.rounded_w8a8_linear(torch.zeros(1, 8, device=kernel_device), w_codes, w_scale[:3])
