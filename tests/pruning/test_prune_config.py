"""`SparseConfig`: what it says about itself, and what it refuses before work starts."""

import json

import pytest
import torch
import transformers.modeling_utils  # registers
from helpers import tiny_model
from transformers.quantizers.auto import AutoQuantizationConfig

from hf_efficient import SparseConfig, WeightOnlyConfig
from hf_efficient.formats import AffineFormat
from hf_efficient.formats.bitmap import BitmapFormat
from hf_efficient.formats.sparse24 import Sparse24Format
from hf_efficient.integrations.peft import merge_and_unload
from hf_efficient.pruning import sparsegpt
from hf_efficient.pruning.mask import Sparsity


TOKENS = torch.randint(3, 128, (4, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "arguments, named",
    [
        (dict(), ["sparsity=None and pattern=None", "exactly one"]),
        (dict(sparsity=0.5, pattern="2:4"), ["sparsity=0.5 and pattern='2:4'", "exactly one"]),
        (dict(sparsity=1.0), ["sparsity=1.0", "below 1"]),
        (dict(sparsity=-0.5), ["sparsity=-0.5"]),
        (dict(sparsity="0.5"), ["sparsity='0.5'"]),
        (dict(pattern="4:2"), ["pattern='4:2'", "0 < n < m"]),
        (dict(pattern="two:four"), ["pattern='two:four'"]),
        (dict(pattern=(2, 4)), ["pattern=(2, 4)", "'n:m'"]),
        (dict(sparsity=0.5, method="magic"), ["method='magic'", "'wanda'"]),
        (dict(sparsity=0.5, method="mask"), ["method='mask'"]),
        (dict(sparsity=0.5, group="column"), ["group='column'", "'layer'"]),
        (dict(pattern="2:4", group="layer"), ["group='layer'", "with a pattern"]),
        (dict(sparsity=0.5, allocation="fair"), ["allocation='fair'", "'owl'"]),
        (dict(pattern="2:4", allocation="owl"), ["allocation='owl'", "with a pattern"]),
        (dict(sparsity=0.5, refine=1), ["refine=1"]),
        (dict(sparsity=0.5, weights=4), ["weights=4", "WeightOnlyConfig"]),
        (dict(sparsity=0.5, weights={"bits": 5}), ["weights: bits=5"]),
        (dict(sparsity=0.5, weights=WeightOnlyConfig(codebook="nf4")), ["weights: codebook='nf4'"]),
        (dict(sparsity=0.5, weights=WeightOnlyConfig(method="awq")), ["weights: method='awq'", "'gptq'"]),
        (dict(sparsity=0.5, weights=WeightOnlyConfig(quantize_lm_head=True)), ["weights=", "quantize_lm_head"]),
        (dict(sparsity=0.5, overrides={"a": {"sparsity": 2}}), ["overrides['a']", "sparsity=2"]),
        (dict(sparsity=0.5, bits=4), ["'bits'", "weights"]),
    ],
)
def test_bad_arguments_are_named(arguments, named):
    with pytest.raises(ValueError) as error:
        SparseConfig(**arguments)
    for part in named:
        assert part in str(error.value)


def test_json_round_trip_and_overrides():
    weights = WeightOnlyConfig(bits=4, group_size=32, method="gptq")
    config = SparseConfig(
        sparsity=0.5,
        weights=weights,
        overrides={"a": {"pattern": "2:4"}, "b": {"weights": None}, "c": {"weights": weights}, "d": {"sparsity": 0.7}},
    )
    back = AutoQuantizationConfig.from_dict(json.loads(config.to_json_string()))
    assert type(back) is SparseConfig and back == config and back.weights == weights
    assert back.for_module("a").format() == Sparse24Format(AffineFormat(4, 32, False))
    assert back.for_module("b").format() == BitmapFormat(None, 0.5)
    assert back.for_module("c").weights == weights
    assert back.for_module("d").target() == Sparsity(0.7)
    assert SparseConfig(pattern="4:8", overrides={"a": {"sparsity": 0.3}}).for_module("a").target() == Sparsity(0.3)
    mixed = SparseConfig(sparsity=0.5, method="sparsegpt", allocation="owl", overrides={"a": {"pattern": "2:4"}})
    assert mixed.for_module("a").target() == Sparsity.of_pattern(2, 4) and mixed.for_module("a").allocation == "uniform"


def test_what_competes_is_the_methods_own_unless_given():
    assert SparseConfig(sparsity=0.5, method="sparsegpt").target() == Sparsity(0.5, group="layer")
    assert SparseConfig(sparsity=0.5, method="sparsegpt", group="row").target() == Sparsity(0.5)
    assert SparseConfig(sparsity=0.5, method="wanda").target() == Sparsity(0.5)
    assert SparseConfig(pattern="2:4", method="sparsegpt").target() == Sparsity.of_pattern(2, 4)


def test_when_text_is_needed():
    assert not SparseConfig(sparsity=0.5, method="magnitude").needs_calibration()
    for more in ({"method": "wanda"}, {"refine": True}, {"allocation": "owl"}, {"weights": {"method": "gptq"}}):
        assert SparseConfig(**{"sparsity": 0.5, "method": "magnitude", **more}).needs_calibration(), more


def load(folder, config):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)


