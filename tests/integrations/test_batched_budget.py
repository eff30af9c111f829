"""How many tokens a step of continuous batching has, by made-up seconds, and in transformers' schedulers."""

import re

import pytest
from helpers import needs_transformers, tiny_model
from test_batched_step import PAGE_SIZE, one_by_one
from transformers import CompileConfig, GenerationConfig

from hf_efficient import ContinuousBatchingConfig
from hf_efficient.cache.request_pages import PageGroup
from hf_efficient.generation.replay import captured_step
from hf_efficient.generation.replay.captured_step import CapturedStep
from hf_efficient.generation.speculation.latency_model import LatencyCurve
from hf_efficient.generation.step_budget import LEAST_PROMPT_TOKENS, StepBudget
from hf_efficient.kernels.replay.recorder import interpreter


def budget_of(seconds: float) -> StepBudget:
    """Tokens take a second each."""
    latency = LatencyCurve()
    for tokens in (1, 32, 64, 128, 256):
        latency.add(tokens, float(tokens))
    return StepBudget(seconds, latency, lambda tokens: tokens)


def test_as_many_tokens_as_take_the_seconds():
    assert budget_of(100.0).tokens(decoding=4, most=256) == 100
    assert budget_of(600.0).tokens(decoding=4, most=512) == 512
    assert budget_of(100.0).tokens(decoding=0, most=256) == 256  # nobody waits for a token
    assert budget_of(1.0).tokens(decoding=4, most=256) == 4 + LEAST_PROMPT_TOKENS  # the prompt gets on
    assert budget_of(1.0).tokens(decoding=4, most=8) == 8
    assert StepBudget(1.0, LatencyCurve(), lambda tokens: tokens).tokens(4, 256) == 256  # nothing is measured yet


@needs_transformers("5.19", "max_ms_between_tokens")
@pytest.mark.skipif(interpreter() is None, reason="no compiler, or a CPU without AVX-512")
def test_prompts_come_in_parts_while_others_decode(monkeypatch):
    """A budget that no step keeps: after the first, none has more than the least part of a prompt."""
    model, widths, original = tiny_model("llama"), [], CapturedStep.__call__

    def counting(self, new, wanted):
        widths.append((sum(len(tokens) == 1 for tokens in new.tokens), new.total))
        return original(self, new, wanted)

    prompts = [list(range(10, 120)), list(range(5, 105))]
    expected = one_by_one(model, prompts)
    monkeypatch.setattr(CapturedStep, "__call__", counting)
    model.set_attn_implementation("flash_paged")

    def tokens_of(**config):
        widths.clear()
        outputs = model.generate_batch(
            inputs=prompts,
            generation_config=GenerationConfig(max_new_tokens=14, do_sample=False, eos_token_id=2, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=128, max_batch_tokens=40, **{PAGE_SIZE: 4}, **config
            ),
        )
        return [output.generated_tokens for output in outputs.values()]

    assert tokens_of() == expected
    assert max(tokens for decoding, tokens in widths if decoding) > 1 + LEAST_PROMPT_TOKENS
    assert tokens_of(max_ms_between_tokens=1e-6) == expected
    beside = [tokens for decoding, tokens in widths if decoding]
    assert len(beside) > 4 and max(beside) <= 1 + LEAST_PROMPT_TOKENS


ASKED = dict(num_blocks=64, max_batch_tokens=40, max_ms_between_tokens=50.0)


@needs_transformers("5.19", "max_ms_between_tokens")
@pytest.mark.parametrize(
    ("attention", "config", "message"),
    [
        ("sdpa", {}, "attn_implementation is 'sdpa'"),
        ("eager", {}, "attn_implementation is 'eager'"),
        ("flash_paged", dict(varlen_compile_config=CompileConfig()), "without compile configs: there is one"),
    ],
)
def test_a_budget_that_nobody_keeps_is_refused_by_name(attention, config, message):
    """Where transformers runs the forwards itself, nobody measures them."""
    model = tiny_model("llama", attn_implementation=attention)
    with pytest.raises(ValueError, match=rf"max_ms_between_tokens in continuous batching needs .*{re.escape(message)}"):
        model.init_continuous_batching(GenerationConfig(), ContinuousBatchingConfig(**ASKED, **config))


