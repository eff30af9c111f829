"""Models that read images or sound: in the native loop and under speculation, tokens as transformers gives them."""

import copy

import pytest
import torch
from draft_models import drafting, fixed
from encoder_decoder_models import random_weights
from helpers import tiny_model
from multimodal_models import MODELS, multimodal_inputs, multimodal_model
from native_loop import NATIVE_LOOP, noted_answers
from oracle import Oracle
from test_speculative_distribution import RIGHT, likeliest_texts, texts_p_value
from transformers import DynamicCache, GemmaForCausalLM

from hf_efficient import (
    EvictionPolicy,
    KeyNorm,
    PagedCache,
    PromptLookup,
    Speculation,
    TokenRecycling,
    enable_speculation,
    optimize,
)
from hf_efficient.generation import model_state, served
from hf_efficient.generation.replay.captured_forward import CapturedForward


pytestmark = NATIVE_LOOP
OPTIONS = dict(max_new_tokens=14, do_sample=False)


@pytest.fixture
def replays(monkeypatch):
    """Whether each forward after the prompts ran captured."""
    calls, call = [], CapturedForward.__call__

    def wrapper(self, *args):
        outputs = call(self, *args)
        calls.append(outputs is not None)
        return outputs

    monkeypatch.setattr(CapturedForward, "__call__", wrapper)
    return calls


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens(name, monkeypatch, replays):
    """Plain and with drafters. One cache and its captures serve all calls, whatever the prompts leave in the model."""
    plain, answers = multimodal_model(name), noted_answers(monkeypatch)
    model = enable_speculation(copy.deepcopy(plain))
    draft = drafting(tiny_model("llama", vocab_size=96))
    lookup, tree = Speculation(PromptLookup(), adaptive=False), Speculation(TokenRecycling(), adaptive=False)
    for rows in (1, 3, 8):
        inputs = multimodal_inputs(name, rows)
        expected = plain.generate(**inputs, **OPTIONS)
        for drafter in (None, None, draft, lookup, tree):
            replays.clear()
            assert torch.equal(model.generate(**inputs, **OPTIONS, assistant_model=drafter), expected), (rows, drafter)
            assert any(replays) or drafter is not None
    assert answers == [True] * 6
    assert served.why_not(model) is None and len(model_state.latest(model).pool.entries) == 1


@pytest.mark.parametrize(
    "name, attention",
    [
        ("llava", "eager"),
        ("qwen2_5_vl", "flash_paged"),
        ("qwen3_vl", "eager"),
        ("qwen3_vl", "flash_paged"),
        ("mistral3", "eager"),
        ("paligemma", "eager"),
        ("paligemma2", "eager"),
        ("voxtral", "flash_paged"),
    ],
)
def test_other_attentions(name, attention):
    plain = multimodal_model(name, "eager" if name == "paligemma2" else "sdpa")
    model = enable_speculation(copy.deepcopy(plain))
    model.set_attn_implementation({"text_config": attention})
    lookup, tree = Speculation(PromptLookup(), adaptive=False), Speculation(TokenRecycling(), adaptive=False)
    for rows in (1, 8):
        inputs = multimodal_inputs(name, rows)
        expected = plain.generate(**inputs, **OPTIONS)
        for drafter in (None, lookup, tree):
            assert torch.equal(model.generate(**inputs, **OPTIONS, assistant_model=drafter), expected), (rows, drafter)


def test_prompts_that_see_ahead():
    """PaliGemma's prompts: text alone, whose mask transformers leaves out where nothing is padded; the next turn of a
    conversation, which is causal; and Gemma and Gemma 3 with such attention. Pages that evict and PaliGemma 2's
    window."""
    plain = multimodal_model("paligemma")
    model, inputs = enable_speculation(copy.deepcopy(plain)), multimodal_inputs("paligemma", 3)
    gemma = random_weights(GemmaForCausalLM(plain.config.text_config))
    lookup, tree = Speculation(PromptLookup(), adaptive=False), Speculation(TokenRecycling(), adaptive=False)
    ids, mask = inputs["input_ids"].clamp(min=8), inputs["attention_mask"]
    gemma3 = tiny_model("gemma3", use_bidirectional_attention=True, eos_token_id=None)
    others = [(each, enable_speculation(copy.deepcopy(each))) for each in (gemma, gemma3)]
    for each, faster in ((plain, model), *others):
        trees = Speculation(TokenRecycling(), adaptive=False)
        for call in (dict(input_ids=ids, attention_mask=mask), dict(input_ids=ids), dict(input_ids=ids[:1])):
            expected = each.generate(**call, **OPTIONS)
            for drafter in (None, trees, fixed(Oracle(expected, 0.7, 5, 96))):
                assert torch.equal(faster.generate(**call, **OPTIONS, assistant_model=drafter), expected), drafter

    def two_turns(model, cache, **draft):
        one = {key: value[:1] for key, value in inputs.items()}
        first = model.generate(**one, **OPTIONS, **draft, past_key_values=cache)
        return model.generate(torch.cat([first, ids[:1, -4:]], 1), **OPTIONS, **draft, past_key_values=cache)

    expected = two_turns(plain, DynamicCache(config=plain.config))
    for draft in ({}, dict(assistant_model=lookup), dict(assistant_model=tree)):
        assert torch.equal(two_turns(model, PagedCache(model.config), **draft), expected)
    cache = PagedCache(model.config, eviction=EvictionPolicy(KeyNorm(), 64))
    model.set_attn_implementation({"text_config": "flash_paged"})
    with pytest.raises(ValueError, match="eviction.* see later ones"):
        model.generate(**inputs, **OPTIONS, past_key_values=cache, assistant_model=lookup)
    narrow = enable_speculation(multimodal_model("paligemma2", "eager"))
    with pytest.raises(ValueError, match="beyond sliding_window=40 tokens the layers of PaliGemma.* need two masks"):
        narrow.generate(**inputs, max_new_tokens=60, prompt_lookup_num_tokens=3)


