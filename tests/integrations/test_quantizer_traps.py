"""What goes wrong with quantizers of third parties in transformers, one test (at least) a trap; T4 is in
test_offload.py."""

import json
import shutil

import fresh_processes
import pytest
import torch
import transformers
from helpers import assert_close
from safetensors.torch import load_file, save_file
from saved_models import INT4, folder, load, logits
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.core_model_loading import WeightConverter
from transformers.quantizers import auto

from hf_efficient import WeightOnlyConfig
from hf_efficient.integrations.transformers_quantizer import EfficientQuantizer
from hf_efficient.integrations.transformers_registration import register
from hf_efficient.layers import CompressedModule, EfficientLinear


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder of a quantized tiny Llama."""
    path = tmp_path_factory.mktemp("quantized")
    load(folder("llama"), **INT4).save_pretrained(path)
    return path


@pytest.fixture
def damaged(saved, tmp_path):
    """damaged(change_tensors=None, **config fields): a copy of `saved` with another content."""

    def make(change=None, **fields):
        shutil.copytree(saved, tmp_path / "d")
        if change is not None:
            tensors = load_file(tmp_path / "d" / "model.safetensors")
            change(tensors)
            save_file(tensors, tmp_path / "d" / "model.safetensors", {"format": "pt"})
        config = json.loads((tmp_path / "d" / "config.json").read_text())
        config["quantization_config"].update(fields)
        (tmp_path / "d" / "config.json").write_text(json.dumps(config))
        return tmp_path / "d"

    return make


T1 = """
import sys
from transformers import AutoModelForCausalLM
for path in sys.argv[1:]:
    try:
        AutoModelForCausalLM.from_pretrained(path)
    except RuntimeError as error:
        print("REFUSED", path, type(error).__name__)
    else:
        print("LOADED", path)
