"""A compressed checkpoint, loaded as another class than it was saved from: the files decide what is compressed."""

import inspect

import pytest
import torch
import transformers
from helpers import tiny_config
from safetensors.torch import load_file, save_file
from torch import nn

from hf_efficient import WeightOnlyConfig
from hf_efficient.layers import CompressedModule


INT4 = dict(bits=4, group_size=32)
SIZES = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
TEXT = dict(SIZES, vocab_size=128, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
CONFIGS = {
    "Bert": ("BertConfig", TEXT, "layer.1"),
    "Roberta": ("RobertaConfig", TEXT, "layer.1"),
    "Llama": ("LlamaConfig", dict(TEXT, num_key_value_heads=2), "layers.1"),
    "T5": (
        "T5Config",
        dict(vocab_size=128, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0),
        "block.1",
    ),
    "Gemma3n": (
        "Gemma3nTextConfig",
        dict(
            TEXT,
            num_kv_shared_layers=0,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size_per_layer_input=128,
            hidden_size_per_layer_input=16,
            laurel_rank=8,
            layer_types=["sliding_attention", "full_attention"],
            activation_sparsity_pattern=[0.0, 0.0],
        ),
        "layers.1",
    ),
    "CLIP": (
        "CLIPConfig",
        dict(
            text_config=dict(TEXT, projection_dim=32),
            vision_config=dict(SIZES, image_size=16, patch_size=8, projection_dim=32),
            projection_dim=32,
        ),
        "vision_model.encoder.layers.1",
    ),
}


def random_model(kind: str, saved_as: str):
    config, arguments, _ = CONFIGS[kind]
    torch.manual_seed(0)
    model = getattr(transformers, saved_as)(getattr(transformers, config)(**arguments)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=1 if "emb" in name else parameter.shape[-1] ** -0.5)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """folders(kind, class): a compressed checkpoint with a block in 8 bits, and the dense one that it stands for."""
    made = {}

    def make(kind, saved_as):
        if (kind, saved_as) not in made:
            path = tmp_path_factory.mktemp(saved_as)
            random_model(kind, saved_as).save_pretrained(path / "plain")
            # by its full name, which begins otherwise in other classes
            name = next(n for n, _ in random_model(kind, saved_as).named_modules() if n.endswith(CONFIGS[kind][2]))
            config = WeightOnlyConfig(**INT4, overrides={name: {"bits": 8}})
            model = getattr(transformers, saved_as).from_pretrained(path / "plain", quantization_config=config)
            model.save_pretrained(path / "compressed")
            model.dequantize()
            model.save_pretrained(path / "dense")
            made[kind, saved_as] = path
        return made[kind, saved_as]

    return make


def outputs(model):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 120, (2, 9), generator=generator)
    given = {"input_ids": ids, "decoder_input_ids": ids, "pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    accepted = inspect.signature(model.forward).parameters
    with torch.no_grad():
        return model(**{name: value for name, value in given.items() if name in accepted})[0]


@pytest.mark.parametrize(
    "kind, saved_as, loaded_as",
    [
        ("Bert", "BertForSequenceClassification", "BertModel"),
        ("Bert", "BertForSequenceClassification", "BertForMaskedLM"),
        ("Bert", "BertForMaskedLM", "BertForSequenceClassification"),
        ("Bert", "BertModel", "BertForSequenceClassification"),
        ("Roberta", "RobertaForMaskedLM", "RobertaForSequenceClassification"),
        ("Llama", "LlamaForCausalLM", "LlamaModel"),
        ("Llama", "LlamaForCausalLM", "LlamaForSequenceClassification"),
        ("Llama", "LlamaModel", "LlamaForCausalLM"),
        ("T5", "T5ForConditionalGeneration", "T5EncoderModel"),
        ("Gemma3n", "Gemma3nForCausalLM", "Gemma3nTextModel"),
        ("CLIP", "CLIPModel", "CLIPTextModel"),
        ("CLIP", "CLIPModel", "CLIPVisionModel"),
        ("CLIP", "CLIPModel", "CLIPVisionModelWithProjection"),
        ("CLIP", "CLIPModel", "CLIPForImageClassification"),
    ],
)
def test_another_head_finds_what_the_files_hold(kind, saved_as, loaded_as, folders, tmp_path):
    path, cls = folders(kind, saved_as), getattr(transformers, loaded_as)
    model, report = cls.from_pretrained(path / "compressed", output_loading_info=True)
    dense = cls.from_pretrained(path / "dense")
    state = model.state_dict()
    dense.load_state_dict({name: state[name] for name in report["missing_keys"]}, strict=False)  # made anew: random
    assert not report["mismatched_keys"]
    stored = load_file(path / "compressed" / "model.safetensors")
    held = {name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")}
    found = {name for name, module in model.named_modules() if isinstance(module, CompressedModule)}
    assert found and all(any(a.endswith(b) or b.endswith(a) for b in held) for a in found)
    assert not any(".qweight" in name for name in report["missing_keys"])
    torch.testing.assert_close(outputs(model), outputs(dense), rtol=1e-3, atol=1e-4)
    model.save_pretrained(tmp_path)
    assert torch.equal(outputs(cls.from_pretrained(tmp_path)), outputs(model))


def test_a_dense_weight_of_the_files_stays_dense(folders, tmp_path):
    path = folders("Llama", "LlamaForCausalLM")
    model = transformers.LlamaForCausalLM.from_pretrained(path / "compressed")
    before, name = outputs(model), "model.layers.0.mlp.up_proj"
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for part in ("qweight", "scale", "zero_point"):
        del tensors[f"{name}.{part}"]
    tensors[f"{name}.weight"] = model.get_submodule(name).dequantized()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    mixed = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert type(mixed.get_submodule(name)) is nn.Linear
    assert sum(isinstance(module, CompressedModule) for module in mixed.modules()) == 13
    torch.testing.assert_close(outputs(mixed), before, rtol=1e-3, atol=1e-4)


def test_the_class_that_was_saved_finds_all_of_it(folders, tmp_path):
    """What is missing from the checkpoint of another class is made anew; from its own it is a damage."""
    path = folders("Bert", "BertForSequenceClassification")
    transformers.BertForSequenceClassification.from_pretrained(path / "compressed").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "pooler" not in name}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="lacks 4 of .*bert.pooler.dense.qweight.*incomplete"):
        transformers.BertForSequenceClassification.from_pretrained(tmp_path)
    transformers.BertForMaskedLM.from_pretrained(tmp_path)


