"""Quantized pages in continuous batching: the tokens are those of a plain cache whose keys and values are rounded
likewise, and the pool takes the bytes it should."""

from unittest import mock

import pytest
import test_continuous_batching
import torch
import transformers
from helpers import needs_transformers, tiny_model
from test_continuous_batching import (  # noqa: F401
    NEW_TOKENS,
    PAGES,
    PROMPTS,
    as_on_a_gpu,
    calls,
    decode_path,
    generate_batch,
    one_by_one,
    padded,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache, GenerationConfig
from transformers.generation.continuous_batching import PagedAttentionCache, continuous_api
from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler, group_layers_by_attn_type
from transformers.generation.continuous_batching.distributed import DistributedHelper

from hf_efficient import ContinuousBatchingConfig
from hf_efficient.integrations import transformers_paged_formats as formats
from hf_efficient.integrations.transformers_continuous_batching import attend_pages
from hf_efficient.kernels.attention.pages import _quantize_tokens


KV_FORMATS = ["int8", "fp8"]
pytestmark = needs_transformers("5.19", "quantized pages in continuous batching")
TOGETHER = 64  # tokens of a batch: all prompts in one forward


def rounded(x, kv_format):
    """x [B, H, S, D] as codes and a scale a token and head, and back."""
    codes, scale = _quantize_tokens(x, formats.FORMATS[kv_format])
    return codes.float() * scale.float()[..., None]


class RoundedCache(DynamicCache):
    """Stores rounded keys and values. The first forward attends to what it computed, unless `rounds_prompt`; later ones
    to what is stored, in `sliding` layers (their numbers) except for the new tokens. Windows are left to the mask."""

    def __init__(self, kv_format, sliding, rounds_prompt):
        super().__init__()
        self.kv_format, self.sliding, self.rounds_prompt = kv_format, sliding, rounds_prompt

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        new, is_first = (key_states, value_states), self.get_seq_length(layer_idx) == 0
        stored = super().update(*(rounded(x, self.kv_format) for x in new), layer_idx)
        if is_first and not self.rounds_prompt:
            return new
        if layer_idx in self.sliding:
            return tuple(torch.cat([old[:, :, : -x.shape[2]], x], 2) for old, x in zip(stored, new))
        return stored


@torch.no_grad()
def one_by_one_rounded(model, kv_format, prompts=PROMPTS, first=None, rounds_prompt=False):
    """Greedy tokens of each prompt alone over a `RoundedCache`, its first `first` tokens in a forward of their own."""
    model.set_attn_implementation("eager")
    layers, results = group_layers_by_attn_type(model.config), []
    for prompt in prompts:
        cache = RoundedCache(kv_format, layers.get("sliding_attention", ()), rounds_prompt)
        tokens, pieces = [], [prompt[:first], prompt[first:]] if first else [prompt]
        while len(tokens) < NEW_TOKENS:
            for piece in pieces:
                logits = model(torch.tensor([piece], device=model.device), past_key_values=cache).logits
            tokens.append(int(logits[0, -1].argmax()))
            pieces = [tokens[-1:]]
        results.append(tokens)
    model.set_attn_implementation("flash_paged")
    return results


def batch_of(model, kv_format, prompts=PROMPTS, **config):
    """`generate_batch` with pages of this format; one forward for all prompts, or what `max_batch_tokens` allows."""
    config = {"max_batch_tokens": TOGETHER, **config}
    model.set_attn_implementation("flash_paged")
    with mock.patch.object(test_continuous_batching, "ContinuousBatchingConfig", ContinuousBatchingConfig):
        return generate_batch(model, prompts, kv_format=kv_format, **config)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_tokens_are_those_of_rounded_keys_and_values(name, kv_format, calls):  # noqa: F811
    """float32, so that nothing but the format rounds: every token is the same."""
    model = tiny_model(name)
    assert batch_of(model, kv_format) == one_by_one_rounded(model, kv_format)
    assert calls["gathered full_attention"] == 0


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_decode_path(kv_format, calls, decode_path, padded):  # noqa: F811
    """By block table, with the empty rows of batches padded for CUDA graphs."""
    model = tiny_model("qwen3")
    expected = one_by_one_rounded(model, kv_format, rounds_prompt=True)
    assert batch_of(model, kv_format, max_blocks_per_request=8, max_requests_per_batch=4) == expected
    assert calls["decode"] >= 2 * (NEW_TOKENS - 1)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_chunks_beside_decoding(name, padded):  # noqa: F811
    """Prompts in chunks, whose new tokens are rounded when others of the batch read the cache: int8 is so near to exact
    that at float32 the tokens are still those of generate()."""
    model = tiny_model(name)
    expected = one_by_one(model)
    assert batch_of(model, "int8", max_batch_tokens=24, max_requests_per_batch=8) == expected


def test_prefixes_are_shared(calls):  # noqa: F811
    """The second request finds two pages of the first, scales and all, and computes only the rest."""
    model = tiny_model("llama", attn_implementation="flash_paged")
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=2, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(**PAGES, max_batch_tokens=24, kv_format="fp8"),
    )
    manager.start()
    tokens = []
    try:
        for prompt in (PROMPTS[0], PROMPTS[3]):
            request = manager.add_request(prompt, max_new_tokens=NEW_TOKENS)
            tokens.append(manager.get_result(request, timeout=60).generated_tokens)
    finally:
        manager.stop(block=True)
    assert calls["new"] == 2  # the first prompt; all other forwards read
    shared = 2 * PAGES["page_size"]
    expected = one_by_one_rounded(model, "fp8", PROMPTS[:1])
    expected += one_by_one_rounded(model, "fp8", PROMPTS[3:], first=shared)
    assert tokens == expected


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_forks_copy_scales(name):
    """Several answers to a prompt: full pages are shared, or copied with the others where layers slide."""
    model = tiny_model(name, attn_implementation="flash_paged")
    config = GenerationConfig(  # samples, from one token
        max_new_tokens=NEW_TOKENS, do_sample=True, top_k=1, num_return_sequences=3, eos_token_id=2, pad_token_id=0
    )
    outputs = model.generate_batch(
        PROMPTS[:2],
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(**PAGES, max_batch_tokens=TOGETHER, kv_format="int8"),
    )
    expected = one_by_one_rounded(model, "int8", PROMPTS[:2])
    answers = [output.generated_tokens for output in outputs.values()]
    assert sorted(answers) == sorted(expected * 3)