@needs_transformers("5.19", "max_ms_between_tokens")
def test_a_budget_needs_a_compiler(monkeypatch):
    monkeypatch.setattr(PageGroup, "serves", lambda *_: False)
    model = tiny_model("llama", attn_implementation="flash_paged")
    manager = model.init_continuous_batching(GenerationConfig(), ContinuousBatchingConfig(**ASKED))
    with pytest.raises(
        ValueError, match="max_ms_between_tokens in continuous batching needs .* not read by the kernels"
    ):
        manager._create_batch_processor()


@needs_transformers("5.19", "max_ms_between_tokens")
@pytest.mark.skipif(interpreter() is None, reason="no compiler, or a CPU without AVX-512")
def test_forwards_of_transformers_are_measured_too(monkeypatch):
    """Prompts longer than a window run as transformers runs them."""
    found, original = [], LatencyCurve.add
    monkeypatch.setattr(LatencyCurve, "add", lambda self, *args: found.append(args) or original(self, *args))
    monkeypatch.setattr(CapturedStep, "__call__", lambda *_: pytest.fail("a forward of ours"))
    model = tiny_model("mistral", attn_implementation="flash_paged")
    outputs = model.generate_batch(
        inputs=[list(range(10, 30))],
        generation_config=GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=2, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(**{**ASKED, PAGE_SIZE: 4}),
    )
    assert [output.error for output in outputs.values()] == [None] and found[0][0] == 24 and found[0][1] > 0


@needs_transformers("5.19", "max_ms_between_tokens")
@pytest.mark.skipif(interpreter() is None, reason="no compiler, or a CPU without AVX-512")
@pytest.mark.parametrize("budget", [None, 1e-6])
def test_nothing_is_captured_while_sequences_decode(budget, monkeypatch):
    """Everyone waits for a capture. Those of few tokens are made before the first step. Without a budget all come when
    they pay."""
    monkeypatch.setattr(captured_step, "FEW_TOKENS", 4)
    monkeypatch.setattr(captured_step, "MANY_EAGER", 2)
    captured, original = [], captured_step.Capture

    def counting(*arguments):
        captured.append(1)
        return original(*arguments)

    monkeypatch.setattr(captured_step, "Capture", counting)
    model = tiny_model("llama")
    prompts = [list(range(10, 120)), list(range(5, 105)), list(range(3, 80))] * 2
    expected = one_by_one(model, prompts)
    model.set_attn_implementation("flash_paged")
    widths, forward = [], CapturedStep._forward

    def noting(self, width, rows, head):
        before = len(captured)
        result = forward(self, width, rows, head)
        widths.append((width, len(captured) > before, self.captures_many, bool(self.pages.starts[1])))
        return result

    monkeypatch.setattr(CapturedStep, "_forward", noting)
    outputs = model.generate_batch(
        inputs=prompts,
        generation_config=GenerationConfig(max_new_tokens=14, do_sample=False, eos_token_id=2, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=256, max_batch_tokens=40, max_ms_between_tokens=budget, **{PAGE_SIZE: 4}
        ),
    )
    assert [output.generated_tokens for output in outputs.values()] == expected
    beside = [(width, is_captured) for width, is_captured, may, _ in widths if not may]
    if budget is None:
        assert not beside
        assert any(is_captured for width, is_captured, _, _ in widths if width > 4)
    else:
        assert len(beside) > 12 and not any(is_captured for _, is_captured in beside)
        assert {width for width, is_captured, _, is_real in widths if is_captured and not is_real} == {1, 4}


@pytest.mark.parametrize("budget", [0, -3.0, "fast", True, float("nan")])
def test_budgets_that_are_none(budget):
    with pytest.raises(ValueError, match="max_ms_between_tokens"):
        ContinuousBatchingConfig(max_ms_between_tokens=budget)
