"""W8A8: formats, the numbers of weights and the products, on small matrices against the papers' equations in
float64."""

import copy

import pytest
import torch
from format_checks import check_declared
from helpers import assert_close

from hf_efficient import methods
from hf_efficient.calibration.static_ranges import activation_tensors, observe
from hf_efficient.configs import W8A8Config
from hf_efficient.configs.calibration import CalibrationConfig
from hf_efficient.formats.transformed import TransformedFormat
from hf_efficient.formats.w8a8 import Float8Format, Int8Format
from hf_efficient.layers import EfficientLinear, compress_linear
from hf_efficient.observers.linear_inputs import LinearInputs


ROWS, OUT, IN = 5, 37, 301  # nothing is a multiple of anything
FORMATS = {
    "absmax": Int8Format(),
    "absmax, tensor": Int8Format(per_channel=False),
    "zeropoint": Int8Format(zero_point=True, asymmetric=True),
    "zeropoint, tensor": Int8Format(per_channel=False, zero_point=True, asymmetric=True),
    "smoothquant": Int8Format(asymmetric=True),
    "static": Int8Format(static=True),
    "static, asymmetric": Int8Format(asymmetric=True, static=True),
    "llm_int8": Int8Format(outlier_threshold=3.0),
    "llm_int8, columns": Int8Format(asymmetric=True, outlier_columns=4),
    "fp8": Float8Format(),
    "fp8, tensor": Float8Format("tensor"),
    "fp8, block": Float8Format("block"),
    "fp8, static": Float8Format(static=True),
    "fp8, columns": Float8Format(outlier_columns=4),
}
BY_NAME = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


def sample(dtype=torch.float32):
    """(x [5, 301] with two outlier columns and a shift, weight [37, 301])."""
    x = torch.randn(ROWS, IN) + 0.5
    x[:, 17], x[2, 200] = 20.0 + x[:, 17], -9.0
    return x.to(dtype), (torch.randn(OUT, IN) + 0.2 * torch.randn(OUT, 1)).to(dtype)


def quantized(weight, format, x):
    """Canonical tensors; static inputs span what x spans."""
    inputs = LinearInputs(weight.shape[1], hessian=False)
    inputs.update(x)
    tensors = methods.quantize(weight, format, "_w8a8_weights", inputs)
    if format.static:
        tensors.update(activation_tensors(x.float().amin()[None], x.float().amax()[None], format))
    return tensors


def e4m3(values):
    """Nearest float8 E4M3 numbers of float64 values up to 448, ties to even."""
    exponent = values.abs().clamp_min(2.0**-6).log2().floor()
    step = 2.0 ** (exponent - 3)
    return (values / step).round() * step


def rounded_rows(x, format):
    """What becomes of x by the definition, in float64; scales are taken in float32, as they are stored."""
    x, low, high = x.double(), x.float().amin(1, keepdim=True), x.float().amax(1, keepdim=True)
    if format.static:
        low, high = low.amin(), high.amax()
    low, high = low.clamp_max(0), high.clamp_min(0)
    if isinstance(format, Float8Format):
        if format.weights == "block":
            return torch.cat([rounded_rows(part, Float8Format()) for part in x.split(128, 1)], 1)
        scale = (torch.maximum(-low, high) * (1 / 448)).double()
        return e4m3(x / scale) * scale
    if format.asymmetric:
        scale = ((high - low) * (1 / 255)).double()
        zero = (-low.double() / scale).round() - 128
    else:
        scale, zero = (torch.maximum(-low, high) * (1 / 127)).double(), 0
    return ((x / scale).round() + zero).clamp(-128, 127).sub(zero) * scale


def expected_output(x, tensors, format):
    weight = format.dequantize(tensors, IN, torch.float64)
    outliers = torch.zeros(IN, dtype=torch.bool)
    if getattr(format, "outlier_threshold", None):
        outliers = (x.abs() >= format.outlier_threshold).any(0)
    elif format.outlier_columns:
        outliers[tensors["outlier_columns"].long()] = True
    rows = rounded_rows(x.masked_fill(outliers, 0.0), format).masked_fill(outliers, 0.0)
    return (rows + x.double().masked_fill(~outliers, 0.0)) @ weight.t()


