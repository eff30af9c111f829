"""Speculation in continuous batching: the tokens of every request are those of `generate()` alone."""

import pytest
import torch
from helpers import TINY_MODELS, needs_transformers, tiny_model
from test_batched_step import FEW_BLOCKS, NEW_TOKENS, PAGE_SIZE, PROMPTS, one_by_one, preempted  # noqa: F401
from transformers import GenerationConfig

from hf_efficient import ContinuousBatchingConfig
from hf_efficient.generation.request_drafts import RequestDrafts
from hf_efficient.generation.speculation.request_policy import RequestDraftPolicy
from hf_efficient.integrations import transformers_batched_step
from hf_efficient.kernels.replay.recorder import interpreter


pytestmark = [
    needs_transformers("5.19", "speculation in continuous batching"),
    pytest.mark.skipif(interpreter() is None, reason="no compiler, or a CPU without AVX-512"),
]


@pytest.fixture
def drafted(monkeypatch):
    """Drafts are made whether they pay or not. Counts of those proposed and accepted."""
    counts, learn = {"proposed": 0, "accepted": 0}, RequestDrafts.learn

    def counting(self, requests, proposed, accepted, tokens):
        counts["proposed"] += sum(proposed)
        counts["accepted"] += sum(accepted)
        learn(self, requests, proposed, accepted, tokens)

    monkeypatch.setattr(RequestDrafts, "learn", counting)
    monkeypatch.setattr(RequestDraftPolicy, "rests", lambda self: False)
    monkeypatch.setattr(RequestDraftPolicy, "share", lambda self, chances, *_: [min(3, len(own)) for own in chances])
    monkeypatch.setattr(RequestDraftPolicy, "depth", lambda *_: 3)
    return counts


def outputs_of(model, prompts=PROMPTS, generation=None, new_tokens=NEW_TOKENS, **config):
    model.set_attn_implementation("flash_paged")
    config = {"num_blocks": 128, PAGE_SIZE: 4, "max_batch_tokens": 24, **config}
    options = {"max_new_tokens": new_tokens, "eos_token_id": 2, "pad_token_id": 0, "do_sample": False}
    outputs = model.generate_batch(
        inputs=prompts,
        generation_config=GenerationConfig(**{**options, **(generation or {})}),
        continuous_batching_config=ContinuousBatchingConfig(**config),
    )
    assert [output.error for output in outputs.values() if output.error] == []
    return list(outputs.values())


def tokens_of(*args, **kwargs):
    return [output.generated_tokens for output in outputs_of(*args, **kwargs)]


@pytest.mark.parametrize("name", TINY_MODELS)
def test_tokens_are_those_of_each_request_alone(name, drafted):
    """With drafts of its own text and of a model that is always right."""
    model = tiny_model(name)
    expected = one_by_one(model, new_tokens=24)
    assert tokens_of(model, new_tokens=24, prompt_lookup_num_tokens=4) == expected
    drafted.update(proposed=0, accepted=0)
    assert tokens_of(model, new_tokens=24, assistant_model=model) == expected
    assert drafted["accepted"] > 0.8 * drafted["proposed"] > 0


def test_a_drafter_that_rests_reads_no_request(monkeypatch):
    """Copies of all texts would take as long as all else that a step does beside its forward."""
    model, read = tiny_model("llama"), []
    expected = one_by_one(model)
    monkeypatch.setattr(RequestDraftPolicy, "rests", lambda self: True)
    monkeypatch.setattr(transformers_batched_step.BatchedIOs, "_growing_of", lambda self, state: read.append(state))
    assert tokens_of(model, prompt_lookup_num_tokens=4) == expected and not read


@pytest.mark.parametrize("drafts", [{}, {"prompt_lookup_num_tokens": 2}])
def test_several_answers_to_one_token(drafts, drafted):
    """All that is left of a prompt waits for its pages to be copied: nothing of it is computed in that step."""
    model, prompts = tiny_model("llama"), [[1], [7], [9, 5]]
    several = dict(num_return_sequences=2, do_sample=True, top_k=1)
    expected = one_by_one(model, prompts)
    assert tokens_of(model, prompts, several, **drafts) == [answer for answer in expected for _ in range(2)]
    assert tokens_of(model, prompts[:1], several, **drafts) == expected[:1] * 2


def test_wrong_drafts_cost_no_token(drafted):
    model, other = tiny_model("llama"), tiny_model("llama", seed=1, attn_implementation="flash_paged")
    assert tokens_of(model, assistant_model=other) == one_by_one(model)
    assert drafted["proposed"] > 3 * drafted["accepted"]


