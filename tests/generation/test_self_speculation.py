"""Drafts from the target's own weights: the draft is what it says, shares what it says, and leaves the target alone."""

import copy
import re

import accelerate
import pytest
import torch
from draft_models import GREEDY, NEW
from helpers import TINY_MODELS, left_padded_batch, tiny_model
from transformers import AutoModelForCausalLM

from hf_efficient import PagedCache, SelfSpeculation, WeightOnlyConfig, enable_speculation
from hf_efficient.generation.drafters.layer_skip import with_layers
from hf_efficient.generation.drafters.low_precision import low_precision_modules, with_modules
from hf_efficient.generation.speculation.options import Speculation


def deep_model(name: str, layers: int = 4, **overrides):
    return tiny_model(name, **({"n_layer": layers} if name == "gpt2" else {"num_hidden_layers": layers}), **overrides)


def fixed(**options) -> Speculation:
    """Drafts in every step, whatever it costs."""
    return Speculation(SelfSpeculation(**options, num_tokens=4), adaptive=False)


@torch.no_grad()
@pytest.mark.parametrize("architecture", TINY_MODELS)
def test_the_draft_is_a_model_of_the_remaining_layers(architecture):
    model, kept = deep_model(architecture), [1, 2]
    types = getattr(model.config, "layer_types", None)
    reference = deep_model(architecture, 2, **({} if types is None else {"layer_types": [types[i] for i in kept]}))
    number = re.compile(r"\.(\d+)\.")
    state = {
        number.sub(lambda m: f".{kept.index(int(m[1]))}.", name, count=1): tensor
        for name, tensor in model.state_dict().items()
        if not (match := number.search(name)) or int(match[1]) in kept
    }
    reference.load_state_dict(state)
    draft = with_layers(model, kept)
    pointers = {parameter.data_ptr() for parameter in model.parameters()}
    assert {parameter.data_ptr() for parameter in draft.parameters()} < pointers
    ids = left_padded_batch((40,))["input_ids"]
    caches = [PagedCache(m.config) for m in (draft, reference)]
    assert len(caches[0].layers) == 2
    for part in (slice(0, 30), slice(30, 40)):
        logits = [m(ids[:, part], past_key_values=cache).logits for m, cache in zip((draft, reference), caches)]
        assert torch.equal(*logits)


@pytest.mark.parametrize("architecture", TINY_MODELS)
def test_greedy_output_is_that_of_plain_generation(architecture):
    """Each in few bits, and in one of three other ways."""
    model, batch = enable_speculation(deep_model(architecture)), left_padded_batch()
    others = (
        (batch, {"skip_layers": [0, 2]}),
        (batch, {"skip_layers": [1], "tree": 9}),
        ({key: value[1:2] for key, value in batch.items()}, {"exit_layer": 2}),
    )
    other = others[list(TINY_MODELS).index(architecture) % 3]
    for inputs, draft in ((batch, {"skip_layers": [1], "bits": 4}), other):
        plain = model.generate(**inputs, **GREEDY)
        output = model.generate(**inputs, **GREEDY, assistant_model=fixed(**draft), return_dict_in_generate=True)
        assert torch.equal(output.sequences, plain) and output.drafted_tokens.min() > 0


def test_agreeing_drafts_are_accepted():
    """Two layers add nothing: without them the model is the same."""
    model, batch = silenced((1, 3)), left_padded_batch()
    options = dict(max_new_tokens=NEW, assistant_model=fixed(skip_layers=[1, 3]), return_dict_in_generate=True)
    model.generation_config.assistant_confidence_threshold = 0.0
    for sampling in ({"do_sample": False}, {"do_sample": True, "top_k": 5}):
        output = model.generate(**batch, **options, **sampling)
        # NEW - 1 = 13 tokens after the first one, at most 5 a step
        assert torch.equal(output.accepted_tokens, output.drafted_tokens) and output.num_steps == 3


def silenced(layers):
    model = enable_speculation(deep_model("llama"))
    with torch.no_grad():
        for index in layers:
            model.model.layers[index].self_attn.o_proj.weight.zero_()
            model.model.layers[index].mlp.down_proj.weight.zero_()
    return model


