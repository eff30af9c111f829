"""BitNet b1.58: the format, layers for training, and checkpoints of transformers' BitNetQuantConfig."""

import pytest
import torch
from format_checks import check_declared
from helpers import assert_close
from transformers.integrations import bitnet as hub

from hf_efficient.bit_linear import BitLinear
from hf_efficient.configs import BitNetConfig
from hf_efficient.formats.ternary import TernaryFormat, canonical_of_bitnet
from hf_efficient.kernels.efficient_linear import pack_trits
from hf_efficient.kernels.linear import native_rounded
from hf_efficient.kernels.linear.ternary import NativeTernaryLayout, TernaryCpuLayout, TernaryTritonLayout
from hf_efficient.layers import compress_linear


FORMATS = [TernaryFormat(), TernaryFormat(dense=True), TernaryFormat(per_channel=True)]


@pytest.fixture(autouse=True)
def eager():
    """transformers compiles its BitNet functions, which takes a compiler and longer than everything here."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("columns", [96, 33])
def test_absmean_follows_its_definition(format, columns):
    weight = torch.randn(7, columns).bfloat16()
    tensors = format.round(weight)
    check_declared(format, tensors, 7, columns)
    w = weight.double()
    mean = w.abs().mean(1, keepdim=True) if format.per_channel else w.abs().mean()
    expected = (w / mean).round().clamp(-1, 1) * mean
    reason = "the mean is taken in float32"
    assert_close(format.dequantize(tensors, columns, torch.float64), expected, 1e-6, 1e-5, reason)


def test_dense_storage_is_that_of_the_kernels_and_takes_1_6_bits():
    trits = torch.randint(-1, 2, (5, 43), dtype=torch.int8)
    format = TernaryFormat(dense=True)
    assert torch.equal(format.pack((trits + 1).to(torch.uint8)), pack_trits(trits))
    assert torch.equal(format.trits(pack_trits(trits), 43), trits)
    assert format.bits_per_weight(64, 640, torch.bfloat16) == 1.6 + 32 / (64 * 640)
    assert TernaryFormat().bits_per_weight(64, 640, torch.bfloat16) == 2 + 32 / (64 * 640)


def test_a_weight_of_zeros_stays_zero():
    format = TernaryFormat()
    assert (format.dequantize(format.round(torch.zeros(4, 8)), 8, torch.float32) == 0).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", [None, TernaryCpuLayout, TernaryTritonLayout])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layouts_compute_the_product_and_turn_back(format, kind, dtype):
    """Of this CPU, of torch's operators, and the GPU's through the op, which has an implementation for CPU tensors."""
    weight = torch.randn(70, 96, dtype=dtype)
    tensors = format.round(weight)
    layout = format.layout(tensors, 96, dtype)
    assert type(layout) is (TernaryCpuLayout if native_rounded.kernel(2) is None else NativeTernaryLayout)
    if kind is not None:
        layout = kind(format.trits(tensors["qweight"], 96), tensors["scale"], layout.pack, dtype)
    assert torch.equal(layout.canonical(), tensors["qweight"])
    assert torch.equal(layout.dequantize(), format.dequantize(tensors, 96, dtype))
    dense, bias = format.dequantize(tensors, 96, torch.float64), torch.randn(70, dtype=dtype)
    for shape in ((1, 96), (2, 3, 96), (40, 96)):
        x = torch.randn(shape, dtype=dtype)
        step = x.double().abs().amax(-1, keepdim=True) / 127
        expected = (x.double() / step).round() * step @ dense.t() + bias.double()
        eps = torch.finfo(dtype).eps
        limits = max(eps, 1e-3), max(2 * eps, 0.004) * expected.abs().max().item()
        assert_close(
            layout.matmul(x, bias), expected, *limits, "one rounding, and a code where x / step is near a half"
        )


def packed_by_transformers(trits):
    return hub.pack_weights(trits.clone().float())


def test_checkpoints_of_bitlinear_are_read_to_the_bit():
    """BitLinear divides by weight_scale."""
    trits = torch.randint(-1, 2, (24, 40), dtype=torch.int8)
    layer = hub.BitLinear(40, 24, bias=False, dtype=torch.float32)
    layer.weight, layer.weight_scale = packed_by_transformers(trits), torch.tensor([3.7]).bfloat16().float()
    arguments = dict(out_features=24, linear_class="bitlinear", format=TernaryFormat())
    tensors = canonical_of_bitnet(layer.weight, layer.weight_scale, **arguments)
    values = TernaryFormat().dequantize(tensors, 40, torch.float32)
    assert torch.equal(values, trits / layer.weight_scale)
    x = torch.randn(5, 40)
    y = TernaryFormat().layout(tensors, 40, torch.float32).matmul(x)
    assert_close(y, layer(x), 1e-6, 1e-5, "the same int8 codes; scales multiplied in another order in float32")


@pytest.mark.parametrize("packed", [True, False])
def test_checkpoints_of_offline_autobitlinear_are_read_to_the_bit(packed):
    """AutoBitLinear multiplies by weight_scale; its weight may lie packed or as floats."""
    trits = torch.randint(-1, 2, (24, 40), dtype=torch.int8)
    layer = hub.AutoBitLinear(40, 24, bias=False, dtype=torch.float32)
    layer.weight.data, layer.weight_scale = trits.float() * 0.5, torch.tensor([1.21875])
    weight = packed_by_transformers(trits) if packed else layer.weight.data.bfloat16()
    scale = layer.weight_scale * (0.5 if packed else 1)
    arguments = dict(out_features=24, linear_class="autobitlinear", format=TernaryFormat(dense=True))
    tensors = canonical_of_bitnet(weight, scale.bfloat16(), **arguments)
    values = arguments["format"].dequantize(tensors, 40, torch.float32)
    assert torch.equal(values, layer.weight * layer.weight_scale)
    x = torch.randn(5, 40)
    y = arguments["format"].layout(tensors, 40, torch.float32).matmul(x)
    assert_close(y, layer(x), 1e-6, 1e-5, "the same int8 codes; scales multiplied in another order in float32")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_checkpoints_of_online_autobitlinear_are_ternarised_to_the_bit(dtype):
    weight = torch.randn(24, 40, dtype=dtype)
    arguments = dict(out_features=24, linear_class="autobitlinear", format=TernaryFormat())
    tensors = canonical_of_bitnet(weight, None, **arguments)
    assert torch.equal(TernaryFormat().dequantize(tensors, 40, dtype), hub.WeightQuant.apply(weight))


@pytest.mark.parametrize(
    "weight, scale, change, message",
    [
        (torch.zeros(6, 8, dtype=torch.uint8), torch.ones(1), {}, "has 24 rows, the layer 20"),
        (torch.full((5, 8), 3, dtype=torch.uint8), torch.ones(1), {}, "holds the code 3"),
        (torch.zeros(5, 8, dtype=torch.uint8), None, {}, "comes with a weight_scale"),
        (torch.randn(20, 8), torch.ones(1), {}, "more values than -c, 0 and c"),
        (torch.randn(20, 8), None, {"linear_class": "linear"}, "linear_class='linear'"),
        (torch.randn(20, 8), None, {"format": TernaryFormat(per_channel=True)}, "one scale a tensor"),
    ],
)
def test_what_is_no_bitnet_weight_is_refused(weight, scale, change, message):
    arguments = dict(out_features=20, linear_class="autobitlinear", format=TernaryFormat())
    with pytest.raises(ValueError, match=message):
        canonical_of_bitnet(weight, scale, **{**arguments, **change})


def test_config():
    config = BitNetConfig(dense=True, overrides={"*.k_proj": {"dense": False}, "*.down_proj": None})
    assert BitNetConfig(**config.to_dict()) == config and config.to_dict()["quant_method"] == "efficient_bitnet"
    assert config.format() == TernaryFormat(dense=True) and config.method_name() == "rtn"
    assert config.for_module("a.k_proj").format() == TernaryFormat() and config.for_module("a.down_proj") is None
    for arguments, message in (
        (dict(per_channel=1), "per_channel=1"),
        (dict(rms_norm_eps=0), "rms_norm_eps=0"),
        (dict(bits=2), "no argument 'bits'"),
        (dict(overrides={"x": {"dense": 2}}), "dense=2"),
        (dict(calibration={}), "calibration"),
    ):
        with pytest.raises(ValueError, match=message):
            BitNetConfig(**arguments)


def test_config_of_a_checkpoint_of_transformers():
    from transformers import BitNetQuantConfig

    saved = BitNetQuantConfig(["lm_head"], "autobitlinear", "online", True, 1e-5).to_dict()
    config = BitNetConfig.of_checkpoint(saved, BitNetConfig(dense=True, modules_to_not_convert=["v_proj"]))
    assert config.modules_to_not_convert == ["lm_head", "v_proj"] and config.dense
    expected = dict(linear_class="autobitlinear", quantization_mode="online", use_rms_norm=True, rms_norm_eps=1e-5)
    assert config.source == expected and "source" not in config.to_dict()
    with pytest.raises(ValueError, match="per_channel"):
        BitNetConfig.of_checkpoint(saved, BitNetConfig(per_channel=True))
    with pytest.raises(ValueError, match="quant_method='gptq'"):
        BitNetConfig.of_checkpoint({"quant_method": "gptq"})


@pytest.mark.parametrize("rms_norm", [False, True])
def test_training_goes_straight_through_and_the_result_computes_the_same(rms_norm):
    torch.manual_seed(0)
    x = torch.randn(256, 32)
    target = x @ TernaryFormat().dequantize(TernaryFormat().round(torch.randn(16, 32)), 32, torch.float32).t()
    layer = BitLinear(32, 16, rms_norm=rms_norm)
    optimizer, losses = torch.optim.Adam(layer.parameters(), 0.01), []
    for _ in range(150):
        loss = (layer(x) - target).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.2 * losses[0]
    small = layer.compressed()
    assert_close(small(x), layer(x), 1e-6, 1e-4, "float32 products of the same codes, in another order")
    assert ("rms_norm.weight" in small.state_dict()) is rms_norm and "weight" in layer.state_dict()
    again = compress_linear(layer, TernaryFormat(), TernaryFormat().round(layer.weight.detach()))
    assert torch.equal(again.dequantized(), small.dequantized())  # what from_pretrained makes of the saved layer


def test_gradients_of_the_training_layer():
    """Those of the product of the rounded operands, as if rounding were the identity."""
    layer, x = BitLinear(8, 4), torch.randn(3, 8, requires_grad=True)
    grad = torch.randn(3, 4)
    layer(x).backward(grad)
    weight = TernaryFormat().dequantize(TernaryFormat().round(layer.weight.detach()), 8, torch.float32)
    step = x.detach().abs().amax(-1, keepdim=True) / 127
    rounded = (x.detach() / step).round() * step
    assert_close(x.grad, grad @ weight, 1e-6, 1e-5, "float32")
    assert_close(layer.weight.grad, grad.t() @ rounded, 1e-6, 1e-5, "float32")
    assert torch.equal(layer.bias.grad, grad.sum(0))


def test_of_linear_trains_the_very_weight():
    linear = torch.nn.Linear(8, 4).eval()
    layer = BitLinear.of_linear(linear)
    assert layer.weight is linear.weight and layer.bias is linear.bias and not layer.training