def test_nothing_of_the_model_in_the_files_is_refused(folders):
    config = tiny_config("llama", quantization_config=WeightOnlyConfig(**INT4).to_dict())
    config.architectures = ["Other"]
    with pytest.raises(ValueError, match="lacks .*its config is that of another model"):
        transformers.LlamaForCausalLM.from_pretrained(
            folders("T5", "T5ForConditionalGeneration") / "compressed", config=config
        )


def test_layers_that_other_checkpoints_hold_fused_are_saved_apart(tmp_path):
    """transformers would concatenate the placeholders of q_proj, k_proj and v_proj, and take the codes for something
    else."""
    torch.manual_seed(0)
    config = transformers.NomicBertConfig(**{name: size for name, size in TEXT.items() if "token" not in name})
    transformers.NomicBertForMaskedLM(config).save_pretrained(tmp_path / "plain")
    assert any("Wqkv" in name for name in load_file(tmp_path / "plain" / "model.safetensors")), "the trap is gone"
    model = transformers.NomicBertForMaskedLM.from_pretrained(
        tmp_path / "plain", quantization_config=WeightOnlyConfig(**INT4)
    )
    model.save_pretrained(tmp_path / "compressed")
    again = transformers.NomicBertForMaskedLM.from_pretrained(tmp_path / "compressed")
    assert torch.equal(outputs(again), outputs(model))
    transformers.NomicBertModel.from_pretrained(tmp_path / "compressed")
    again.dequantize()
    again.save_pretrained(tmp_path / "dense")
    dense = transformers.NomicBertForMaskedLM.from_pretrained(tmp_path / "dense")
    torch.testing.assert_close(outputs(dense), outputs(model), rtol=1e-3, atol=1e-4)


def test_what_is_relied_on_in_transformers():
    from hf_efficient.integrations import transformers_quantization_configs

    get = transformers.PreTrainedConfig.get_config_dict
    transformers_quantization_configs.register(())
    assert transformers.PreTrainedConfig.get_config_dict.__func__ is get.__func__, "registering twice changes nothing"
    assert transformers.CLIPTextConfig.base_config_key == "text_config"