def test_search_finds_the_layers_that_matter_least():
    model = silenced((1, 2))
    ids = left_padded_batch((50, 50))["input_ids"]
    drafter = SelfSpeculation.search(model, ids, 2, num_tokens=3)
    assert drafter.skip_layers == [1, 2] and drafter.num_tokens == 3
    assert len(SelfSpeculation.search(model, ids, 3).skip_layers) == 3
    for number in (0, 4, 1.0, True):
        with pytest.raises(ValueError, match="must be an integer from 1 to 3"):
            SelfSpeculation.search(model, ids, number)


def snapshot(model) -> tuple:
    modules = {name: (id(module), sorted(vars(module))) for name, module in model.named_modules()}
    tensors = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    return modules, model.config.to_dict(), model.generation_config.to_dict(), tensors


def assert_unchanged(model, before: tuple) -> None:
    after = snapshot(model)
    assert before[:3] == after[:3] and before[3].keys() == after[3].keys()
    for name, (pointer, tensor) in before[3].items():
        assert pointer == after[3][name][0] and torch.equal(tensor, after[3][name][1])


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_oss"])
def test_the_target_stays_as_it_is(architecture):
    model, batch = enable_speculation(deep_model(architecture)), left_padded_batch()
    before = snapshot(model)
    drafts = [fixed(skip_layers=[1]), fixed(exit_layer=1, bits=3)]
    for draft in drafts:
        model.generate(**batch, max_new_tokens=4, do_sample=False, assistant_model=draft)
        assert_unchanged(model, before)
        assert draft.draft.runner is None, "the draft's cache is gone when the rows have ended"

    def fails(ids, scores):
        if ids.shape[1] > 13:
            raise RuntimeError("no more")
        return scores

    for draft in drafts:
        with pytest.raises(RuntimeError, match="no more"):
            model.generate(**batch, max_new_tokens=9, do_sample=False, assistant_model=draft, logits_processor=[fails])
        assert_unchanged(model, before)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flash_paged"])
def test_early_exit_of_transformers_takes_batches(attention):
    model, batch = enable_speculation(deep_model("gemma3")), left_padded_batch()
    model.set_attn_implementation(attention)
    options = GREEDY
    plain = model.generate(**batch, **options)
    output = model.generate(**batch, **options, assistant_early_exit=2, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain) and output.num_steps > 0
    with pytest.raises(ValueError, match="exit_layer=9: the model has 4 layers"):
        model.generate(**batch, **options, assistant_early_exit=9)
    with pytest.raises(ValueError, match="assistant_early_exit=2 and an assistant model were both given"):
        model.generate(**batch, **options, assistant_early_exit=2, assistant_model=model)


@torch.no_grad()
def test_few_bit_copies_follow_the_weights():
    """Another copy for loaded weights, weights changed in place, and merged adapters; else the one of before."""
    model, drafter = enable_speculation(tiny_model("llama")), SelfSpeculation(bits=4)
    ids = left_padded_batch((9,))["input_ids"]

    def drafted() -> torch.Tensor:
        drafter.check(model)
        layers = low_precision_modules(model, drafter.config)
        assert torch.equal(drafter.model(ids).logits, with_modules(model, layers)(ids).logits)
        return drafter.model.model.layers[0].mlp.up_proj

    first = drafted()
    assert drafted() is first
    model.load_state_dict(tiny_model("llama", seed=7).state_dict())
    assert (loaded := drafted()) is not first
    model.model.layers[1].mlp.up_proj.weight.mul_(2)
    assert (scaled := drafted()) is not loaded and drafted() is scaled
    model.model.layers[0].mlp.up_proj.weight.data.mul_(2)  # as PEFT merges
    model.model.layers[0].mlp.merged_adapters = ["default"]
    assert drafted() is not scaled


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral", "gpt_oss"])
def test_few_bit_copies_are_those_of_from_pretrained(architecture, tmp_path):
    model = tiny_model(architecture)
    model.save_pretrained(tmp_path)
    config = WeightOnlyConfig(bits=4, group_size=32, method="rtn")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32)
    before = snapshot(model)
    draft = with_modules(model, low_precision_modules(model, config))
    ids = left_padded_batch((20,))["input_ids"]
    assert torch.equal(draft(ids, use_cache=False).logits, reference(ids, use_cache=False).logits)
    assert_unchanged(model, before)
    own = [t for t in draft.state_dict().values() if t.data_ptr() not in {t.data_ptr() for t in model.parameters()}]
    dense = sum(
        p.numel() for name, p in model.named_parameters() if p.dim() >= 2 and ".layers." in name or ".h." in name
    )
    # 4 bits, and a float32 scale and a uint8 zero point for 32 weights; biases and norms are shared
    assert sum(t.nbytes for t in own if t.numel() > 3) <= dense * (4 + 40 / 32) / 8 + 1


