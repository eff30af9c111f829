"""Eviction in continuous batching: the tokens are those of `generate()` with a `PagedCache` of the same policy. What
cannot be evicted from is refused by name."""

import pytest
import torch
from helpers import needs_transformers, tiny_model
from test_batched_speculation import drafted, outputs_of, tokens_of  # noqa: F401
from test_batched_step import PAGE_SIZE, forwards  # noqa: F401
from transformers import GenerationConfig

import hf_efficient
from hf_efficient import AdaKV, ContinuousBatchingConfig, EvictionPolicy, KeyNorm, SinkWindow, SnapKV
from hf_efficient.cache.request_eviction import RequestEviction
from hf_efficient.cache.request_pages import PageGroup
from hf_efficient.kernels.replay.recorder import interpreter


pytestmark = [
    needs_transformers("5.19", "eviction in continuous batching"),
    pytest.mark.skipif(interpreter() is None, reason="no compiler, or a CPU without AVX-512"),
]
PAGE, NEW, BUDGET = 8, 30, 32
POLICIES = {
    "norms, always": EvictionPolicy(KeyNorm(recent=4), budget=BUDGET, when="always"),
    "norms, prompts": EvictionPolicy(KeyNorm(recent=4), budget=0.5),
    "windows": EvictionPolicy(SinkWindow(sinks=3), budget=BUDGET, when="always"),
}


def prompts():
    """Of which the second is shorter than the budget at first."""
    generator = torch.Generator().manual_seed(3)
    found = [torch.randint(3, 128, (length,), generator=generator).tolist() for length in (60, 12, 41)]
    return [*found, found[0][:50]]


def alone(model, policy, given):
    """Greedy tokens of each prompt alone by `generate()`."""
    model.set_attn_implementation("flash_paged")
    options, found = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=2), []
    for prompt in given:
        cache = hf_efficient.PagedCache(model.config, block_size=PAGE, eviction=policy)
        row = model.generate(torch.tensor([prompt]), past_key_values=cache, **options)[0]
        found.append(row[len(prompt) :].tolist())
    return found


def together(model, given, **config):
    return tokens_of(model, given, new_tokens=NEW, **{"max_batch_tokens": 256, PAGE_SIZE: PAGE, **config})


@pytest.mark.parametrize(
    ("name", "policy"), [("llama", "norms, always"), ("qwen3", "norms, prompts"), ("llama", "windows")]
)
def test_tokens_are_those_of_generate(name, policy, forwards):  # noqa: F811
    model, given, policy = tiny_model(name), prompts(), POLICIES[policy]
    expected = alone(model, policy, given)
    assert expected != alone(model, None, given)  # so that it is seen
    assert together(model, given, eviction=policy) == expected
    assert "replayed" in forwards


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_codes_are_moved_as_they_are(dtype):
    """The tokens of the smallest keys stay in each head, in their order, with their codes and scales."""
    generator = torch.Generator().manual_seed(0)
    codes = [torch.randint(0, 120, (9, PAGE, 2, 16), generator=generator, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.rand(9, PAGE, 2, generator=generator).half() + 0.1 for _ in range(2)]
    pages, table = tuple(each.view(dtype) for each in codes), [7, 2, 5, 1]
    group = PageGroup({0: pages}, {0: dict(k_scale=scales[0], v_scale=scales[1])})
    eviction = RequestEviction(EvictionPolicy(KeyNorm(recent=4), 16, when="always"), group, tiny_model("llama").config)
    before = [x[table].flatten(0, 1)[:30].clone() for x in (*codes, *scales)]
    norms = (before[0].view(dtype).float() * before[2].float()[..., None]).norm(dim=-1)
    norms[-4:] = 0
    left = eviction.after("request", 30, 1, False, table)
    assert left == 16 - (PAGE - 1) and eviction.dropped("request") == 30 - left
    for head in range(2):
        kept = norms[:, head].topk(left, largest=False).indices.sort().values
        for x, old in zip((*codes, *scales), before):
            assert torch.equal(x[table].flatten(0, 1)[:left, head], old[kept, head])


def test_blocks_are_given_back(monkeypatch):
    """A request holds its budget and a page at most behind every step, however long it gets."""
    held, after = [], RequestEviction.after
    monkeypatch.setattr(RequestEviction, "after", lambda self, *args: held.append(after(self, *args)) or held[-1])
    model, policy = tiny_model("llama"), POLICIES["norms, always"]
    # 9 blocks of 8: two requests of 30 + 100 tokens would take 34
    answers = tokens_of(
        model, [[5] * 30, [7] * 30], new_tokens=100, num_blocks=12, eviction=policy, max_batch_tokens=64,
        generation=dict(eos_token_id=-1), **{PAGE_SIZE: PAGE},
    )  # fmt: skip
    assert [len(answer) for answer in answers] == [100, 100]
    assert max(held) <= BUDGET and len(held) > 100


def test_a_full_pool_drafts_and_several_answers(drafted):  # noqa: F811
    """Requests that begin anew read what they wrote as a prompt, so their budgets are not reached here."""
    model, policy, given = tiny_model("llama"), EvictionPolicy(KeyNorm(), budget=100, when="always"), prompts()
    expected = alone(model, None, given)
    assert together(model, given, eviction=policy, num_blocks=25, prompt_lookup_num_tokens=3) == expected
    assert drafted["accepted"] > 0
    policy, given = POLICIES["norms, prompts"], prompts()[:1]
    twice = dict(num_return_sequences=2, do_sample=True, top_k=1)
    answers = together(model, given, eviction=policy, generation=twice)
    assert answers[0] == answers[1] != alone(model, None, given)[0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(eviction="all"), "eviction='all': must be an EvictionPolicy"),
        (dict(eviction=EvictionPolicy(SnapKV(), 64)), "eviction with SnapKV .* KeyNorm.. and SinkWindow"),
        (dict(eviction=EvictionPolicy(AdaKV(KeyNorm()), 64)), "eviction with AdaKV .* keep equally many of each head"),
        (dict(eviction=POLICIES["windows"], kv_format="int4"), "kv_format='int4' with eviction"),
        (dict(eviction=POLICIES["windows"], assistant_model="llama"), "eviction and assistant_model are both given"),
    ],
)
def test_what_cannot_be_evicted(config, message):
    if "assistant_model" in config:
        config = {**config, "assistant_model": tiny_model("llama")}
    with pytest.raises(ValueError, match=message):
        ContinuousBatchingConfig(**config)


@pytest.mark.parametrize(
    ("name", "message"),
    [("gemma2", "eviction in continuous batching: .* sliding window"), ("gpt2", "eviction of a model of GPT2Config")],
)
def test_models_that_cannot_be_evicted_from(name, message):
    model = tiny_model(name, attn_implementation="flash_paged")
    config = ContinuousBatchingConfig(eviction=POLICIES["windows"], num_blocks=32)
    manager = model.init_continuous_batching(GenerationConfig(eos_token_id=2), config)
    with pytest.raises(ValueError, match=message):
        manager._create_batch_processor()