@BY_NAME
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layout_computes_the_definition(format, dtype):
    x, weight = sample(dtype)
    tensors = quantized(weight, format, x)
    check_declared(format, tensors, OUT, IN, dtype)
    layout = format.layout(tensors, IN, dtype)
    assert torch.equal(layout.canonical().view(torch.int8), tensors["qweight"].view(torch.int8))
    assert torch.equal(layout.dequantize(), format.dequantize(tensors, IN, dtype))
    expected, bias = expected_output(x, tensors, format), torch.randn(OUT).to(dtype)
    size = expected.abs().max().item()
    if dtype == torch.float32:  # a code on the border of two may fall to either side in float32
        tolerance = 2e-4, 1e-3 * size, "int32 sums are exact; a few codes may differ by one"
    else:
        tolerance = 2**-7, 2**-6 * size, "operands of float8 products and all outputs are rounded to bfloat16"
    assert_close(layout.matmul(x), expected, *tolerance)
    assert_close(layout.matmul(x.view(1, ROWS, IN), bias)[0], expected + bias.double(), *tolerance)
    assert layout.matmul(x[:0]).shape == (0, OUT)


@BY_NAME
def test_weights_are_the_nearest(format):
    """Of all codes the nearest, on the grid that the largest magnitude (or the range) of what shares a scale spans."""
    x, weight = sample()
    weight[3], weight[4] = 0.0, weight[4].abs()
    tensors = quantized(weight, format, x)
    back = format.dequantize(tensors, IN, torch.float64)
    assert torch.isfinite(back).all() and (back[3] == 0).all() and (tensors["scale"] > 0).all()
    scale, kept = tensors["scale"].double(), torch.zeros(IN, dtype=torch.bool)
    if format.outlier_columns:
        kept[tensors["outlier_columns"].long()] = True
        assert torch.equal(back[:, kept], weight[:, kept].double()) and kept[17] and kept.sum() == 4
    rest = weight.double().masked_fill(kept, 0.0)
    if isinstance(format, Float8Format):
        if format.weights == "block":
            scale = scale.repeat_interleave(128, 0)[:OUT].repeat_interleave(128, 1)[:, :IN]
        numbers = rest / scale
        assert torch.equal(tensors["qweight"].double(), e4m3(numbers.clamp(-448, 448)))
        assert numbers.abs().max().item() == pytest.approx(448, rel=1e-6)
        return
    low, high = rest.amin(1, keepdim=True).clamp_max(0), rest.amax(1, keepdim=True).clamp_min(0)
    if not format.per_channel:
        low, high = low.amin(0, keepdim=True), high.amax(0, keepdim=True)
    spanned = (high - low) / 255 if format.zero_point else torch.maximum(-low, high) / 127
    used = scale != 1  # a row of zeros
    assert torch.allclose(scale[used], spanned[used], rtol=1e-6)
    error = (back - weight.double())[:, ~kept].abs()
    assert (error <= (0.5 + format.zero_point) * 1.00001 * scale.expand(OUT, 1)).all()
    inside = error[(error > 0.50001 * scale)]
    assert len(inside) < 5, "only the ends of a range whose zero point was rounded may be a step away"


def correlated(rows=400, columns=150):
    return torch.randn(rows, 30) @ torch.randn(30, columns) + 0.3 * torch.randn(rows, columns)


@pytest.mark.parametrize("name", ["absmax", "zeropoint", "llm_int8, columns", "fp8", "fp8, block", "fp8, columns"])
def test_known_inputs_lower_the_error(name):
    """With a Hessian no row's output error is above that of the nearest codes, and together it is far below."""
    format, weight, x = FORMATS[name], torch.randn(20, 150), correlated()
    errors = []
    for hessian in (False, True):
        inputs = LinearInputs(150, hessian=hessian)
        inputs.update(x)
        tensors = methods.quantize(weight, format, "_w8a8_weights", inputs)
        assert {part: tuple(t.shape) for part, t in tensors.items()} == format.shapes(20, 150)
        back = format.dequantize(tensors, 150, torch.float64)
        errors.append(((back - weight.double()) @ x.double().t()).square().sum(1))
    assert (errors[1] <= errors[0] * 1.0001).all() and errors[1].sum() < 0.5 * errors[0].sum()


