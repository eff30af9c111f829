"""What a request of continuous batching may ask for itself: stop strings, and how its tokens are drawn."""

import itertools

import pytest
import tokenizers
import torch
from helpers import byte_level_tokenizer, needs_transformers, tiny_model
from saved_models import INT4, folder, load
from test_batched_speculation import drafted  # noqa: F401
from test_batched_step import NEW_TOKENS, PAGE_SIZE, PROMPTS, manager_of, one_by_one, plain  # noqa: F401
from transformers import GenerationConfig, PreTrainedTokenizerFast

from hf_efficient import ContinuousBatchingConfig
from hf_efficient.generation.replay.captured_step import CapturedStep
from hf_efficient.generation.stop_strings import CutText, StopStrings, cut
from hf_efficient.kernels.replay.recorder import interpreter


pytestmark = [
    needs_transformers("5.19", "options of requests in continuous batching"),
    pytest.mark.skipif(interpreter() is None, reason="no compiler, or a CPU without AVX-512"),
]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level_tokenizer()


def alone(model, prompt, tokenizer, **options):
    """The new tokens of `generate()`."""
    model.set_attn_implementation("eager")
    options = dict(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=2) | options
    row = model.generate(torch.tensor([prompt]), tokenizer=tokenizer, **options)[0]
    return row[len(prompt) :].tolist()


def stops_of(tokenizer, answers):
    """A string of each answer, in turn: within a token, of several tokens, and the beginning of one."""
    texts = [tokenizer.decode(answer, skip_special_tokens=False) for answer in answers]
    return [text[at : at + length] for text, (at, length) in zip(texts, itertools.cycle(((2, 1), (3, 3), (5, 6))))]


def batched(model, tokenizer, prompts=PROMPTS, generation=None, **config):
    model.set_attn_implementation("flash_paged")
    options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": 2, "pad_token_id": 0, "do_sample": False}
    outputs = model.generate_batch(
        inputs=prompts,
        generation_config=GenerationConfig(**options | (generation or {})),
        continuous_batching_config=ContinuousBatchingConfig(
            **{"num_blocks": 128, PAGE_SIZE: 4, "max_batch_tokens": 24, **config}
        ),
        tokenizer=tokenizer,
    )
    assert [output.error for output in outputs.values() if output.error] == []
    return [output.generated_tokens for output in outputs.values()]


@pytest.mark.parametrize(("name", "chosen"), [("llama", range(3)), ("gpt2", [0]), ("gemma3", [1]), ("qwen3_moe", [2])])
def test_stop_strings_end_a_request_where_generate_ends(name, chosen, tokenizer, drafted):  # noqa: F811
    """Without drafts, with accepted drafts that run past the stop string, and where requests are preempted. A stop
    string is of every kind in one architecture, of one kind in the others. How all architectures take drafts back is in
    test_batched_speculation.py."""
    model = tiny_model(name)
    whole, cut = one_by_one(model, new_tokens=24), 0
    stops = stops_of(tokenizer, whole)
    for stop in (stops[index] for index in chosen):
        expected = [alone(model, prompt, tokenizer, stop_strings=stop, max_new_tokens=24) for prompt in PROMPTS]
        cut += sum(len(answer) < len(other) for answer, other in zip(expected, whole))
        generation = dict(stop_strings=[stop, "never in the text"], max_new_tokens=24)
        assert batched(model, tokenizer, generation=generation) == expected, stop
        assert batched(model, tokenizer, generation=generation, num_blocks=13) == expected, stop
        assert batched(model, tokenizer, generation=generation, assistant_model=model) == expected, stop
    assert cut >= len(chosen) and drafted["accepted"] > 0


def test_a_stop_string_may_begin_in_the_prompt(tokenizer):
    """As in `generate()`, whose criterion reads the last tokens of the prompt, too. One within the prompt is none."""
    model = tiny_model("llama")
    (first,) = one_by_one(model, PROMPTS[:1])
    text = tokenizer.decode([PROMPTS[0][-1], first[0]], skip_special_tokens=False)
    assert len(text) > 1
    for stop in (text, tokenizer.decode(PROMPTS[0][-3:], skip_special_tokens=False)):
        expected = alone(model, PROMPTS[0], tokenizer, stop_strings=stop)
        assert batched(model, tokenizer, PROMPTS[:1], dict(stop_strings=stop)) == [expected]
        assert len(expected) == (1 if stop == text else NEW_TOKENS)


