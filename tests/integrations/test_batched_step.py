"""Continuous batching on a CPU by this package's forwards: every request gets the tokens that `generate()` gives it
alone, however requests are batched, cut, cancelled or preempted."""

import itertools
import time
from unittest import mock

import foreign_layouts
import pytest
import torch
from helpers import TINY_MODELS, needs_transformers, tiny_model
from saved_models import INT4, folder, load
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import RequestState

import hf_efficient
from hf_efficient import SparseConfig, W8A8Config
from hf_efficient.cache.request_pages import NewTokens
from hf_efficient.generation.replay import captured_forward, captured_step
from hf_efficient.generation.replay.captured_step import CapturedStep
from hf_efficient.integrations import transformers_releases
from hf_efficient.kernels.replay.recorder import NotReplayable, interpreter


pytestmark = [
    needs_transformers("5.19", "forwards of this package in continuous batching"),
    pytest.mark.skipif(interpreter() is None, reason="no compiler, or a CPU without AVX-512"),
]
PAGE_SIZE = "page_size" if transformers_releases.has("5.18") else "block_size"
NEW_TOKENS = 14
# Prompts that end within, at and past a page of 4; two of them share their first 9 tokens.
_SHARED = [5, 17, 40, 99, 12, 77, 31, 64, 8]
PROMPTS = [_SHARED + [21, 50], [33] * 3, list(range(60, 76)), _SHARED + [90, 91, 92, 93]]


@pytest.fixture
def forwards(monkeypatch):
    """What each forward of ours did: "eager", "captured" or "replayed"."""
    found, original = [], CapturedStep._forward

    def _forward(self, width, rows, head):
        captured = self._captures.get((width, rows))
        result = original(self, width, rows, head)
        now = self._captures.get((width, rows))
        found.append("eager" if now is None else "replayed" if now is captured else "captured")
        return result

    monkeypatch.setattr(CapturedStep, "_forward", _forward)
    return found


def batched(model, prompts=PROMPTS, generation=None, attention="flash_paged", new_tokens=NEW_TOKENS, **config):
    """The generated tokens of each prompt (and of each of its `num_return_sequences`), and all outputs."""
    model.set_attn_implementation(attention)
    config = {"num_blocks": 128, PAGE_SIZE: 4, "max_batch_tokens": 24, **config}
    outputs = model.generate_batch(
        inputs=prompts,
        generation_config=GenerationConfig(
            max_new_tokens=new_tokens, eos_token_id=2, pad_token_id=0, **{"do_sample": False, **(generation or {})}
        ),
        continuous_batching_config=ContinuousBatchingConfig(**config),
    )
    assert [output.error for output in outputs.values() if output.error] == []
    return [output.generated_tokens for output in outputs.values()], list(outputs.values())


def one_by_one(model, prompts=PROMPTS, new_tokens=NEW_TOKENS):
    model.set_attn_implementation("eager")
    options = dict(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    rows = (model.generate(torch.tensor([prompt]), **options)[0] for prompt in prompts)
    return [row[len(prompt) :].tolist() for row, prompt in zip(rows, prompts)]


@pytest.fixture
def plain(monkeypatch):
    """A context in which transformers prepares and runs its batches itself."""

    def run(*args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(continuous_api, "ContinuousBatchingIOs", ContinuousBatchingIOs)
            return batched(*args, **kwargs)

    return run


@pytest.mark.parametrize("name", TINY_MODELS)
def test_tokens_are_those_of_each_request_alone(name, forwards):
    """Prompts in chunks beside sequences that decode; windows shorter than the prompts."""
    model = tiny_model(name)
    expected = one_by_one(model)
    assert batched(model)[0] == expected
    assert "replayed" in forwards


@pytest.mark.parametrize("config", [dict(max_batch_tokens=4), dict(max_batch_tokens=600), {PAGE_SIZE: 16}])
def test_any_cut_of_a_batch(config, forwards):
    """Of 4 tokens, and of more than one forward takes."""
    model, generator = tiny_model("llama", max_position_embeddings=1024), torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 128, (length,), generator=generator).tolist() for length in (300, 7, 290, 60)]
    expected = one_by_one(model, prompts)
    assert batched(model, prompts, **{"num_blocks": 256, **config})[0] == expected
    assert "replayed" in forwards


def test_only_replayed_forwards_of_few_tokens_tell_their_seconds(forwards, monkeypatch):
    """Eager ones take twice as long, and are captured the next time."""
    steady, original = [], CapturedStep.__call__

    def noting(self, new, wanted):
        result = original(self, new, wanted)
        steady.append(self.is_steady)
        return result

    monkeypatch.setattr(CapturedStep, "__call__", noting)
    batched(tiny_model("llama"))
    assert {"eager", "captured", "replayed"} == set(forwards)
    assert steady == [kind == "replayed" for kind in forwards]