def test_kept_columns_of_float8_take_back_what_they_can():
    """Given the codes, the columns in 16 bits are the least squares of the original output (but for the damping)."""
    format, weight, x = FORMATS["fp8, columns"], torch.randn(20, 150), correlated()
    inputs = LinearInputs(150)
    inputs.update(x)
    tensors = methods.quantize(weight, format, "_w8a8_weights", inputs)
    columns, x = tensors["outlier_columns"].long(), x.double()
    error = x @ (weight.double() - format.dequantize(tensors, 150, torch.float64)).t()
    left = torch.linalg.lstsq(x[:, columns], error).solution
    assert (error - x[:, columns] @ left).square().sum() > 0.999 * error.square().sum()
    as_given = {**tensors, "outlier_weight": weight[:, columns]}
    without = x @ (weight.double() - format.dequantize(as_given, 150, torch.float64)).t()
    assert error.square().sum() < 0.95 * without.square().sum()


@pytest.mark.parametrize("columns", [4, 150])
def test_inputs_that_are_all_zero_leave_the_weight(columns):
    format, weight = Float8Format(outlier_columns=columns), torch.randn(20, 150)
    inputs = LinearInputs(150)
    inputs.update(torch.zeros(8, 150))
    tensors = methods.quantize(weight, format, "_w8a8_weights", inputs)
    kept = tensors["outlier_columns"].long()
    assert torch.equal(tensors["outlier_weight"], weight[:, kept])
    assert (format.dequantize(tensors, 150, torch.float32) - weight).abs().max() < weight.abs().max() / 16


@pytest.mark.parametrize("weights", ["channel", "tensor", "block"])
def test_scales_of_float8_lie_where_the_codes_err_least(weights):
    """All weights are 1.0625 times a power of two: halfway between two codes if the scale is one, exact on others."""
    format, weight = Float8Format(weights), 1.0625 * 2.0 ** torch.randint(-4, 4, (20, 150)).float()
    weight[:, 0] = weight[0, 128] = 448 / 32
    plain, inputs = methods.quantize(weight, format, "_w8a8_weights"), LinearInputs(150)
    inputs.update(torch.randn(400, 150))
    moved = methods.quantize(weight, format, "_w8a8_weights", inputs)
    ratio = moved["scale"] / plain["scale"]
    assert (ratio >= 1).all() and (ratio < 2).all() and (ratio > 1).any()
    errors = [(format.dequantize(t, 150, torch.float32) - weight).square().sum() for t in (plain, moved)]
    assert errors[1] < 0.5 * errors[0]


def test_integer_products_are_exact():
    """Sums of code products beyond 2^24, where float32 would round."""
    format, columns = Int8Format(), 4096
    weight = torch.full((3, columns), 127.0)
    weight[1, ::2], weight[2, 0] = -127.0, 126.0
    x = torch.full((2, columns), 127.0)
    x[1, 5] = 1.0
    tensors = methods.quantize(weight, format, "_w8a8_weights")
    assert (tensors["scale"] == 1).all()
    y = format.layout(tensors, columns, torch.float32).matmul(x)
    assert torch.equal(y.double(), (x.double() @ weight.double().t()).float().double())


def test_llm_int8_is_the_decomposition_of_the_paper():
    """Equation 8: the sum of the product of outlier columns and the rescaled int8 product of the others."""
    x, weight = sample()
    tensors = methods.quantize(weight, Int8Format(outlier_threshold=6.0), "_w8a8_weights")
    outliers = (x.abs() >= 6.0).any(0)
    assert outliers.nonzero().flatten().tolist() == [17, 200]
    codes, row = tensors["qweight"].double(), tensors["scale"].double()
    others = x.double()[:, ~outliers]
    column = others.abs().amax(1, keepdim=True) / 127
    product = ((others / column).round() @ codes[:, ~outliers].t()) * column * row.t()
    expected = product + x.double()[:, outliers] @ (codes * row)[:, outliers].t()
    y = Int8Format(outlier_threshold=6.0).layout(tensors, IN, torch.float32).matmul(x)
    assert_close(y, expected, 2e-5, 1e-3, "float32 scales; a code on a border may differ")


