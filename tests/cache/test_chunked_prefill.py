"""`prefill_chunk_size` over a PagedCache: the tokens of the whole prompt at once, and memory that the chunk bounds."""

import pytest
import torch
from helpers import TINY_MODELS, left_padded_batch, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from hf_efficient import PagedCache
from hf_efficient.kernels.attention import masks, policy, torch_cpu


def generate(model, cache, inputs, chunk, **options):
    options = dict(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0, **options)
    return model.generate(**inputs, past_key_values=cache, prefill_chunk_size=chunk, **options)


@pytest.mark.parametrize(
    "name, attention", [*((name, "flash_paged") for name in TINY_MODELS), ("llama", "sdpa"), ("gemma2", "eager")]
)
def test_tokens_are_those_of_the_whole_prompt(name, attention):
    """A padded batch whose shortest rows are padding for several chunks, windows shorter than it and longer than a
    chunk, then a second turn."""
    model = tiny_model(name)
    model.set_attn_implementation(attention)
    inputs = left_padded_batch((3, 23, 14))
    whole = PagedCache(model.config, block_size=8)
    caches = {chunk: PagedCache(model.config, block_size=8) for chunk in (5, 16)}
    for turn in range(2):
        expected = generate(model, whole, inputs, None)
        for chunk, cache in caches.items():
            assert torch.equal(generate(model, cache, inputs, chunk), expected), (chunk, turn)
            assert cache.cache_seqlens == whole.cache_seqlens
        ids = torch.cat([expected, left_padded_batch((11,) * 3, seed=1)["input_ids"]], 1)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, ids.shape[1] - 23), value=1)
        inputs = dict(input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize("kv_format", ["int8", "fp8", "int4", "int2"])
@pytest.mark.parametrize("attention", ["flash_paged", "sdpa"])
def test_quantized_pages(kv_format, attention):
    """A chunk sees the rounded keys and values of those before it: as a prompt given in three forwards, and longer than
    what int4 and int2 keep exact."""
    model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=512)
    model.set_attn_implementation(attention)
    inputs = left_padded_batch((270, 330))
    cache, other = (PagedCache(model.config, kv_format=kv_format) for _ in range(2))
    tokens = generate(model, cache, inputs, 150)
    with torch.no_grad():
        for stop in (150, 300, 330):
            start = other.get_seq_length()
            mask = inputs["attention_mask"][:, :stop]
            positions = (mask.cumsum(1) - 1).clamp_min(0)[:, start:]
            logits = model(
                inputs["input_ids"][:, start:stop], attention_mask=mask, position_ids=positions, past_key_values=other
            ).logits
    assert torch.equal(tokens[:, 330], logits[:, -1].argmax(-1)) and cache.cache_seqlens[1] == 335


@pytest.mark.parametrize("options", [dict(num_beams=3), dict(num_return_sequences=2, do_sample=True, top_k=1)])
def test_beams_and_samples(options):
    model = tiny_model("llama", attn_implementation="flash_paged")
    inputs = left_padded_batch((5, 17))
    options = {"max_new_tokens": 6, "eos_token_id": -1, "pad_token_id": 0, **options}
    expected = model.generate(**inputs, **options)
    cache = PagedCache(model.config, num_blocks=24)
    assert torch.equal(model.generate(**inputs, past_key_values=cache, prefill_chunk_size=7, **options), expected)


class Largest(TorchDispatchMode):
    """The most bytes of a tensor that an operation gave."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, min(tensor.nbytes, tensor.untyped_storage().nbytes()))
        return result


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_the_chunk_bounds_memory(name):
    """A padded prompt of 2,048 tokens: nothing is larger than the scores of a chunk for every head."""
    batch, length, chunk = 2, 2048, 256
    model = tiny_model(name, max_position_embeddings=4096, num_hidden_layers=1, attn_implementation="flash_paged")
    inputs = left_padded_batch((length - 300, length))
    cache = PagedCache(model.config)
    with Largest() as largest:
        generate(model, cache, inputs, chunk)
    scores = 4 * batch * model.config.num_attention_heads * chunk * (length + 6)
    assert largest.bytes <= scores
    assert cache.cache_seqlens == [length - 295, length + 5]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_long_prompts_are_attended_in_slices(plain, masked, monkeypatch):
    """What would take more scores than are held at a time; causal or by a mask, as SDPA and in plain operations."""
    query, key, value = torch.randn(2, 4, 37, 8), torch.randn(2, 2, 37, 8), torch.randn(2, 2, 37, 8)
    seen = torch.ones(37, 37, dtype=torch.bool).tril()
    if masked:
        seen = seen & (torch.arange(37) >= torch.tensor([0, 9])[:, None, None])
        options = dict(mask=masks.additive(seen))
    else:
        options = dict(causal=True)
    options |= dict(softcap=5.0, s_aux=torch.randn(4)) if plain else {}
    expected = torch_cpu.attend(query, key, value, **options)
    monkeypatch.setattr(policy, "SCORES", 2 * 4 * 37 * 5)
    with Largest() as largest:
        output = torch_cpu.attend(query, key, value, **options)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    assert largest.bytes <= max(4 * policy.SCORES, 4 * 2 * 37 * 4 * 8)