def test_a_full_pool_evicts_and_goes_on(llama):
    """So few blocks that pages kept for sharing are given up and requests are put back. int8: tokens as from
    generate()."""
    prompts = PROMPTS + [[7 + n] * 9 for n in range(4)]
    expected = one_by_one(llama, prompts)
    evictions = []
    original = formats.FormattedCache.evict_cached_blocks
    with mock.patch.object(
        formats.FormattedCache, "evict_cached_blocks", lambda self: evictions.append(original(self)) or evictions[-1]
    ):
        assert batch_of(llama, "int8", prompts, num_blocks=12) == expected
    assert any(evictions)


def flash_model(name):
    model = tiny_model(name, head_dim=64, attn_implementation="flash_paged")
    return model


def built(kv_format, dtype, model, page_size=16, **config):
    """The cache that continuous batching builds."""
    config = ContinuousBatchingConfig(
        kv_format=kv_format, page_size=page_size, max_batch_tokens=16, max_requests_per_batch=4,
        max_blocks_per_request=4, max_memory_percent=1.0, use_async_batching=False, **config,
    )  # fmt: skip
    return continuous_api.PagedAttentionCache(
        model.config,
        config,
        "cpu",
        DistributedHelper(device_mesh=None, cpu_group_timeout=None, tp_plan={}),
        dtype,
        True,
    )


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_bytes_of_the_pool(kv_format):
    """As many blocks in half the bytes, and twice the blocks in a budget of bytes."""
    model = flash_model("llama")
    plain, quantized = (built(name, torch.bfloat16, model, num_blocks=64) for name in ("auto", kv_format))
    assert plain.num_blocks == quantized.num_blocks == 64
    assert quantized.cache_tensor.numel() <= 0.53 * plain.cache_tensor.numel()
    for cache in (plain, quantized):
        views = [view for allocator in cache.cache_allocators.values() for view in allocator._copy_view.unbind()]
        assert sum(map(torch.numel, views)) == cache.cache_tensor.numel()
    with mock.patch.object(PagedAttentionMemoryHandler, "get_available_memory", lambda self: 8 << 20):
        plain, quantized = (built(name, torch.bfloat16, model) for name in ("auto", kv_format))
    assert quantized.cache_tensor.numel() <= plain.cache_tensor.numel()
    # for every token transformers also plans for the keys and values of one layer in full precision, here of two layers
    assert quantized.num_blocks >= 1.4 * plain.num_blocks