DRAFTERS = ("prompt_lookup_num_tokens", "assistant_model")


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        *(("llama", drafter) for drafter in DRAFTERS),
        *(("gemma3", DRAFTERS[0]), ("qwen3_moe", DRAFTERS[1]), ("gpt_oss", DRAFTERS[1])),
    ],
)
def test_requests_that_are_preempted_go_on(name, drafter, drafted, preempted):  # noqa: F811
    """A pool that holds one sequence at its longest, in which prefixes are shared. All architectures draft above, and
    are preempted in test_batched_step.py."""
    model = tiny_model(name)
    expected = one_by_one(model)
    given = {drafter: 4 if drafter == "prompt_lookup_num_tokens" else model}
    assert tokens_of(model, num_blocks=FEW_BLOCKS.get(name, 8), **given) == expected
    assert preempted and (drafted["proposed"] > 0 or drafter == "prompt_lookup_num_tokens")


def test_an_end_within_drafts(drafted):
    """Nothing follows the token that ends a sequence, though drafts after it were right."""
    model = tiny_model("llama")
    expected = one_by_one(model)
    end = expected[0][4]
    for output, whole in zip(outputs_of(model, generation=dict(eos_token_id=end), assistant_model=model), expected):
        cut = whole.index(end) + 1 if end in whole else len(whole)
        assert output.generated_tokens == whole[:cut]


def test_log_probabilities_of_drafts(drafted):
    model = tiny_model("qwen3")
    for output, plain in zip(
        outputs_of(model, assistant_model=model, return_logprobs=True), outputs_of(model, return_logprobs=True)
    ):
        assert output.generated_tokens == plain.generated_tokens
        assert output.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
    assert drafted["accepted"] > 0


def test_sampling_keeps_the_distribution(drafted):
    """Second tokens of 400 samples, with the temperature of each request: as often as by `generate()`'s
    probabilities."""
    model, prompt = tiny_model("llama"), PROMPTS[1]
    generation = dict(do_sample=True, temperature=0.5, top_k=4)
    config = dict(num_blocks=2048, max_batch_tokens=200, seed=5, per_request_processors=True)
    sampled = tokens_of(
        model, [prompt] * 400, generation, 4, assistant_model=model, allow_block_sharing=False, **config
    )
    model.set_attn_implementation("eager")
    first = max({tokens[0] for tokens in sampled}, key=[tokens[0] for tokens in sampled].count)
    following = [tokens[1] for tokens in sampled if tokens[0] == first]
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, first]])).logits[0, -1].float() / 0.5
    best = logits.topk(4)
    probabilities = dict(zip(best.indices.tolist(), best.values.softmax(0).tolist()))
    assert set(following) <= set(probabilities) and drafted["accepted"] > 20
    for token, probability in probabilities.items():
        spread = (probability * (1 - probability) / len(following)) ** 0.5
        assert following.count(token) / len(following) == pytest.approx(probability, abs=4 * spread)


def test_what_cannot_be_drafted_is_refused():
    model = tiny_model("llama", attn_implementation="flash_paged")
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens=0"):
        ContinuousBatchingConfig(prompt_lookup_num_tokens=0)
    with pytest.raises(ValueError, match="one drafter"):
        ContinuousBatchingConfig(prompt_lookup_num_tokens=3, assistant_model=model)
    with pytest.raises(ValueError, match="assistant_model is a str"):
        ContinuousBatchingConfig(assistant_model="gpt2")
    with pytest.raises(ValueError, match="knows 96 tokens, and the model 128"):
        tokens_of(model, assistant_model=tiny_model("llama", vocab_size=96, attn_implementation="flash_paged"))
    with pytest.raises(ValueError, match="'eager' on cpu"):
        tokens_of(model, assistant_model=tiny_model("llama", attn_implementation="eager"))
    eager = tiny_model("llama", attn_implementation="sdpa")
    with pytest.raises(ValueError, match="attn_implementation is 'sdpa'"):
        eager.init_continuous_batching(
            generation_config=GenerationConfig(),
            continuous_batching_config=ContinuousBatchingConfig(prompt_lookup_num_tokens=3),
        )


def test_a_config_keeps_its_assistant():
    """transformers copies configs deeply."""
    import copy

    model = tiny_model("llama")
    config = ContinuousBatchingConfig(assistant_model=model, num_blocks=3)
    copied = copy.deepcopy(config)
    assert copied.assistant_model is model and copied.num_blocks == 3 and copied is not config
