"""Prompts on a CPU: sequence by sequence, or some of one length at once, in chunks that are captured and replayed."""

import pytest
import torch
from helpers import TINY_MODELS, left_padded_batch
from native_loop import NATIVE_LOOP, served_model, transformers_loop

from hf_efficient.generation import ragged_model
from hf_efficient.generation.replay import captured_forward, captured_prompt
from hf_efficient.generation.replay.captured_prompt import CapturedPrompt
from hf_efficient.kernels.replay import recorder
from hf_efficient.kernels.replay.instructions import OPS
from hf_efficient.kernels.replay.recorder import Capture, NotReplayable


pytestmark = NATIVE_LOOP
LENGTHS = (23, 4, 40, 16, 16, 21)
OPTIONS = dict(do_sample=False, max_new_tokens=6, pad_token_id=0, eos_token_id=None)
EAGER = ("mistral", "gemma2", "gemma3", "gpt_oss")  # windows drop tokens, which prompts of one batch have to share


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr(captured_prompt, "CHUNKS", (32, 16))
    monkeypatch.setattr(captured_prompt, "STEP", 4)
    monkeypatch.setattr(captured_prompt, "LEAST_TOKENS", 8)


@pytest.fixture
def captures(monkeypatch):
    """Of each prompt that a `CapturedPrompt` was given: its tokens, and whether all its chunks were captured."""
    prompts, call = [], CapturedPrompt.__call__

    def noted(self, tokens, positions):
        logits = call(self, tokens, positions)
        prompts.append((tokens.shape[1], logits is not None))
        return logits

    monkeypatch.setattr(CapturedPrompt, "__call__", noted)
    return prompts


@pytest.fixture
def replays(monkeypatch):
    """The logits of each chunk that was replayed."""
    logits, replay = [], Capture.replay

    def noted(self, *args, **kwargs):
        output = replay(self, *args, **kwargs)
        if isinstance(output, torch.Tensor):  # captured forwards of few tokens return tuples
            logits.append(output)
        return output

    monkeypatch.setattr(Capture, "replay", noted)
    return logits


def generates_as_transformers(model, batches, **options):
    with transformers_loop():
        expected = [model.generate(**batch, **OPTIONS, **options) for batch in batches]
    for batch, tokens in zip(batches, expected):
        assert torch.equal(model.generate(**batch, **OPTIONS, **options), tokens)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_tokens_are_those_of_transformers(name, captures, replays):
    generates_as_transformers(served_model(name), [left_padded_batch(LENGTHS, seed=seed) for seed in range(3)])
    if name in EAGER:
        assert not captures
    else:
        runs = [(23, True), (4, True), (40, True), (16, True), (21, True)]  # two prompts of 16 tokens at once
        assert captures == 2 * runs, "the first batch ran eagerly"
        assert len(replays) == 2 * 8 - 5, "each of the widths 4, 8, 16, 32 and of two times 16 was captured once"


def test_batches_of_other_sizes_and_the_last_position(captures):
    """A capture outlives a batch. Padding behind a prompt needs no learned position beyond it."""
    model = served_model("gpt2")
    lengths = [(250, 250), (250, 250), (26,), (26, 30)]
    generates_as_transformers(model, [left_padded_batch(own, seed=seed) for seed, own in enumerate(lengths)])
    assert captures == [(length, True) for length in (250, 250, 26, 26, 30)]


@pytest.mark.parametrize("kind", ["hole", "right", "chunks", "short", "scores"])
def test_prompts_that_run_at_once(kind, captures):
    batches, options = [left_padded_batch((24, 20), seed=seed) for seed in range(3)], {}
    for batch in batches:
        if kind == "hole":
            batch["attention_mask"][:, 10] = 0
        elif kind == "right":
            batch["attention_mask"] = batch["attention_mask"].flip(1)
        elif kind == "short":
            batch.update({key: value[:, -7:] for key, value in batch.items()})
    if kind == "chunks":
        options = dict(prefill_chunk_size=8)
    elif kind == "scores":
        options = dict(output_hidden_states=True, return_dict_in_generate=True)
    model = served_model("llama")
    for batch in batches:
        output = model.generate(**batch, **OPTIONS, **options)
        with transformers_loop():
            expected = model.generate(**batch, **OPTIONS, **options)
        if kind == "scores":
            output, expected = output.sequences, expected.sequences
        assert torch.equal(output, expected)
    assert not captures


def test_memory_of_all_captures_is_bounded(monkeypatch, replays):
    monkeypatch.setattr(captured_forward, "LEAST_KEPT_BYTES", 0)
    monkeypatch.setattr(captured_forward, "KEPT_SHARE", 1e-9)
    kept, call = [], CapturedPrompt.__call__

    def noted(self, *args):
        logits = call(self, *args)
        kept.append(len(self._captures))
        return logits

    monkeypatch.setattr(CapturedPrompt, "__call__", noted)
    generates_as_transformers(served_model("llama"), [left_padded_batch((72,), seed=seed) for seed in range(12)])
    assert set(kept) == {1} and len(replays) == 2, "of the widths 32, 32, 8 the second replays the first"
    assert len(kept) == 2, "prompts 2 and 7: captures that do not fit are not made again in every call"


@pytest.mark.parametrize(("budget", "widths"), [(1 << 30, {32, 8}), (31, {16, 8})])
def test_activations_of_a_chunk_stay_within_the_budget(budget, widths, monkeypatch):
    shapes, read = set(), CapturedPrompt._read

    def noted(self, *args):
        logits = read(self, *args)
        shapes.update(width for _, width in self._captures)
        return logits

    monkeypatch.setattr(ragged_model, "tokens_within_budget", lambda model: budget)
    monkeypatch.setattr(CapturedPrompt, "_read", noted)
    generates_as_transformers(served_model("llama"), [left_padded_batch((40,), seed=seed) for seed in range(3)])
    assert shapes == widths


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2"])
def test_the_head_is_computed_for_the_last_chunk_alone(name, monkeypatch):
    model = served_model(name)
    vocabulary, products = model.config.vocab_size, []
    interpret = recorder._interpret

    def noted(instructions):
        products.extend(step.op == OPS["DENSE"] and step.sizes[2] == vocabulary for step in instructions)
        return interpret(instructions)

    monkeypatch.setattr(recorder, "_interpret", noted)
    batch = left_padded_batch((79,))  # chunks of 32, 32, 12 and 4
    generates_as_transformers(model, [batch] * 3)  # the second captures, and its second chunk of 32 is replayed
    products.clear()
    model.generate(**batch, **OPTIONS | dict(max_new_tokens=1))
    assert products.count(True) == 1 and products.count(False) > 8


@pytest.mark.parametrize("error", [NotReplayable("numbers"), RuntimeError("no such operator")])
def test_a_forward_that_cannot_be_captured_runs_eagerly(error, captures, monkeypatch, caplog):
    model, init = served_model("llama"), Capture.__init__

    def refusing(self, *args):
        init(self, *args)
        if isinstance(self.output, torch.Tensor):
            raise error

    monkeypatch.setattr(Capture, "__init__", refusing)
    generates_as_transformers(model, [left_padded_batch(LENGTHS, seed=seed) for seed in range(3)])
    assert captures == [(length, False) for length in (23, 4, 40, 16, 21)], "never tried again"
    assert ("prompts run eagerly" in caplog.text) is not isinstance(error, NotReplayable)