def test_copies_are_made_once_for_a_model_and_its_dtype():
    drafter, model = SelfSpeculation(bits=4), tiny_model("llama")
    drafter.check(model)
    first = drafter.model.model.layers[0].mlp.up_proj
    drafter.check(model)
    assert drafter.model.model.layers[0].mlp.up_proj is first
    drafter.check(copy.deepcopy(model))
    assert drafter.model.model.layers[0].mlp.up_proj is not first
    drafter.check(model.to(torch.bfloat16))
    assert drafter.model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16


@torch.no_grad()
def test_modules_with_hooks_of_accelerate_are_not_run_for_the_draft():
    model, ids = deep_model("llama"), left_padded_batch((9,))["input_ids"]
    expected = with_layers(model, [0, 3])(ids, use_cache=False).logits
    calls = []

    class Hook(accelerate.hooks.ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append(module)
            return args, kwargs

    hooked = [model, model.model, model.model.layers[0].self_attn]
    for module in hooked:
        accelerate.hooks.add_hook_to_module(module, Hook())
    draft = with_layers(model, [0, 3])
    assert torch.equal(draft(ids, use_cache=False).logits, expected)
    assert calls == [draft, draft.model, draft.model.layers[0].self_attn]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "nothing makes the draft cheaper"),
        ({"skip_layers": []}, "skip_layers=.*at least one layer index"),
        ({"skip_layers": 1}, "skip_layers=1: must be a list of at least one layer index"),
        ({"skip_layers": [1.5]}, "skip_layers=.*at least one layer index"),
        ({"skip_layers": [1], "exit_layer": 1}, "give one of them"),
        ({"exit_layer": 0}, "exit_layer=0: must be an integer of at least 1"),
        ({"bits": 5}, r"bits=5 is not supported: it must be one of \(2, 3, 4, 6, 8\)"),
        ({"bits": 4, "num_tokens": 0}, "num_tokens=0: must be an integer of at least 1"),
        ({"skip_layers": [4]}, "skip_layers=.*layers 0 to 3, not 4"),
        ({"skip_layers": [-1, 2]}, "skip_layers=.*layers 0 to 3, not -1"),
        ({"skip_layers": [0, 1, 2, 3]}, "at least one must stay"),
        ({"exit_layer": 5}, "exit_layer=5: the model has 4 layers"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    model = enable_speculation(deep_model("llama"))
    with pytest.raises(ValueError, match=message):
        model.generate(**left_padded_batch(), max_new_tokens=2, assistant_model=SelfSpeculation(**arguments))


def test_models_whose_layers_cannot_be_left_out_are_refused():
    model = deep_model("llama")
    model.config.num_kv_shared_layers = 2
    with pytest.raises(ValueError, match="LlamaForCausalLM: its layers share keys and values"):
        SelfSpeculation(exit_layer=1).check(model)
    model.config.num_kv_shared_layers = 0
    model.model.layers = torch.nn.ModuleDict({str(i): layer for i, layer in enumerate(model.model.layers)})
    with pytest.raises(ValueError, match="its decoder has 0 lists of 4 layers"):
        SelfSpeculation(bits=4).check(model)
