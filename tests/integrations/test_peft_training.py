"""Training over 4-bit weights as QLoRA does it, and other ways of training few parameters: the loss falls, the
compressed weights stay as they are, and what was trained can be saved, reloaded and, for LoRA, merged."""

import copy
import sys

import pytest
import saved_models
import torch
from helpers import assert_close, enable_checkpointing, needs_adapters, tiny_model
from recurrent_models import recurrent_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_efficient import WeightOnlyConfig
from hf_efficient.integrations.peft import merge_and_unload


peft = pytest.importorskip("peft")

IDS = torch.randint(3, 128, (4, 17), generator=torch.Generator().manual_seed(0))
LORA = dict(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT, about the model's config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """SmolLM2's shape in small: nine query heads over three, a tied head; with biases, for BitFit."""
    folder = tmp_path_factory.mktemp("smol")
    shape = dict(num_attention_heads=9, num_key_value_heads=3, hidden_size=72, tie_word_embeddings=True)
    tiny_model("llama", attention_bias=True, mlp_bias=True, **shape).save_pretrained(folder)
    return folder


def load(folder, dtype=torch.float32, **config):
    config = WeightOnlyConfig(**{"bits": 4, "group_size": 24, **config})
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=dtype)


def train(model, steps=50, rate=5e-3) -> list[float]:
    model.train()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trainable, lr=rate), []
    for _ in range(steps):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


def codes_of(model) -> list[torch.Tensor]:
    return [value.clone() for name, value in model.state_dict().items() if "qweight" in name]


@pytest.mark.parametrize("quantization", [{}, {"codebook": "nf4", "double_quantization": True}], ids=["int4", "nf4"])
def test_qlora(quantization, folder, tmp_path):
    base = load(folder, **quantization)
    before = codes_of(base)
    enable_checkpointing(base)
    model = peft.get_peft_model(peft.prepare_model_for_kbit_training(base), peft.LoraConfig(**LORA))
    losses = train(model)
    assert losses[-1] < 0.5 * losses[0], losses
    assert all(torch.equal(old, new) for old, new in zip(before, codes_of(model), strict=True))
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(IDS).logits
        again = peft.PeftModel.from_pretrained(load(folder, **quantization), tmp_path)
        assert torch.equal(again(IDS).logits, expected)
        merged = merge_and_unload(again)
        assert_close(merged(IDS).logits, expected, 1e-4, 1e-2, "the adapter is added to the weight")
    merged.save_pretrained(tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert getattr(plain.config, "quantization_config", None) is None
    with torch.no_grad():
        assert torch.equal(plain(IDS).logits, merged(IDS).logits)


@pytest.mark.parametrize("name, targets", [("gpt2", ["c_attn", "c_fc"]), ("mixtral", ["q_proj", "o_proj"])])
def test_lora_of_other_architectures(name, targets, tmp_path):
    base = saved_models.load(saved_models.folder(name), **saved_models.INT4)
    before = codes_of(base)
    model = peft.get_peft_model(base, peft.LoraConfig(**{**LORA, "target_modules": targets}))
    losses = train(model, 4, 1e-2)
    assert losses[-1] < losses[0] - 0.05, losses
    assert all(torch.equal(old, new) for old, new in zip(before, codes_of(model), strict=True))
    model.save_pretrained(tmp_path)
    again = saved_models.load(saved_models.folder(name), **saved_models.INT4)
    again = peft.PeftModel.from_pretrained(again, tmp_path)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


@needs_adapters
def test_transformers_own_adapter_loading(folder, tmp_path):
    model = load(folder)
    model.add_adapter(peft.LoraConfig(**LORA))
    train(model, 2)
    model.save_pretrained(tmp_path)
    again = load(folder)
    again.load_adapter(str(tmp_path))
    with torch.no_grad():
        assert_close(again(IDS).logits, model(IDS).logits, 1e-6, 1e-5, "the same adapter")


@needs_adapters
def test_a_model_is_saved_without_peft_layers(folder, tmp_path):
    """transformers leaves PEFT's layers where it deletes an adapter; no name would be found again."""
    model = load(folder)
    with torch.no_grad():
        expected = model(IDS).logits
    model.add_adapter(peft.LoraConfig(**LORA), "one")
    model.delete_adapter("one")
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(IDS).logits, expected)
    model = peft.get_peft_model(load(folder), peft.LoraConfig(**LORA))
    with pytest.raises(ValueError, match=r"q_proj\.lora_A\.default\.weight belongs to an adapter: save the adapter"):
        model.get_base_model().save_pretrained(tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_a_model_that_peft_casts_computes_as_one_that_it_cast_before(folder, tmp_path):
    """`prepare_model_for_kbit_training` casts the data of bfloat16 Parameters, so layouts made before it are
    outdated."""
    base = load(folder, torch.bfloat16)
    with torch.no_grad():
        base(IDS)
    model = peft.get_peft_model(peft.prepare_model_for_kbit_training(base), peft.LoraConfig(**LORA))
    train(model, 2)
    model.save_pretrained(tmp_path)
    prepared = peft.prepare_model_for_kbit_training(load(folder, torch.bfloat16))
    again = peft.PeftModel.from_pretrained(prepared, tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "IA3Config"])
