"""A quantization_config given for a checkpoint that is compressed already."""

import json

import pytest
import torch
from helpers import tiny_model
from safetensors.torch import load_file, save_file
from saved_models import INT4, folder
from torch import nn
from transformers import AutoModelForCausalLM

from hf_efficient import BitNetConfig, CalibrationConfig, SparseConfig, W8A8Config, WeightOnlyConfig


def load(path, config=None):
    options = {} if config is None else {"quantization_config": config}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)


@pytest.fixture(scope="module")
def int4(tmp_path_factory):
    path = tmp_path_factory.mktemp("int4")
    load(folder(), WeightOnlyConfig(**INT4, overrides={"layers.0": {"bits": 8}})).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "config",
    [
        WeightOnlyConfig(bits=2, group_size=32),
        WeightOnlyConfig(bits=8),
        WeightOnlyConfig(),
        WeightOnlyConfig(**INT4, overrides={"layers.1": {"bits": 8}}),
        WeightOnlyConfig(**INT4),
        WeightOnlyConfig(**INT4, overrides={"layers.0": {"bits": 8}}, quantize_lm_head=True),
        WeightOnlyConfig(**INT4, overrides={"layers.0": {"bits": 8}}, modules_to_not_convert=["k_proj"]),
        W8A8Config(),
        SparseConfig(sparsity=0.5, method="magnitude"),
        BitNetConfig(),
        {"quant_method": "efficient_weight_only", "bits": 2},
    ],
    ids=str,
)
def test_another_config_is_refused_with_both_in_the_message(config, int4):
    with pytest.raises(ValueError) as error:
        load(int4, config)
    asked = "bits=2" if isinstance(config, dict) else type(config).__name__
    for part in ("compressed already", "group_size", "32", "layers.0", asked, "dequantize()"):
        assert part in str(error.value)


def test_the_same_config_and_dequantize_are_fine(int4):
    expected = {name: tensor.clone() for name, tensor in load(int4).state_dict().items()}
    same = WeightOnlyConfig(**INT4, overrides={"layers.0": {"bits": 8}})
    for config in (same, same.to_dict()):
        found = load(int4, config).state_dict()
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    dense = load(int4, WeightOnlyConfig(dequantize=True))
    assert type(dense.model.layers[0].mlp.up_proj) is nn.Linear


def test_the_same_config_with_calibration_is_fine(tmp_path):
    tokens = torch.randint(3, 128, (4, 16), generator=torch.Generator().manual_seed(0))
    options = dict(bits=4, group_size=32, mixed_precision=True)
    config = WeightOnlyConfig(**options, calibration=CalibrationConfig(tokens=tokens))
    model = load(folder(), config)
    model.save_pretrained(tmp_path)
    assert load(tmp_path, config).config.quantization_config.overrides == model.config.quantization_config.overrides
    load(tmp_path, WeightOnlyConfig(**options))
    with pytest.raises(ValueError, match="compressed already .*mixed_precision=True"):
        load(tmp_path, WeightOnlyConfig(**INT4))


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors"])
def test_checkpoints_of_other_libraries_are_refused(method, tmp_path):
    saved = {"quant_method": method, "bits": 4, "group_size": 128, "load_in_4bit": method == "bitsandbytes"}
    _with_config(tmp_path, saved)
    with pytest.raises(
        ValueError, match=f"compressed already .*{method}.*128.* quantized again .WeightOnlyConfig.bits=8"
    ):
        load(tmp_path, WeightOnlyConfig(bits=8))


def _with_config(path, saved):
    tiny_model("llama").save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | ({"quantization_config": saved} if saved else {})))


@pytest.mark.parametrize("saved", [None, {"quant_method": "of_tomorrow"}])
def test_integers_are_not_quantized(saved, tmp_path):
    """transformers goes on where it does not know a method, and casts what it reads."""
    _with_config(tmp_path, saved)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = (tensors[name] * 100).to(torch.int8)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="holds 1 weights as integers.*up_proj.*does not name"):
        load(tmp_path, WeightOnlyConfig(**INT4))


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"up_projj": {"bits": 8}}, "'up_projj' matches no module of LlamaForCausalLM.*near it are .*up_proj"),
        ({"lm_head": {"bits": 8}}, "'lm_head' changes nothing: lm_head .Linear. holds no weight.*quantize_lm_head"),
        ({"input_layernorm": {"bits": 8}}, "'input_layernorm' changes nothing: model.layers.0.input_layernorm"),
        ({"mlp": {"bits": 8}, "up_proj": {"bits": 2}}, "'up_proj' changes nothing: an earlier pattern"),
    ],
)
def test_overrides_that_change_nothing_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        load(folder(), WeightOnlyConfig(**INT4, overrides=overrides))


def test_overrides_that_leave_what_is_left_are_fine():
    load(folder(), WeightOnlyConfig(**INT4, overrides={"lm_head": None, "up_proj": {"bits": 8}}))
