"""The ways into speculation, and what is refused before anything is computed."""

import copy
import logging
import pickle
from threading import Thread

import draft_models
import pytest
import torch
import transformers
from draft_models import GREEDY, character_tokenizer, counting, drafting
from helpers import left_padded_batch, tiny_model
from transformers import DynamicCache, GenerationConfig, TextIteratorStreamer, pipeline

from hf_efficient import SpeculativeGenerationMixin, enable_speculation, speculative_generate
from hf_efficient.generation.speculation.options import chosen


llama = pytest.fixture(draft_models.llama)


def test_custom_generate_is_the_same_loop(llama):
    target, draft, batch, plain = llama
    stock = tiny_model("llama")
    assert not isinstance(stock, SpeculativeGenerationMixin)
    options = dict(**batch, custom_generate=speculative_generate, **GREEDY)
    assert torch.equal(stock.generate(**options, draft_model=draft), plain)
    output = stock.generate(**options, prompt_lookup_num_tokens=3, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain) and output.num_steps > 0
    single = stock.generate(batch["input_ids"][1:2], draft_model=draft, num_return_sequences=2, **{
        **{k: v for k, v in options.items() if k not in batch}, "do_sample": True, "top_k": 1
    })  # fmt: skip
    assert torch.equal(single, plain[1:2].expand(2, -1))
    several = dict(**batch, max_new_tokens=GREEDY["max_new_tokens"], do_sample=True, top_k=1, num_return_sequences=2)
    found = target.generate(**several, assistant_model=draft)
    assert torch.equal(found, plain.repeat_interleave(2, 0)), "as many samples of each prompt"


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
    options = dict(**batch, **GREEDY)
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
    with pytest.raises(ValueError, match="needs the tokenizers of both models"):
        other = dict(tokenizer=Vocabulary(90), assistant_tokenizer=Vocabulary(90, shift=1))
        target.generate(**options, assistant_model=draft, **other)


def test_settings_of_transformers_reach_the_drafter(llama):
    target, draft, *_ = llama
    config = GenerationConfig(prompt_lookup_num_tokens=5, max_matching_ngram_size=3)
    lookup = chosen(None, config, target).drafter((None, None))
    assert (lookup.max_tokens, lookup.max_ngram) == (5, 3)
    draft = copy.deepcopy(draft)
    settings = draft.generation_config
    settings.num_assistant_tokens, settings.assistant_confidence_threshold = 7, 0.25
    settings.num_assistant_tokens_schedule = "constant"
    speculation = chosen(draft, GenerationConfig(), target)
    assistant = speculation.drafter((None, None))
    assert (assistant.max_tokens, assistant.threshold, speculation.adapts) == (7, 0.25, False)
    settings.num_assistant_tokens_schedule = None
    assert speculation.adapts


def test_settings_of_drafts_that_have_no_meaning_here(llama, caplog, monkeypatch):
    """Refused by name, or a warning; transformers' defaults are no news."""
    target, draft, batch, plain = copy.deepcopy(llama)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    settings = draft.generation_config
    settings.assistant_lookbehind = settings.target_lookbehind = 10
    assert torch.equal(target.generate(**batch, **GREEDY, assistant_model=draft), plain)
    assert not caplog.records
    settings.num_assistant_tokens_schedule = "heuristic"
    for _ in range(2):
        assert torch.equal(target.generate(**batch, **GREEDY, assistant_model=draft), plain)
    (record,) = [each for each in caplog.records if "num_assistant_tokens_schedule='heuristic'" in each.message]
    for name, value, allowed in (
        ("num_assistant_tokens_schedule", "linear", "'constant', 'heuristic'"),
        ("assistant_lookbehind", 4, "10 is allowed"),
        ("target_lookbehind", 4, "10 is allowed"),
    ):
        before = getattr(settings, name)
        setattr(settings, name, value)
        with pytest.raises(ValueError, match=f"{name}={value!r} in the assistant's .*{allowed}"):
            target.generate(**batch, **GREEDY, assistant_model=draft)
        setattr(settings, name, before)


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
    with pytest.raises(TypeError, match="draft='str'"):
        target.generate(**options, draft_model="gpt2")
    with pytest.raises(ValueError, match="num_beams=2"):
        target.generate(**options, draft_model=draft, num_beams=2)
    with pytest.raises(TypeError, match="draft='LlamaModel': expected a transformers model that can generate"):
        target.generate(**options, draft_model=target.model)
    for drafts in (dict(draft_model=draft), {}):
        with pytest.raises(ValueError, match="guidance_scale: its .* remembers its last call, .* speculative_generate"):
            target.generate(**options, **drafts, guidance_scale=1.5)
    with pytest.raises(ValueError, match=r"input_ids of shape \(0, 11\)"):
        target.generate(batch["input_ids"][:0], prompt_lookup_num_tokens=2, max_new_tokens=4)
    embeds = target.get_input_embeddings()(batch["input_ids"])
    with pytest.raises(ValueError, match="cannot start from inputs_embeds alone"):
        target.generate(inputs_embeds=embeds, custom_generate=speculative_generate, draft_model=draft, max_new_tokens=4)