assert "hf_efficient" not in sys.modules
"""


def test_t1_without_the_plugin_a_checkpoint_is_refused(saved, tmp_path):
    paths = [saved]
    for name, config in (
        ("gpt2", INT4),
        ("mixtral", {**INT4, "modules_to_not_convert": ["self_attn"]}),  # only the fused experts are compressed
        ("gpt_oss", {**INT4, "modules_to_not_convert": ["self_attn"]}),
        ("llama_tied", {**INT4, "quantize_lm_head": True, "modules_to_not_convert": ["layers"]}),  # only the head
    ):
        load(folder(name), **config).save_pretrained(tmp_path / name)
        paths.append(tmp_path / name)
    done = fresh_processes.run(["-c", T1, *paths])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("REFUSED") == len(paths), done.stdout
    assert "MISMATCH" in done.stderr, "the report must show why"


def test_t2_dequantize_reaches_a_saved_checkpoint(saved):
    assert WeightOnlyConfig in auto.LOADING_ATTRIBUTES_CONFIG_TYPES
    expected = load(saved)
    expected.dequantize()
    for options in (
        dict(quantization_config=WeightOnlyConfig(dequantize=True)),
        dict(config=_config_asking_to_dequantize(saved)),
    ):
        model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, **options)
        assert not any(isinstance(m, CompressedModule) for m in model.modules())
        assert torch.equal(logits(model), logits(expected))


@pytest.mark.parametrize(
    "part, change, message",
    [
        ("scale", None, r"the state dict has no model\.layers\.0\.mlp\.up_proj\.scale"),
        ("scale", lambda t: t * float("nan"), "up_proj: scale holds values that are not finite in float32"),
        ("qweight", lambda t: t.int(), r"up_proj\.qweight is torch\.int32, expected torch\.uint8"),
    ],
)
def test_a_state_dict_is_checked_as_files_are(part, change, message, saved):
    tensors, name = load_file(saved / "model.safetensors"), f"model.layers.0.mlp.up_proj.{part}"
    model = transformers.LlamaForCausalLM.from_pretrained(
        None, config=AutoConfig.from_pretrained(saved), state_dict=tensors
    )
    assert torch.equal(logits(model), logits(load(saved)))
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name])
    with pytest.raises(ValueError, match=message):
        transformers.LlamaForCausalLM.from_pretrained(
            None, config=AutoConfig.from_pretrained(saved), state_dict=tensors
        )


@pytest.mark.parametrize("kind", [AutoModelForCausalLM, transformers.AutoModel])
@pytest.mark.parametrize("dequantize", [False, True])
def test_plain_weights_under_a_quantization_config_are_named(kind, dequantize, saved, tmp_path):
    shutil.copytree(folder("llama"), tmp_path / "plain")
    shutil.copy(saved / "config.json", tmp_path / "plain")
    asked = {"quantization_config": WeightOnlyConfig(dequantize=True)} if dequantize else {}
    with pytest.raises(ValueError, match=r"hold no compressed weight of Llama\w+, only plain ones, .*delete quantiz"):
        kind.from_pretrained(tmp_path / "plain", **asked)


def _config_asking_to_dequantize(path):
    config = AutoConfig.from_pretrained(path)
    config.quantization_config["dequantize"] = True
    return config


def test_t3_nothing_compressed_is_trainable(saved, tmp_path):
    load(folder("mixtral"), **INT4).save_pretrained(tmp_path)
    for model in (load(folder("llama"), **INT4), load(saved), load(folder("mixtral"), **INT4), load(tmp_path)):
        for module in model.modules():
            if isinstance(module, CompressedModule):
                trainable = [n for n, p in module.named_parameters() if p.requires_grad]
                assert not trainable or set(trainable) <= {"bias", "gate_up_proj_bias", "down_proj_bias"}
                for weight in module.compressed_weights():  # Parameters, not buffers: accelerate offloads only those
                    assert all(name in module.state_dict() for name in weight.names().values())


@pytest.mark.parametrize("name", ["llama_tied", "gpt2"])
def test_t5_a_tied_head_is_kept_unless_asked_for(name, tmp_path):
    kept = load(folder(name), **INT4)
    assert type(kept.lm_head) is nn.Linear and kept.lm_head.weight is kept.get_input_embeddings().weight
    kept.save_pretrained(tmp_path / "kept")
    assert torch.equal(logits(load(tmp_path / "kept")), logits(kept))

    asked = load(folder(name), **INT4, quantize_lm_head=True)
    assert type(asked.lm_head) is EfficientLinear and type(asked.get_input_embeddings()) is nn.Embedding
    embedding = asked.get_input_embeddings().weight
    step = asked.lm_head.canonical()["scale"].max().item()
    assert (asked.lm_head.dequantized() - embedding).abs().max() <= 0.51 * step, "the head is the embedding, rounded"
    asked.save_pretrained(tmp_path / "asked")
    again = load(tmp_path / "asked")
    assert torch.equal(logits(again), logits(asked)) and not again.config.tie_word_embeddings
    again.tie_weights()
    assert type(again.lm_head) is EfficientLinear and torch.equal(logits(again), logits(asked))
    again.dequantize()
    assert_close(logits(again), logits(asked), 2e-5, 1e-3, "the same weights through other operators")


def test_t5_a_tied_head_is_calibrated():
    asked = load(folder("llama_tied"), bits=4, group_size=32, quantize_lm_head=True)  # the method is chosen
    embedding = asked.get_input_embeddings().weight
    assert type(asked.lm_head) is EfficientLinear and not asked.config.tie_word_embeddings
    plain = AutoModelForCausalLM.from_pretrained(folder("llama_tied"), dtype=torch.float32)
    assert torch.equal(embedding, plain.get_input_embeddings().weight), "the input embedding stays as it was"
    step = asked.lm_head.canonical()["scale"].max().item()
    assert (asked.lm_head.dequantized() - embedding).abs().max() <= 8 * step and step > 0


def test_t6_names_below_a_prefix_are_excluded(tmp_path):
    vision = dict(
        model_type="clip_vision_model",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        projection_dim=32,
    )
    text = dict(
        model_type="llama",
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=127)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(tmp_path)
    options = dict(dtype=torch.float32)
    excluded = WeightOnlyConfig(**INT4, modules_to_not_convert=["vision_tower"])
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, quantization_config=excluded, **options)
    kinds = {n: type(m) for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert any("vision_tower" in n for n in kinds)
    assert all((kind is nn.Linear) == ("vision_tower" in n or n == "lm_head") for n, kind in kinds.items())
    model.save_pretrained(tmp_path / "q")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "q", **options)
    assert torch.equal(logits(again), logits(model))


def test_t7_declared_shapes_are_the_loaded_ones():
    """A weight of another architecture's shape is a mismatch, not something quantized into place."""
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(
            folder("llama"),
            config=AutoConfig.from_pretrained(folder("llama"), intermediate_size=128),
            quantization_config=WeightOnlyConfig(**INT4),
        )