def test_memory_of_all_captures_is_bounded(forwards, monkeypatch):
    """Captures that do not fit are not made again in every step."""
    monkeypatch.setattr(captured_forward, "LEAST_KEPT_BYTES", 0)
    monkeypatch.setattr(captured_forward, "KEPT_SHARE", 1e-9)
    kept, drop = [], CapturedStep._drop_oldest

    def noted(self):
        drop(self)
        kept.append(len(self._captures))

    monkeypatch.setattr(CapturedStep, "_drop_oldest", noted)
    model = tiny_model("llama")
    expected = one_by_one(model, new_tokens=40)
    assert batched(model, new_tokens=40)[0] == expected
    assert set(kept) == {1} and forwards.count("captured") < 6 and "replayed" in forwards


def test_long_windows(forwards):
    """Prompts shorter than the window, which sequences then outgrow."""
    model = tiny_model("gemma2", sliding_window=16)
    expected = one_by_one(model, new_tokens=30)
    assert batched(model, new_tokens=30)[0] == expected
    assert forwards.count("replayed") > 16


# Pages of 4 that hold one of the sequences at its longest; those of windows alone take fewer
FEW_BLOCKS = {"mistral": 7, "gemma3": 7}


@pytest.fixture
def preempted(monkeypatch):
    """The requests that gave their pages back to begin anew."""
    found, original = [], RequestState.create_equivalent_initial_request

    def create_equivalent_initial_request(self):
        found.append(self.request_id)
        return original(self)

    monkeypatch.setattr(RequestState, "create_equivalent_initial_request", create_equivalent_initial_request)
    return found


@pytest.mark.parametrize("name", TINY_MODELS)
def test_preempted_requests_go_on(name, preempted):
    model = tiny_model(name)
    expected = one_by_one(model)
    assert batched(model, num_blocks=FEW_BLOCKS.get(name, 8))[0] == expected
    assert preempted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replay_computes_what_an_eager_forward_does(dtype, monkeypatch):
    model = tiny_model("qwen3", dtype)
    tokens, outputs = batched(model, return_logprobs=True)
    monkeypatch.setattr(captured_step, "Capture", mock.Mock(side_effect=NotReplayable))
    eager_tokens, eager_outputs = batched(model, return_logprobs=True)
    if dtype is torch.float32:
        assert tokens == eager_tokens
    tolerance = 1e-4 if dtype is torch.float32 else 0.3
    for output, eager in zip(outputs, eager_outputs):
        pairs = zip(output.generated_tokens, eager.generated_tokens)
        same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        assert same > 0 and output.logprobs[:same] == pytest.approx(eager.logprobs[:same], abs=tolerance)


def adopted(tmp_path):
    """A checkpoint in GPTQ's format."""
    foreign_layouts.write(tmp_path / "gptq", tiny_model("llama"), foreign_layouts.gptq, torch.float32)
    hf_efficient.adopt("gptq")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "gptq", dtype=torch.float32)


KINDS = {
    "int4": lambda _: load(folder("llama"), **INT4),
    "int8": lambda _: load(folder("llama"), bits=8, group_size=-1, method="rtn"),
    "w8a8": lambda _: load(folder("llama"), options={"quantization_config": W8A8Config()}),
    "sparse": lambda _: load(
        folder("llama"), options={"quantization_config": SparseConfig(method="magnitude", pattern="2:4")}
    ),
    "adopted": adopted,
}


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_models(kind, forwards, tmp_path):
    model = KINDS[kind](tmp_path)
    expected = one_by_one(model)
    assert batched(model)[0] == expected
    assert "replayed" in forwards


def test_models_with_sdpa_are_switched(forwards):
    """Those whose `generate()` this package runs, too, until the manager stops."""
    model = load(folder("llama"), **INT4)
    expected = one_by_one(model)
    assert batched(model, attention="sdpa")[0] == expected
    assert "replayed" in forwards and model.config._attn_implementation == "sdpa"
    forwards.clear()
    assert batched(model, attention="sdpa", auto_switch_to_flash=False)[0] == expected and not forwards
    dense = tiny_model("llama")
    batched(dense, attention="sdpa")
    assert not forwards  # nobody asked for this package


def test_sampling_is_transformers(plain, forwards):
    """Processors of each request and log-probabilities: the same draws from the same seed."""
    model = tiny_model("llama")
    generation = dict(do_sample=True, temperature=0.8, top_k=20, top_p=0.9)
    options = dict(generation=generation, return_logprobs=True, seed=3)
    tokens, outputs = batched(model, **options)
    expected, others = plain(model, **options)
    assert tokens == expected and "replayed" in forwards
    for output, other in zip(outputs, others):
        assert output.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_several_answers_to_a_prompt(forwards):
    """A prompt's pages are copied for its second answer, which is the same one, as nothing is drawn."""
    model = tiny_model("llama")
    expected = one_by_one(model)
    tokens, _ = batched(model, generation=dict(num_return_sequences=2, do_sample=True, top_k=1))
    assert tokens == [answer for answer in expected for _ in range(2)]


