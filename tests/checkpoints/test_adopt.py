"""Checkpoints of other libraries through `from_pretrained`, in layouts written from their definitions."""

import json

import foreign_layouts
import pytest
import torch
from helpers import assert_close, tiny_model
from safetensors.torch import load_file, save_file
from saved_models import logits
from transformers import AutoModel, AutoModelForCausalLM

import hf_efficient
from hf_efficient.checkpoints.adopt.awq import AWQ
from hf_efficient.checkpoints.adopt.compressed_tensors import CompressedTensors
from hf_efficient.checkpoints.adopt.gptq import GPTQ
from hf_efficient.experts import EfficientExperts
from hf_efficient.layers import EfficientLinear


HALF, WIDE = torch.float16, torch.bfloat16
LAYOUTS = {  # name -> layout, dtype, options
    "gptq": ("gptq", HALF, {}),
    "gptq symmetric channel": ("gptq", HALF, dict(symmetric=True, size=-1)),
    "gptq_v2": ("gptq", HALF, dict(version="gptq_v2")),
    "gptq activation order": ("gptq", HALF, dict(order="activation", size=16)),
    "gptq 8": ("gptq", HALF, dict(bits=8)),
    "gptq 3": ("gptq", HALF, dict(bits=3)),
    "gptq 2": ("gptq", HALF, dict(bits=2, order="groups")),
    "awq": ("awq", HALF, {}),
    "packed": ("packed", WIDE, {}),
    "packed asymmetric order": ("packed", WIDE, dict(symmetric=False, order="activation")),
    "packed 8 channel": ("packed", WIDE, dict(bits=8, strategy="channel")),
    "packed 3": ("packed", WIDE, dict(bits=3, symmetric=False)),
    "bitmask": ("bitmask", WIDE, {}),
    "bitmask of any pattern": ("bitmask", WIDE, dict(pattern=None)),
    "w8a8": ("plain", WIDE, {}),
    "w8a8 static tensor": ("plain", WIDE, dict(dynamic=False, strategy="tensor")),
    "w8a16": ("plain", WIDE, dict(inputs=False, symmetric=False)),
    "fp8": ("plain", WIDE, dict(kind="float")),
    "fp8 static": ("plain", WIDE, dict(kind="float", dynamic=False, strategy="tensor")),
    "fp8 block": ("plain", WIDE, dict(kind="float", strategy="block")),
    "nvfp4": ("fp4", WIDE, {}),
    "mxfp4": ("fp4", WIDE, dict(kind="mxfp4")),
    "nf4": ("bitsandbytes_4bit", WIDE, {}),
    "nf4 in words of bfloat16": ("bitsandbytes_4bit", WIDE, dict(storage=WIDE)),  # some look like NaN
    "nf4 double": ("bitsandbytes_4bit", WIDE, dict(double=True)),
    "fp4": ("bitsandbytes_4bit", WIDE, dict(table="fp4", block=128)),
    "llm_int8": ("bitsandbytes_8bit", HALF, {}),
    "hqq": ("hqq", HALF, {}),
    "hqq 8": ("hqq", HALF, dict(bits=8)),
    "hqq 3": ("hqq", WIDE, dict(bits=3)),
    "hqq 2": ("hqq", HALF, dict(bits=2, size=16)),
    "torchao int8": ("torchao_int8", WIDE, {}),
    "torchao intx": ("torchao_int8", WIDE, dict(size=32, bits=4)),
    "torchao int4": ("torchao_int4", WIDE, {}),
}


SAVED = (
    "gptq activation order",
    "awq",
    "bitmask",
    "bitmask of any pattern",
    "w8a8",
    "w8a16",
    "fp8",
    "nvfp4",
    "mxfp4",
    "nf4",
    "llm_int8",
    "hqq",
    "torchao int4",
)  # one a format of ours


pytestmark = pytest.mark.usefixtures("all_adopted")