def test_config_of_another_architecture_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="the checkpoint has no weights for 14 of the 14 weights.*another architecture"
    ):
        AutoModelForCausalLM.from_pretrained(
            folder("gpt2"),
            config=AutoConfig.from_pretrained(folder("llama")),
            quantization_config=WeightOnlyConfig(**INT4),
        )


def test_t8_an_error_while_quantizing_is_not_swallowed(monkeypatch):
    from hf_efficient.methods import rtn

    def fails(weight, format):
        raise ArithmeticError("method failed")

    monkeypatch.setattr(rtn, "quantize", fails)
    with pytest.raises((RuntimeError, ValueError)):
        load(folder("llama"), **INT4)


NAME = "model.layers.0.mlp.up_proj."


@pytest.mark.parametrize(
    "change, fields, named",
    [
        (lambda t: t.pop(NAME + "scale"), {}, ["lacks 1 of 56 tensors", NAME + "scale"]),
        (lambda t: t.pop(NAME + "qweight"), {}, [NAME + "qweight"]),
        (lambda t: t.update({NAME + "scale": torch.ones(96, 3)}), {}, [NAME + "scale: (96, 3) instead of (96, 2)"]),
        (None, dict(bits=8), ["14 tensors", "do not have the shape", "q_proj.qweight: (64, 32) instead of (64, 64)"]),
        (None, dict(group_size=64), ["scale: (64, 2) instead of (64, 1)"]),
        (None, dict(version=99), ["version=99", "version 1"]),
        (None, dict(bits=5), ["bits=5"]),
        (None, dict(method="later"), ["method='later'"]),
        (None, dict(outliers=3), ["'outliers'"]),
    ],
)
def test_t8_damaged_checkpoints_name_the_damage(change, fields, named, damaged):
    with pytest.raises(ValueError) as error:
        load(damaged(change, **fields))
    for part in named:
        assert part in str(error.value)


def test_t9_dequantize_after_a_save(tmp_path):
    model = load(folder("llama"), **INT4)
    model.save_pretrained(tmp_path)
    assert isinstance(model.config.dtype, str), "the trap is gone from transformers: simplify _dequantize"
    model.dequantize()
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    other = load(tmp_path)
    other.dequantize(torch.bfloat16)
    assert other.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    cast = load(tmp_path).to(torch.bfloat16)
    cast.dequantize()
    assert {parameter.dtype for parameter in cast.parameters()} == {torch.bfloat16} and logits(cast).isfinite().all()
    with pytest.raises(ValueError):
        model.dequantize()


