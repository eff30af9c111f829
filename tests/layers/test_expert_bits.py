"""Mixtures whose experts have different numbers of bits: chosen by calibration or given, saved, loaded, refused."""

import pytest
import torch
from helpers import save_tiny, tiny_model
from transformers import AutoModelForCausalLM

from hf_efficient import CalibrationConfig, ExpertOffload, WeightOnlyConfig, compress_on_disk, export
from hf_efficient.calibration import sensitivity
from hf_efficient.calibration.gradients import language_loss_gradients, name_of_expert
from hf_efficient.calibration.sensitivity import Sensitivity, choose_bits
from hf_efficient.experts import EfficientExperts, is_fused_experts
from hf_efficient.formats.expert_bits import ExpertBitsFormat
from hf_efficient.kernels.linear.grouped_cpu import ExpertLayouts


TOKENS = torch.randint(3, 128, (4, 24), generator=torch.Generator().manual_seed(0))
EXPERTS = "model.layers.0.mlp.experts"
EACH = {"model.layers.*.mlp.experts": {"bits": [4, 2, 8, 3]}}


def config(**arguments):
    given = dict(bits=4, group_size=32, method="gptq", calibration=CalibrationConfig(tokens=TOKENS))
    return WeightOnlyConfig(**given | arguments)


def load(folder, **arguments):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **arguments)


@torch.no_grad()
def logits(model):
    return model(TOKENS).logits


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_gradients_reach_each_expert(name):
    """With the inputs of the same call they add up to autograd's gradients of the fused weights."""
    model, sums = tiny_model(name), {}
    experts = {n: m for n, m in model.named_modules() if is_fused_experts(m)}

    def add(key, inputs, gradient):
        sums[key] = sums.get(key, 0) + gradient.t() @ inputs

    language_loss_gradients(model, {}, TOKENS, [], add, experts=experts)
    for window in TOKENS:
        scores = model(window[None]).logits[0, :-1]
        torch.nn.functional.cross_entropy(scores, window[1:], reduction="sum").backward()
    for path, module in experts.items():
        for weight in ("gate_up_proj", "down_proj"):
            for expert, expected in enumerate(getattr(module, weight).grad):
                found = sums.get(name_of_expert(path, weight, expert), torch.zeros_like(expected))
                torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_experts_that_tokens_reach_more_often_get_more_bits(monkeypatch):
    """All hold the same weights and are as sensitive, so that only frequency tells them apart; one that none reaches
    keeps its bits."""
    model, counts = tiny_model("mixtral", num_hidden_layers=1), [20, 96, 1, 0]
    module = model.get_submodule(EXPERTS)
    found = {}
    for weight in ("gate_up_proj", "down_proj"):
        matrices = getattr(module, weight).data
        matrices[:] = matrices[0].clone()
        rows, columns = matrices[0].shape
        for expert, count in enumerate(counts):
            sums = torch.full((columns,), float(count)), torch.full((rows,), float(count))
            found[name_of_expert(EXPERTS, weight, expert)] = Sensitivity(*sums, count)
    monkeypatch.setattr(sensitivity, "sensitivities", lambda *arguments: found)
    bits = choose_bits(model, {EXPERTS: config(bits=3).format()}, TOKENS)[EXPERTS]
    assert bits == [3, 4, 2, 3]
    for kept, own in ((4, config(scale_dtype="float32")), ([4, 2, 8, 3], config(bits=[4, 2, 8, 3]))):
        assert choose_bits(model, {EXPERTS: own.format()}, TOKENS)[EXPERTS] == kept


def test_calibration_chooses_bits_and_a_checkpoint_keeps_them(tmp_path):
    save_tiny(tmp_path / "dense", "mixtral")
    model = load(tmp_path / "dense", quantization_config=config(bits=3, mixed_precision=True))
    each = {name: fields["bits"] for name, fields in model.config.quantization_config.overrides.items()}
    experts = {name: bits for name, bits in each.items() if name.endswith("experts")}
    assert any(isinstance(bits, list) and len(bits) == 4 for bits in experts.values()), each
    model.save_pretrained(tmp_path / "small")
    loaded = load(tmp_path / "small")
    assert torch.equal(logits(loaded), logits(model))
    formats = {type(m.compressed_weights()[0].format) for m in loaded.modules() if isinstance(m, EfficientExperts)}
    assert ExpertBitsFormat in formats
    dense = load(tmp_path / "small", quantization_config=WeightOnlyConfig(dequantize=True))
    for name, module in model.named_modules():
        for weight in module.compressed_weights() if isinstance(module, EfficientExperts) else ():
            again = getattr(dense.get_submodule(name), weight.prefix[:-1])
            assert torch.equal(again, module.dequantized(weight.prefix))


def test_given_bits(tmp_path, monkeypatch):
    """The same bits from disk to disk, refined too; products of all experts in one call, as one by one."""
    save_tiny(tmp_path / "dense", "mixtral")
    given = config(method="awq", refine=True, overrides=EACH)
    model = load(tmp_path / "dense", quantization_config=given)
    model.save_pretrained(tmp_path / "memory")
    compress_on_disk(tmp_path / "dense", tmp_path / "disk", given, "64GB", dtype=torch.bfloat16, say=lambda text: None)
    expected = logits(model)
    assert torch.equal(logits(load(tmp_path / "disk")), expected)
    module = model.get_submodule(EXPERTS)
    weight = module.compressed_weights()[0]
    assert module.canonical(weight.prefix)["qweight"].numel() == weight.out_features * weight.in_features * 17 // 8
    with monkeypatch.context() as patch:
        patch.setattr(ExpertLayouts, "grouped", None)
        assert torch.equal(logits(model), expected)
    with pytest.raises(ValueError, match=r"mlp\.experts: experts with different numbers of bits cannot be offloaded"):
        ExpertOffload("1MB").attach(model)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(bits=[4, 2]), "bits of 2 experts for a weight of no experts"),
        (dict(overrides={"*experts": {"bits": [4, 2]}}), "experts: bits of 2 experts for a weight of 4 experts"),
    ],
)
def test_bits_of_other_experts_are_refused(tmp_path, arguments, message):
    save_tiny(tmp_path, "mixtral")
    with pytest.raises(ValueError, match=message):
        load(tmp_path, quantization_config=config(**arguments))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(bits=[4, 5]), r"bits=\[4, 5\] is not supported: it must be a list of one of \(2, 3, 4, 6, 8\) for each"),
        (dict(bits=[4, 2], group_size=None), "group_size=None is not supported"),
        (dict(bits=[4, 2], rotate=True), "rotate=True is not supported"),
        (dict(bits=[4, 2], activation_bits=4, rotate=False), "activation_bits=4 is not supported"),
    ],
)
def test_what_experts_with_their_own_bits_do_not_have(arguments, message):
    with pytest.raises(ValueError, match=message):
        config(**arguments)


def test_other_engines_do_not_read_them(tmp_path):
    save_tiny(tmp_path / "dense", "mixtral")
    model = load(tmp_path / "dense", quantization_config=config(method="rtn", calibration=None, overrides=EACH))
    with pytest.raises(ValueError, match="the fused weights of experts"):
        export(model, tmp_path / "out")
