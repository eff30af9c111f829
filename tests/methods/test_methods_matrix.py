"""Every method over decoders, encoders and encoder-decoders: loads and calibrates inside `from_pretrained`, generates,
saves, reloads to the same bits, turns back into an ordinary model, and what was reloaded trains adapters. A weight of
zeros stays one."""

import json
import shutil
import warnings

import pytest
import torch
import transformers
from helpers import assert_close, assert_same_tensors, is_installed, tiny_model, tiny_tokenizer
from table import METHODS
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

import hf_efficient
from hf_efficient.calibration.blocks import weight_of
from hf_efficient.configs import available_methods, available_pruning_methods
from hf_efficient.integrations import transformers_quantizer, transformers_registration
from hf_efficient.layers import CompressedModule, EfficientLinear


hf_efficient.register()  # before transformers' own loading code is imported
TOKENS = torch.randint(3, 128, (6, 24), generator=torch.Generator().manual_seed(1))
PROMPT = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))
# bits -> largest norm of the change of the logits, in units of the dense logits (those of another model: 1.4)
LOSS = {"sparse": 1.2, 1: 1.1, 2: 1.1, 2.5: 0.8, 3: 0.7, 4: 0.4, 6: 0.1, 8: 0.05}  # static inputs clip
LOSS |= {"fp8": 0.12, "fp8_e5m2": 0.2}


BERT = dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
T5 = dict(vocab_size=128, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0)
ARCHITECTURES = {
    **{name: (lambda name=name: tiny_model(name)) for name in ("llama", "gpt2", "qwen3_moe", "gemma3")},
    "one_layer": lambda: tiny_model("llama", num_hidden_layers=1),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**BERT)),
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
}
DECODERS = ("llama", "one_layer")
ZEROS = "model.layers.0.self_attn.k_proj"  # there


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("methods") / name
            torch.manual_seed(0)
            model = ARCHITECTURES[name]()
            if name in DECODERS:
                torch.nn.init.zeros_(model.get_submodule(ZEROS).weight)
            model.save_pretrained(made[name])
        return made[name]

    return folder


def config_of(method, **more):
    arguments = dict(METHODS[method])
    kind = AUTO_QUANTIZATION_CONFIG_MAPPING[arguments.pop("quant_method")]
    calibration = None if method == "bitnet" else {"tokens": TOKENS, "batch_size": 3}
    return kind(**arguments, calibration=calibration, **more)


def load(folder, **options):
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, name).from_pretrained(folder, dtype=torch.float32, **options)


def linears(model):
    return [(name, module) for name, module in model.named_modules() if isinstance(module, EfficientLinear)]


@torch.no_grad()
def logits(model):
    inputs = {"decoder_input_ids": PROMPT} if model.config.is_encoder_decoder else {}
    return model(input_ids=PROMPT, **inputs).logits


def cases():
    """Every method on a decoder, of two layers where it decides over all layers; on other architectures methods that
    look at blocks: scales between layers, rotations and refinement (after GPTQ)."""
    others = [
        *[(m, a) for m in ("awq_4", "gptq_rotated_4", "gptq_refined_3") for a in ARCHITECTURES if a not in DECODERS],
        *[(m, a) for m in ("trellis_2", "sparsegpt_int4") for a in ("gpt2", "qwen3_moe")],
        *[("w8a8_smoothquant", a) for a in ("t5", "qwen3_moe")],  # scales at the places of AWQ's
    ]
    whole = {"mixed_4", "trellis_2.5", "gradient_owl", *(method for method, _ in others)}
    return [(m, "llama" if m in whole else "one_layer") for m in METHODS] + others


