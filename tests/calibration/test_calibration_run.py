"""Blocks are compressed one after another, each on what the compressed ones before it give; interrupted runs resume."""

import sys
import types

import pytest
import torch
from helpers import assert_close, tiny_model
from sample_blocks import state_of
from test_calibration_blocks import own_hidden_states, t5, targets_of

from hf_efficient.calibration.residence import InMemory
from hf_efficient.calibration.run import calibrate
from hf_efficient.configs import CalibrationConfig, WeightOnlyConfig
from hf_efficient.formats.transformed import TransformedFormat
from hf_efficient.layers import EfficientLinear
from hf_efficient.methods import rtn


TOKENS = torch.randint(3, 128, (6, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def method(monkeypatch):
    """A method that rounds to nearest and keeps the statistics it was given, in `seen`."""
    module = types.ModuleType("hf_efficient.methods.noting")
    module.FORMATS, module.NEEDS, module.seen = rtn.FORMATS, ("hessian",), []

    def quantize(weight, format, inputs=None):
        module.seen.append(inputs)
        return rtn.quantize(weight, format)

    module.quantize = quantize
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


class Scheme(WeightOnlyConfig):
    def method_name(self):
        return "noting"


def configs_of(model, **scheme):
    return {name: Scheme(bits=4, group_size=16, **scheme) for name in targets_of(model)}


def config(**arguments):
    return CalibrationConfig(tokens=TOKENS, batch_size=2, **{"device": "cpu", **arguments})


def batches():
    return [dict(input_ids=batch) for batch in TOKENS.split(2)]


def test_every_linear_sees_what_the_compressed_model_feeds_its_block(method):
    model = tiny_model("llama", num_hidden_layers=3)
    configs, inputs = configs_of(model), {}
    decided = calibrate(model, configs, config(), None, [lambda block: inputs.update({block.name: block.inputs})])
    assert list(inputs) == ["model.layers.0", "model.layers.1", "model.layers.2"] and set(decided) == set(configs)
    assert all(isinstance(model.get_submodule(name), EfficientLinear) for name in configs)
    for number, batch in enumerate(batches()):
        states = own_hidden_states(model, batch, ["model.layers.0", "model.layers.1", "model.norm"])
        assert torch.equal(inputs["model.layers.1"][number], states["model.layers.0"])
        assert torch.equal(inputs["model.layers.2"][number], states["model.layers.1"])
    head = method.seen[-1]  # of the output embedding, which lies outside the blocks: it comes last
    normed = [own_hidden_states(model, batch, ["model.norm"])["model.norm"] for batch in batches()]
    normed = torch.cat(normed).flatten(0, 1)
    assert head.name == "lm_head" and head.count == TOKENS.numel()
    assert_close(head.hessian, normed.t() @ normed, 1e-5, 0.1, "the same rows, summed in another order")


def test_original_outputs_are_handed_to_refinement(method, llama):
    original = [own_hidden_states(llama, batch, ["model.layers.0", "model.layers.1"]) for batch in batches()]
    configs, seen = configs_of(llama, refine=True), []

    def refine(block, targets):
        assert set(block.tensors) == set(block.linears)
        for batch, target in enumerate(targets):
            assert torch.equal(target, original[batch][block.name])
        for tensors in block.tensors.values():
            tensors["scale"] = torch.ones_like(tensors["scale"])
        seen.append(block.name)

    calibrate(llama, configs, config(), None, refine=refine)
    assert seen == ["model.layers.0", "model.layers.1"]
    assert torch.all(llama.model.layers[0].self_attn.q_proj.canonical()["scale"] == 1)
    with pytest.raises(ValueError, match="refine=True is asked for"):
        calibrate(tiny_model("llama"), configs, config(), None)


def scaling(block) -> None:
    """A transform that folds into a norm and leaves an input scale: y = W x = (W / 2) (2 x)."""
    norm, name = block.module.input_layernorm, block.name + ".self_attn."
    norm.weight.data *= 2
    for linear in ("q_proj", "k_proj", "v_proj"):
        block.linears[name + linear].weight.data /= 2
    block.formats[name + "o_proj"] = TransformedFormat(block.formats[name + "o_proj"], input_scale=True)
    block.transforms[name + "o_proj"] = {"input_scale": torch.linspace(0.5, 2, 64)}


def test_what_transforms_decide_is_reported(method, shallow_llama):
    decided = calibrate(shallow_llama, configs_of(shallow_llama), config(), None, [scaling])
    assert decided["model.layers.0.self_attn.o_proj"]["input_scale"] is True
    assert decided["model.layers.0.self_attn.q_proj"] == Scheme(bits=4, group_size=16).scheme()
    assert torch.equal(
        shallow_llama.model.layers[0].self_attn.o_proj.canonical()["input_scale"], torch.linspace(0.5, 2, 64)
    )


@pytest.mark.parametrize("name, stop_after", [("llama", 9), ("llama", 16), ("t5", 9), ("t5", 30), ("mixtral", 14)])
def test_an_interrupted_run_resumes_to_the_same_bits(method, tmp_path, name, stop_after):
    def make():
        return t5() if name == "t5" else tiny_model(name, num_hidden_layers=3)

    folder = tmp_path / "progress"
    transforms = [scaling] if name == "llama" else []
    uninterrupted = make()
    decided = calibrate(uninterrupted, configs_of(uninterrupted), config(), None, transforms)
    total, method.seen = len(method.seen), []
    normal = method.quantize

    def interrupted(weight, format, inputs=None):
        if len(method.seen) == stop_after:
            raise KeyboardInterrupt
        return normal(weight, format, inputs)

    method.quantize = interrupted
    model = make()
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, configs_of(model), config(checkpoint_dir=folder), None, transforms)
    method.quantize, method.seen = normal, []
    with pytest.raises(ValueError, match=r"progress of another calibration \(schemes differ\)"):
        calibrate(make(), configs_of(make(), symmetric=True), config(checkpoint_dir=folder), None, transforms)
    other = CalibrationConfig(tokens=TOKENS.flip(0), batch_size=2, checkpoint_dir=folder)
    with pytest.raises(ValueError, match=r"\(tokens differ\)"):
        calibrate(make(), configs_of(make()), other, None, transforms)
    model = make()
    assert calibrate(model, configs_of(model), config(checkpoint_dir=folder), None, transforms) == decided
    assert 0 < len(method.seen) < total  # something was restored, and something was left to do
    expected, state = state_of(uninterrupted), state_of(model)
    assert set(expected) == set(state)
    assert all(torch.equal(expected[key], state[key]) for key in expected)
    assert not folder.exists()


def test_one_block_at_a_time_is_moved_to_the_device_and_back(method, monkeypatch):
    model = tiny_model("llama", num_hidden_layers=3)
    names, moves, to = {module: name for name, module in model.named_modules()}, [], torch.nn.Module.to

    def moved(self, device):
        moves.append((names[self], str(device)))
        return to(self, device)

    monkeypatch.setattr(torch.nn.Module, "to", moved)
    calibrate(model, configs_of(model), config(device="cpu:0"), None)  # another name of the same device
    expected = [(f"model.layers.{index}", device) for index in range(3) for device in ("cpu:0", "cpu")]
    assert moves == expected


@pytest.mark.gpu
def test_on_a_gpu_one_block_is_resident(method):
    on_cpu, model = tiny_model("llama", num_hidden_layers=3), tiny_model("llama", num_hidden_layers=3)
    calibrate(on_cpu, configs_of(on_cpu), config(device="cpu"), None)
    resident = []

    def note(block):
        resident.append({".".join(n.split(".")[:3]) for n, p in model.named_parameters() if p.is_cuda})

    calibrate(model, configs_of(model), config(device="cuda"), None, [note])
    assert resident == [{f"model.layers.{index}"} for index in range(3)]
    assert not any(parameter.is_cuda for parameter in model.parameters())
    for inputs in method.seen:
        assert inputs.absmax.is_cuda or inputs.name == "lm_head" or inputs.absmax.device.type == "cpu"
    state = state_of(model)
    for key, value in state_of(on_cpu).items():
        assert torch.equal(state[key], value)  # weights are rounded to nearest: the device changes nothing


def test_errors_name_the_layer(method):
    model = tiny_model("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.up_proj: the weight has 1 values"):
        calibrate(model, {n: s for n, s in configs_of(model).items() if "layers.1.mlp.up" in n}, config(), None)
    model = tiny_model("llama")
    model.model.layers[1].input_layernorm.weight.data[7] = float("inf")
    with pytest.raises(ValueError, match=r"model.layers.1.self_attn.q_proj: NaN or infinity in its inputs"):
        calibrate(model, configs_of(model), config(), None)


def test_modules_that_are_not_there_or_never_called(method, llama):
    with pytest.raises(ValueError, match=r"configs names modules that LlamaForCausalLM does not have.*model.layers.9"):
        calibrate(llama, {"model.layers.9": Scheme()}, config(), None)
    llama.spare = torch.nn.Linear(64, 64)
    with pytest.raises(ValueError, match=r"never reaches 1 modules, for example \['spare'\]"):
        calibrate(llama, configs_of(llama), config(), None)
    with torch.device("meta"):
        llama.spare = torch.nn.Linear(64, 64)
    with pytest.raises(ValueError, match=r"2 are offloaded, for example \['spare.weight'"):
        calibrate(llama, configs_of(llama), config(), None)


def test_blocks_stay_where_the_model_is_if_torchs_build_for_cuda_finds_no_gpu(monkeypatch):
    def current_accelerator(check_available=False):
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current_accelerator)
    assert InMemory(tiny_model("llama")).device == torch.device("cpu")