def load(folder, dtype=None, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto", **options)


def dense(weights, dtype):
    """The tiny model with these weights in its linear layers."""
    model = tiny_model("llama", dtype, num_hidden_layers=1)
    with torch.no_grad():
        for name, weight in weights.items():
            model.get_submodule(name).weight.copy_(weight)
    return model


def assert_same(found, expected, layout):
    if layout == "bitsandbytes_8bit":  # which multiplies twice, ours once: float16 differs in its last place, rarely
        torch.testing.assert_close(found, expected, rtol=2**-10, atol=0)
    else:
        assert torch.equal(found, expected)


def test_marlin24(tmp_path):
    """Its tiles want 64 rows; its scales are float16 in models of any dtype."""
    sizes = dict(
        num_hidden_layers=1, hidden_size=128, intermediate_size=256, num_attention_heads=2, num_key_value_heads=1
    )
    plain = tiny_model("llama", head_dim=64, **sizes)
    weights = foreign_layouts.write(tmp_path, plain, foreign_layouts.marlin24, WIDE, size=-1)
    model = load(tmp_path, WIDE)
    assert model.config.quantization_config.weights.scale_dtype == "float16"
    for name, weight in weights.items():
        assert torch.equal(model.get_submodule(name).dequantized(dtype=WIDE), weight)


def test_gptq_whose_patterns_set_groups_that_do_not_divide_the_inputs(tmp_path):
    model = tiny_model("llama", num_hidden_layers=1)
    weights = foreign_layouts.write(tmp_path, model, foreign_layouts.gptq, HALF, size=48)
    tensors = {k: t for k, t in load_file(tmp_path / "model.safetensors").items() if not k.endswith("g_idx")}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": True}
    patterns = {"-:.*lm_head": {}, r"+:.*\.layers\.0\.": {"bits": 4, "group_size": 48, "desc_act": False}}
    foreign_layouts.rewrite_config(tmp_path, quantization_config={**config, "dynamic": patterns})
    model = load(tmp_path)
    for name, weight in weights.items():
        assert torch.equal(model.get_submodule(name).dequantized(dtype=HALF), weight)


def test_groups_that_name_modules_as_the_checkpoint_does(tmp_path):
    """Which the headless model calls otherwise."""
    plain = tiny_model("llama", num_hidden_layers=1)
    weights = foreign_layouts.write(tmp_path, plain, foreign_layouts.packed, WIDE)
    saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    group = saved["config_groups"].pop("group_0")
    targets = {"mlp": [name for name in weights if "mlp" in name], "attention": [r"re:model\.layers\.0\.self_attn"]}
    saved["config_groups"] = {part: {**group, "targets": names} for part, names in targets.items()}
    foreign_layouts.rewrite_config(tmp_path, quantization_config=saved)
    model = AutoModel.from_pretrained(tmp_path, dtype="auto")
    for name, weight in weights.items():
        assert torch.equal(model.get_submodule(name.removeprefix("model.")).dequantized(dtype=WIDE), weight.to(WIDE))


def converted(reader, layout, dtype, rows=48, columns=64, **options):
    """(what the reader makes of a weight in 3 bits, what it is)"""
    parts, weight, saved = layout(rows, columns, dtype, bits=3, **options)
    format = hf_efficient.WeightOnlyConfig(bits=3, group_size=32, symmetric=options.get("symmetric", False)).format()
    return format.dequantize(reader(saved).convert(parts, rows, columns, format, dtype), columns, dtype), weight


@pytest.mark.parametrize(
    "reader, layout, dtype", [(GPTQ, foreign_layouts.gptq, HALF), (CompressedTensors, foreign_layouts.packed, WIDE)]
)
def test_zero_points_of_3_bits_that_do_not_fill_their_words(reader, layout, dtype):
    assert torch.equal(*converted(reader, layout, dtype, symmetric=False))


@pytest.mark.parametrize("version", ["0.9.0", "6.0.3", "7.0.0"])
def test_zero_points_of_3_bits_by_gptqmodel(version):
    """Before version 7 it subtracted these from words of 32 bits; since then one from each zero point."""
    ones = torch.tensor([0b00100100100100100100100100100100, 0b10010010010010010010010010010010 - 2**32])
    ones = torch.cat([ones, torch.tensor([0b01001001001001001001001001001001])]).int()
    is_old = int(version[0]) < 7

    def layout(*args, **options):
        parts, weight, saved = foreign_layouts.gptq(*args, version="gptq_v2" if is_old else "gptq", **options)
        if is_old:
            parts["qzeros"] -= ones.repeat(2)[: parts["qzeros"].shape[1]]
        meta = {"quantizer": ["optimum:1.24.0", f"gptqmodel:{version}"]}
        return parts, weight, {**saved, "checkpoint_format": "gptq", "meta": meta}

    for symmetric in (True, False):
        assert torch.equal(*converted(GPTQ, layout, HALF, rows=64, symmetric=symmetric))


def test_an_unknown_version_of_gptqmodel_is_refused_for_3_bits(tmp_path):
    for bits in (4, 3):
        foreign_layouts.write(tmp_path, tiny_model("llama", num_hidden_layers=1), foreign_layouts.gptq, HALF, bits=bits)
        saved = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
        meta = {"quantizer": ["gptqmodel:main"]}
        foreign_layouts.rewrite_config(tmp_path, quantization_config={**saved, "meta": meta})
        if bits == 4:
            load(tmp_path)
    with pytest.raises(ValueError, match=r"meta\.quantizer=\['gptqmodel:main'\] has no number of a version"):
        load(tmp_path)


@pytest.mark.parametrize("name", LAYOUTS)
def test_adopted_model_is_the_dequantized_one(name, tmp_path):
    layout, dtype, options = LAYOUTS[name]
    weights = foreign_layouts.write(
        *(tmp_path / "theirs", tiny_model("llama", num_hidden_layers=1)),
        *(getattr(foreign_layouts, layout), dtype),
        **options,
    )
    model = load(tmp_path / "theirs")
    layers = {n: m for n, m in model.named_modules() if isinstance(m, EfficientLinear)}
    assert set(layers) == set(weights)
    assert model.config.quantization_config.quant_method.startswith("efficient_")
    for n, layer in layers.items():
        assert_same(layer.dequantized(dtype=dtype), weights[n].to(dtype), layout)
    reference = logits(dense(weights, dtype))
    rounds = layout in ("plain", "bitsandbytes_8bit") and options.get("inputs", True)
    tolerance = 0.2 if rounds else {HALF: 0.01, WIDE: 0.06}[dtype]
    reason = "weights rounded to 16 bits there and not here, 8-bit inputs where the layout has them"
    assert_close(logits(model), reference, tolerance, float("inf"), reason)
    if name not in SAVED:
        return
    ids = torch.tensor([[1, 5, 9]])
    tokens = model.generate(ids, max_new_tokens=3, do_sample=False)
    model.save_pretrained(tmp_path / "ours")
    again = load(tmp_path / "ours")
    assert torch.equal(logits(again), logits(model))
    assert torch.equal(again.generate(ids, max_new_tokens=3, do_sample=False), tokens)
    model.dequantize()
    for n, weight in weights.items():
        assert_same(model.get_submodule(n).weight.detach(), weight.to(dtype), layout)


EXPERTS = {
    "gptq": ("gptq", HALF, dict(size=16)),
    "awq": ("awq", HALF, dict(size=16)),
    "nf4": ("bitsandbytes_4bit", WIDE, {}),
    "w8a8": ("plain", WIDE, {}),
}


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_that_transformers_fuses(name, architecture, tmp_path):
    layout, dtype, options = EXPERTS[name]
    plain = tiny_model(architecture, num_hidden_layers=1, intermediate_size=64, moe_intermediate_size=64)
    only = lambda n: n not in ("lm_head", "model.layers.0.mlp.gate")  # noqa: E731
    weights = foreign_layouts.write(
        tmp_path / "theirs", plain, getattr(foreign_layouts, layout), dtype, only, **options
    )
    model = load(tmp_path / "theirs")
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, EfficientExperts)
    layers = {n: weight.to(dtype) for n, weight in weights.items() if ".experts." in n}
    gate, down, up = (
        torch.stack([weight for n, weight in layers.items() if n.endswith(leaf)])
        for leaf in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"))
    )
    assert torch.equal(experts.dequantized("gate_up_proj_", dtype), torch.cat([gate, up], 1))
    assert torch.equal(experts.dequantized("down_proj_", dtype), down)
    again = load(tmp_path / "theirs")
    again.save_pretrained(tmp_path / "ours")
    assert torch.equal(logits(load(tmp_path / "ours")), logits(model))
    again.dequantize()
    rounds = 0.2 if name == "w8a8" else 0.06
    assert_close(logits(model), logits(again), rounds, float("inf"), "16-bit weights there, 8-bit inputs here")