def test_models_that_cannot_be_pruned(tmp_path):
    tiny_model("llama_tied").save_pretrained(tmp_path / "tied")
    for config, match in (
        (SparseConfig(pattern="5:10", method="magnitude"), r"q_proj: pattern 5:10 does not divide in_features=64"),
        (SparseConfig(pattern="5:10", calibration={"tokens": TOKENS}), "q_proj: pattern 5:10 does not divide"),
        (SparseConfig(sparsity=0.5, method="magnitude", quantize_lm_head=True), "quantize_lm_head=True .* tied to the"),
    ):
        with pytest.raises(ValueError, match=match):
            load(tmp_path / "tied", config)


def test_a_compressed_model_is_not_pruned(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "dense")
    magnitude = SparseConfig(sparsity=0.5, method="magnitude")
    again = SparseConfig(sparsity=0.6, method="magnitude")
    again_is_refused = "compressed already .*{}.* cannot be pruned again .*0.6"
    for config, match in ((WeightOnlyConfig(group_size=32), "efficient_weight_only"), (magnitude, "0.5")):
        load(tmp_path / "dense", config).save_pretrained(tmp_path / config.name)
        with pytest.raises(ValueError, match=again_is_refused.format(match)):
            load(tmp_path / config.name, again)
    again.dequantize = True
    dense = load(tmp_path / "efficient_sparse", again).model.layers[0].mlp.up_proj
    assert type(dense) is torch.nn.Linear and (dense.weight == 0).float().mean() == 0.5
    load(tmp_path / "efficient_sparse", magnitude)


def test_single_modules_have_their_own_sparsity(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path)
    overrides = {"layers.1": {"pattern": "2:4"}, "k_proj": None, "o_proj": {"sparsity": 0.75, "weights": {"bits": 8}}}
    model = load(tmp_path, SparseConfig(sparsity=0.25, method="magnitude", overrides=overrides))
    zeros = {"0.self_attn.q_proj": 0.25, "0.self_attn.o_proj": 0.75, "1.self_attn.o_proj": 0.5, "1.mlp.up_proj": 0.5}
    for name, share in zeros.items():
        weight = model.get_submodule(f"model.layers.{name}").dequantized()
        assert (weight == 0).float().mean().item() == pytest.approx(share, abs=0.01), name
    assert type(model.model.layers[0].self_attn.k_proj) is torch.nn.Linear
    assert model.model.layers[0].self_attn.o_proj.format.weights.bits == 8


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_zeros_stay_when_an_adapter_is_merged(tmp_path):
    peft = pytest.importorskip("peft")
    tiny_model("llama").save_pretrained(tmp_path)
    base = load(tmp_path, SparseConfig(pattern="2:4", method="magnitude"))
    before = {name: m.dequantized() for name, m in base.named_modules() if name.endswith("down_proj")}
    adapted = peft.LoraConfig(r=4, target_modules=["down_proj"], init_lora_weights=False)
    merged = merge_and_unload(peft.get_peft_model(base, adapted))
    for name, weight in before.items():
        after = merged.get_submodule(name).weight
        assert torch.equal(after == 0, weight == 0) and not torch.equal(after, weight)


def test_an_interrupted_run_resumes_to_the_same_bits(tmp_path, monkeypatch):
    tiny_model("llama", num_hidden_layers=3).save_pretrained(tmp_path)
    weights = WeightOnlyConfig(bits=4, group_size=32, method="gptq")
    config = SparseConfig(
        pattern="2:4",
        method="sparsegpt",
        weights=weights,
        overrides={"o_proj": {"sparsity": 0.5, "weights": None}},
        calibration={"tokens": TOKENS, "checkpoint_dir": str(tmp_path / "progress")},
    )
    expected, calls, whole = load(tmp_path, config).state_dict(), [], sparsegpt.prune

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 16:
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(sparsegpt, "prune", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load(tmp_path, config)
    resumed = load(tmp_path, config).state_dict()
    assert len(calls) == 16 + 7, "two blocks were restored"
    assert set(resumed) == set(expected) and all(torch.equal(resumed[name], expected[name]) for name in expected)