@pytest.mark.parametrize("method, architecture", cases())
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_method_from_loading_to_adapters(method, architecture, folders, tmp_path):
    folder = folders(architecture)
    dense = load(folder)
    model = load(folder, quantization_config=config_of(method))
    compressed = [module for module in model.modules() if isinstance(module, CompressedModule)]
    plain = {name for name, module in model.named_modules() if type(module) is torch.nn.Linear and "head" not in name}
    assert compressed and not any("proj" in n or "query" in n for n in plain), "every projection is compressed"
    expected, got = logits(dense), logits(model)
    bits = METHODS[method].get("dtype") or METHODS[method].get("bits", 8)  # fp8 has 3 bits of mantissa
    is_sparse = METHODS[method]["quant_method"] == "efficient_sparse"
    bits = "sparse" if is_sparse else bits
    if method != "bitnet":  # ternary weights make another model
        error = ((got - expected).norm() / expected.norm()).item()
        assert error < LOSS[bits], f"the logits moved by {error:.3f} of their size"
    if architecture in DECODERS:
        zeros = model.get_submodule(ZEROS)
        assert (zeros.format.dequantize(zeros.canonical(), 64, torch.float32) == 0).all()
        assert zeros(torch.randn(3, 64)).abs().max() < 1e-4  # not 0: zero points are taken off a sum
    if dense.can_generate():
        assert model.generate(PROMPT, max_new_tokens=4, do_sample=False).shape[1] > 1

    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert torch.equal(logits(again), got)
    assert_same_tensors(again.state_dict(), model.state_dict())

    if (method, architecture) == ("gptq_refined_3", "llama") and is_installed("peft"):  # as calibration leaves it
        assert torch.equal(logits(check_adapters_train_on(model).unload()), got)

    masks = {n: m.format.mask(m.canonical(), m.in_features) for n, m in linears(model) if is_sparse}
    plain = model.dequantize()
    assert not any(isinstance(module, CompressedModule) for module in plain.modules())
    for name, mask in masks.items():
        target = again.config.quantization_config.for_module(name).target()
        weight = weight_of(plain.get_submodule(name))
        count, kept = target.competitors(*mask.shape)
        assert (mask.reshape(-1, count).sum(1) == kept).all(), f"{name}: every group keeps as many as asked for"
        assert (weight[~mask] == 0).all(), f"{name}: zeros stay zeros"
    rounds_inputs = "activation_bits" in METHODS[method]
    if METHODS[method]["quant_method"] in ("efficient_weight_only", "efficient_sparse") and not rounds_inputs:
        assert_close(logits(plain), got, 1e-3, 0.02, "the same weights, summed and transformed in another order")
    if architecture in DECODERS and is_installed("peft"):
        check_adapters_train_on(again)


def check_adapters_train_on(base):
    import peft

    adapter = peft.LoraConfig(r=4, target_modules=["v_proj", "down_proj"], task_type="CAUSAL_LM")
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = peft.get_peft_model(base, adapter)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for _ in range(4):
            losses.append(model(input_ids=PROMPT, labels=PROMPT).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
    assert losses[-1].item() < losses[0].item() - 0.05, [loss.item() for loss in losses]
    return model


def test_the_table_names_every_method():
    sparse = [row for row in METHODS.values() if row["quant_method"] == "efficient_sparse"]
    assert {row.get("method", "wanda") for row in sparse} == set(available_pruning_methods())
    weight_only = [row for row in METHODS.values() if row["quant_method"] == "efficient_weight_only"]
    named = {config.name for config in transformers_registration.CONFIGS}
    assert {row.get("method", "rtn") for row in weight_only} | {"kmeans"} == set(available_methods())
    assert {row["quant_method"] for row in METHODS.values()} == named


@pytest.mark.parametrize("method", ["awq_4", "gptq_rotated_4"])
def test_a_base_model_reads_the_checkpoint_of_one_with_a_head(method, folders, tmp_path):
    """What calibration decided for single modules counts there, too; and the caller's config stays as it was."""
    config = config_of(method, modules_to_not_convert=["k_proj", "gate_proj"])
    model = load(folders("one_layer"), quantization_config=config)
    assert config.overrides == {} and config.calibration.tokens is TOKENS
    assert model.config.quantization_config.overrides and model.config.quantization_config.calibration.tokens is None
    model.save_pretrained(tmp_path)
    base = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(base(PROMPT).last_hidden_state, model.model(PROMPT).last_hidden_state)
    again = load(folders("one_layer"), quantization_config=config)
    assert torch.equal(logits(again), logits(model))


def test_bad_calibration_text_is_named_before_weights_are_read(folders, tmp_path, monkeypatch):
    def too_late(*args, **kwargs):
        raise AssertionError("the weights have been loaded")

    monkeypatch.setattr(transformers_quantizer.EfficientQuantizer, "_process_model_after_weight_loading", too_late)
    folder = tmp_path / "model"
    shutil.copytree(folders("llama"), folder)
    few = hf_efficient.WeightOnlyConfig(method="gptq", calibration={"texts": ["too little"]})
    with pytest.raises(ValueError, match="has no tokenizer for the calibration text"):
        load(folder, quantization_config=few)
    tiny_tokenizer().save_pretrained(folder)
    with pytest.raises(ValueError, match="the calibration text has 10 tokens"):
        load(folder, quantization_config=few)