@pytest.mark.parametrize("name", ["static", "static, asymmetric", "fp8, static"])
def test_static_is_dynamic_where_the_range_is_the_same(name):
    x, weight = sample()
    format = FORMATS[name]
    one = x[:1]
    tensors = quantized(weight, format, one)
    own = {"activation_scale", "activation_zero_point"}
    kind = type(format)
    fields = {**vars(format), "static": False}
    dynamic = kind(**fields).layout({k: t for k, t in tensors.items() if k not in own}, IN, torch.float32)
    assert torch.equal(format.layout(tensors, IN, torch.float32).matmul(one), dynamic.matmul(one))


@BY_NAME
def test_module_saves_trains_and_dequantizes(format):
    x, weight = sample()
    tensors = quantized(weight, format, x)
    dense = torch.nn.Linear(IN, OUT)
    dense.weight.data.copy_(weight)
    module = compress_linear(dense, format, tensors).requires_grad_(False)
    y = module(x)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for part, tensor in tensors.items():
        assert torch.equal(state[part].view(torch.uint8), tensor.view(torch.uint8)), part
    empty = EfficientLinear(IN, OUT, True, format, torch.float32)
    empty.load_state_dict(state)
    assert torch.equal(empty(x), y) and torch.equal(copy.deepcopy(empty)(x), y)
    assert torch.equal(module.dequantized(), format.dequantize(tensors, IN, torch.float32))
    module.to(torch.bfloat16)
    assert all(module.state_dict()[part].dtype == tensor.dtype for part, tensor in tensors.items())
    grad, leaf = torch.randn(ROWS, OUT), x.clone().requires_grad_()
    empty(leaf).backward(grad)
    expected = grad @ empty.dequantized()
    assert_close(leaf.grad, expected, 1e-5, 1e-3, "straight through the rounding, with the weight as dequantized")


def test_bits_per_weight():
    assert Int8Format().bits_per_weight(576, 1536, torch.bfloat16) == 8 + 32 / 1536
    assert Int8Format(outlier_columns=16).bits_per_weight(512, 512, torch.bfloat16) == 8 + 32 / 512 + (
        16 * 16 / 512 + 16 * 32 / 512**2
    )
    assert Float8Format("block", False).bits_per_weight(256, 256, torch.bfloat16) == 8 + 32 / 128**2


class _Block:
    """What `observe` uses of a Block: two linears in a row."""

    def __init__(self, first, second, configs):
        self.linears, self.experts = {"first": first, "second": second}, {}
        self.schemes, self.formats = configs, {name: config.format() for name, config in configs.items()}
        self.tensors = {name: {} for name in configs}
        self.inputs = [torch.randn(2, 7, 16) for _ in range(3)]

    def run(self, batch):
        return self.linears["second"](self.linears["first"](self.inputs[batch]))


def test_static_ranges_are_those_of_the_inputs():
    static = dict(activations="static", calibration=CalibrationConfig(texts=["text"]))
    first, second = torch.nn.Linear(16, 8), torch.nn.Linear(8, 4)
    configs = {"first": W8A8Config(**static), "second": W8A8Config(method="zeropoint", **static)}
    block = _Block(first, second, configs)
    made = observe(block)
    x = torch.cat([batch.flatten(0, 1) for batch in block.inputs])
    hidden = first(x)
    assert made["first"]["activation_scale"].item() == pytest.approx(x.abs().max().item() / 127, rel=1e-6)
    scale = (hidden.max() - hidden.min()).item() / 255
    assert made["second"]["activation_scale"].item() == pytest.approx(scale, rel=1e-6)
    assert made["second"]["activation_zero_point"].item() == round(-hidden.min().item() / scale) - 128
    assert not first._forward_pre_hooks and "activation_zero_point" not in made["first"]
    # what is rounded is the scaled input
    block.formats["first"] = TransformedFormat(block.formats["first"], input_scale=True)
    block.tensors["first"] = {"input_scale": torch.full((16,), 0.5)}
    assert torch.equal(observe(block)["first"]["activation_scale"], made["first"]["activation_scale"] / 2)
    assert torch.equal(observe(block, batches=3)["second"]["activation_scale"], made["second"]["activation_scale"])
    with pytest.raises(ValueError, match="first: no activations were seen"):
        observe(block, batches=0)
    block.inputs[1][0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="first: activations hold NaN"):
        observe(block)


