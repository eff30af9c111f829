"""The same checkpoints read by the libraries they come from, where these are installed (CI has compressed-tensors;
the others bring compiled code)."""

import foreign_layouts
import pytest
import torch
from helpers import assert_close, tiny_model
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import hf_efficient
from hf_efficient import W8A8Config, WeightOnlyConfig
from hf_efficient.layers import EfficientLinear


pytestmark = pytest.mark.usefixtures("none_adopted")


def ours(folder, dtype):
    hf_efficient.adopt()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return {n: m.dequantized(dtype=dtype) for n, m in model.named_modules() if isinstance(m, EfficientLinear)}


def assert_same(found, expected):
    assert found and set(found) == set(expected)
    for name, weight in found.items():
        assert torch.equal(weight, expected[name]), (name, (weight.float() - expected[name].float()).abs().max())


COMPRESSED = {
    "packed": ("packed", dict(symmetric=False)),
    "packed 3 channel": ("packed", dict(bits=3, strategy="channel")),
    "packed 8": ("packed", dict(bits=8)),
    "int8": ("plain", dict(dynamic=False, strategy="tensor")),
    "int8 asymmetric": ("plain", dict(inputs=False, symmetric=False)),
    "fp8": ("plain", dict(kind="float")),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors(name, tmp_path):
    pytest.importorskip("compressed_tensors")
    layout, options = COMPRESSED[name]
    model = tiny_model("llama", num_hidden_layers=1)
    foreign_layouts.write(tmp_path, model, getattr(foreign_layouts, layout), torch.bfloat16, **options)
    from transformers import CompressedTensorsConfig

    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    linears = {n: m.weight.detach() for n, m in theirs.named_modules() if type(m) is torch.nn.Linear and n != "lm_head"}
    assert_same(ours(tmp_path, torch.bfloat16), linears)


def test_compressed_tensors_dequantized_while_loading(tmp_path):
    pytest.importorskip("compressed_tensors")
    from transformers import CompressedTensorsConfig

    hf_efficient.adopt()
    plain = tiny_model("llama", num_hidden_layers=1)
    weights = foreign_layouts.write(tmp_path, plain, foreign_layouts.packed, torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    assert not hasattr(model, "hf_quantizer")
    for name, weight in weights.items():
        assert type(model.get_submodule(name)) is torch.nn.Linear
        assert torch.equal(model.get_submodule(name).weight, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("table", ["nf4", "fp4"])
def test_bitsandbytes_4bit_quantized_by_itself(table, double, dtype, tmp_path):
    """Rows of whole blocks: bitsandbytes 0.50.2 dequantizes others wrongly on a CPU with AVX-512."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=table, bnb_4bit_use_double_quant=double, bnb_4bit_compute_dtype=dtype
    )
    tiny_model("llama", dtype, num_hidden_layers=1, intermediate_size=128).save_pretrained(tmp_path / "dense")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=dtype, quantization_config=config)
    theirs.save_pretrained(tmp_path / "quantized")
    expected = {
        n: bitsandbytes.functional.dequantize_4bit(m.weight.data, m.weight.quant_state)
        for n, m in theirs.named_modules()
        if isinstance(m, bitsandbytes.nn.Linear4bit)
    }
    assert_same(ours(tmp_path / "quantized", dtype), expected)


def test_bitsandbytes_8bit_quantized_by_itself(tmp_path):
    """Its dequantization multiplies twice, ours once: float16 differs in its last place, rarely."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    dtype = torch.float16
    tiny_model("llama", dtype, num_hidden_layers=1).save_pretrained(tmp_path / "dense")
    config = BitsAndBytesConfig(load_in_8bit=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=dtype, quantization_config=config)
    theirs.save_pretrained(tmp_path / "quantized")
    found = ours(tmp_path / "quantized", dtype)
    for name, module in theirs.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear8bitLt):
            weight = bitsandbytes.functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB).half()
            torch.testing.assert_close(found[name], weight, rtol=2**-10, atol=0)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_hqq(bits, tmp_path):
    quantize = pytest.importorskip("hqq.core.quantize")
    weights = {}

    def layout(rows, columns, dtype):
        codes, meta = quantize.Quantizer.quantize(
            torch.randn(rows, columns) / 8, nbits=bits, group_size=32, axis=1, device="cpu"
        )
        meta = {**meta, "scale": meta["scale"].to(dtype), "zero": meta["zero"].to(dtype), "compute_dtype": dtype}
        parts = {"W_q": codes, "scale": meta["scale"], "zero": meta["zero"], "shape": torch.tensor([rows, columns])}
        parts |= {name: torch.tensor(meta[name], dtype=torch.int32) for name in ("nbits", "group_size", "axis")}
        return parts, quantize.Quantizer.dequantize(codes, meta), {"quant_method": "hqq"}

    weights = foreign_layouts.write(tmp_path, tiny_model("llama", num_hidden_layers=1), layout, torch.float16)
    assert_same(ours(tmp_path, torch.float16), weights)


@pytest.mark.parametrize("name", ["int8", "intx"])
def test_torchao_quantized_by_itself(name, tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    dtype = torch.bfloat16
    tiny_model("llama", dtype, num_hidden_layers=1).save_pretrained(tmp_path / "dense")
    kinds = {
        "int8": lambda: quantization.Int8WeightOnlyConfig(),
        "intx": lambda: quantization.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=quantization.PerGroup(32), version=2
        ),
    }
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "dense", dtype=dtype, quantization_config=TorchAoConfig(kinds[name]())
    )
    theirs.save_pretrained(tmp_path / "quantized")
    expected = {
        n: m.weight.dequantize()
        for n, m in theirs.named_modules()
        if isinstance(m, torch.nn.Linear) and type(m.weight.data) is not torch.Tensor
    }
    with safe_open(tmp_path / "quantized" / "model.safetensors", framework="pt") as opened:
        assert any("qdata" in key for key in opened.keys())
    assert_same(ours(tmp_path / "quantized", dtype), expected)


@pytest.mark.parametrize("config", [WeightOnlyConfig(codebook="nf4", group_size=64), W8A8Config(method="llm_int8")])
def test_bitsandbytes_loads_what_we_wrote(config, tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    tiny_model("llama", num_hidden_layers=1, intermediate_size=128).save_pretrained(tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    hf_efficient.save_as_bitsandbytes(model, tmp_path / "theirs")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32)
    for name, module in model.named_modules():
        if isinstance(module, EfficientLinear):
            weight, found = theirs.get_submodule(name).weight, module.dequantized()
            if isinstance(config, W8A8Config):
                assert isinstance(theirs.get_submodule(name), bitsandbytes.nn.Linear8bitLt)
                dense = bitsandbytes.functional.int8_vectorwise_dequant(weight.data, weight.SCB)
                torch.testing.assert_close(found, dense, rtol=2**-22, atol=0)
            else:
                dense = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
                assert torch.equal(found, dense.view(found.shape))
    ids = torch.randint(3, 128, (2, 9))
    with torch.no_grad():
        assert_close(model(ids).logits, theirs(ids).logits, 0.05, float("inf"), "8-bit inputs, rounded in other ways")