def test_prompts_and_scales(kind, folder, tmp_path):
    options = {"num_virtual_tokens": 8}
    if kind == "IA3Config":
        options = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    model = peft.get_peft_model(load(folder), getattr(peft, kind)(task_type="CAUSAL_LM", **options))
    losses = train(model, 30, 2e-2)
    assert losses[-1] < losses[0] - 0.1, losses
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(load(folder), tmp_path)
    with torch.no_grad():
        assert_close(again(IDS).logits, model(IDS).logits, 1e-6, 1e-5, "the same adapter")


@pytest.mark.parametrize(
    "name, kind", [("mamba2", "LoraConfig"), ("mamba2", None), ("bamba", "LoraConfig"), ("bamba", "PromptTuningConfig")]
)
def test_fused_kernels_do_not_read_compressed_weights(name, kind, tmp_path, monkeypatch):
    """Those of Mamba take `out_proj.weight`, in training alone."""
    recurrent_model(name).save_pretrained(tmp_path)
    options = {"target_modules": ["in_proj"]} if kind == "LoraConfig" else {"num_virtual_tokens": 4}
    model = load(tmp_path, group_size=32)
    module = sys.modules[type(model).__module__]
    if kind is not None:
        model = peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", **options))
    monkeypatch.setattr(module, "mamba2_split_conv1d_scan_combined", None)  # which cannot be called
    found = [each.train()(input_ids=IDS, labels=IDS, use_cache=False).loss for each in (model, copy.deepcopy(model))]
    expected = model.eval()(input_ids=IDS, labels=IDS, use_cache=False).loss
    assert all(torch.equal(loss, expected) for loss in found)


def test_bitfit(folder, tmp_path):
    """Only biases learn (https://arxiv.org/abs/2106.10199); they are ordinary parameters of a compressed layer."""
    model = load(folder)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    before = codes_of(model)
    losses = train(model, 30, 5e-3)
    assert losses[-1] < losses[0] - 0.1, losses
    assert all(torch.equal(old, new) for old, new in zip(before, codes_of(model), strict=True))
    save_file({k: v for k, v in model.state_dict().items() if k.endswith("bias")}, tmp_path / "biases.safetensors")
    again = load(folder)
    again.load_state_dict(load_file(tmp_path / "biases.safetensors"), strict=False)
    model.save_pretrained(tmp_path / "whole")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    with torch.no_grad():
        expected = model(IDS).logits
        assert torch.equal(again(IDS).logits, expected) and torch.equal(whole(IDS).logits, expected)
