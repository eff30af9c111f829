"""Speculation changes no output: greedy token for token, sampled in distribution, whatever acts on the logits."""

import copy

import draft_models
import pytest
import torch
from draft_models import GREEDY, NEW, drafting, end_token, fixed, models, perturbed
from helpers import TINY_MODELS, left_padded_batch, tiny_model
from test_speculative_distribution import RIGHT, p_value
from transformers import (
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers import MinNewTokensLengthLogitsProcessor as MinNewTokens

from hf_efficient import enable_speculation
from hf_efficient.generation.drafters.prompt_lookup import PromptLookup
from hf_efficient.generation.sequences import Sequences


SDPA_REFUSED = ("gemma2", "gpt_oss")  # transformers offers no SDPA for these
llama = pytest.fixture(draft_models.llama)


@pytest.mark.parametrize(  # eager attention with all of them: tests/integrations/test_matrix.py
    "name, attention",
    [
        *((name, "flash_paged") for name in TINY_MODELS),
        *((name, "eager" if name in SDPA_REFUSED else "sdpa") for name in TINY_MODELS),
        ("llama", "eager"),
    ],
)
def test_greedy_output_is_that_of_plain_generation(name, attention):
    target, drafts, inputs, plain = models(name)
    for model in drafts.values():
        model.set_attn_implementation(attention)
    options = {kind: {"assistant_model": draft} for kind, draft in drafts.items()}
    options["lookup"] = {"prompt_lookup_num_tokens": 3}
    kinds = (("good", "itself", "lookup"), ("good",) if attention == "flash_paged" else ("bad",))
    for batch, expected, some in zip(inputs, plain, kinds):
        for kind in some:
            option = options[kind]
            output = target.generate(**batch, **option, **GREEDY, return_dict_in_generate=True)
            assert torch.equal(output.sequences, expected), (kind, len(expected))
            if kind == "itself":
                assert output.num_steps <= -(-(NEW - 1) // 5), "4 drafts and the target's own token a step"
                # a row ends early only at an end-of-sequence token, and what it drafted after that is lost
                ended = (output.sequences[:, -NEW:] == 2).any(1)
                assert (output.accepted_tokens == output.drafted_tokens)[~ended].all()


@pytest.mark.parametrize("attention", ["sdpa", "flash_paged"])
def test_any_model_can_draft_for_any_other(attention):
    """Another architecture, another attention implementation, fewer positions than the output needs."""
    target, _, (batch, _), (expected, _) = models("llama")
    target.set_attn_implementation(attention)
    for name, overrides in (("gpt2", dict(n_positions=16)), ("opt", dict(max_position_embeddings=12)), ("gemma3", {})):
        draft = drafting(tiny_model(name, seed=3, **overrides))
        output = target.generate(**batch, assistant_model=draft, **GREEDY)
        assert torch.equal(output, expected), name


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_learned_positions_are_not_overrun(name):
    """The last tokens take the model's last positions: padding and drafts must stay inside."""
    batch = left_padded_batch()
    limit = {"gpt2": "n_positions", "opt": "max_position_embeddings"}[name]
    target = tiny_model(name, **{limit: 11 + NEW - 1})
    expected = target.generate(**batch, **GREEDY)
    draft = perturbed(target, 0.3)
    for attention in ("sdpa", "flash_paged"):
        enable_speculation(target).set_attn_implementation(attention)
        output = target.generate(**batch, assistant_model=draft, **GREEDY)
        assert torch.equal(output, expected)


# --- what acts at every position ---


def assert_speculation_gives(expected, target, draft, options):
    for drafts in ({"assistant_model": draft}, {"assistant_model": target}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(target.generate(**options, **drafts), expected)


class StopAfter(StoppingCriteria):
    """Stops a row right after `token`."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


def allowed(batch_index: int, ids: torch.Tensor) -> list[int]:
    """Depends on the row, on the length and on the last token; fails on ids that it would not have allowed."""

    def allows(token: int, length: int) -> bool:
        return token >= 3 and (token + batch_index + length + int(ids[length - 1])) % 3 > 0

    for length in range(left_padded_batch()["input_ids"].shape[1], len(ids)):
        assert allows(int(ids[length]), length), "asked about ids that were excluded before"
    return [token for token in range(128) if allows(token, len(ids))]


POSITION_DEPENDENT = {
    "repetition": dict(repetition_penalty=1.5),
    "ngrams": dict(no_repeat_ngram_size=1),
    "encoder_repetition": dict(encoder_repetition_penalty=2.0),
    "prefix": dict(prefix_allowed_tokens_fn=allowed),
    "forced_end": dict(forced_eos_token_id=5),
    "decay": dict(exponential_decay_length_penalty=(3, 1.5)),
    "bias": dict(sequence_bias={(7, 9): 4.0, (11,): -3.0}, suppress_tokens=[4, 6]),
}


@pytest.mark.parametrize("kind", POSITION_DEPENDENT)
def test_logits_processors_see_the_ids_of_plain_generation(kind, llama):
    target, draft, batch, plain = llama
    options = dict(**batch, **POSITION_DEPENDENT[kind], **GREEDY)
    expected = target.generate(**options)
    if kind not in ("forced_end", "decay"):
        assert not torch.equal(expected, plain), "the option must matter"
    assert_speculation_gives(expected, target, draft, options)


@pytest.mark.parametrize("minimum", [{}, {"min_new_tokens": 9}, {"min_length": 17}])
def test_end_of_sequence_inside_a_draft(minimum, llama):
    target, draft, batch, plain = llama
    for row, step in ((0, 2), (1, 6), (2, 0)):
        eos = [end_token(plain, row, step), 2]
        options = dict(**batch, **minimum, **GREEDY, eos_token_id=eos, pad_token_id=1)
        expected = target.generate(**options)
        assert_speculation_gives(expected, target, draft, options)


@pytest.mark.parametrize(
    "processor", [MinLengthLogitsProcessor(8, [2, 5]), MinNewTokens(5, 3, 2), MinNewTokens(5, 3, -1)]
)
def test_minimum_lengths_are_those_of_each_sequence(processor):
    criteria = StoppingCriteriaList([MaxLengthCriteria(64)])
    sequences = Sequences(torch.ones(3, 5, dtype=torch.int64), None, 0, LogitsProcessorList([processor]), criteria)
    sequences.generated, logits = [0, 2, 9], torch.randn(3, 4, 7)
    given = logits.clone()
    scores = sequences.process(logits, offset=1)
    for row, length in enumerate(sequences.lengths):
        for position in range(4):
            ids = torch.ones(1, length + 1 + position, dtype=torch.int64)
            assert torch.equal(scores[row, position], processor(ids, logits[row, position][None])[0])
    assert torch.equal(logits, given)


@pytest.mark.parametrize("eos", [2, None])
def test_stopping_criteria_act_at_every_position(eos, llama):
    """Without an end-of-sequence token, plain generation lets stopped rows run on until all have stopped."""
    target, draft, batch, plain = llama
    target.generation_config.eos_token_id = eos
    tokens = [end_token(plain, 0, 3), end_token(plain, 1, 8), end_token(plain, 2, 1)]
    criteria = StoppingCriteriaList([StopAfter(token) for token in tokens])
    options = dict(**batch, **GREEDY, stopping_criteria=criteria)
    expected = target.generate(**options)
    assert expected.shape[1] < plain.shape[1]
    assert_speculation_gives(expected, target, draft, options)


def test_stopping_criteria_get_the_scores_so_far(llama):
    target, draft, batch, _ = llama
    seen = []

    class Check(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            seen.append((input_ids.shape[1] - 11, len(scores), scores[-1].shape))
            return torch.zeros(len(input_ids), dtype=torch.bool)

    options = dict(max_new_tokens=5, return_dict_in_generate=True, output_scores=True)
    target.generate(**batch, **options, assistant_model=draft, stopping_criteria=StoppingCriteriaList([Check()]))
    assert {length for length, _, _ in seen} == {1, 2, 3, 4, 5}
    assert all(length == count and shape == (3, 128) for length, count, shape in seen)


@pytest.mark.parametrize("tokens", [1, 2, 6])
def test_never_longer_than_asked(tokens, llama):
    target, _, batch, plain = llama
    draft = drafting(copy.deepcopy(target), 20)
    output = target.generate(**batch, assistant_model=draft, max_new_tokens=tokens, do_sample=False)
    assert torch.equal(output, plain[:, : 11 + tokens])


# --- sampling ---


@pytest.mark.parametrize("drafting_with, processor", [("assistant", "position_dependent"), ("lookup", "pointwise")])
def test_sampled_text_has_the_distribution_of_the_target(drafting_with, processor):
    """Three tokens from a vocabulary of 8, many rows at once, against the exact probabilities of all 512 texts."""
    target = tiny_model("llama", vocab_size=8, eos_token_id=None, pad_token_id=None)
    rows, prompt = 7000, torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4]])
    warpers = dict(temperature=1.7, top_k=6) if processor == "pointwise" else dict(top_k=0, repetition_penalty=1.4)
    option = {"assistant_model": perturbed(target, 0.5)} if drafting_with == "assistant" else {}
    if drafting_with == "lookup":
        option = {"assistant_model": fixed(PromptLookup(2, 1))}
    probabilities, texts = torch.ones(1), prompt
    for _ in range(3):
        scores = target.generate(
            texts, max_new_tokens=1, do_sample=True, **warpers, return_dict_in_generate=True, output_scores=True
        ).scores[0]
        probabilities = (probabilities[:, None] * scores.softmax(-1)).flatten()
        following = torch.arange(8).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(8, 0), following], 1)
    torch.manual_seed(0)
    output = enable_speculation(target).generate(
        prompt.expand(rows, -1), **option, **warpers, max_new_tokens=3, do_sample=True, return_dict_in_generate=True
    )
    assert 0 < output.accepted_tokens.sum() < output.drafted_tokens.sum(), "some accepted, some rejected"
    text = output.sequences[:, -3:] @ torch.tensor([64, 8, 1])
    assert p_value(torch.bincount(text, minlength=512), probabilities) > RIGHT


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["sdpa", "flash_paged"])
def test_on_an_accelerator(attention):
    """float32 on the device: greedy output is that of plain generation there, with a draft on the host too."""
    target = enable_speculation(tiny_model("mistral", seed=2).to("cuda"))
    draft = perturbed(target, 0.1)
    target.set_attn_implementation(attention)
    batch = {key: value.to("cuda") for key, value in left_padded_batch().items()}
    for options in ({}, {"repetition_penalty": 1.3}):
        expected = target.generate(**batch, **options, **GREEDY)
        for place in ("cuda", "cpu"):
            output = target.generate(**batch, **options, **GREEDY, assistant_model=draft.to(place))
            assert torch.equal(output, expected)
        output = target.generate(**batch, **options, prompt_lookup_num_tokens=3, **GREEDY)
        assert torch.equal(output, expected)
