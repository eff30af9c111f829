"""A quantized model on a CPU generates fast by itself, and is otherwise what transformers takes it for."""

import copy
import functools
import io
import os
import pickle

import pytest
import torch
from draft_models import Recorder
from helpers import (
    TINY_MODELS,
    left_padded_batch,
    needs_transformers,
    openmp_threads_before_and_after,
    tiny_model,
    tiny_tokenizer,
)
from native_loop import NATIVE_LOOP, transformers_loop
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, AutoModelForCausalLM, LlamaForCausalLM, pipeline

from hf_efficient import BitNetConfig, TokenRecycling, W8A8Config, WeightOnlyConfig, enable_speculation
from hf_efficient.generation.output import SpeculativeOutput
from hf_efficient.generation.replay import captured_forward
from hf_efficient.generation.replay.captured_forward import EAGER_FORWARDS, CapturedForward
from hf_efficient.integrations.peft import merge_and_unload
from hf_efficient.integrations.transformers_generation import AutomaticGenerationMixin, SpeculativeGenerationMixin
from hf_efficient.kernels.replay.recorder import Capture


pytestmark = NATIVE_LOOP
CONFIGS = {
    "int4": WeightOnlyConfig(bits=4, group_size=32),
    "int8_head": WeightOnlyConfig(bits=8, group_size=-1, symmetric=True, quantize_lm_head=True),
    "embeddings": WeightOnlyConfig(bits=4, group_size=32, method="rtn", embeddings=True),
    "w8a8": W8A8Config(),
    "bitnet": BitNetConfig(),
}
GREEDY = dict(do_sample=False, max_new_tokens=9)
FORWARDS = [False] * EAGER_FORWARDS + [True] * (8 - EAGER_FORWARDS)  # of one token, in a model's first call


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    tiny_model("llama", eos_token_id=None).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def load(path, config="int4", cls=AutoModelForCausalLM, **options):
    if config is not None:
        options["quantization_config"] = CONFIGS[config]
    return cls.from_pretrained(path, dtype=torch.float32, **options)


@pytest.fixture
def replays(monkeypatch):
    """Whether each forward of one token was captured or replayed."""
    calls, call = [], CapturedForward.__call__

    def wrapper(*args):
        output = call(*args)
        calls.append(output is not None)
        return output

    monkeypatch.setattr(CapturedForward, "__call__", wrapper)
    return calls


IDS = torch.randint(3, 128, (1, 7), generator=torch.Generator().manual_seed(1))


def generated_as_transformers(model, **options):
    """What `generate()` gives, which is what transformers' loop gives."""
    output = model.generate(IDS, **GREEDY, **options)
    with transformers_loop():
        assert torch.equal(model.generate(IDS, **GREEDY, **options), output)
    return output


@pytest.mark.parametrize("config", CONFIGS)
def test_loaded_and_reloaded(config, folder, tmp_path, replays):
    model = load(folder, config, device_map="auto" if config == "int4" else None)
    output = generated_as_transformers(model)
    assert replays == FORWARDS
    model.save_pretrained(tmp_path)
    again = load(tmp_path, None)
    assert again.config.architectures == ["LlamaForCausalLM"]
    assert torch.equal(generated_as_transformers(again), output) and sum(replays) == 2 * sum(FORWARDS)


@pytest.mark.parametrize(
    "name",
    [
        *sorted(TINY_MODELS.keys() - {"llama", "opt"}),
        pytest.param("opt", marks=needs_transformers("5.18", "an OPT whose forward can be captured")),
    ],
)
def test_architectures(name, tmp_path, replays):
    tiny_model(name, eos_token_id=None).save_pretrained(tmp_path)
    model = load(tmp_path)
    if model.config._attn_implementation == "eager":  # transformers offers no SDPA for this one
        model.set_attn_implementation("flash_paged")
    generated_as_transformers(model)
    assert replays == FORWARDS


def test_a_thousand_tokens_take_one_capture(tmp_path, monkeypatch):
    """One capture for one sequence, and one for two (of 300 tokens), and nothing is compiled."""
    tiny_model("llama", eos_token_id=None, max_position_embeddings=1100).save_pretrained(tmp_path)
    model, made = load(tmp_path), []
    monkeypatch.setattr(captured_forward, "Capture", lambda *args: made.append(Capture(*args)) or made[-1])
    counters.clear()
    for prompts, captures, new in ((IDS, 1, 1000), (IDS.repeat(2, 1), 2, 300)):
        options = dict(max_new_tokens=new, do_sample=False, pad_token_id=0)
        output = model.generate(prompts, **options)
        assert len(made) == captures and not counters, counters
        with transformers_loop():
            assert torch.equal(model.generate(prompts, **options), output)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts the threads of Linux")
