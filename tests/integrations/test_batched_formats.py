"""Quantized pages in continuous batching by this package's forwards: the tokens are those of a plain cache all of whose
keys and values are rounded likewise, however requests are batched."""

import pytest
import torch
from helpers import needs_transformers, tiny_model
from test_batched_speculation import drafted, outputs_of, tokens_of  # noqa: F401
from test_batched_step import NEW_TOKENS, PROMPTS, forwards  # noqa: F401
from test_paged_formats import RoundedCache

from hf_efficient.kernels.replay.recorder import interpreter


pytestmark = [
    needs_transformers("5.19", "quantized pages in continuous batching"),
    pytest.mark.skipif(interpreter() is None, reason="no compiler, or a CPU without AVX-512"),
]
KV_FORMATS = ["int8", "fp8"]


@torch.no_grad()
def one_by_one_rounded(model, kv_format, prompts=PROMPTS, new_tokens=NEW_TOKENS):
    """Greedy tokens of each prompt alone over a cache that rounds every key and value."""
    model.set_attn_implementation("eager")
    results = []
    for prompt in prompts:
        cache, tokens, piece = RoundedCache(kv_format, (), True), [], prompt
        while len(tokens) < new_tokens:
            logits = model(torch.tensor([piece]), past_key_values=cache).logits
            tokens.append(int(logits[0, -1].argmax()))
            piece = tokens[-1:]
        results.append(tokens)
    return results


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_tokens_are_those_of_rounded_keys_and_values(name, kv_format, forwards):  # noqa: F811
    """Prompts in chunks beside sequences that decode; prefixes that are shared; windows of the longest prompt (longer
    prompts run as transformers runs them)."""
    windows = {} if name == "llama" else {"sliding_window": max(map(len, PROMPTS))}
    model = tiny_model(name, **windows)
    expected = one_by_one_rounded(model, kv_format)
    assert tokens_of(model, kv_format=kv_format) == expected
    assert "replayed" in forwards


@pytest.mark.parametrize(
    "config", [dict(max_batch_tokens=4), dict(num_blocks=13), dict(num_blocks=13, max_batch_tokens=64)]
)
def test_any_batch_and_a_full_pool(config):
    model = tiny_model("llama")
    assert tokens_of(model, kv_format="int8", **config) == one_by_one_rounded(model, "int8")


def test_drafts(drafted):  # noqa: F811
    model = tiny_model("llama")
    expected = one_by_one_rounded(model, "fp8")
    assert tokens_of(model, kv_format="fp8", assistant_model=model) == expected
    assert tokens_of(model, kv_format="fp8", prompt_lookup_num_tokens=3) == expected
    assert drafted["accepted"] > 0


def test_several_answers_to_a_prompt():
    """A fork copies codes and scales."""
    model = tiny_model("llama")
    expected = one_by_one_rounded(model, "int8")
    generation = dict(num_return_sequences=2, do_sample=True, top_k=1)
    tokens = [output.generated_tokens for output in outputs_of(model, generation=generation, kv_format="int8")]
    assert tokens == [answer for answer in expected for _ in range(2)]


def test_pages_are_read_in_bfloat16():
    model = tiny_model("qwen3", torch.bfloat16)
    outputs = outputs_of(model, kv_format="int8", return_logprobs=True)
    plain = outputs_of(model, return_logprobs=True)
    for output, other in zip(outputs, plain):
        assert output.logprobs[0] == pytest.approx(other.logprobs[0], abs=0.1)
