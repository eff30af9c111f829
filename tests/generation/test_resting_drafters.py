"""A drafter that rests costs nothing: its calls run the forwards of plain ones, and hardly any other code."""

import pytest
import torch
from helpers import left_padded_batch, tiny_model
from transformers.generation import StoppingCriteria

from hf_efficient import BestOf, EagleHead, PromptLookup, SelfSpeculation, TokenRecycling, enable_speculation
from hf_efficient.generation import model_state
from hf_efficient.generation.decode import speculative_generate
from hf_efficient.generation.ragged_model import RaggedModel
from hf_efficient.generation.replay.captured_forward import CapturedForward
from hf_efficient.generation.speculation.draft_length import DraftLengthPolicy


ROWS, NEW = 8, 24


class Ends(StoppingCriteria):
    """Sequence b ends after 6 + 2 b tokens."""

    def __init__(self, prompt_length: int):
        self.prompt_length = prompt_length

    def __call__(self, ids, scores, **options):
        return ids.shape[1] - self.prompt_length >= 6 + 2 * torch.arange(len(ids))


@pytest.fixture
def target():
    model = enable_speculation(tiny_model("llama"))
    model.generation_config.eos_token_id = 1000
    return model


@pytest.fixture
def ran(monkeypatch):
    """Each forward behind the prompt: sequences, tokens that it computed, and whether it left out hidden states; and
    each capture."""
    forwards, forward, capture = [], RaggedModel.__call__, CapturedForward.new_capture

    def noted(self, tokens, *arguments, **options):
        logits = forward(self, tokens, *arguments, **options)
        forwards.append((len(tokens), self.computed, self.hidden is None))
        return logits

    def captures(self, *arguments):
        forwards.append("capture")
        return capture(self, *arguments)

    monkeypatch.setattr(RaggedModel, "__call__", noted)
    monkeypatch.setattr(CapturedForward, "new_capture", captures)
    return forwards


def drafters(target):
    return {
        "PromptLookup": PromptLookup(),
        "TokenRecycling": TokenRecycling(2, 2),
        "BestOf": BestOf(PromptLookup(), TokenRecycling(2, 2)),
        "SelfSpeculation": SelfSpeculation(bits=4),
        "EagleHead": EagleHead.for_model(target, 64),
    }


@pytest.mark.parametrize("name", ["PromptLookup", "TokenRecycling", "BestOf", "SelfSpeculation", "EagleHead"])
def test_a_resting_drafter_runs_the_forwards_of_a_plain_call(name, target, ran, monkeypatch):
    """Also where sequences end one by one: then nothing is captured that a plain call would not capture."""
    drafter, inputs = drafters(target)[name], left_padded_batch([3, 5, 4, 2, 5, 3, 4, 5])
    options = dict(max_new_tokens=NEW, do_sample=False, stopping_criteria=[Ends(inputs["input_ids"].shape[1])])
    # `SelfSpeculation` gets ready
    target.generate(**inputs, **options | dict(max_new_tokens=2), assistant_model=drafter)
    for _ in range(3):
        ran.clear()
        plain = target.generate(**inputs, **options, custom_generate=speculative_generate)
    expected = list(ran)
    assert len(expected) == 19 and "capture" not in expected
    kinds = [type(part) for part in (drafter, *getattr(drafter, "drafters", ()))]
    state = model_state.state_of(target)
    for rows in (8, 4, 2, 1):
        remembered = state.drafter(drafter.remembered_by).statistics
        remembered[rows] = DraftLengthPolicy(rows, 1).statistics
        remembered[rows].steps_to_trial = remembered[rows].pause_steps = 1000
    calls = []
    for kind in kinds:
        for method in ("begin", "propose", "observe", "accept", "stirs", "select"):
            own = getattr(kind, method)
            monkeypatch.setattr(
                kind, method, lambda self, *args, own=own, method=method: calls.append(method) or own(self, *args)
            )
    monkeypatch.setattr(DraftLengthPolicy, "choose", None)  # a look at the pause is enough
    ran.clear()
    assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter), plain)
    assert ran == expected
    assert "propose" not in calls and "observe" not in calls
    watchers = sum(kind.watches for kind in kinds) and len(kinds)
    assert calls.count("accept") <= watchers * len(ran) and calls.count("stirs") <= watchers * len(ran)
