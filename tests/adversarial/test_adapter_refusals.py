"""What PEFT's adapters cannot do to compressed weights, which need not change, is refused by name."""

import contextlib
import importlib.util
import io
import sys

import pytest
import torch
from adapted_models import ALL, IGNORED, adapted, config_of, load, logits, peft
from helpers import assert_close
from peft.tuners.tuners_utils import BaseTuner
from torch import nn
from transformers import AutoModelForCausalLM

import hf_efficient
from hf_efficient.integrations.peft import merge_and_unload
from hf_efficient.layers import EfficientLinear


pytestmark = pytest.mark.filterwarnings(*IGNORED)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_2", "olora", "kasa"])
@pytest.mark.parametrize("targets", [ALL, "q_proj"])
def test_initialisations_that_change_the_base_are_refused(init, targets):
    model = load("llama", modules_to_not_convert=["layers.0"])
    before, expected = {key: value.clone() for key, value in model.state_dict().items()}, logits(model)
    options = {"kasa_config": peft.KasaConfig()} if init == "kasa" else {"init_lora_weights": init}
    targets = targets if targets == ALL else [targets]
    with pytest.raises(ValueError, match=rf"LoraConfig\(.*{init}.*layers\.1.*AffineFormat\(bits=4.*dequantize\(\)"):
        peft.get_peft_model(model, config_of("lora", targets, **options))
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(value, after[key]) for key, value in before.items())
    assert torch.equal(logits(model), expected)
    on_dense_layers = [f"layers.0.self_attn.{name}_proj" for name in "qk"]
    peft.get_peft_model(model, config_of("lora", on_dense_layers, **options))


def test_training_a_compressed_layer_itself_is_refused():
    with pytest.raises(ValueError, match="LNTuningConfig.*q_proj.*modules_to_save"):
        peft.get_peft_model(load("llama"), peft.LNTuningConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"q_proj\.weight is the weight of an EfficientLinear.*target_modules"):
        peft.get_peft_model(load("llama"), config_of("lora", [], target_parameters=["q_proj.weight"]))
    with pytest.raises(ValueError, match=r"gate_up_proj_scale is a part .* one of \['gate_up_proj', 'down_proj'\]"):
        peft.get_peft_model(load("mixtral"), config_of("lora", [], target_parameters=["experts.gate_up_proj_scale"]))
    model = adapted(load("llama"), config_of("lora", ["down_proj"]))
    with pytest.raises(ValueError, match="modules_to_save: .*down_proj.base_layer is adapted as well"):
        model.add_adapter("second", config_of("lora", ["q_proj"], modules_to_save=["mlp"]))


def test_offloaded_layers(tmp_path, monkeypatch):
    """An adapter that only adds computes there, too; PEFT loads it given a device map. One that reads the weight says
    why not."""
    monkeypatch.chdir(tmp_path)  # PEFT writes what it offloads to a relative path
    parts = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    where = {**dict.fromkeys(parts, "cpu"), "model.layers.1": "disk"}
    base = adapted(load("llama"), config_of("lora", ["q_proj"]))
    base.save_pretrained(tmp_path / "adapter")
    load("llama").save_pretrained(tmp_path / "model")

    def offloaded():
        return AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", device_map=where, offload_folder=tmp_path / "disk", dtype=torch.float32
        )

    placed = {f"base_model.model.{name}": device for name, device in where.items()}
    options = {"device_map": placed, "offload_dir": tmp_path / "adapter disk"}
    model = peft.PeftModel.from_pretrained(offloaded(), tmp_path / "adapter", **options).eval()
    assert_close(logits(model), logits(base), 1e-5, 1e-2, "the same adapter")
    with pytest.raises(ValueError, match=r"LoraConfig\(use_dora=.*layers.1.self_attn.q_proj, which is offloaded"):
        peft.get_peft_model(offloaded(), config_of("dora", ["q_proj"]))