GOOD = [
    {},
    dict(weights="tensor"),
    dict(method="zeropoint"),
    dict(method="smoothquant", rotate=True),
    dict(method="llm_int8", threshold=4.0),
    dict(method="llm_int8", outlier_columns=16),
    dict(activations="static", observer="percentile", percentile=99.9),
    dict(activations="static", observer="mse", method="zeropoint"),
    dict(dtype="fp8", weights="block"),
    dict(dtype="fp8", method="llm_int8", outlier_columns=16),
    dict(dtype="fp8", method="smoothquant", activations="static", observer="absmax"),
]


@pytest.mark.parametrize("arguments", GOOD, ids=str)
def test_config_round_trip(arguments):
    config = W8A8Config(**arguments, overrides={"down_proj": {"rotate": arguments.get("method") != "llm_int8"}})
    again = W8A8Config(**config.to_dict())
    assert again == config and again.quant_method == "efficient_w8a8" and again.format() == config.format()
    assert again.for_module("model.layers.0.mlp.down_proj").rotate is (config.method != "llm_int8")
    needs = config.method == "smoothquant" or config.activations == "static" or config.outlier_columns > 0
    assert config.needs_calibration() is needs


BAD = [
    (dict(dtype="int4"), r"dtype='int4' .* one of \('int8', 'fp8', 'fp8_e5m2'\)"),
    (dict(method="rtn"), "method='rtn'"),
    (dict(weights="group"), "weights='group'"),
    (dict(threshold=-1.0), "threshold=-1.0"),
    (dict(method="llm_int8", threshold=True), "threshold=True"),
    (dict(percentile=20, activations="static", observer="percentile"), "percentile=20"),
    (dict(outlier_columns=1.5), "outlier_columns=1.5"),
    (dict(rotate=1), "rotate=1 "),
    (dict(dtype="fp8", method="zeropoint"), "method='zeropoint' .* for dtype='fp8'"),
    (dict(dtype="fp8", method="llm_int8"), "method='llm_int8' .* for dtype='fp8'"),
    (
        dict(dtype="fp8", method="llm_int8", outlier_columns=4, weights="block"),
        "weights='block' .* for method='llm_int8'",
    ),
    (dict(weights="block"), "weights='block' .* for dtype='int8'"),
    (dict(dtype="fp8", weights="block", activations="static"), "activations='static' .* for weights='block'"),
    (dict(method="llm_int8", activations="static"), "activations='static' .* for method='llm_int8'"),
    (dict(observer="mse"), "observer='mse' .* for activations='dynamic'"),
    (dict(dtype="fp8", activations="static", observer="entropy"), "observer='entropy' .* for dtype='fp8'"),
    (dict(activations="static", percentile=99.0), "percentile=99.0"),
    (dict(outlier_columns=4), "outlier_columns=4 .* for method='absmax'"),
    (dict(threshold=3.0), "threshold=3.0"),
    (dict(method="llm_int8", outlier_columns=4, threshold=3.0), "threshold=3.0"),
    (dict(method="llm_int8", rotate=True), "rotate=True"),
    (dict(bits=8), "no argument 'bits'"),
    (dict(overrides={"down_proj": {"method": "llm_int8", "rotate": True}}), "overrides.*rotate=True"),
]


@pytest.mark.parametrize("arguments, message", BAD, ids=str)
def test_config_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        W8A8Config(**arguments)


def test_outlier_columns_need_inputs():
    with pytest.raises(ValueError, match="outlier_columns=4 are chosen by calibration"):
        methods.quantize(torch.randn(8, 16), Int8Format(outlier_columns=4), "_w8a8_weights")
    with pytest.raises(ValueError, match="NaN or infinite"):
        methods.quantize(torch.full((8, 16), torch.nan), Int8Format(), "_w8a8_weights")
    inputs = LinearInputs(16, hessian=False)
    inputs.update(torch.randn(3, 16))
    every = methods.quantize(torch.randn(8, 16), Int8Format(outlier_columns=32), "_w8a8_weights", inputs)
    assert every["outlier_columns"].tolist() == list(range(16)), "no more columns than there are"
    assert {part: tuple(t.shape) for part, t in every.items()} == Int8Format(outlier_columns=32).shapes(8, 16)