def test_t10_casting_a_model_keeps_codes_and_scales(tmp_path):
    model = load(folder("llama"), torch.bfloat16, **INT4)
    before = model.state_dict()
    with pytest.raises(ValueError):
        model.half()
    model.to(torch.float16)
    after = model.state_dict()
    assert model.dtype == torch.float16 and after["model.norm.weight"].dtype == torch.float16
    packed = [k for k in before if k.endswith(("qweight", "scale", "zero_point"))]
    assert packed and all(torch.equal(before[k], after[k]) and before[k].dtype == after[k].dtype for k in packed)
    expected = logits(load(folder("llama"), torch.bfloat16, **INT4).to(torch.float32))
    assert_close(logits(model).float(), expected, 0.05, 0.5, "float16 activations over the same weights")
    model.save_pretrained(tmp_path)
    again = load(tmp_path, torch.float16).state_dict()
    assert all(torch.equal(again[k], after[k]) and again[k].dtype == after[k].dtype for k in after)


def test_t11_attributes_of_a_config_do_not_reach_the_json(tmp_path):
    config = WeightOnlyConfig(**INT4)
    config.tokenizer = object()
    model = AutoModelForCausalLM.from_pretrained(folder("llama"), quantization_config=config, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_t12_hooks_survive_dequantize():
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = load(folder("llama"), **INT4)
    hook = AlignDevicesHook(execution_device="cpu")
    add_hook_to_module(model.model.layers[0].mlp.up_proj, hook)
    before = logits(model)
    model.dequantize()
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear and model.model.layers[0].mlp.up_proj._hf_hook is hook
    assert_close(logits(model), before, 2e-5, 1e-3, "the same weights through other operators")


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_t13_memory_is_planned_for_the_compressed_size(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder(name)), dtype=torch.bfloat16)
        quantizer = EfficientQuantizer(WeightOnlyConfig(**INT4), pre_quantized=False)
        quantizer.preprocess_model(model=model)
    planned = sum(quantizer.param_element_size(model, n, p) * p.numel() for n, p in model.named_parameters())
    loaded = load(folder(name), torch.bfloat16, **INT4)
    tensors = {t.data_ptr(): t.nbytes for t in loaded.state_dict().values()}
    assert planned == sum(tensors.values())


def test_t14_experts_do_not_depend_on_the_experts_implementation():
    model = load(folder("mixtral"), **INT4)
    before = logits(model)
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(implementation)
        assert torch.equal(logits(model), before)
    model.set_experts_implementation("eager")
    model.dequantize()
    assert model.config._experts_implementation == "eager"
    assert_close(logits(model), before, 2e-5, 1e-3, "the same weights through other operators")


def test_unknown_expert_modules_are_refused():
    class ForeignExperts(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel = nn.Parameter(torch.zeros(4, 8, 8))

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder("llama")))
        model.model.layers[0].mlp.experts = ForeignExperts()
    quantizer = EfficientQuantizer(WeightOnlyConfig(**INT4), pre_quantized=False)
    with pytest.raises(
        ValueError, match=r"layers.0.mlp.experts \(ForeignExperts\).*modules_to_not_convert=\['experts'\]"
    ):
        quantizer.preprocess_model(model=model)


def test_registering_twice_changes_nothing():
    register()
    assert auto.AUTO_QUANTIZER_MAPPING["efficient_weight_only"] is EfficientQuantizer
    assert auto.LOADING_ATTRIBUTES_CONFIG_TYPES.count(WeightOnlyConfig) == 1


def test_a_compressed_model_keeps_no_converters():
    conversions = load(folder("mixtral"), **INT4)._weight_conversions
    assert isinstance(conversions, list) and not any(isinstance(c, WeightConverter) for c in conversions)


def test_loading_and_saving_are_those_of_transformers():
    """A model that does not ask for this package is loaded and saved by transformers' own methods: `from_pretrained`
    is called with what it is given, which is remembered."""
    code = (
        "import transformers.modeling_utils as m; before = dict(vars(m.PreTrainedModel)); "
        "import hf_efficient; hf_efficient.register(); after = vars(m.PreTrainedModel); "
        "assert all(after[name] is before[name] for name in ('__init__', 'save_pretrained')); "
        "assert after['from_pretrained'].__func__.__wrapped__ is before['from_pretrained'].__func__"
    )
    fresh_processes.run(["-c", code], check=True)
