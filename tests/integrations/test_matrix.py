"""config × attention × cache × speculation over tiny random models of many architectures: greedy decoding of a
left-padded batch gives the same tokens (float32) as eager attention with transformers' own cache and no
speculation."""

import itertools
import re

import pytest
import torch
from helpers import TINY_MODELS, left_padded_batch, tiny_model
from table import ATTENTIONS, CACHES, CONFIGS, REFUSALS, SPECULATION
from transformers import AutoModelForCausalLM

import hf_efficient
from hf_efficient.integrations.transformers_releases import has


NEW_TOKENS = 12


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """architecture -> folder of its tiny random model."""
    folder = tmp_path_factory.mktemp("matrix")
    return {name: _save(name, folder / name) for name in TINY_MODELS}


def _save(name, folder):
    tiny_model(name).save_pretrained(folder)
    return folder


def load(folder, attention, config):
    options = (
        {} if CONFIGS[config] is None else {"quantization_config": hf_efficient.WeightOnlyConfig(**CONFIGS[config])}
    )
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=torch.float32, **options)
    model.generation_config.num_assistant_tokens = 3
    return model


# every architecture without quantization and in one format, two of them in each format
PAIRS = [(name, config) for name in TINY_MODELS for config in CONFIGS if config in ("none", "int4_group")]
PAIRS += [(name, config) for name in ("llama", "qwen3_moe") for config in CONFIGS if (name, config) not in PAIRS]


def is_asked_for(architecture, config, attention, cache, speculation) -> bool:
    """Two architectures, one of them with windows, have the whole product, one of them also in a format. For
    the others every two of attention, cache and speculation meet, in a format as far as it runs them."""
    if (architecture, config) in (("llama", "none"), ("gemma3", "none"), ("llama", "int4_group")):
        return True
    attentions = [each for each in ATTENTIONS if (architecture, each) not in REFUSALS]
    places = [list(each).index(name) for each, name in ((attentions, attention), (CACHES, cache))]
    return sum(places, list(SPECULATION).index(speculation)) % len(attentions) == 0


@pytest.mark.parametrize("architecture, config", PAIRS)
def test_every_combination_decodes_the_same_tokens(architecture, config, checkpoints):
    inputs = left_padded_batch()
    options = dict(max_new_tokens=NEW_TOKENS, do_sample=False)
    expected = load(checkpoints[architecture], "eager", config).generate(**inputs, **options)
    failures = []
    # other attentions read nothing of how weights are stored: with quantized ones a cache of each kind says enough
    for attention in ATTENTIONS if CONFIGS[config] is None else ("sdpa", "flash_paged"):
        refusal = REFUSALS.get((architecture, attention))
        if refusal and has("5.23"):  # older releases load some of them
            with pytest.raises((ValueError, ImportError), match=refusal):
                load(checkpoints[architecture], attention, config)
        if refusal:
            continue
        model = hf_efficient.enable_speculation(load(checkpoints[architecture], attention, config))
        for cache, make_cache in CACHES.items():
            if CONFIGS[config] is not None and cache != "default" and attention != "flash_paged":
                continue
            for speculation, arguments in SPECULATION.items():
                if not is_asked_for(architecture, config, attention, cache, speculation):
                    continue
                tokens = model.generate(**inputs, **options, past_key_values=make_cache(model), **arguments(model))
                if not torch.equal(tokens, expected):
                    failures.append((attention, cache, speculation, tokens.tolist()))
    assert not failures, f"expected {expected.tolist()}, got {failures}"


@pytest.mark.parametrize("architecture", TINY_MODELS)
def test_every_two_options_of_an_architecture_meet(architecture):
    attentions = [attention for attention in ATTENTIONS if (architecture, attention) not in REFUSALS]
    everything = list(itertools.product(attentions, CACHES, SPECULATION))
    asked_for = [names for names in everything if is_asked_for(architecture, "none", *names)]
    for one, other in itertools.combinations(range(3), 2):
        assert {(n[one], n[other]) for n in asked_for} == {(n[one], n[other]) for n in everything}


def test_refusals_name_known_rows():
    for architecture, attention in REFUSALS:
        assert architecture in TINY_MODELS and attention in ATTENTIONS
        re.compile(REFUSALS[architecture, attention])
