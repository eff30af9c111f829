import copy
import functools
import pickle
from threading import Thread

import pytest
import torch
from helpers import TINY_MODELS, left_padded_batch, tiny_model
from test_verification import chi_square_excess
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    DynamicCache,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

from hf_efficient import PagedCache, SpeculativeGenerationMixin, enable_speculation, speculative_generate
from hf_efficient.generation.speculative import SpeculativeOutput


NEW = 14
SDPA_REFUSED = ("gemma2", "gpt_oss")  # transformers offers no SDPA for these


def perturbed(model, amount: float, seed: int = 1):
    """A draft that agrees with `model` now and then."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * amount)
    return drafting(draft)


def drafting(model, tokens: int = 4):
    model.generation_config.num_assistant_tokens = tokens
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


@functools.cache
def models(name: str):
    """Target and drafts of one architecture, with the plain greedy outputs of a batch of 3 and of its middle row."""
    target = tiny_model(name)
    drafts = {"good": perturbed(target, 0.1), "bad": drafting(tiny_model(name, seed=7))}
    batch = left_padded_batch()
    single = {key: value[1:2] for key, value in batch.items()}
    plain = [target.generate(**inputs, max_new_tokens=NEW, do_sample=False) for inputs in (batch, single)]
    drafting(enable_speculation(target))
    return target, {**drafts, "itself": target}, (batch, single), plain


@pytest.fixture
def llama():
    """Target, good draft, batch of 3 and its plain greedy output; the generation config is fresh."""
    target, drafts, (batch, _), (plain, _) = models("llama")
    saved = copy.deepcopy(target.generation_config)
    yield target, drafts["good"], batch, plain
    target.generation_config = saved


def counting(model, monkeypatch) -> list[tuple[int, int]]:
    """(rows, columns) of each forward of `model` from now on."""
    shapes, forward = [], model.forward

    @functools.wraps(forward)
    def wrapper(*args, **kwargs):
        shapes.append(tuple(kwargs["input_ids"].shape))
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", wrapper)
    return shapes


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flash_paged"])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_greedy_output_is_that_of_plain_generation(name, attention):
    if attention == "sdpa" and name in SDPA_REFUSED:
        pytest.skip("transformers offers no SDPA for this architecture")
    target, drafts, inputs, plain = models(name)
    for model in drafts.values():
        model.set_attn_implementation(attention)
    options = [(kind, {"assistant_model": draft}) for kind, draft in drafts.items()]
    options.append(("lookup", {"prompt_lookup_num_tokens": 3}))
    for batch, expected in zip(inputs, plain):
        for kind, option in options:
            output = target.generate(
                **batch, **option, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True
            )
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
        output = target.generate(**batch, assistant_model=draft, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(output, expected), name


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_learned_positions_are_not_overrun(name):
    """The last tokens take the model's last positions: filler and drafts must stay inside."""
    batch = left_padded_batch()
    limit = {"gpt2": "n_positions", "opt": "max_position_embeddings"}[name]
    target = tiny_model(name, **{limit: 11 + NEW - 1})
    expected = target.generate(**batch, max_new_tokens=NEW, do_sample=False)
    draft = perturbed(target, 0.3)
    for attention in ("sdpa", "flash_paged"):
        enable_speculation(target).set_attn_implementation(attention)
        output = target.generate(**batch, assistant_model=draft, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(output, expected)


# --- what acts at every position ---


class StopAfter(StoppingCriteria):
    """Stops a row right after `token`."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


class Recorder(BaseStreamer):
    def __init__(self):
        self.values, self.ended = [], 0

    def put(self, value):
        self.values.append(value.flatten().tolist())

    def end(self):
        self.ended += 1


def allowed(batch_index: int, ids: torch.Tensor) -> list[int]:
    """Depends on the row, on the length and on the last token."""
    return [t for t in range(3, 128) if (t + batch_index + len(ids) + int(ids[-1])) % 3]


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
def test_logits_processors_see_what_they_see_in_plain_generation(kind, llama):
    target, draft, batch, plain = llama
    options = dict(**batch, **POSITION_DEPENDENT[kind], max_new_tokens=NEW, do_sample=False)
    expected = target.generate(**options)
    if kind not in ("forced_end", "decay"):
        assert not torch.equal(expected, plain), "the option must matter"
    for drafts in ({"assistant_model": draft}, {"assistant_model": target}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(target.generate(**options, **drafts), expected)


def end_token(plain: torch.Tensor, row: int, step: int) -> int:
    """A token that row `row` says for the first time at `step`."""
    generated = plain[row, -NEW:].tolist()
    assert generated[step] not in generated[:step]
    return generated[step]


@pytest.mark.parametrize("minimum", [None, 9])
def test_end_of_sequence_inside_a_draft(minimum, llama):
    target, draft, batch, plain = llama
    for row, step in ((0, 2), (1, 6), (2, 0)):
        eos = [end_token(plain, row, step), 2]
        options = dict(
            **batch, max_new_tokens=NEW, do_sample=False, eos_token_id=eos, pad_token_id=1, min_new_tokens=minimum
        )
        expected = target.generate(**options)
        for drafts in ({"assistant_model": draft}, {"assistant_model": target}, {"prompt_lookup_num_tokens": 3}):
            assert torch.equal(target.generate(**options, **drafts), expected)


@pytest.mark.parametrize("eos", [2, None])
def test_stopping_criteria_act_at_every_position(eos, llama):
    """Without an end-of-sequence token, plain generation lets stopped rows run on until all have stopped."""
    target, draft, batch, plain = llama
    target.generation_config.eos_token_id = eos
    tokens = [end_token(plain, 0, 3), end_token(plain, 1, 8), end_token(plain, 2, 1)]
    criteria = StoppingCriteriaList([StopAfter(token) for token in tokens])
    options = dict(**batch, max_new_tokens=NEW, do_sample=False, stopping_criteria=criteria)
    expected = target.generate(**options)
    assert expected.shape[1] < plain.shape[1]
    for drafts in ({"assistant_model": draft}, {"assistant_model": target}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(target.generate(**options, **drafts), expected)


def test_stopping_criteria_get_the_scores_so_far(llama):
    target, draft, batch, _ = llama
    seen = []

    class Check(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            seen.append((input_ids.shape[1] - 11, len(scores), scores[-1].shape))
            return torch.zeros(len(input_ids), dtype=torch.bool)

    target.generate(
        **batch,
        assistant_model=draft,
        max_new_tokens=5,
        stopping_criteria=StoppingCriteriaList([Check()]),
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert {length for length, _, _ in seen} == {1, 2, 3, 4, 5}
    assert all(length == count and shape == (3, 128) for length, count, shape in seen)


@pytest.mark.parametrize("tokens", [1, 2, 6])
def test_never_longer_than_asked(tokens, llama):
    target, _, batch, plain = llama
    draft = drafting(copy.deepcopy(target), 20)
    output = target.generate(**batch, assistant_model=draft, max_new_tokens=tokens, do_sample=False)
    assert torch.equal(output, plain[:, : 11 + tokens])


# --- what comes back ---


def test_scores_and_logits_are_those_of_plain_generation(llama):
    target, draft, batch, plain = llama
    options = dict(**batch, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_scores=True)
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


def test_statistics_count_what_they_say(llama, monkeypatch):
    target, draft, batch, plain = llama
    shapes = counting(target, monkeypatch)
    output = target.generate(
        **batch,
        assistant_model=draft,
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=end_token(plain, 0, 3),
        return_dict_in_generate=True,
    )
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


def test_fewer_forwards_than_tokens_when_the_draft_is_right(llama, monkeypatch):
    target, _, batch, plain = llama
    draft = drafting(copy.deepcopy(target))
    shapes = counting(target, monkeypatch)
    output = target.generate(batch["input_ids"][1:2], assistant_model=draft, max_new_tokens=NEW, do_sample=False)
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
    target.generate(**single, max_new_tokens=NEW, do_sample=False, streamer=expected)
    for drafts in ({"assistant_model": draft}, {"prompt_lookup_num_tokens": 3}):
        streamer = Recorder()
        target.generate(**single, **drafts, max_new_tokens=NEW, do_sample=False, streamer=streamer)
        assert streamer.values == expected.values and streamer.ended == 1
    streamer = Recorder()
    target.generate(
        **single,
        custom_generate=speculative_generate,
        draft_model=draft,
        token_streamer=streamer,
        max_new_tokens=NEW,
        do_sample=False,
    )
    assert streamer.values == expected.values and streamer.ended == 1


def test_a_streamer_is_never_left_hanging(llama):
    target, draft, batch, _ = llama
    streamer = Recorder()
    with pytest.raises(ValueError, match="streamer was given with a batch of 3"):
        target.generate(**batch, assistant_model=draft, max_new_tokens=4, streamer=streamer)
    assert streamer.ended == 1


# --- caches ---


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
def test_a_callers_cache_keeps_all_rows_at_their_own_length(attention, llama):
    target, draft, batch, plain = llama
    target.set_attn_implementation(attention)
    cache = PagedCache(target.config)
    options = dict(**batch, max_new_tokens=NEW, do_sample=False, eos_token_id=end_token(plain, 0, 3))
    expected = target.generate(**options)
    output = target.generate(**options, past_key_values=cache, assistant_model=draft)
    assert torch.equal(output, expected)
    prompts = [5, 11, 8] if attention == "flash_paged" else [11, 11, 11]
    assert cache.cache_seqlens == [prompts[0] + 3, prompts[1] + NEW - 1, prompts[2] + NEW - 1]
    with pytest.raises(ValueError, match="a batch is continued only when all its rows end at the same column"):
        target.generate(output, past_key_values=cache, assistant_model=draft, max_new_tokens=2)


def test_chunked_prefill(llama):
    target, draft, batch, plain = llama
    output = target.generate(**batch, assistant_model=draft, prefill_chunk_size=4, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(output, plain)


def test_a_pool_too_small_says_so(llama):
    target, draft, batch, _ = llama
    with pytest.raises((ValueError, RuntimeError), match="block"):
        target.generate(
            **batch, past_key_values=PagedCache(target.config, num_blocks=2), assistant_model=draft, max_new_tokens=4
        )


# --- sampling ---


@pytest.mark.parametrize("drafting_with", ["assistant", "lookup"])
@pytest.mark.parametrize("processor", ["pointwise", "position_dependent"])
def test_sampled_text_has_the_distribution_of_the_target(drafting_with, processor):
    """Three tokens from a vocabulary of 8, many rows at once, against the exact probabilities of all 512 texts."""
    target = tiny_model("llama", vocab_size=8, eos_token_id=None, pad_token_id=None)
    rows, prompt = 4000, torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4]])
    warpers = dict(temperature=1.7, top_k=6) if processor == "pointwise" else dict(top_k=0, repetition_penalty=1.4)
    option = {"assistant_model": perturbed(target, 0.5)} if drafting_with == "assistant" else {}
    if drafting_with == "lookup":
        option = {"prompt_lookup_num_tokens": 2, "max_matching_ngram_size": 1}
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
        prompt.expand(rows, -1),
        **option,
        **warpers,
        max_new_tokens=3,
        do_sample=True,
        return_dict_in_generate=True,
    )
    assert 0 < output.accepted_tokens.sum() < output.drafted_tokens.sum(), "some accepted, some rejected"
    text = output.sequences[:, -3:] @ torch.tensor([64, 8, 1])
    excess = chi_square_excess(torch.bincount(text, minlength=512), probabilities)
    assert excess < 4, f"chi-square {excess:.1f} standard deviations too large"


# --- ways in ---


def test_custom_generate_is_the_same_loop(llama):
    target, draft, batch, plain = llama
    stock = tiny_model("llama")
    assert not isinstance(stock, SpeculativeGenerationMixin)
    options = dict(**batch, custom_generate=speculative_generate, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(stock.generate(**options, draft_model=draft), plain)
    output = stock.generate(**options, prompt_lookup_num_tokens=3, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain) and output.num_steps > 0
    single = stock.generate(batch["input_ids"][1:2], draft_model=draft, num_return_sequences=2, **{
        **{k: v for k, v in options.items() if k not in batch}, "do_sample": True, "top_k": 1
    })  # fmt: skip
    assert torch.equal(single, plain[1:2].expand(2, -1))


def test_enabling_keeps_the_class_to_the_outside(tmp_path):
    model = tiny_model("llama")
    cls = type(model)
    assert enable_speculation(model) is model and enable_speculation(model) is model
    assert isinstance(model, cls) and type(model).__mro__.count(SpeculativeGenerationMixin) == 1
    assert (type(model).__name__, type(model).__module__) == (cls.__name__, cls.__module__)
    model.save_pretrained(tmp_path)
    reloaded = cls.from_pretrained(tmp_path)
    assert reloaded.config.architectures == ["LlamaForCausalLM"]
    batch = left_padded_batch()
    expected = reloaded.generate(**batch, max_new_tokens=4, do_sample=False)
    for duplicate in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(duplicate, SpeculativeGenerationMixin)
        output = duplicate.generate(**batch, max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=2)
        assert torch.equal(output, expected)
    with pytest.raises(TypeError, match="enable_speculation takes a transformers model"):
        enable_speculation(torch.nn.Linear(2, 2))


def character_tokenizer():
    characters = {"<pad>": 0, "<s>": 1, "</s>": 2, **{chr(i + 29): i for i in range(3, 128)}}
    tokenizer = Tokenizer(WordLevel(characters, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def test_pipeline_text_streamer_and_stop_strings(llama):
    target, draft, _, _ = llama
    tokenizer = character_tokenizer()
    prompts = ["To be or", "not to be that"]
    expected = pipeline("text-generation", model=tiny_model("llama"), tokenizer=tokenizer)
    speculative = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=draft)
    options = dict(max_new_tokens=8, do_sample=False, batch_size=2)
    texts = expected(prompts, **options)
    assert speculative(prompts, **options) == texts

    inputs = tokenizer(prompts[:1], return_tensors="pt", return_token_type_ids=False)
    text = texts[0][0]["generated_text"]
    stop = text[len(prompts[0]) + 3]
    short = target.generate(
        **inputs, stop_strings=[stop], tokenizer=tokenizer, max_new_tokens=8, do_sample=False, assistant_model=draft
    )
    assert tokenizer.decode(short[0]) == text[: text.index(stop, len(prompts[0])) + 1]

    streamer = TextIteratorStreamer(tokenizer, timeout=20)
    keywords = dict(**inputs, max_new_tokens=8, do_sample=False, assistant_model=draft, streamer=streamer)
    thread = Thread(target=target.generate, kwargs=keywords)
    thread.start()
    assert "".join(streamer) == text
    thread.join()


# --- what is refused, before anything is computed ---


class Vocabulary:
    def __init__(self, size: int, shift: int = 0):
        self.size, self.shift = size, shift

    def get_vocab(self):
        return {f"w{i + self.shift}": i for i in range(self.size)}


@pytest.mark.parametrize("size", [96, 160])
def test_differently_padded_vocabularies_need_the_tokenizers(size, llama):
    target, _, batch, plain = llama
    draft = drafting(tiny_model("llama", vocab_size=size, seed=5))
    batch = {**batch, "input_ids": batch["input_ids"] % 96}
    options = dict(**batch, max_new_tokens=NEW, do_sample=False)
    expected = target.generate(**options)
    with pytest.raises(ValueError, match="different tokenizers"):  # transformers' own words
        target.generate(**options, assistant_model=draft)
    same = dict(tokenizer=Vocabulary(90), assistant_tokenizer=Vocabulary(90))
    if expected.max() < size:
        assert torch.equal(target.generate(**options, assistant_model=draft, **same), expected)
        torch.manual_seed(0)
        target.generate(**{**options, "do_sample": True, "top_k": 0}, assistant_model=draft, **same)
    with pytest.raises(ValueError, match=f"vocab_size=128, the assistant vocab_size={size}"):
        target.generate(**options, custom_generate=speculative_generate, draft_model=draft)
    with pytest.raises(ValueError, match="the same vocabulary and token ids"):
        other = dict(tokenizer=Vocabulary(90), assistant_tokenizer=Vocabulary(90, shift=1))
        target.generate(**options, assistant_model=draft, **other)


REFUSED = {
    "beams": (dict(num_beams=2), "num_beams=2: speculation is greedy or sampled"),
    "no_cache": (dict(use_cache=False), "use_cache=False"),
    "static": (dict(cache_implementation="static"), "cache_implementation='static'"),
    "quantized": (dict(cache_implementation="offloaded"), "cache_implementation='offloaded'"),
    "lookup_too": (dict(prompt_lookup_num_tokens=3), "prompt_lookup_num_tokens=3 and an assistant model were both"),
    "hidden_states": (dict(output_hidden_states=True, return_dict_in_generate=True), "output_hidden_states=True"),
    "attentions": (dict(output_attentions=True, return_dict_in_generate=True), "output_attentions=True"),
    "ensemble": (dict(assistant_ensemble_weight=0.5), "assistant_ensemble_weight=0.5"),
    "synced": (dict(synced_gpus=True), "synced_gpus=True"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refusals_name_the_argument(kind, llama, monkeypatch):
    target, draft, batch, _ = llama
    target.set_attn_implementation("eager" if kind == "attentions" else "sdpa")
    shapes = counting(target, monkeypatch)
    options, message = REFUSED[kind]
    with pytest.raises(ValueError, match=message):
        target.generate(**batch, assistant_model=draft, max_new_tokens=4, **options)
    assert shapes == []


def test_custom_generate_refusals(llama):
    target, draft, batch, _ = llama
    options = dict(**batch, custom_generate=speculative_generate, max_new_tokens=4)
    with pytest.raises(ValueError, match="nothing to draft with"):
        target.generate(**options)
    with pytest.raises(ValueError, match="num_beams=2"):
        target.generate(**options, draft_model=draft, num_beams=2)
    with pytest.raises(ValueError, match="remembers its last call"):
        target.generate(**options, draft_model=draft, guidance_scale=1.5)
    embeds = target.get_input_embeddings()(batch["input_ids"])
    with pytest.raises(ValueError, match="cannot start from inputs_embeds alone"):
        target.generate(
            inputs_embeds=embeds, custom_generate=speculative_generate, draft_model=draft, max_new_tokens=4
        )


def test_foreign_caches_and_models_are_refused(llama, monkeypatch):
    import transformers

    target, draft, batch, _ = llama
    with pytest.raises(ValueError, match="past_key_values=DynamicCache: speculation runs on a PagedCache"):
        target.generate(
            **batch, past_key_values=DynamicCache(config=target.config), assistant_model=draft, max_new_tokens=4
        )
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=128, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    t5.generation_config.decoder_start_token_id = 0
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder"):
        enable_speculation(t5).generate(batch["input_ids"], prompt_lookup_num_tokens=2, max_new_tokens=4)
    bloom = transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=128, hidden_size=16, n_layer=1, n_head=2)
    )
    with pytest.raises(ValueError, match="takes no position_ids"):
        enable_speculation(bloom).generate(**batch, prompt_lookup_num_tokens=2, max_new_tokens=4)
    with pytest.raises(ValueError, match="assistant_model=BloomForCausalLM"):
        target.generate(**batch, assistant_model=bloom, max_new_tokens=4)
    flex = enable_speculation(tiny_model("llama"))
    flex.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="attn_implementation='flex_attention'"):
        flex.generate(**batch, prompt_lookup_num_tokens=2, max_new_tokens=4)


def test_bad_draft_settings_are_refused(llama):
    target, _, batch, _ = llama
    draft = drafting(copy.deepcopy(target), 0)
    with pytest.raises(ValueError, match="num_assistant_tokens=0"):
        target.generate(**batch, assistant_model=draft, max_new_tokens=4)
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens=0"):
        target.generate(**batch, prompt_lookup_num_tokens=0, max_new_tokens=4)