def test_stop_strings_of_one_call_are_gone_with_it(tokenizer):
    """As arguments of `generate_batch`, and of a manager that stays."""
    model = tiny_model("llama")
    whole = one_by_one(model)
    stop = tokenizer.decode(whole[0], skip_special_tokens=False)[2:4]
    expected = [alone(model, prompt, tokenizer, stop_strings=stop) for prompt in PROMPTS]
    model.set_attn_implementation("flash_paged")
    options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": 2, "pad_token_id": 0, "do_sample": False}
    pages = ContinuousBatchingConfig(**{"num_blocks": 128, PAGE_SIZE: 4, "max_batch_tokens": 24})
    config, stopping = GenerationConfig(**options), GenerationConfig(**options, stop_strings=stop)
    try:
        for generation, arguments, answers in (
            (stopping, dict(tokenizer=tokenizer), expected),
            (config, {}, whole),
            (config, dict(stop_strings=stop, tokenizer=tokenizer), expected),
        ):
            outputs = model.generate_batch(PROMPTS, generation, pages, persistent_manager=True, **arguments)
            assert [output.generated_tokens for output in outputs.values()] == answers
    finally:
        model.destroy_cached_continuous_batching_manager()
    assert stopping.stop_strings == stop and expected != whole
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="stop_strings in generate_batch needs a model with attn_implementation"):
        pages.auto_switch_to_flash = False
        model.generate_batch(PROMPTS, config, pages, stop_strings=stop, tokenizer=tokenizer)


def test_stop_strings_need_a_tokenizer(tokenizer):
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="stop_strings need the model's tokenizer"):
        batched(model, None, generation=dict(stop_strings="a"))
    with pytest.raises(ValueError, match=r"stop_strings=\['a', ''\]: must be a string"):
        batched(model, tokenizer, generation=dict(stop_strings=["a", ""]))
    manager = manager_of(model)
    with pytest.raises(ValueError, match="stop_strings need the model's tokenizer"):
        manager.add_request(PROMPTS[0], stop_strings="a")


def results_of(manager, requests):
    """The output of each request, given as (prompt, options)."""
    names = [manager.add_request(prompt, max_new_tokens=NEW_TOKENS, **options) for prompt, options in requests]
    found = {}
    while len(found) < len(names):
        result = manager.get_result(timeout=60)
        found[result.request_id] = result
    assert [result.error for result in found.values() if result.error] == []
    return [found[name] for name in names]


def manager_with(model, generation=None, **config):
    model.set_attn_implementation("flash_paged")
    return model.init_continuous_batching(
        generation_config=GenerationConfig(eos_token_id=2, pad_token_id=0, **(generation or {})),
        continuous_batching_config=ContinuousBatchingConfig(
            **{"num_blocks": 512, PAGE_SIZE: 4, "max_batch_tokens": 200, "per_request_processors": True, **config}
        ),
    )


@pytest.mark.parametrize("default", [dict(do_sample=False), dict(do_sample=True, temperature=1.0, top_k=5)])
def test_each_request_says_whether_it_samples(default, tokenizer):
    """Greedy ones beside others get the tokens of `generate()` alone."""
    model = tiny_model("llama")
    expected, sampled = one_by_one(model), dict(do_sample=True, temperature=3.0, top_k=0)
    manager = manager_with(model, default)
    manager.start()
    try:
        requests = [(prompt, dict(do_sample=False)) for prompt in PROMPTS]
        mixed = [each for pair in zip(requests, [(prompt, sampled) for prompt in PROMPTS]) for each in pair]
        outputs = results_of(manager, mixed)
        alone = results_of(manager, [(PROMPTS[0], sampled)] * 8)
    finally:
        manager.stop(block=True)
    assert [output.generated_tokens for output in outputs[::2]] == expected
    assert len({tuple(output.generated_tokens) for output in alone}) > 1