@pytest.mark.parametrize("name, targets, options", [
    ("llama", ["q_proj"], {}), ("mixtral", ALL, {}), ("llama", ["lm_head"], dict(modules_to_save=["mlp"])),
])  # fmt: skip
def test_merging_into_compressed_weights_is_refused(name, targets, options):
    model = adapted(load(name, modules_to_not_convert=["lm_head"]), config_of("lora", targets, **options))
    expected = logits(model)
    for merge in (model.merge_and_unload, model.merge_adapter, lambda: model.merge_and_unload(safe_merge=True)):
        with pytest.raises(ValueError, match=r"is compressed.*hf_efficient\.integrations\.peft\.merge_and_unload"):
            merge()
        assert torch.equal(logits(model), expected)
    if options:
        with pytest.raises(ValueError, match=r"unload\(\): .*mlp is compressed.*delete_adapter"):
            model.unload()
        model.delete_adapter("default")
    plain = model.unload()
    assert torch.equal(logits(plain), logits(load(name, modules_to_not_convert=["lm_head"])))


def test_nothing_writes_to_a_compressed_weight():
    """Whatever method PEFT adds: the weight reads as a dense one, and refuses to change."""
    layer = adapted(load("llama"), config_of("lora", ["q_proj"])).base_model.model.model.layers[0].self_attn.q_proj
    base = layer.base_layer
    dense = EfficientLinear.dequantized(base)
    assert isinstance(base.weight, nn.Parameter) and base.weight.shape == dense.shape
    assert torch.equal(base.weight + 1, dense + 1) and torch.equal(torch.stack([base.weight])[0], dense)

    def add():
        base.weight.data += 1

    def assign():
        base.weight.data = dense

    def replace():
        base.weight = nn.Parameter(dense)

    def out():
        torch.add(dense, 1, out=base.weight)

    for write in (
        add,
        assign,
        replace,
        out,
        lambda: base.weight.data.copy_(dense),
        lambda: nn.init.zeros_(base.weight),
    ):
        with pytest.raises(RuntimeError, match="compressed"):
            write()
    assert torch.equal(base.weight.clone(), dense)


def test_the_weight_of_an_adapted_layer_has_the_dtype_of_its_inputs():
    """Models cast to it (`x.to(self.proj.weight.dtype)`); packed codes are integers."""
    model = adapted(load("llama"), config_of("lora", ["q_proj"])).to(torch.bfloat16)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert "qweight" in layer.base_layer._parameters and layer.weight.dtype is torch.bfloat16


def test_prompts_are_not_merged():
    model = peft.get_peft_model(load("llama"), peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="PromptTuningConfig"):
        merge_and_unload(model)
    assert any(isinstance(module, EfficientLinear) for module in model.modules()), "nothing was dequantized"


def test_peft_is_served_from_the_moment_it_is_imported():
    """Looking for a package without importing it, as transformers does, changes nothing. Here hf_efficient came
    before peft; the other way round it serves at once."""
    called = []
    finder = hf_efficient._RegisterAfterImport("this", lambda: called.append("this"))
    sys.modules.pop("this", None)
    sys.meta_path.insert(0, finder)
    try:
        assert importlib.util.find_spec("this") and finder in sys.meta_path and not called
        with contextlib.redirect_stdout(io.StringIO()):
            importlib.import_module("this")
        assert called == ["this"] and finder not in sys.meta_path
    finally:
        sys.meta_path[:] = [other for other in sys.meta_path if other is not finder]
    assert hf_efficient._RegisterAfterImport("no_such_package", None).find_spec("no_such_package") is None
    spec = importlib.util.spec_from_file_location("hf_efficient_again", hf_efficient.__file__)
    before = list(sys.meta_path)
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        waiting = [each.module for each in sys.meta_path if each not in before]
    finally:
        sys.meta_path[:] = before
    assert not {"peft", "transformers.modeling_utils"} & {*waiting} and hasattr(BaseTuner.inject_adapter, "__wrapped__")
