"""There and back: what `export` writes, `adopt` reads into the same layers."""

import pytest
import torch
import unpackers
from exported import compressed, largest_difference, logits
from helpers import assert_close, tiny_model
from transformers import AutoModelForCausalLM

import hf_efficient
from hf_efficient.checkpoints import adopt
from hf_efficient.layers import EfficientLinear


W8A8 = dict(quant_method="efficient_w8a8")


@pytest.mark.parametrize(
    ("format", "config"),
    [
        ("compressed-tensors", dict(bits=4, group_size=32)),
        ("compressed-tensors", dict(bits=8, group_size=-1, symmetric=True)),
        ("compressed-tensors", dict(bits=4, group_size=32, codebook="mxfp4")),
        ("compressed-tensors", dict(bits=4, group_size=16, codebook="nvfp4")),
        ("compressed-tensors", W8A8),
        ("compressed-tensors", dict(W8A8, dtype="fp8")),
        ("gptq", dict(bits=4, group_size=32)),
        ("gptq", dict(bits=3, group_size=32, symmetric=True)),
        ("awq", dict(bits=4, group_size=32)),
        ("gguf", dict(bits=4, group_size=32, symmetric=True)),
        ("gguf", dict(bits=8, group_size=32, symmetric=True)),
    ],
)
def test_there_and_back(tmp_path, format, config, monkeypatch):
    monkeypatch.setattr(adopt, "_adopted", {format})
    model = compressed(tmp_path, model_dtype=torch.bfloat16, **config)
    output = tmp_path / ("out.gguf" if format == "gguf" else "out")
    assert hf_efficient.export(model, output, format).rounding == 0
    where = (tmp_path, {"gguf_file": "out.gguf"}) if format == "gguf" else (output, {})
    again = AutoModelForCausalLM.from_pretrained(where[0], dtype=torch.bfloat16, **where[1]).eval()
    layers = dict(model.named_modules())
    for name, module in again.named_modules():
        if isinstance(module, EfficientLinear):
            ours, theirs = layers[name].canonical(), module.canonical()
            assert torch.equal(theirs["qweight"].float(), ours["qweight"].float())
            if "scale" not in ours:
                assert torch.equal(theirs["scale_codes"].float(), ours["scale_codes"].float())
                continue
            scale = ours["scale"].float().repeat_interleave(theirs["scale"].shape[1] // ours["scale"].shape[1], 1)
            assert torch.equal(theirs["scale"].float(), scale)
            if "zero_point" in ours:
                assert torch.equal(theirs["zero_point"], ours["zero_point"])
    assert sum(isinstance(module, EfficientLinear) for module in again.modules()) == 14
    reason = "the same codes and scales; those in float16 are multiplied in float16, then rounded to bfloat16"
    assert_close(logits(again), logits(model), rms=0.05, maximum=1.0, reason=reason)


def test_a_layer_of_zeros_in_nvfp4(tmp_path, monkeypatch):
    monkeypatch.setattr(adopt, "_adopted", {"compressed-tensors"})
    dense = tiny_model("llama", torch.bfloat16, num_hidden_layers=1)
    torch.nn.init.zeros_(dense.model.layers[0].self_attn.q_proj.weight)
    dense.save_pretrained(tmp_path / "dense")
    config = hf_efficient.WeightOnlyConfig(codebook="nvfp4", method="rtn")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    hf_efficient.export(model, tmp_path / "out", "compressed-tensors")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.model.layers[0].self_attn.q_proj.dequantized().count_nonzero() == 0


def test_an_adopted_gguf_file_is_written_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(adopt, "_adopted", {"gguf"})
    model = compressed(tmp_path, model_dtype=torch.bfloat16, bits=4, group_size=32)
    hf_efficient.export(model, tmp_path / "first.gguf", "gguf")
    adopted = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="first.gguf", dtype=torch.bfloat16)
    assert hf_efficient.export(adopted, tmp_path / "second.gguf", "gguf").rounding == 0
    first, second = (unpackers.gguf(tmp_path / f"{name}.gguf") for name in ("first", "second"))
    assert largest_difference(first, second) == 0
