"""Caches of this package asked for by name."""

import pytest
import torch
from draft_models import perturbed
from helpers import save_tiny, tiny_model, tiny_tokenizer
from transformers import GenerationConfig, pipeline

from hf_efficient import PagedCache, PrefixCache, enable_speculation, optimize
from hf_efficient.integrations import transformers_cache_names as names


PROMPT = torch.tensor([[5, 17, 40, 99, 12, 77, 31, 64, 8]])
OPTIONS = dict(max_new_tokens=40, do_sample=False, return_dict_in_generate=True, pad_token_id=0)


@pytest.mark.parametrize("attention", ["flash_paged", "sdpa"])
@pytest.mark.parametrize("name", ["paged_int8", "paged_fp8", "paged_int4", "paged_int2"])
def test_the_name_is_the_cache(name, attention):
    """The same tokens, and the same kind of cache, as from a cache that is passed."""
    model = tiny_model("llama", attn_implementation=attention, hidden_size=128)
    kv_format = names.KV_FORMATS[name]
    expected = model.generate(PROMPT, past_key_values=PagedCache(model.config, kv_format=kv_format), **OPTIONS)
    output = model.generate(PROMPT, cache_implementation=name, **OPTIONS)
    assert torch.equal(output.sequences, expected.sequences)
    assert isinstance(output.past_key_values, PagedCache) and output.past_key_values.kv_format == kv_format


@pytest.mark.parametrize("name", names.KV_FORMATS)
def test_a_saved_generation_config_and_a_pipeline(name, tmp_path):
    save_tiny(tmp_path)
    config = GenerationConfig(cache_implementation=name, max_new_tokens=4, do_sample=False, pad_token_id=0)
    config.save_pretrained(tmp_path)
    pipe = pipeline("text-generation", model=str(tmp_path))
    assert pipe.model.generation_config.cache_implementation == name
    output = pipe.model.generate(PROMPT, return_dict_in_generate=True)
    assert output.past_key_values.kv_format == names.KV_FORMATS[name]
    assert pipe("The river")[0]["generated_text"].startswith("The river")


@pytest.mark.parametrize("prepare", [lambda model: model, optimize, enable_speculation], ids=["stock", "auto", "ours"])
@pytest.mark.parametrize("names_of", [("paged_int8", None), ("paged", "paged"), (None, "paged_int8")])
def test_drafts_over_a_cache_of_a_generation_config(prepare, names_of):
    """Drafted by a model in generate() and in a pipeline, and from the prompt: the text is that without drafts."""
    model = tiny_model("llama", hidden_size=128, eos_token_id=None, attn_implementation="flash_paged")
    draft, options = perturbed(model, 0.1), dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    model.generation_config.cache_implementation, draft.generation_config.cache_implementation = names_of
    pipe = pipeline("text-generation", model=model, tokenizer=tiny_tokenizer())
    ids, text = model.generate(PROMPT, **options), pipe("The river", **options)
    prepare(model)
    for drafts in (dict(assistant_model=draft), dict(prompt_lookup_num_tokens=3)):
        output = model.generate(PROMPT, **options, **drafts, return_dict_in_generate=True)
        assert torch.equal(output.sequences, ids)
        if names_of[0] is not None:
            assert output.past_key_values.kv_format == names.KV_FORMATS[names_of[0]]
    drafted = pipeline("text-generation", model=model, tokenizer=tiny_tokenizer(), assistant_model=draft)
    assert drafted("The river", **options) == text


def test_a_pipeline_shares_prefixes_across_calls(tmp_path):
    save_tiny(tmp_path)
    pipe = pipeline("text-generation", model=str(tmp_path))
    prefix, options = PrefixCache(pipe.model, 16), dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    for end in ("today", "again"):
        text = "The river runs through the old town and under the bridge " + end
        cache = PagedCache(pipe.model.config, prefix_cache=prefix)
        assert pipe(text, past_key_values=cache, **options) == pipe(text, **options)
    assert prefix.stats()["hits"] == 1 and prefix.stats()["skipped_tokens"] >= 32


def test_other_names_and_no_cache():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="Choose one of: .*paged_int8"):
        model.generate(PROMPT, cache_implementation="paged_int3")
    with pytest.raises(ValueError, match="both `cache_implementation`"):
        model.generate(PROMPT, cache_implementation="paged_int8", past_key_values=PagedCache(model.config))
