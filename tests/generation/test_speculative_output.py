"""What comes back from a speculative run: scores, statistics, streams; and what becomes of the cache."""

import copy

import draft_models
import pytest
import torch
from draft_models import GREEDY, NEW, Recorder, counting, drafting, end_token, fixed
from helpers import left_padded_batch, tiny_model
from transformers import StoppingCriteriaList

from hf_efficient import PagedCache, PromptLookup, enable_speculation, speculative_generate
from hf_efficient.generation import model_state
from hf_efficient.generation.drafters.assistant import AssistantDrafter
from hf_efficient.generation.output import SpeculativeOutput
from hf_efficient.kernels.replay.recorder import interpreter


llama = pytest.fixture(draft_models.llama)


def test_scores_and_logits_are_those_of_plain_generation(llama):
    target, draft, batch, plain = llama
    options = dict(**batch, **GREEDY, return_dict_in_generate=True, output_scores=True)
    options.update(output_logits=True, repetition_penalty=1.3, eos_token_id=end_token(plain, 0, 4), pad_token_id=0)
    expected = target.generate(**options)
    output = target.generate(**options, assistant_model=draft)
    assert torch.equal(output.sequences, expected.sequences)
    for ours, theirs in ((output.scores, expected.scores), (output.logits, expected.logits)):
        assert len(ours) == len(theirs)
        for step, (a, b) in enumerate(zip(ours, theirs)):
            live = (expected.sequences[:, 11 : 11 + step] != options["eos_token_id"]).all(1)
            # the same float32 sums in another order: logits here reach 10
            torch.testing.assert_close(a[live], b[live], rtol=1e-4, atol=1e-4)
            assert (a[~live] == 0).all()


def test_scores_behind_the_end_of_a_sequence(llama):
    """A criterion ends one in the middle of its accepted drafts."""
    target, _, batch, _ = llama
    criteria = StoppingCriteriaList([lambda ids, scores: torch.tensor([13, 99, 99]) <= ids.shape[1]])
    options = dict(**batch, **GREEDY, eos_token_id=2, stopping_criteria=criteria, pad_token_id=0)
    options.update(return_dict_in_generate=True, output_scores=True, output_logits=True)
    output = target.generate(**options, assistant_model=drafting(target))
    for collected in (output.scores, output.logits):
        assert [bool(step[0].any()) for step in collected] == [True] * 2 + [False] * (NEW - 2)
        assert all(step[1:].any(1).all() for step in collected)


def test_statistics_are_the_counts_they_are_named_for(llama, monkeypatch):
    target, draft, batch, plain = llama
    shapes = counting(target, monkeypatch)
    options = dict(**GREEDY, eos_token_id=end_token(plain, 0, 3), return_dict_in_generate=True)
    output = target.generate(**batch, **options, assistant_model=draft)
    assert isinstance(output, SpeculativeOutput)
    verifications = shapes[1:]
    assert output.num_steps == len(verifications)
    assert output.row_steps.sum() == sum(rows for rows, _ in verifications), "finished rows leave the batch"
    assert verifications[0][0] == 3 and verifications[-1][0] < 3
    generated = torch.tensor([4, NEW, NEW])
    assert (output.sequences[0, 15:] == 0).all() and output.sequences.shape[1] == 11 + NEW
    # every step gives its accepted drafts and one token of the target's, except where a draft was the last token
    missing = 1 + output.row_steps + output.accepted_tokens - generated
    assert ((missing == 0) | (missing == 1)).all()
    assert (output.accepted_tokens <= output.drafted_tokens).all()
    assert output.tokens_per_step == pytest.approx((generated - 1).sum().item() / output.row_steps.sum().item())
    plain_output = target.generate(**batch, max_new_tokens=1, prompt_lookup_num_tokens=2, return_dict_in_generate=True)
    assert (plain_output.num_steps, plain_output.tokens_per_step) == (0, 0.0)


@pytest.mark.parametrize("attention", ["flash_paged", "sdpa"])
def test_a_returned_cache_is_the_callers(attention, llama):
    """It holds the whole text but its last token, grows, and another call does not write into it. Pages are read, and
    forwards captured, whatever the attention, where no prompt is padded."""
    target, draft, batch, _ = copy.deepcopy(llama)
    target.set_attn_implementation(attention)
    options = dict(assistant_model=draft, do_sample=False, eos_token_id=None)
    for rows in (slice(1, 2), slice(0, 3)):
        prompts = {name: values[rows] for name, values in batch.items()}
        output = target.generate(**prompts, **options, max_new_tokens=NEW, return_dict_in_generate=True)
        assert output.past_key_values.state.pool.num_blocks is None
    ids = batch["input_ids"][1:2]
    output = target.generate(ids, **options, max_new_tokens=NEW, return_dict_in_generate=True)
    cache = output.past_key_values
    assert cache.cache_seqlens == [output.sequences.shape[1] - 1]
    if interpreter() is not None:
        assert [kept.captured is not None for kept in model_state.latest(target).pool.entries] == [True], (
            "and are replayed by the next call"
        )
    target.generate(ids, **options, max_new_tokens=NEW, repetition_penalty=2.0)
    expected = target.generate(output.sequences, **options, max_new_tokens=40)
    assert torch.equal(target.generate(output.sequences, past_key_values=cache, **options, max_new_tokens=40), expected)