def test_options_of_requests_draw_from_their_own_distribution():
    """First tokens of 300 samples for each of four settings, all in the same batches: as often as by the warped
    probabilities of `generate()`'s processors."""
    model, prompt, count = tiny_model("llama"), PROMPTS[1], 300
    settings = [
        dict(temperature=0.5, top_k=4),
        dict(temperature=2.0, top_p=0.3),
        dict(temperature=1.0),
        dict(temperature=0.7, top_k=10, top_p=0.5),
    ]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, -1:].float()
    manager = manager_with(model, dict(do_sample=True, max_new_tokens=1), seed=5, allow_block_sharing=False)
    manager.start()
    try:
        requests = [(prompt, options) for options in settings for _ in range(count)]
        names = [manager.add_request(prompt, max_new_tokens=1, **options) for _, options in requests]
        found = {}
        while len(found) < len(names):
            result = manager.get_result(timeout=60)
            found[result.request_id] = result.generated_tokens[0]
    finally:
        manager.stop(block=True)
    draws = [found[name] for name in names]
    for index, options in enumerate(settings):
        warped = model._get_logits_processor(GenerationConfig(do_sample=True, **{"top_k": 0, **options}))
        probabilities = warped(torch.tensor([prompt]), logits.clone()).softmax(-1)[0]
        own = draws[index * count : (index + 1) * count]
        assert all(probabilities[token] > 0 for token in own), options
        for token, probability in enumerate(probabilities.tolist()):
            spread = max((probability * (1 - probability) / count) ** 0.5, 1 / count)
            assert own.count(token) / count == pytest.approx(probability, abs=4.5 * spread), options


@pytest.mark.parametrize("unused", [{}, dict(do_sample=False, temperature=0.5, top_k=3)])
def test_log_probabilities_of_greedy_requests(unused):
    """Those of the scores as they are: what warps them is for requests that sample."""
    model = tiny_model("qwen3")
    managers = manager_of(model, return_logprobs=True), manager_with(model, unused, return_logprobs=True)
    results = []
    for manager in managers:
        manager.start()
        try:
            results.append(results_of(manager, [(prompt, {}) for prompt in PROMPTS]))
        finally:
            manager.stop(block=True)
    for output, other in zip(*results):
        assert output.generated_tokens == other.generated_tokens
        assert output.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_options_of_one_request_are_gone_with_it(tokenizer):
    """Stop strings and sampling of a request do not reach the next one."""
    model = tiny_model("llama")
    expected = one_by_one(model)
    manager = manager_with(model)
    manager.start()
    try:
        stop = tokenizer.decode(expected[0], skip_special_tokens=False)[2:4]
        options = dict(stop_strings=stop, tokenizer=tokenizer)
        (short,) = results_of(manager, [(PROMPTS[0], options)])
        results_of(manager, [(PROMPTS[0], dict(do_sample=True, temperature=5.0))])
        (whole,) = results_of(manager, [(PROMPTS[0], {})])
    finally:
        manager.stop(block=True)
    assert len(short.generated_tokens) < NEW_TOKENS and whole.generated_tokens == expected[0]


def test_a_quantized_model_with_sdpa(tokenizer):
    """It is switched to our attention while it serves, and its stop strings are read. Others are not ours to read."""
    model = load(folder("llama"), **INT4)
    stop = tokenizer.decode(one_by_one(model)[0], skip_special_tokens=False)[2:4]
    expected = [alone(model, prompt, tokenizer, stop_strings=stop) for prompt in PROMPTS]
    model.set_attn_implementation("sdpa")
    options = dict(max_new_tokens=NEW_TOKENS, eos_token_id=2, pad_token_id=0, do_sample=False, stop_strings=stop)
    outputs = model.generate_batch(
        PROMPTS,
        generation_config=GenerationConfig(**options),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=128, max_batch_tokens=24),
        tokenizer=tokenizer,
    )
    assert [output.generated_tokens for output in outputs.values()] == expected


