"""Continuous batching in every supported release of transformers: each request gets the tokens that it has alone."""

import pytest
import torch
from helpers import tiny_model
from saved_models import INT4, folder, load
from transformers import ContinuousBatchingConfig, GenerationConfig

import hf_efficient
from hf_efficient.integrations import transformers_releases


PROMPTS = [[5, 17, 40, 99, 12, 77, 31, 64, 8, 21, 50], [33] * 3, list(range(60, 76))]
PAGE_SIZE = "page_size" if transformers_releases.has("5.18") else "block_size"  # transformers' name of it


def batched(model, attention):
    model.set_attn_implementation(attention)
    outputs = model.generate_batch(
        inputs=PROMPTS,
        generation_config=GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=2, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=128, max_batch_tokens=24, **{PAGE_SIZE: 4}),
        progress_bar=False,
    )
    errors = [output.error for output in outputs.values() if output.error]
    if errors:
        raise RuntimeError(errors[0])
    return [outputs[name].generated_tokens for name in sorted(outputs, key=lambda name: int(name.split("_")[-1]))]


def one_by_one(model):
    model.set_attn_implementation("eager")
    tokens = (model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False) for prompt in PROMPTS)
    return [row[0, len(prompt) :].tolist() for row, prompt in zip(tokens, PROMPTS)]


@pytest.mark.parametrize("attention", ["flash_paged", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "mixtral"])
def test_dense_models(name, attention):
    model = tiny_model(name)
    assert batched(model, attention) == one_by_one(model)


@pytest.mark.parametrize("attention", ["flash_paged", "sdpa"])
def test_quantized_models(attention):
    model = load(folder("llama"), **INT4)
    assert batched(model, attention) == one_by_one(model)


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_windows_and_softcap(name):
    model = tiny_model(name)
    if transformers_releases.has("5.19"):
        assert batched(model, "flash_paged") == one_by_one(model)
    else:
        with pytest.raises(ValueError, match="sliding_window=8 in continuous batching .* needs transformers 5.19 or"):
            batched(model, "flash_paged")


@pytest.mark.skipif(transformers_releases.has("5.19"), reason="transformers' pages can be quantized")
@pytest.mark.parametrize("kv_format", ["int8", "fp8"])
def test_quantized_pages_are_refused_by_name(kv_format):
    with pytest.raises(ValueError, match=f"kv_format='{kv_format}' .* needs transformers 5.19 or later"):
        hf_efficient.ContinuousBatchingConfig(kv_format=kv_format)