def manager_of(model, **config):
    model.set_attn_implementation("flash_paged")
    return model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=2, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            **{"num_blocks": 128, PAGE_SIZE: 4, "max_batch_tokens": 24, **config}
        ),
    )


def answer(manager, prompt):
    request = manager.add_request(prompt, max_new_tokens=NEW_TOKENS)
    return manager.get_result(request, timeout=60).generated_tokens


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_model_that_changes_is_captured_anew(is_shared, forwards):
    """Weights are replaced between two requests: no forward of the old ones is replayed, and no page is shared."""
    model, other = tiny_model("llama"), tiny_model("llama", seed=1)
    expected = one_by_one(model), one_by_one(other)
    manager = manager_of(model, allow_block_sharing=is_shared)
    manager.start()
    try:
        first = answer(manager, PROMPTS[0])
        model.load_state_dict(other.state_dict())
        second = answer(manager, PROMPTS[0])
    finally:
        manager.stop(block=True)
    assert (first, second) == (expected[0][0], expected[1][0])


def active(manager) -> list:
    processor = manager.batch_processor
    return [] if processor is None else list(processor.scheduler.active_requests.values())


def test_requests_that_run_while_the_model_changes_share_no_pages_afterwards(forwards):
    """Their pages hold tokens of both models."""
    model, other = tiny_model("llama", eos_token_id=None), tiny_model("llama", seed=1, eos_token_id=None)
    expected = one_by_one(other)
    manager = manager_of(model, allow_block_sharing=True)
    manager.start()
    try:
        long = manager.add_request(PROMPTS[0], max_new_tokens=200)
        while not any(state.generated_tokens for state in active(manager)):
            time.sleep(0.001)
        with manager.pause():
            model.load_state_dict(other.state_dict())
            assert len(active(manager)) == 1
        answers = [answer(manager, PROMPTS[1])]  # from here on the old pages are not found
        manager.cancel_request(long)
        answers += [answer(manager, PROMPTS[0]), answer(manager, PROMPTS[0])]
    finally:
        manager.stop(block=True)
    assert answers == [expected[1], expected[0], expected[0]]


def test_hooks_run(forwards):
    """A hook sees every forward."""
    model, seen = tiny_model("llama"), []
    expected = one_by_one(model)
    model.model.layers[0].register_forward_pre_hook(lambda *args: seen.append(1))
    tokens, _ = batched(model)
    assert tokens == expected and len(seen) >= NEW_TOKENS and set(forwards) <= {"eager"}


@pytest.mark.parametrize("is_shared", [True, False])
def test_prefixes_are_shared(is_shared, monkeypatch):
    """The second request finds two pages of the first, whose 8 tokens are not computed again."""
    model, computed, original = tiny_model("llama"), [], CapturedStep.__call__
    expected = one_by_one(model)

    def counting(self, new, wanted):
        computed.append(new.total)
        return original(self, new, wanted)

    monkeypatch.setattr(CapturedStep, "__call__", counting)
    manager, prompts = manager_of(model, allow_block_sharing=is_shared), []
    manager.start()
    try:
        for index in (0, 3):
            computed.clear()
            assert answer(manager, PROMPTS[index]) == expected[index]
            prompts.append(sum(computed) - (len(expected[index]) - 1))  # each token but the last is read, too
    finally:
        manager.stop(block=True)
    assert prompts == [len(PROMPTS[0]), len(PROMPTS[3]) - (8 if is_shared else 0)]


def test_parts_of_a_batch():
    """Forwards of at most 4 tokens; the last token of a prompt asks for logits, wherever it falls."""
    new = NewTokens([[1], [2, 3, 4, 5, 6], [7]], [9, 0, 3], [7, 0, 3], [[[0], [1], [2]]], ["a", "b", "c"])
    parts = list(captured_step._parts(new, [True, True, False], 4, 4))
    assert [part for part, _ in parts] == [
        NewTokens([[1], [2, 3, 4]], [9, 0], [7, 0], [[[0], [1]]], ["a", "b"]),
        NewTokens([[5, 6], [7]], [3, 3], [3, 3], [[[1], [2]]], ["b", "c"]),
    ]
    assert [index for _, index in parts] == [[0], [1]]
    parts = list(captured_step._parts(new, [True, True, False], 4, 2))  # two tokens of a request at most
    assert [[*map(len, part.tokens)] for part, _ in parts] == [[1, 2], [2], [1, 1]]
    assert [index for _, index in parts] == [[0], [], [0]]
