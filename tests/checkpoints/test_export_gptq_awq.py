"""GPTQ and AWQ checkpoints, read back by unpackers of our own writing, and AWQ by the converter of
compressed-tensors."""

import json

import pytest
import torch
import unpackers
from exported import compressed, largest_difference, logits, weights
from helpers import assert_close
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import hf_efficient
from hf_efficient import methods
from hf_efficient.formats import AffineFormat
from hf_efficient.formats.transformed import TransformedFormat
from hf_efficient.layers import compress_linear


HALF_ULP = 2**-11  # of float16, relative: what a scale that came in float32 may change


def dense_copy(folder, target):
    """The exported folder as a plain model whose weights are what `unpackers` reads."""
    read = getattr(unpackers, target)(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    plain = folder.parent / "unpacked"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(config))
    dense = {n: t for n, t in unpackers.tensors_of(folder).items() if n.endswith(("weight", "bias"))}
    save_file({**dense, **read}, plain / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_holds_every_width(tmp_path, bits, symmetric):
    # bfloat16 scales are float16 numbers, so the weights are the same to the bit
    model = compressed(tmp_path, model_dtype=torch.bfloat16, bits=bits, group_size=32, symmetric=symmetric)
    report = hf_efficient.export(model, tmp_path / "out", "gptq")
    assert report.rounding == 0 and report.quantized_layers == 14
    assert largest_difference(weights(model), unpackers.gptq(tmp_path / "out")) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (config["bits"], config["group_size"], config["sym"], config["desc_act"]) == (bits, 32, symmetric, False)
    if bits == 3:  # of the first version GPTQModel has two kinds
        assert config["checkpoint_format"] == "gptq_v2"


def test_gptq_stores_a_zero_point_of_zero_in_the_second_version_only(tmp_path):
    model = compressed(tmp_path, bits=4, group_size=32)
    layers = [module for module in model.modules() if hasattr(module, "zero_point")]
    for layer in layers:
        layer.zero_point.clamp_(min=1)
    hf_efficient.export(model, tmp_path / "first", "gptq")
    layers[-1].zero_point[3, 0] = 0
    hf_efficient.export(model, tmp_path / "second", "gptq")
    for name in ("first", "second"):
        config = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        assert config["checkpoint_format"] == {"first": "gptq", "second": "gptq_v2"}[name]
    assert largest_difference(weights(model), unpackers.gptq(tmp_path / "second")) <= HALF_ULP


@pytest.mark.parametrize("target", ["gptq", "awq"])
@pytest.mark.parametrize("group_size", [32, 64, -1, None])
def test_logits_are_those_of_the_model(tmp_path, target, group_size):
    model = compressed(tmp_path, bits=4, group_size=group_size, symmetric=group_size is None)
    report = hf_efficient.export(model, tmp_path / "out", target)
    assert 0 < report.rounding <= HALF_ULP
    assert largest_difference(weights(model), getattr(unpackers, target)(tmp_path / "out")) <= 2 * HALF_ULP
    reason = "scales in float32 were rounded to float16: 2^-12 of a weight on average, through two layers"
    assert_close(logits(dense_copy(tmp_path / "out", target)), logits(model), rms=1e-3, maximum=0.02, reason=reason)


@pytest.mark.parametrize("symmetric", [True, False])
def test_awq_is_what_the_converter_of_compressed_tensors_reads(tmp_path, symmetric):
    converters = pytest.importorskip(
        "compressed_tensors.entrypoints.convert", reason="compressed-tensors is installed in CI"
    )
    model = compressed(tmp_path, model_dtype=torch.bfloat16, bits=4, group_size=32, symmetric=symmetric)
    assert hf_efficient.export(model, tmp_path / "out", "awq").rounding == 0
    converter = converters.AutoAWQConverter.from_pretrained(str(tmp_path / "out"))
    tensors = {n: t for n, t in unpackers.tensors_of(tmp_path / "out").items()}
    converted = converter.process(tensors)
    for name, weight in weights(model).items():
        rows, columns = converted[f"{name}_shape"].tolist()
        zero = unpackers.stream(converted[f"{name}_zero_point"].t(), 4, rows).T.repeat(32, 1)
        codes = unpackers.stream(converted[f"{name}_packed"], 4, columns)
        scale = converted[f"{name}_scale"].float().repeat_interleave(32, 1)
        assert torch.equal(torch.from_numpy(codes - zero).float() * scale, weight)


def test_what_stays_dense_is_named(tmp_path):
    model = compressed(tmp_path, bits=4, group_size=32, modules_to_not_convert=["layers.0.mlp"])
    hf_efficient.export(model, tmp_path / "gptq", "gptq")
    hf_efficient.export(model, tmp_path / "awq", "awq")
    kept = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]
    config = json.loads((tmp_path / "awq" / "config.json").read_text())["quantization_config"]
    assert config["modules_to_not_convert"] == [*kept, "lm_head"]
    config = json.loads((tmp_path / "gptq" / "config.json").read_text())["quantization_config"]
    assert set(config["dynamic"]) == {"-:^" + name.replace(".", r"\.") + "$" for name in kept}
    for target in ("gptq", "awq"):
        assert torch.equal(
            unpackers.tensors_of(tmp_path / target)[f"{kept[0]}.weight"], model.get_submodule(kept[0]).weight
        )