@pytest.mark.parametrize("options", [{}, dict(use_cache=False), dict(prompt_lookup_num_tokens=2)])
def test_a_call_gives_its_openmp_threads_back(options, folder):
    """Those of another Python thread, which streams for example, would wait beside them."""
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=CONFIGS["int4"])
    call = functools.partial(model.generate, **left_padded_batch(), **GREEDY, **options)
    assert openmp_threads_before_and_after(call) == [(2, 0)]


def test_other_models_are_untouched(folder):
    assert type(load(folder, None)) is LlamaForCausalLM
    assert not isinstance(load(folder, cls=AutoModel), SpeculativeGenerationMixin)
    model = load(folder)
    assert type(model) is not LlamaForCausalLM and repr(type(model)) == repr(LlamaForCausalLM)
    model.dequantize()
    assert type(model) is LlamaForCausalLM and generated_as_transformers(model).shape == (1, 16)


def unpickled(model):
    return pickle.loads(pickle.dumps(model))


def saved_and_loaded(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, unpickled, saved_and_loaded])
def test_copies_and_pickles(copied, folder, replays):
    try:
        copied(load(folder, None))
    except AttributeError as error:  # kernels 0.16, which axolotl installs, makes local classes
        pytest.skip(f"a model of transformers alone cannot be copied so in this environment: {error}")
    model = load(folder)
    output = model.generate(IDS, **GREEDY)
    replays.clear()
    other = copied(model)
    assert type(other) is type(model)
    assert torch.equal(other.generate(IDS, **GREEDY), output) and sum(replays) == sum(FORWARDS)


def test_pipeline(folder, replays):
    model = load(folder)
    run = pipeline("text-generation", model=model, tokenizer=tiny_tokenizer())
    text = run("hello world", **GREEDY)[0]["generated_text"]
    assert text.startswith("hello world") and sum(replays) == sum(FORWARDS)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters(folder, replays):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(load(folder), peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    output = adapted.eval().generate(input_ids=IDS, **GREEDY)
    assert sum(replays) == sum(FORWARDS)
    with adapted.disable_adapter():
        without = adapted.generate(input_ids=IDS, **GREEDY)
        assert torch.equal(without, generated_as_transformers(load(folder))) and not torch.equal(without, output)
    assert torch.equal(adapted.generate(input_ids=IDS, **GREEDY), output)
    generated_as_transformers(merge_and_unload(adapted))

    replays.clear()
    prompted = peft.get_peft_model(load(folder), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    prompted.eval().generate(input_ids=IDS, **GREEDY)
    assert not replays, "the prompt is put in by a method of the model that a captured forward does not call"


def test_hooks_and_counters_see_every_forward(folder, replays):
    model = load(folder)
    seen = []
    handles = [
        lambda: model.model.norm.register_forward_hook(lambda *args: seen.append(1)),
        lambda: nn.modules.module.register_module_forward_pre_hook(lambda m, x: seen.append(m is model.model.norm)),
    ]
    for register in handles:
        seen.clear()
        handle = register()
        model.generate(IDS, **GREEDY)
        handle.remove()
        assert sum(seen) == 9
    with FlopCounterMode(display=False) as counter:
        model.generate(IDS, **GREEDY)
    assert counter.get_total_flops() > 0 and not replays
    model.generate(IDS, **GREEDY)
    assert sum(replays) == sum(FORWARDS)


def test_a_forward_that_cannot_be_captured_runs_eagerly(folder, replays, monkeypatch):
    def fails(forward, late):
        forward()
        raise NotImplementedError("an operator of a kind of its own")

    said = []
    monkeypatch.setattr(captured_forward, "Capture", fails)
    monkeypatch.setattr(captured_forward.logger, "warning_once", said.append)
    generated_as_transformers(load(folder))
    assert not any(replays) and "of a kind of its own" in said[0]


def test_assistants(folder):
    """Ours at any batch size, and transformers' own where ours refuses."""
    model, batch = load(folder), left_padded_batch()
    options = dict(**GREEDY, pad_token_id=0)
    expected = model.generate(**batch, **options)
    output = model.generate(**batch, **options, prompt_lookup_num_tokens=2, return_dict_in_generate=True)
    assert isinstance(output, SpeculativeOutput) and torch.equal(output.sequences, expected)
    assert torch.equal(model.generate(**batch, **options, assistant_model=TokenRecycling()), expected)
    row = batch["input_ids"][1:2]
    streamer = Recorder()
    model.generate(row, **options, prompt_lookup_num_tokens=2, streamer=streamer)
    assert streamer.ended == 1 and len(streamer.values) == 1 + 9
    asked = dict(output_attentions=True, return_dict_in_generate=True, prompt_lookup_num_tokens=2)
    model.set_attn_implementation("eager")
    output = model.generate(row, **options, **asked)
    assert type(output).__name__ == "GenerateDecoderOnlyOutput" and len(output.attentions)
    with pytest.raises(ValueError, match="output_attentions"):
        enable_speculation(model).generate(row, **options, **asked)
    assert not isinstance(model, AutomaticGenerationMixin) and isinstance(model, SpeculativeGenerationMixin)