def test_a_batch_in_which_nobody_samples_draws_nothing(monkeypatch):
    model = tiny_model("llama")
    manager = manager_with(model, dict(do_sample=True))
    monkeypatch.setattr(torch, "multinomial", lambda *_, **__: pytest.fail("drawn"))
    calls, original = [], CapturedStep.__call__
    monkeypatch.setattr(CapturedStep, "__call__", lambda self, *args: calls.append(1) or original(self, *args))
    manager.start()
    try:
        results_of(manager, [(prompt, dict(do_sample=False)) for prompt in PROMPTS])
    finally:
        manager.stop(block=True)
    assert calls


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(do_sample=True, temperature=0.0), "temperature=0.0: must be a number greater than 0; do_sample=False"),
        (dict(do_sample=True, temperature=float("nan")), "temperature=nan"),
        (dict(do_sample=True, temperature=10**400), "temperature=10+: must be a number"),
        (dict(do_sample=True, top_p=1.5), "top_p=1.5: must be a number greater than 0 and at most 1"),
        (dict(do_sample=True, top_k=2.5), "top_k=2.5: must be an integer of at least 1, or 0"),
        (dict(do_sample="yes"), "do_sample='yes': must be True or False"),
        (dict(temperature=0.5), "temperature=0.5 changes nothing without do_sample=True"),
        (dict(stop_strings=3), "stop_strings=3: must be a string"),
    ],
)
def test_bad_options_are_refused_by_name(options, message):
    manager = manager_with(tiny_model("llama"))
    with pytest.raises(ValueError, match=message):
        manager.add_request(PROMPTS[0], **options)


@pytest.mark.parametrize("default", [{}, dict(do_sample=True, temperature=1e-50, top_k=10**22)])
def test_extreme_options_end_no_manager(default):
    """As temperature 0 and all tokens. They overflowed float32 and int32 in the loop of all requests."""
    manager, prompt = manager_with(tiny_model("llama"), default), PROMPTS[0]
    manager.start()
    try:
        options = [dict(do_sample=False), dict(do_sample=True, temperature=1e-50, top_k=10**22), dict(do_sample=True)]
        outputs = results_of(manager, [(prompt, each) for each in options])
    finally:
        manager.stop(block=True)
    greedy, cold, other = (output.generated_tokens for output in outputs)
    assert cold == greedy and other and (other == greedy or not default)


def test_options_of_requests_are_asked_for_in_the_config():
    """A manager whose requests do not set them refuses them, and names what would let them."""
    manager = manager_with(tiny_model("llama"), dict(do_sample=True), per_request_processors=False)
    with pytest.raises(ValueError, match=r"temperature of a request needs .*per_request_processors=True"):
        manager.add_request(PROMPTS[0], temperature=0.5)


def test_text_is_cut_where_a_stop_string_begins(tokenizer):
    """In parts of any length, as from one text; what might be its beginning is held back."""

    class Parts:
        def step(self, tokenizer, part):
            return part or None

    text = "one two\n\nthree"
    for stops, expected in (
        (["\n\n"], "one two"),
        (["two\n\n\n"], text),
        (["\nthr", "ee"], "one two\n"),
        (["one"], ""),
        (["e\n", "o\n\nt"], "one tw"),
    ):
        for lengths in itertools.product((1, 2, 3, 5), repeat=2):
            stream, parts, at = CutText(Parts(), StopStrings(stops, tokenizer)), [], 0
            for length in itertools.cycle(lengths):
                if at >= len(text):
                    break
                parts.append(stream.step(None, text[at : at + length]))
                at += length
            assert "".join(filter(None, parts)) + stream.rest() == expected
            assert stream.is_cut == (expected != text)
    answer = "The river runs to the sea"
    tokens = tokenizer.encode(answer, add_special_tokens=False)
    for begin in range(1, len(answer) - 2):
        stop = answer[begin : begin + 3]
        kept, text = cut(tokens, StopStrings(stop, tokenizer), tokenizer)
        assert tokenizer.decode(kept) == text == answer[: answer.index(stop)]
    assert cut(tokens, StopStrings("nowhere", tokenizer), tokenizer) == (tokens, None)


def test_the_text_before_a_stop_string_is_not_encoded_anew():
    """Llama 2's tokenizer puts a space before every text that it encodes, and takes one away where it decodes."""
    words = {"▁Hello": 0, "▁world": 1, "▁": 2, "▁wor": 3, **{letter: i + 4 for i, letter in enumerate("wordl")}}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="▁"))
    model.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(" ", 1, 0)]
    )
    model.normalizer = tokenizers.normalizers.Prepend("▁")
    fast = PreTrainedTokenizerFast(tokenizer_object=model)
    tokens, text = cut([0, 1], StopStrings("ld", fast), fast)
    assert text == "Hello wor" and tokens[:1] == [0]
