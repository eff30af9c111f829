"""Steps of continuous batching in which all requests decode: the same ones as transformers schedules, and the same
answers."""

import pytest
from helpers import needs_transformers, tiny_model
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from hf_efficient.generation.replay.captured_step import CapturedStep
from hf_efficient.integrations import transformers_decoding_steps as decoding_steps
from hf_efficient.integrations import transformers_releases
from hf_efficient.integrations import transformers_request_options as request_options
from hf_efficient.kernels.replay.recorder import interpreter


pytestmark = [
    needs_transformers("5.19", "forwards of this package in continuous batching"),
    pytest.mark.skipif(interpreter() is None, reason="no compiler, or a CPU without AVX-512"),
]
PAGE_SIZE = "page_size" if transformers_releases.has("5.18") else "block_size"
PROMPTS = [[5, 17, 40, 99, 12, 77, 31, 64, 8, 21], [33] * 3, [*range(60, 76)], [5, 17, 40, 99, 12, 77, 31, 64, 90]]


def served(monkeypatch, options=None, generation=None, **config):
    """The answers to `PROMPTS`, all of which are there before the first step; what each step and each marked page
    was."""
    steps, run, mark = [], CapturedStep.__call__, PagedAttentionCache.mark_complete_blocks

    def noting(self, new, wanted):
        steps.append([[*each] for each in (new.names, new.tokens, new.positions, wanted)])
        steps[-1].append([[*map(list, of_group)] for of_group in new.tables])
        return run(self, new, wanted)

    def marking(self, state, complete_blocks):
        if complete_blocks:
            steps.append((state.request_id, complete_blocks))
        mark(self, state, complete_blocks)

    model = tiny_model("llama")
    model.set_attn_implementation("flash_paged")
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            eos_token_id=2, pad_token_id=0, **{"do_sample": False, **(generation or {})}
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            **{"num_blocks": 64, PAGE_SIZE: 4, "max_batch_tokens": 24, **config}
        ),
    )
    answers = {}
    with monkeypatch.context() as patch:
        patch.setattr(CapturedStep, "__call__", noting)
        patch.setattr(PagedAttentionCache, "mark_complete_blocks", marking)
        for number, prompt in enumerate(PROMPTS):
            manager.add_request(prompt, f"r{number}", max_new_tokens=14 + number, **(options or {}))
        manager.start()
        try:
            finished = 0
            while finished < len(PROMPTS) * manager.num_return_sequences:
                output = manager.get_result(timeout=60)
                answers.setdefault(output.request_id, []).append(output)
                finished += output.is_finished()
        finally:
            manager.stop(block=True)
    return answers, steps


CASES = {
    "plain": {},
    "shared": dict(allow_block_sharing=True),
    "preempted": dict(num_blocks=8),
    "few_tokens": dict(max_batch_tokens=4),
    "few_requests": dict(max_requests_per_batch=2),
    "forked": dict(generation=dict(num_return_sequences=2, do_sample=True, top_k=1)),
    "few_forked": dict(max_requests_per_batch=3, generation=dict(num_return_sequences=4, do_sample=True, top_k=1)),
    "logprobs": dict(return_logprobs=True),
    "streamed": dict(options=dict(streaming=True)),
    "timed": dict(options=dict(record_timestamps=True)),
}


@pytest.mark.parametrize("scheduler", ["fifo", "prefill_first"])
@pytest.mark.parametrize("case", CASES)
def test_steps_and_answers_are_those_of_transformers(case, scheduler, monkeypatch):
    config = {"allow_block_sharing": False, "scheduler_type": scheduler, **CASES[case]}
    found, at_once = [], decoding_steps._all_that_decode
    monkeypatch.setattr(decoding_steps, "_all_that_decode", lambda *args: found.append(at_once(*args)) or found[-1])
    answers, steps = served(monkeypatch, **config)
    monkeypatch.setattr(decoding_steps, "_all_that_decode", lambda *_: None)
    monkeypatch.setattr(request_options, "go_on", lambda *args: args)
    expected, theirs = served(monkeypatch, **config)
    assert steps == theirs
    assert [futures for futures in found if futures], "no step was scheduled at once"
    assert answers.keys() == expected.keys()
    for name, outputs in answers.items():
        assert [output.generated_tokens for output in outputs] == [each.generated_tokens for each in expected[name]]
        assert outputs[-1].logprobs == expected[name][-1].logprobs
        times = outputs[-1].timestamps
        assert times is None or (len(times) == len(outputs[-1].generated_tokens) and times == sorted(times))
