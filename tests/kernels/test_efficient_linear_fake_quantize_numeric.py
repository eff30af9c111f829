"""Fake quantization against the reference and torch's operators: natively on CUDA, through the Triton interpreter
elsewhere."""

import numpy as np
import pytest
import torch
from linear_checks import check_errors, check_graph, check_learned, learned

from hf_efficient.kernels import efficient_linear, triton_devices
from hf_efficient.kernels.efficient_linear import weight_only
from hf_efficient.kernels.linear.fake_quantize import FakeQuantizer
from hf_efficient.kernels.native import tiers


DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# config of hf_efficient as (class, arguments), whose canonical tensors have zero points of each kind
CONFIGS = {
    "2 bits": ("WeightOnlyConfig", dict(bits=2, group_size=32, method="rtn")),
    "symmetric": ("WeightOnlyConfig", dict(bits=4, group_size=32, symmetric=True, method="rtn")),
    "a group a row": ("WeightOnlyConfig", dict(bits=8, group_size=-1, method="rtn")),
    "one group": ("WeightOnlyConfig", dict(bits=4, group_size=None, symmetric=True, method="rtn")),
    "float zero points": ("WeightOnlyConfig", dict(bits=4, group_size=32, method="hqq", zero_point="float")),
    "ternary": ("BitNetConfig", {}),
    "W8A8 with zero points": ("W8A8Config", dict(method="zeropoint")),
}