def test_foreign_caches_and_models_are_refused(llama, monkeypatch):
    target, draft, batch, _ = llama
    with pytest.raises(ValueError, match="past_key_values=DynamicCache: speculation runs on a PagedCache"):
        target.generate(
            **batch, past_key_values=DynamicCache(config=target.config), assistant_model=draft, max_new_tokens=4
        )
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=128, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="takes no position_ids"):
        enable_speculation(bloom).generate(**batch, prompt_lookup_num_tokens=2, max_new_tokens=4)
    with pytest.raises(ValueError, match="assistant_model=BloomForCausalLM"):
        target.generate(**batch, assistant_model=bloom, max_new_tokens=4)
    flex = enable_speculation(tiny_model("llama"))
    flex.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="attn_implementation='flex_attention'"):
        flex.generate(**batch, prompt_lookup_num_tokens=2, max_new_tokens=4)


def test_models_with_a_state_are_refused_as_drafts(llama, monkeypatch):
    target, _, batch, _ = llama
    shape = dict(vocab_size=128, hidden_size=16, num_hidden_layers=4)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=8, intermediate_size=16)
    linear = {f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads")}
    linear |= {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
    experts = dict(num_experts=2, moe_intermediate_size=8, shared_expert_intermediate_size=8)
    hybrid = transformers.Qwen3NextConfig(**shape, **heads, **linear, **experts)
    shapes = counting(target, monkeypatch)
    for draft in (
        transformers.MambaForCausalLM(transformers.MambaConfig(**shape, state_size=8)),
        transformers.Qwen3NextForCausalLM(hybrid),
    ):
        reason = f"assistant_model={type(draft).__name__} has layers with a recurrent state"
        for rows in (1, 3):
            inputs = {key: value[:rows] for key, value in batch.items()}
            with pytest.raises(ValueError, match=reason):
                target.generate(**inputs, assistant_model=draft, max_new_tokens=4)
    assert shapes == []


def test_bad_draft_settings_are_refused(llama):
    target, _, batch, _ = llama
    draft = drafting(copy.deepcopy(target))
    tokens = [("num_assistant_tokens", x, "an integer of at least 1") for x in (0, 2.5, True, "3", float("nan"))]
    wrong = (-1, 1.01, "a", True, float("nan"))
    chances = [("assistant_confidence_threshold", x, "a number from 0 to 1") for x in wrong]
    for name, value, allowed in tokens + chances:
        settings = drafting(draft).generation_config
        setattr(settings, name, value)
        with pytest.raises(ValueError, match=f"{name}={value!r} in the assistant's .*: expected {allowed}"):
            target.generate(**batch, assistant_model=draft, max_new_tokens=4)
    drafting(draft, 7.0)  # as transformers' heuristic schedule leaves it
    target.generate(**batch, assistant_model=draft, max_new_tokens=4)
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens=0"):
        target.generate(**batch, prompt_lookup_num_tokens=0, max_new_tokens=4)