@pytest.mark.skipif(interpreter() is None, reason="nothing is captured without the C++ kernels")
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma3", "gpt2"])
def test_the_returned_cache_of_a_padded_batch_goes_on(architecture):
    """The next forward over it gives the logits of the whole text. Its own forwards were captured."""
    target = enable_speculation(tiny_model(architecture, eos_token_id=None)).eval()
    target.set_attn_implementation("flash_paged")
    batch, new = left_padded_batch([3, 9]), 12
    options = dict(max_new_tokens=new, min_new_tokens=new, do_sample=False, prompt_lookup_num_tokens=3)
    output = target.generate(**batch, **options, return_dict_in_generate=True)
    ids, cache = output.sequences, output.past_key_values
    mask = torch.cat([batch["attention_mask"], torch.ones(2, new, dtype=torch.int64)], 1)
    positions, seen = (mask.cumsum(1) - 1).clamp(min=0), cache.get_seq_length()
    assert seen == ids.shape[1] - 1 and cache.state.pool.num_blocks is None
    with torch.no_grad():
        expected = target(ids, attention_mask=mask, position_ids=positions).logits[:, -1]
        last = dict(attention_mask=mask, position_ids=positions[:, seen:], past_key_values=cache)
        actual = target(ids[:, seen:], **last).logits[:, -1]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)  # the same float32 sums in another order
    assert model_state.latest(target).pool.entries


def test_fewer_forwards_than_tokens_when_the_draft_is_right(llama, monkeypatch):
    target, _, batch, plain = llama
    draft = drafting(copy.deepcopy(target))
    shapes = counting(target, monkeypatch)
    output = target.generate(batch["input_ids"][1:2], assistant_model=draft, **GREEDY)
    assert torch.equal(output, plain[1:2])
    assert shapes == [(1, 11), (1, 5), (1, 5), (1, 3)]


def test_a_step_without_guesses_is_a_plain_decode_step(llama, monkeypatch):
    target, _, _, _ = llama
    ids = torch.arange(20, 31)[None]  # no token twice
    expected = target.generate(ids, max_new_tokens=4, do_sample=False)
    assert len(set(expected[0, :-1].tolist())) == expected.shape[1] - 1, "the last token is not looked up"
    shapes = counting(target, monkeypatch)
    output = target.generate(
        ids, max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=3, return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, expected)
    assert shapes == [(1, 11), (1, 1), (1, 1), (1, 1)] and output.tokens_per_step == 1.0


def test_streams_the_tokens_of_plain_generation(llama):
    target, draft, batch, plain = llama
    single = {"input_ids": batch["input_ids"][1:2]}
    expected = Recorder()
    target.generate(**single, **GREEDY, streamer=expected)
    for drafts in ({"assistant_model": draft}, {"prompt_lookup_num_tokens": 3}):
        streamer = Recorder()
        target.generate(**single, **drafts, **GREEDY, streamer=streamer)
        assert streamer.values == expected.values and streamer.ended == 1
    streamer = Recorder()
    custom = dict(custom_generate=speculative_generate, draft_model=draft, token_streamer=streamer)
    target.generate(**single, **custom, **GREEDY)
    assert streamer.values == expected.values and streamer.ended == 1


@pytest.mark.parametrize("ends", [False, True])
def test_streams_columns_of_a_batch(llama, ends):
    """What transformers' loop gives a streamer, though drafts let sequences run apart."""
    target, draft, batch, plain = llama
    options = {**GREEDY, "eos_token_id": end_token(plain, 1, 6) if ends else None, "pad_token_id": 0}
    stock = tiny_model("llama")
    streamers = [Recorder() for _ in range(4)]
    stock.generate(**batch, **options, streamer=streamers[0])
    for streamer, drafter in zip(streamers[1:], (None, draft, fixed(PromptLookup()))):
        target.generate(**batch, **options, assistant_model=drafter, streamer=streamer)
        assert streamer.values == streamers[0].values and streamer.ended == 1