@pytest.fixture(autouse=True)
def rounds_to_bfloat16(monkeypatch):
    """The interpreter cuts off what a GPU rounds."""
    if not weight_only.INTERPRETED:
        return
    from triton.runtime import interpreter

    def convert(data, source, target, rounding):
        assert {source.name, target.name} == {"fp32", "bf16"}
        data = torch.from_numpy(np.ascontiguousarray(data))
        if target.name == "bf16":
            return data.bfloat16().view(torch.int16).numpy()
        return data.view(torch.int16).view(torch.bfloat16).float().numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def case(device, rows, columns, width, low, high, zero):
    """(weight, scale, zero, keywords): some weights are cut off, some lie between two codes, one group has a scale of
    0."""
    torch.manual_seed(0)
    groups = -(-columns // width)
    scale = torch.rand(rows, groups, device=device) + 0.1
    weight = torch.randn(rows, columns, device=device) * (high - low) / 3
    weight[0, 0], weight[0, -1], weight[-1, 0] = 1e9, -1e9, float("inf")
    if rows > 2:
        scale[1, -1], scale[2, 0] = 0, 0.5
        half = min(width, columns)
        weight[2, :half] = torch.arange(half, device=device) / 4
    zeros = {
        "number": (low + high) / 2,
        "groups": torch.randint(low, high + 1, (groups, rows), device=device).float().t(),  # its strides are odd ones
        "one": torch.full((1, 1), 1.5, device=device),
        "row": torch.randn(rows, 1, device=device),
    }
    return weight, scale, zeros[zero], dict(low=low, high=high, group_size=width)


def check(weight, scale, zero, layout, dtype, work, passes_all=False):
    """Both kernels beside their references."""
    rounded = efficient_linear.fake_quantize_weight(weight, scale, zero, dtype=dtype, work=work, **layout)
    expected = efficient_linear.fake_quantize_weight_reference(weight, scale, zero, dtype=dtype, work=work, **layout)
    assert rounded.dtype == dtype
    torch.testing.assert_close(rounded, expected, rtol=0, atol=0, equal_nan=True)
    gradient = torch.randn(weight.shape, device=weight.device).to(dtype)
    layout = layout | dict(passes_all=passes_all)
    passed, of_scale = efficient_linear.fake_quantize_gradients(weight, scale, zero, rounded, gradient, **layout)
    expected = efficient_linear.fake_quantize_gradients_reference(weight, scale, zero, rounded, gradient, **layout)
    torch.testing.assert_close(passed, expected[0], rtol=0, atol=0)
    check_of_scale(of_scale, weight, scale, zero, rounded, gradient, layout)


def check_of_scale(of_scale, weight, scale, zero, rounded, gradient, layout):
    """Sums in float32 beside those in float64, where weights are finite: a term is rounded three times, and on its way
    to the sum fewer than 60 times, each time by 2^-24."""
    uncut = efficient_linear.fake_quantize_gradients_reference(
        weight, scale, zero, rounded, gradient, **layout | dict(passes_all=False)
    )[0]
    first, second = rounded.double() * gradient, uncut.double() * weight.nan_to_num(posinf=0).double()
    short = (0, -weight.shape[1] % layout["group_size"])
    sums = [
        torch.nn.functional.pad(terms, short).unflatten(1, (-1, layout["group_size"])).sum(2)
        for terms in (first - second, first.abs() + second.abs())
    ]
    known = of_scale.isfinite()
    assert ((of_scale - sums[0]).abs() <= 2**-18 * sums[1])[known].all()
    assert (known | ~weight.isfinite().all(1, keepdim=True)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, columns, width", [(5, 256, 64), (67, 100, 32), (3, 333, 333), (3, 40, 64), (1, 1, 1), (2, 4400, 4400)]
)
def test_the_numbers_of_the_reference(rows, columns, width, dtype, kernel_device, nan_poison):
    for zero, work in (("groups", dtype), ("number", torch.float32)):
        check(*case(kernel_device, rows, columns, width, 0, 15, zero), dtype, work)


RANGES = (0, 1), (-128, 127), (0, 255), (0, 1023)


@pytest.mark.parametrize(
    "zero, low, high, dtype",
    [
        (zero, *codes, DTYPES[(i + j) % 3])
        for i, zero in enumerate(("number", "groups", "one", "row"))
        for j, codes in enumerate(RANGES)
    ],
)
def test_zero_points_and_codes(zero, low, high, dtype, kernel_device, nan_poison):
    check(*case(kernel_device, 4, 130, 33, low, high, zero), dtype, dtype, passes_all=zero == "one")


def test_scales_of_one_row_of_one_column_and_one_for_all(kernel_device, nan_poison):
    weight, scale, zero, layout = case(kernel_device, 4, 130, 33, 0, 15, "groups")
    for shared in (scale[:1], scale[:, :1], scale[2:3, 1:2]):
        check(weight, shared, zero, layout, torch.float16, torch.float32)


def test_nan_stays_nan_and_its_gradient_passes(kernel_device, nan_poison):
    weight, scale, zero, layout = case(kernel_device, 4, 130, 33, 0, 15, "groups")
    weight[:, 5] = float("nan")
    for dtype in DTYPES:
        check(weight, scale, zero, layout, dtype, dtype)
    rounded = efficient_linear.fake_quantize_weight(weight, scale, zero, dtype=torch.float16, **layout)
    assert torch.equal(rounded.isnan(), weight.isnan())


def test_no_rows(kernel_device):
    weight, scale, zero, layout = case(kernel_device, 4, 130, 33, 0, 15, "groups")
    rounded = efficient_linear.fake_quantize_weight(weight[:0], scale[:0], 8.0, dtype=torch.float16, **layout)
    passed, of_scale = efficient_linear.fake_quantize_gradients(weight[:0], scale[:0], 8.0, rounded, rounded, **layout)
    assert rounded.shape == passed.shape == (0, 130) and of_scale.shape == (0, 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_numbers_of_torchs_operators(name, dtype, kernel_device, nan_poison, monkeypatch):
    """`CodedWeight` with the kernels, and without."""
    pytest.importorskip("transformers")
    import hf_efficient
    from hf_efficient import methods
    from hf_efficient.compression.recovery.coded_weights import CodedWeight

    kind, arguments = CONFIGS[name]
    config = getattr(hf_efficient, kind)(**arguments)
    torch.manual_seed(0)
    weight = torch.randn(37, 100 if "bits" in arguments else 96, device=kernel_device)
    weight[3, :32] = 0
    tensors = methods.quantize(weight.to(dtype), config.format(), config.method_name())
    coded = CodedWeight(config.format(), tensors, weight.shape[1], dtype, weight)
    with torch.no_grad():
        coded.weight.add_(torch.randn_like(weight) * 0.3)
        coded.weight[5, 7] = 1e9
        coded.log_scale.add_(torch.randn_like(coded.log_scale) * 0.1)
    gradient = torch.randn_like(weight).to(dtype)
    monkeypatch.setattr(triton_devices, "why_not", lambda device: None)
    assert coded.quantizer(dtype)[0] is not None
    found = learned(coded, dtype, gradient)
    monkeypatch.setattr(triton_devices, "why_not", lambda device: "asked for torch's operators")
    monkeypatch.setenv(tiers.VARIABLE, "torch")
    assert coded.quantizer(dtype)[0] is None
    check_learned(found, learned(coded, dtype, gradient), gradient)


def test_the_launcher_takes_what_the_kernels_serve(kernel_device, monkeypatch):
    monkeypatch.setattr(triton_devices, "why_not", lambda device: None)
    quantizer, weight = FakeQuantizer(0, 15, 33, torch.float16), torch.randn(4, 130, device=kernel_device)
    assert quantizer.serves(weight, torch.float16)
    for given, dtype in ((weight.t(), torch.float16), (weight.double(), torch.float16), (weight, torch.bfloat16)):
        assert not quantizer.serves(given, dtype)
    scale = torch.rand(4, 4, device=kernel_device).half()
    rounded = quantizer.rounded(weight, scale, scale, torch.float16)
    layout = dict(low=0, high=15, group_size=33)
    expected = efficient_linear.fake_quantize_weight_reference(
        weight, scale.float(), scale.float(), dtype=torch.float16, work=torch.float16, **layout
    )
    assert torch.equal(rounded, expected)
    gradient = torch.randn(130, 4, device=kernel_device).half().t()
    passed, _ = quantizer.gradients(weight, scale, scale, rounded, gradient)
    expected = efficient_linear.fake_quantize_gradients_reference(weight, scale, scale, rounded, gradient, **layout)
    assert torch.equal(passed, expected[0])
    with pytest.raises(ValueError, match=r"scale \[4, 3\] does not broadcast to \[4, 4\]"):
        quantizer.rounded(weight, scale[:, :3], scale, torch.float16)


def test_bad_arguments(kernel_device):
    weight, scale, zero, layout = case(kernel_device, 4, 130, 33, 0, 15, "groups")
    rounded = torch.zeros(4, 130, dtype=torch.float16, device=kernel_device)

    def of(weight=weight, scale=scale, zero=zero, dtype=torch.float16, work=torch.float32, **changed):
        settings = layout | changed
        return lambda: efficient_linear.fake_quantize_weight(weight, scale, zero, dtype=dtype, work=work, **settings)

    def gradients(rounded=rounded, gradient=rounded):
        return lambda: efficient_linear.fake_quantize_gradients(weight, scale, zero, rounded, gradient, **layout)

    check_errors(
        (ValueError, r"weight is torch.float16 \(4, 130\)", of(weight.half())),
        (ValueError, "weight is .* with strides", of(weight.t().contiguous().t())),
        (ValueError, r"weight is .* allowed is torch.float32 \[N, K\]", of(weight[0])),
        (ValueError, r"scale \[4, 3\] does not broadcast to \[4, 4\]", of(scale=scale[:, :3])),
        (ValueError, "scale is torch.float16", of(scale=scale.half())),
        (ValueError, r"zero \[4\] does not broadcast", of(zero=zero[0])),
        (ValueError, "zero is torch.int32", of(zero=zero.int())),
        (ValueError, "zero=None: allowed is a number or a tensor", of(zero=None)),
        (ValueError, "dtype=torch.float64", of(dtype=torch.float64)),
        (ValueError, "work=torch.bfloat16: allowed is torch.float16", of(work=torch.bfloat16)),
        (ValueError, "group_size=0", of(group_size=0)),
        (ValueError, "low=16, high=15", of(low=16)),
        (ValueError, "high=4194304", of(high=2**22)),
        (ValueError, r"rounded \[4, 129\]", gradients(rounded[:, 1:])),
        (ValueError, "rounded is torch.float64", gradients(rounded.double())),
        (
            ValueError,
            r"gradient \[4, 130\] with strides .* without gaps",
            gradients(gradient=rounded[:, :1].expand(4, 130)),
        ),
        (ValueError, "gradient is torch.float32 .* it must be torch.float16", gradients(gradient=rounded.float())),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, columns, width", [(4096, 14336, 128), (4096, 14336, 14336), (576, 1536, 1536), (576, 577, 64)]
)
def test_native_sizes(rows, columns, width, dtype):
    weight, scale, zero, layout = case("cuda", rows, columns, width, 0, 15, "groups")
    check(weight, scale, zero, layout, dtype, dtype)
    rounded = check_graph(
        lambda: efficient_linear.fake_quantize_weight(weight, scale, zero, dtype=dtype, work=dtype, **layout)
    )
    gradient = torch.randn_like(rounded)
    weight = weight.clamp(-1e9, 1e9)  # the sums are finite
    for which in (0, 1):
        check_graph(
            lambda which=which: efficient_linear.fake_quantize_gradients(
                weight, scale, zero, rounded, gradient, **layout
            )[which]
        )


@pytest.mark.gpu
def test_native_is_one_launch():
    weight, scale, _, layout = case("cuda", 64, 4096, 64, 0, 15, "number")
    quantizer = FakeQuantizer(0, 15, 64, torch.bfloat16)

    def call():
        rounded = quantizer.rounded(weight, scale, 8.0, torch.bfloat16)
        quantizer.gradients(weight, scale[:1], 8.0, rounded, rounded)

    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert sorted(names) == ["fake_quantize_gradients_kernel", "fake_quantize_weight_kernel"]


@pytest.mark.gpu
def test_native_more_than_2_31_weights():
    rows, columns = 2**15 + 8, 2**16
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    weight = torch.randn(rows, columns, device="cuda")
    scale, layout = torch.rand(rows, columns // 128, device="cuda"), dict(low=0, high=15, group_size=128)
    rounded = efficient_linear.fake_quantize_weight(weight, scale, 8.0, dtype=torch.bfloat16, **layout)
    passed, of_scale = efficient_linear.fake_quantize_gradients(weight, scale, 8.0, rounded, rounded, **layout)
    last = slice(-64, None)
    tail = weight[last], scale[last], 8.0
    expected = efficient_linear.fake_quantize_weight_reference(*tail, dtype=torch.bfloat16, **layout)
    assert torch.equal(rounded[last], expected)
    expected = efficient_linear.fake_quantize_gradients_reference(*tail, rounded[last], rounded[last], **layout)
    assert torch.equal(passed[last], expected[0])
    torch.testing.assert_close(of_scale[last], expected[1], rtol=1e-4, atol=1e-3)