@pytest.mark.native_loop
@pytest.mark.parametrize("name", ["gptq activation order", "hqq", "torchao int4", "nf4", "w8a8"])
def test_generates_by_the_recorded_loop(name, tmp_path):
    layout, dtype, options = LAYOUTS[name]
    model = tiny_model("llama", num_hidden_layers=1)
    foreign_layouts.write(tmp_path, model, getattr(foreign_layouts, layout), dtype, **options)
    model = load(tmp_path, torch.float32)
    ids = torch.tensor([[1, 5, 9, 33]])
    tokens = model.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    with torch.no_grad():
        scores = model(tokens[:, :-1]).logits[:, ids.shape[1] - 1 :]
    scores[..., model.generation_config.eos_token_id] = -float("inf")
    assert torch.equal(tokens[:, ids.shape[1] :], scores.argmax(-1))


def test_words_by_hand():
    word = torch.tensor([[0x76543210]], dtype=torch.int32)
    saved = {"bits": 4, "group_size": 8}
    format = hf_efficient.WeightOnlyConfig(bits=4, group_size=-1).format()
    # GPTQ: eight inputs of one output, the first in the lowest bits; zero points are stored less one
    parts = {"qweight": word.expand(1, 8), "qzeros": torch.tensor([[0x66666666]], dtype=torch.int32)}
    parts["scales"] = torch.full((1, 8), 0.5)
    weight = format.dequantize(GPTQ(saved).convert(parts, 8, 8, format, torch.float32), 8, torch.float32)
    assert weight.tolist() == [[-3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5, 0.0]] * 8
    # AWQ: eight outputs of one input, in the order 0, 2, 4, 6, 1, 3, 5, 7
    parts["qweight"], parts["qzeros"] = word.expand(8, 1), torch.zeros(1, 1, dtype=torch.int32)
    weight = format.dequantize(AWQ(saved).convert(parts, 8, 8, format, torch.float32), 8, torch.float32)
    assert weight[:, 0].tolist() == [0.0, 2.0, 0.5, 2.5, 1.0, 3.0, 1.5, 3.5]