def test_streams_no_token_behind_the_end(llama):
    """Without an end-of-sequence token all sequences grow until the last one has stopped."""
    target, _, batch, _ = llama
    recorders = Recorder(), Recorder()
    criteria = StoppingCriteriaList([lambda ids, scores: torch.tensor([12, 14, 16]) <= ids.shape[1]])
    options = dict(**batch, **GREEDY, eos_token_id=None, stopping_criteria=criteria)
    expected = tiny_model("llama").generate(**options, streamer=recorders[0])
    found = target.generate(**options, assistant_model=drafting(target), streamer=recorders[1])  # 5 tokens a step
    assert torch.equal(found, expected) and expected.shape[1] == 16
    assert recorders[0].values == recorders[1].values


def test_a_streamer_is_never_left_hanging(llama):
    target, draft, batch, _ = llama
    streamer = Recorder()
    with pytest.raises(ValueError, match="output_attentions=True is not available"):
        options = dict(return_dict_in_generate=True, output_attentions=True, streamer=streamer)
        target.generate(**batch, assistant_model=draft, max_new_tokens=4, **options)
    assert streamer.ended == 1


# --- caches ---


class Cancelled(Exception):
    pass


class Cancels(Recorder):
    def put(self, value):
        super().put(value)
        if len(self.values) > 3:
            raise Cancelled


def cancels(ids, scores):
    if ids.shape[1] > 12:
        raise Cancelled
    return torch.zeros(len(ids), dtype=torch.bool) if scores is None else scores


@pytest.mark.parametrize("code", ["streamer", "processor", "criterion"])
@pytest.mark.parametrize("tree", [None, 9])
def test_a_cache_holds_no_drafts_after_an_exception(code, tree, llama):
    """So that a conversation goes on after its answer was cancelled."""
    target, draft, batch, _ = llama
    ids, cache = batch["input_ids"][1:2], PagedCache(target.config)
    options = {
        "streamer": dict(streamer=Cancels()),
        "processor": dict(logits_processor=[cancels]),
        "criterion": dict(stopping_criteria=[cancels]),
    }[code]
    drafter = fixed(AssistantDrafter(draft, tree=tree))
    with pytest.raises(Cancelled):
        target.generate(ids, past_key_values=cache, assistant_model=drafter, **GREEDY, **options)
    expected = target.generate(ids, **GREEDY)
    kept = max(cache.cache_seqlens[0] + 1, ids.shape[1])
    assert torch.equal(target.generate(expected[:, :kept], past_key_values=cache, max_length=25), expected)


@pytest.mark.parametrize("attention", ["sdpa", "flash_paged"])
def test_a_paged_cache_is_used_and_continued(attention, llama):
    target, draft, batch, _ = llama
    target.set_attn_implementation(attention)
    ids = batch["input_ids"][1:2]
    cache = PagedCache(target.config)
    first = target.generate(ids, past_key_values=cache, assistant_model=draft, max_new_tokens=6, do_sample=False)
    assert cache.cache_seqlens == [first.shape[1] - 1], "the last token has not been through the model"
    turn = torch.cat([first, torch.tensor([[40, 41, 42]])], 1)
    expected = target.generate(turn, max_new_tokens=6, do_sample=False)
    for drafts in ({"assistant_model": draft}, {"prompt_lookup_num_tokens": 3}, {}):
        continued = copy.deepcopy(cache)
        output = target.generate(turn, past_key_values=continued, **drafts, max_new_tokens=6, do_sample=False)
        assert torch.equal(output, expected)
        assert continued.cache_seqlens == [output.shape[1] - 1]


@pytest.mark.parametrize("attention", ["sdpa", "flash_paged"])
def test_a_callers_cache_keeps_all_sequences_at_their_own_length(attention, llama):
    target, draft, batch, plain = llama
    target.set_attn_implementation(attention)
    cache = PagedCache(target.config)
    options = dict(**batch, **GREEDY, eos_token_id=end_token(plain, 0, 3))
    expected = target.generate(**options)
    output = target.generate(**options, past_key_values=cache, assistant_model=draft)
    assert torch.equal(output, expected)
    prompts = [5, 11, 8] if attention == "flash_paged" else [11, 11, 11]
    assert cache.cache_seqlens == [prompts[0] + 3, prompts[1] + NEW - 1, prompts[2] + NEW - 1]
    with pytest.raises(ValueError, match="a batch is continued only when all its rows end at the same column"):
        target.generate(output, past_key_values=cache, assistant_model=draft, max_new_tokens=2)


def test_chunked_prefill(llama):
    target, draft, batch, plain = llama
    output = target.generate(**batch, assistant_model=draft, prefill_chunk_size=4, **GREEDY)
    assert torch.equal(output, plain)


def test_a_pool_too_small_says_so(llama):
    target, draft, batch, _ = llama
    with pytest.raises((ValueError, RuntimeError), match="block"):
        target.generate(
            **batch, past_key_values=PagedCache(target.config, num_blocks=2), assistant_model=draft, max_new_tokens=4
        )
