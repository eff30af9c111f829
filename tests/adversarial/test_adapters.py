"""PEFT's adapters on compressed models compute what they compute on the dequantized model: before and after merging, in
the gradients, and after a reload."""

import pytest
import torch
from adapted_models import (
    ADAPTERS,
    ADOPTED,
    ALL,
    FORMATS,
    IDS,
    IGNORED,
    TARGETS,
    adapted,
    config_of,
    load,
    logits,
    peft,
)
from helpers import assert_close, rms_error_ratio
from torch import nn
from transformers.pytorch_utils import Conv1D

import hf_efficient
from hf_efficient.integrations.peft import merge_and_unload
from hf_efficient.layers import CompressedModule


ON_CONV1D = ("lora", "lora bias", "dora", "rslora", "mica", "adalora", "ia3", "vera")  # what PEFT has for plain GPT-2
pytestmark = pytest.mark.filterwarnings(*IGNORED)


def with_linears(model):
    """`model` with an nn.Linear for each Conv1D, which many adapters know nothing of."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            new = nn.Linear(*module.weight.shape)
            new.weight, new.bias = nn.Parameter(module.weight.data.t().contiguous()), module.bias
            model.set_submodule(name, new)
    return model


def pruned_places(model) -> dict[str, torch.Tensor]:
    """Name of a weight -> where it is pruned, [N, K] (experts in front)."""
    return {
        f"{name}.{weight.prefix[:-1] or 'weight'}": ~weight.format.mask(
            module.canonical(weight.prefix), weight.in_features
        )
        for name, module in model.named_modules()
        if isinstance(module, CompressedModule)
        for weight in module.compressed_weights()
    }


def gradients(model) -> dict[str, torch.Tensor]:
    model(input_ids=IDS, labels=IDS).loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def check(make, config, tmp_path, tolerance=1e-5, reference=None, merges=True):
    """The adapter of `config()` on the model of `make()` against that on `reference`, by default the same model
    dequantized. Returns the merged model and what it should compute. merges: whether it loses nothing."""
    compressed, dense = adapted(make(), config()), adapted(reference or make().dequantize(), config())
    actual, expected = logits(compressed), logits(dense)
    reason = "the same adapter over weights that differ by rounding of products, or by that of inputs"
    assert_close(actual, expected, tolerance, 1e3 * tolerance, reason)
    base = logits(make())
    assert rms_error_ratio(actual, base) > 1e-3, "the adapter does something"
    if getattr(compressed.active_peft_config, "bias", "none") == "none":  # biases that are trained stay as they are
        with compressed.disable_adapter():
            assert torch.equal(logits(compressed), base)
    ours, theirs = gradients(compressed), gradients(dense)
    assert ours.keys() == theirs.keys()
    for key, gradient in ours.items():
        assert rms_error_ratio(gradient, theirs[key]) < 30 * tolerance, key
    compressed.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(make(), tmp_path).eval()
    assert torch.equal(logits(again), actual)
    merged = merge_and_unload(again)
    assert not any(isinstance(module, CompressedModule) for module in merged.modules())
    if merges:
        assert_close(logits(merged), expected, 2e-5, 1e-2, "the same product, with the adapter in the weight")
    return merged, expected


@pytest.mark.parametrize(
    "name, adapter", [("llama", a) for a in ADAPTERS] + [("gpt2", a) for a in (*ON_CONV1D, "lokr", "oft", "frod")]
)
def test_adapters_compute_as_on_dequantized_weights(name, adapter, tmp_path):
    reference = None if adapter in ON_CONV1D else with_linears(load(name).dequantize())
    config = lambda: config_of(adapter, TARGETS[name])  # noqa: E731
    merged, _ = check(lambda: load(name), config, tmp_path, reference=reference)
    if name == "gpt2":
        assert type(merged.transformer.h[0].attn.c_proj) is Conv1D


@pytest.mark.parametrize("adapter", ["lora", "dora", "lokr", "oft"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_adapters_of_mixtures(name, adapter, tmp_path):
    targets = ALL if adapter == "lora" else TARGETS[name]
    check(lambda: load(name), lambda: config_of(adapter, targets), tmp_path)


def test_all_linear_means_the_same_of_a_compressed_mixture():
    for name in ("mixtral", "qwen3_moe", "gpt_oss"):
        ours, theirs = config_of("lora", ALL), config_of("lora", ALL)
        compressed, dense = peft.get_peft_model(load(name), ours), peft.get_peft_model(load(name).dequantize(), theirs)
        assert compressed.targeted_module_names == dense.targeted_module_names
        assert compressed.targeted_parameter_names == dense.targeted_parameter_names


def test_experts_with_transposed_weights_and_biases(tmp_path):
    """gpt_oss; several adapters at once add up."""
    targets = {"target_parameters": [f"experts.{name}" for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj")]}
    config = lambda: config_of("lora", ["q_proj"], **targets)  # noqa: E731
    check(lambda: load("gpt_oss"), config, tmp_path)
    both = []
    for model in (load("gpt_oss"), load("gpt_oss").dequantize()):
        model = adapted(model, config())
        model.load_adapter(tmp_path, "second")
        model.base_model.set_adapter(["default", "second"])
        both.append(logits(model))
    assert_close(both[0], both[1], 1e-5, 1e-2, "the same adapters")


@pytest.mark.parametrize(
    "format, name, adapter",
    [
        *((format, "llama", "lora") for format in (*FORMATS, *ADOPTED)),
        *((format, "llama", "dora") for format in ("nf4 double", "w8a8", "2:4 int4", "gptq")),
        *((format, "mixtral", "lora") for format in (*FORMATS, "gptq")),
    ],
)
def test_formats(format, name, adapter, tmp_path, none_adopted):
    if format in ADOPTED:
        hf_efficient.adopt(format)
    targets, is_sparse = ALL if adapter == "lora" else TARGETS[name], "2:4" in format
    config, make = lambda: config_of(adapter, targets), lambda: load(name, format)  # noqa: E731
    inputs = rms_error_ratio(logits(make()), logits(make().dequantize()))  # where they are in 8 bits, adapters' are not
    merged, _ = check(make, config, tmp_path, 1e-5 + 3 * inputs, merges=not is_sparse)
    if not is_sparse:
        return
    dense = adapted(make().dequantize(), config()).merge_and_unload()
    pruned = pruned_places(make())
    assert pruned
    for key, value in merged.named_parameters():
        kept = dense.get_parameter(key).detach()
        assert_close(value, kept.masked_fill(pruned.get(key, torch.tensor(False)), 0), 1e-6, 1e-4, f"{key}: merged")


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_modules_to_save_are_dense_copies(name, tmp_path):
    """Compressed layers among them, or a whole block that holds some: they train as those of the plain model do."""
    saved = {"gpt2": ["c_fc", "ln_f"], "llama": ["mlp"], "mixtral": ["experts", "lm_head"]}[name]
    config = lambda: config_of("lora", TARGETS[name][:1], modules_to_save=saved)  # noqa: E731
    _, expected = check(lambda: load(name), config, tmp_path)
    # what was saved over compressed weights is one for the plain model, too
    plain = peft.PeftModel.from_pretrained(load(name).dequantize(), tmp_path).eval()
    assert_close(logits(plain), expected, 1e-5, 1e-2, "the same adapter")


def test_sparse_square_conv1d_keeps_its_own_zeros():
    model = load("gpt2", "2:4")
    zeros = model.transformer.h[0].attn.c_proj.dequantized().t() == 0
    merged = merge_and_unload(adapted(model, config_of("lora", ["attn.c_proj"])))
    assert torch.equal(merged.transformer.h[0].attn.c_proj.weight == 0, zeros)


def test_merging_a_sparse_model_with_a_trained_block():
    """The block that modules_to_save trained is kept as it was trained, the zeros of adapted layers stay."""
    model = adapted(load("llama", "2:4"), config_of("lora", ["q_proj"], modules_to_save=["mlp"]))
    trained = model.base_model.model.model.layers[0].mlp.modules_to_save["default"].up_proj.weight.clone()
    zeros = pruned_places(load("llama", "2:4"))["model.layers.0.self_attn.q_proj.weight"]
    merged = merge_and_unload(model).model.layers[0]
    assert torch.equal(merged.mlp.up_proj.weight, trained)
    assert torch.equal(merged.self_attn.q_proj.weight == 0, zeros)


@pytest.mark.native_loop
@pytest.mark.parametrize("name, options", [("llama", dict(use_dora=True)), ("qwen3_moe", {})])
def test_generating_with_adapters_on_and_off(name, options):
    model = adapted(load(name), config_of("lora", ALL, **options))
    model.generation_config.eos_token_id = None

    def generated():
        return [model.generate(input_ids=IDS, max_new_tokens=8, do_sample=False) for _ in range(2)]

    def expected():
        ids = IDS
        for _ in range(8):
            with torch.no_grad():
                ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        return ids

    with_adapter = expected()
    assert all(torch.equal(tokens, with_adapter) for tokens in generated())
    with model.disable_adapter():
        without = expected()
        assert not torch.equal(without, with_adapter)
        assert all(torch.equal(tokens, without) for tokens in generated())
    assert all(torch.equal(tokens, with_adapter) for tokens in generated())