def test_forwards_wait_for_no_device():
    """A fake tensor raises when the host reads it: batches that read by table and by index, and rings."""
    models = [flash_model(name) for name in ("llama", "mistral")]
    with FakeTensorMode():
        for model in models:
            cache = built("int8", torch.float32, model, num_blocks=8)
            (allocator,) = cache.cache_allocators.values()
            starts, index = torch.zeros(3, dtype=torch.int32), torch.zeros(1, 40, dtype=torch.int64)
            key = torch.zeros(1, allocator.num_key_value_heads, 2, allocator.head_dim)
            batch = dict(
                cu_seq_lens_q=starts, cu_seq_lens_k={allocator.layer_type: starts}, max_length_q=1,
                max_length_k={allocator.layer_type: 32}, read_index=index, write_index=index[:, :2],
            )  # fmt: skip
            if not allocator.supports_block_table:
                keys, values = PagedAttentionCache.update(cache, key, key, 1, batch)
                assert keys.shape == values.shape == (1, allocator.num_key_value_heads, 40, allocator.head_dim)
                continue
            options = dict(softmax_scale=None, causal=True, window_size=(-1, -1), softcap=0.0, s_aux=None)
            for table in (None, torch.zeros(1, 2, 4, dtype=torch.int32)):
                output = attend_pages(cache, 1, key.repeat(1, 2, 1, 1), key, key, block_table=table, **batch, **options)
                assert output.shape == (1, 2, 4, allocator.head_dim)


def test_bad_formats():
    for kv_format in ("int3", "bfloat16", None, 8, ["int8"]):
        with pytest.raises(ValueError, match=r"kv_format=.*one of \['auto', 'int8', 'fp8', 'int4', 'int2'\]"):
            ContinuousBatchingConfig(kv_format=kv_format)
    model = tiny_model("llama")
    model.set_attn_implementation("sdpa")
    config = ContinuousBatchingConfig(kv_format="fp8", auto_switch_to_flash=False)
    with pytest.raises(ValueError, match="kv_format='fp8' needs .*flash_paged.*'sdpa'"):
        model.generate_batch(PROMPTS, continuous_batching_config=config)


def test_other_caches_stay_as_they_are():
    """transformers' own config, and ours without a format, get transformers' own allocators."""
    for config in (ContinuousBatchingConfig(**PAGES), transformers.ContinuousBatchingConfig(**PAGES)):
        model = tiny_model("gemma2", attn_implementation="flash_paged")
        manager = model.init_continuous_batching(GenerationConfig(eos_token_id=2), config)
        allocators = manager._create_batch_processor().cache.cache_allocators.values()
        names = {type(allocator).__module__ for allocator in allocators}
        assert len(allocators) == 2 and all(name.startswith("transformers.") for name in names)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_on_the_accelerator(name, kv_format, decode_path):  # noqa: F811
    """With transformers' defaults for CUDA: graphs for both paths."""
    model = tiny_model(name, attn_implementation="flash_paged").cuda()
    expected = one_by_one_rounded(model, kv_format, rounds_prompt=True)
    assert batch_of(model, kv_format, page_size=16, max_requests_per_batch=4) == expected
