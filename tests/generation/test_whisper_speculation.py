"""Whisper's own `generate()` with any drafter: the tokens of the same call without one."""

import copy

import pytest
import torch
from draft_models import Recorder
from encoder_decoder_models import encoder_decoder
from test_encoder_decoder_speculation import draft_of

from hf_efficient import (
    BestOf,
    PromptLookup,
    Speculation,
    TokenRecycling,
    enable_speculation,
    optimize,
    speculative_generate,
)
from hf_efficient.generation.drafters.assistant import AssistantDrafter


MULTILINGUAL = dict(
    is_multilingual=True, lang_to_id={"<|en|>": 30, "<|de|>": 31, "<|fr|>": 32},
    task_to_id={"transcribe": 33, "translate": 34}, prev_sot_token_id=36,
    suppress_tokens=[5, *range(41, 51)],  # timestamps at which a long form would not go on
)  # fmt: skip
WITHOUT_TIMESTAMPS = 40, 63  # the token before the timestamps: in calls with them, and where there shall be none
DRAFTERS = {
    "assistant": lambda draft: dict(assistant_model=draft),
    "tree of an assistant": lambda draft: dict(assistant_model=AssistantDrafter(draft, tree=12)),
    "Speculation": lambda draft: dict(assistant_model=Speculation(draft, adaptive=False)),
    "TokenRecycling": lambda draft: dict(assistant_model=TokenRecycling()),
    "BestOf": lambda draft: dict(assistant_model=BestOf(PromptLookup(3), TokenRecycling())),
    "prompt lookup": lambda draft: dict(prompt_lookup_num_tokens=3),
}
_CHUNKS = dict(return_timestamps=True, max_new_tokens=8, temperature=0.0)
CALLS = {
    "language and task": dict(language="de", task="translate"),
    "detected language": dict(task="transcribe"),
    "prompt_ids": dict(language="en", prompt_ids=torch.tensor([36, 9, 11, 12])),
    "samples": dict(language="en", num_return_sequences=2, do_sample=True, temperature=1.0, top_k=1),
    "timestamps": dict(language="en", return_timestamps=True),
    "long form": dict(language="en", **_CHUNKS),
    "long form, text before": dict(language="en", **_CHUNKS, condition_on_prev_tokens=True),
    "long form, prompt_ids": dict(
        language="en", **_CHUNKS, condition_on_prev_tokens=True, prompt_ids=torch.tensor([36, 9]),
        prompt_condition_type="all-segments",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def models():
    """A multilingual Whisper as transformers runs it, the same with speculation, and a draft of it."""
    plain, _ = encoder_decoder("whisper")
    for name, value in MULTILINGUAL.items():
        setattr(plain.generation_config, name, value)
    return plain, enable_speculation(copy.deepcopy(plain)), draft_of(plain)


def sound(call: str, rows: int) -> dict:
    """Features of one window; of a long form of two to four windows, each row's of its own length."""
    frames = 150 if call.startswith("long form") else 40
    features = torch.randn(3, 8, frames, generator=torch.Generator().manual_seed(3))[:rows]
    if frames == 40:
        return dict(input_features=features)
    mask = torch.arange(frames) < torch.tensor([[150], [70], [110]])[:rows]
    return dict(input_features=features * mask[:, None], attention_mask=mask.long())


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("call", CALLS)
def test_calls(call, rows, models):
    plain, model, draft = models
    options = {"max_new_tokens": 12, **CALLS[call], **sound(call, rows)}
    for each in models[:2]:
        each.generation_config.no_timestamps_token_id = WITHOUT_TIMESTAMPS["return_timestamps" not in options]
    expected = plain.generate(**options)
    for name in ("assistant",) if rows == 1 else ("TokenRecycling", "prompt lookup"):
        assert torch.equal(model.generate(**options, **DRAFTERS[name](draft)), expected), name


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafters(drafter, models):
    """All of them, and with the tokens that the first step must not say, which Whisper forgets beside an assistant."""
    plain, model, draft = models
    options = dict(**sound("", 3), max_new_tokens=16)
    first = plain.generate(**options)[:, 0].tolist()
    drafts = DRAFTERS[drafter](draft)
    for suppressed in ([], first):
        for each in models[:2]:
            each.generation_config.begin_suppress_tokens = suppressed
            each.generation_config.no_timestamps_token_id = WITHOUT_TIMESTAMPS[1]
        expected, streamer, streamed = plain.generate(**options), Recorder(), Recorder()
        assert set(first).isdisjoint(expected[:, 0].tolist()) == bool(suppressed)
        assert torch.equal(model.generate(**options, **drafts), expected)
        plain.generate(**options, streamer=streamer)
        model.generate(**options, **drafts, streamer=streamed)
        assert streamed.values == streamer.values and streamed.ended == 1


def test_prompts_of_the_decoder_are_padded(models, monkeypatch):
    """The table has a call whose rows have unequally much text before them."""
    plain, *_ = models
    plain.generation_config.no_timestamps_token_id = WITHOUT_TIMESTAMPS[0]
    masks, generate = [], type(plain).prepare_inputs_for_generation

    def note(self, *args, decoder_attention_mask=None, **kwargs):
        masks.append(decoder_attention_mask)
        return generate(self, *args, decoder_attention_mask=decoder_attention_mask, **kwargs)

    monkeypatch.setattr(type(plain), "prepare_inputs_for_generation", note)
    plain.generate(**CALLS["long form, text before"], **sound("long form", 3))
    assert any(mask is not None and not mask.all() for mask in masks)


def test_what_is_refused(models):
    plain, model, _ = models
    options = dict(**sound("", 1), max_new_tokens=4)
    for each in (model, optimize(copy.deepcopy(plain))):
        with pytest.raises(ValueError, match="num_beams=2: speculation is greedy or sampled"):
            each.generate(**options, assistant_model=TokenRecycling(), num_beams=2)
    with pytest.raises(ValueError, match="assistant_model='mtp': Whisper.* has num_mtp_layers=None"):
        model.generate(**options, assistant_model="mtp")
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens=2 and an assistant model were both given"):
        model.generate(**options, assistant_model=TokenRecycling(), prompt_lookup_num_tokens=2)
    assert model.generate(**options, assistant_model=None).shape[0] == 1, "no draft is left from a call that failed"


@pytest.mark.parametrize("call", ["long form", "timestamps"])
def test_a_loop_passed_as_a_callable(call, models):
    """Whisper's `generate()` takes apart what the loop returns, also where its class is as it was."""
    plain = models[0]
    plain.generation_config.no_timestamps_token_id = WITHOUT_TIMESTAMPS[0]
    options = {"max_new_tokens": 8, **CALLS[call], **sound(call, 3), "return_dict_in_generate": True}
    expected = plain.generate(**options)
    found = plain.generate(**options, custom_generate=speculative_generate, draft_model=PromptLookup(3))
    assert torch.equal(found["sequences"], expected["sequences"])