def test_samples_have_the_models_distribution():
    """5,000 continuations of four tokens of one prompt with an image, against their exact probabilities."""
    plain, inputs = multimodal_model("llava"), multimodal_inputs("llava", 1)
    model, ids = enable_speculation(copy.deepcopy(plain)), inputs["input_ids"]
    many = {key: x.expand(5_000, *x.shape[1:]) for key, x in inputs.items()}
    options = dict(do_sample=True, top_k=2, temperature=1.5, max_new_tokens=4, return_dict_in_generate=True)
    torch.manual_seed(0)
    guesses = plain.generate(**inputs, max_new_tokens=4, do_sample=False).expand(5_000, -1)
    found = model.generate(**many, **options, assistant_model=fixed(Oracle(guesses, 1.0, 2, 128)))
    assert 0 < found.accepted_tokens.sum() < found.drafted_tokens.sum()

    def logits_of(texts):
        return plain(texts, pixel_values=inputs["pixel_values"].expand(len(texts), -1, -1, -1)).logits[:, -1]

    assert texts_p_value(found.sequences, likeliest_texts(logits_of, ids[0].tolist(), 4)) > RIGHT


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "mistral3", "gemma3", "paligemma"])
def test_other_calls(name, monkeypatch):
    """Samples with transformers' random numbers, several of one prompt; sequences that end; text alone; dicts."""
    plain, answers = multimodal_model(name), noted_answers(monkeypatch)
    model, inputs = optimize(copy.deepcopy(plain)), multimodal_inputs(name, 3)
    longest = plain.generate(**inputs, **OPTIONS)
    calls = [
        dict(do_sample=True, num_return_sequences=2, max_new_tokens=12),
        dict(OPTIONS, eos_token_id=int(longest[1, -8])),
        dict(OPTIONS, repetition_penalty=1.3),
        dict(OPTIONS, return_dict_in_generate=True, output_logits=True),
    ]
    texts = [inputs] * len(calls) + [{key: inputs[key] for key in ("input_ids", "attention_mask")}]
    for given, call in zip(texts, [*calls, OPTIONS]):
        found = []
        for each in (plain, model):
            torch.manual_seed(5)
            found.append(each.generate(**given, **call))
        if call.get("return_dict_in_generate"):
            torch.testing.assert_close(found[1].logits, found[0].logits, rtol=1e-4, atol=1e-4)
            found = [each.sequences for each in found]
        assert torch.equal(*found), call
    assert answers == [True] * 5


def test_what_stays_with_transformers(monkeypatch):
    """Inputs of which it is not known what reads them, and a subclass with a step of its own."""
    model, answers = enable_speculation(multimodal_model("llava")), noted_answers(monkeypatch)
    inputs = multimodal_inputs("llava", 1)
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach()
    given = dict(inputs_embeds=embeddings, attention_mask=inputs["attention_mask"])
    expected = model.generate(inputs["input_ids"], **given, **OPTIONS)
    assert torch.equal(model.generate(inputs["input_ids"], **given, **OPTIONS, prompt_lookup_num_tokens=3), expected)
    kind = type(model)

    class Own(kind):
        def prepare_inputs_for_generation(self, *args, **kwargs):
            return super().prepare_inputs_for_generation(*args, **kwargs)

    model.__class__ = Own
    assert "overrides a step" in served.why_not(model)
    with pytest.raises(ValueError, match="overrides a step"):
        model.generate(**inputs, **OPTIONS, prompt_lookup_num_tokens=3)
    model.__class__ = kind
    model.generate(**inputs, **OPTIONS)
    assert answers == [False, True]