@pytest.mark.parametrize("target", ["gptq", "awq"])
def test_experts_are_written_one_by_one(tmp_path, target):
    model = compressed(tmp_path, "qwen3_moe", model_dtype=torch.bfloat16, bits=4, group_size=16)
    hf_efficient.export(model, tmp_path / "out", target)
    theirs = getattr(unpackers, target)(tmp_path / "out")
    experts = model.model.layers[1].mlp.experts
    gate_up = experts.dequantized("gate_up_proj_", torch.float32)
    for expert in range(4):
        name = f"model.layers.1.mlp.experts.{expert}."
        both = torch.cat([theirs[f"{name}gate_proj.weight"], theirs[f"{name}up_proj.weight"]])
        assert torch.equal(both, gate_up[expert])
        assert torch.equal(theirs[f"{name}down_proj.weight"], experts.dequantized("down_proj_", torch.float32)[expert])


REFUSED = {
    "awq": [
        (dict(bits=8, group_size=32), "weights of 8 bits; this target has 4"),
        (dict(bits=3, group_size=32), "weights of 3 bits"),
        (dict(bits=4, group_size=32, quantize_lm_head=True), "the output embedding"),
        (dict(bits=4, group_size=32, codebook="nf4"), "codebook='nf4'"),
        (dict(quant_method="efficient_w8a8"), "weights and activations in 8 bits"),
    ],
    "gptq": [
        (dict(bits=4, group_size=32, overrides={"down_proj": {"bits": 8}}), "weights of 8 bits beside layers of 4"),
        (dict(bits=4, group_size=-1, codebook="kmeans"), "codebook='kmeans'"),
        (dict(bits=4, group_size=32, rotate=True), "rotated while the model runs"),
        (dict(quant_method="efficient_bitnet"), "ternary"),
        (dict(bits=4, group_size=32, shape=dict(hidden_size=60, head_dim=16)), "do not fill words of 32 bits"),
    ],
}


@pytest.mark.parametrize(("target", "config", "message"), [(t, c, m) for t, rows in REFUSED.items() for c, m in rows])
def test_layers_that_do_not_fit_are_named(tmp_path, target, config, message):
    model = compressed(tmp_path, **config)
    with pytest.raises(ValueError, match=r"for example (model\.layers\.\d|lm_head).*" + message + ".*dequantize"):
        hf_efficient.export(model, tmp_path / "out", target)
    assert not (tmp_path / "out").exists()


def test_factors_that_were_not_folded_are_refused(tmp_path):
    model = compressed(tmp_path, bits=4, group_size=32)
    format = TransformedFormat(AffineFormat(4, 32, False), input_scale=True)
    weight, transform = torch.randn(64, 96), {"input_scale": torch.rand(96) + 0.5}
    tensors = methods.quantize(weight, format, "rtn", transform=transform)
    down = torch.nn.Linear(96, 64, bias=False)
    model.model.layers[0].mlp.down_proj = compress_linear(down, format, tensors)
    with pytest.raises(ValueError, match="1 of 14 .*layers.0.mlp.down_proj: its input is multiplied by factors"):
        hf_efficient.export(model, tmp_path / "out", "awq")
