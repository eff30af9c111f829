"""Speculation in transformers' continuous batching: `ContinuousBatchingConfig(prompt_lookup_num_tokens=...)` and
`ContinuousBatchingConfig(assistant_model=...)`."""

import torch
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator

from hf_efficient.cache.request_pages import PageGroup, RequestPages
from hf_efficient.generation.replay.captured_step import WIDTHS, padded
from hf_efficient.generation.request_draft_model import ModelDrafts
from hf_efficient.generation.request_drafts import LookupDrafts, RequestDrafts
from hf_efficient.generation.speculation.latency_model import LatencyCurve
from hf_efficient.generation.speculation.request_policy import RequestDraftPolicy
from hf_efficient.integrations import transformers_releases
from hf_efficient.integrations.transformers_page_forward import PageForwards
from hf_efficient.kernels.attention import api


DRAFTERS = "prompt_lookup_num_tokens", "assistant_model"
NEED_FORWARDS = *DRAFTERS, "max_ms_between_tokens"  # of the arguments of a config, those that need forwards of ours


def is_asked(config) -> bool:
    """Whether a `ContinuousBatchingConfig` asks for drafts."""
    return any(getattr(config, name, None) is not None for name in DRAFTERS)


def drafts_of(config, cache, forward_seconds: LatencyCurve) -> RequestDrafts | None:
    """What proposes drafts for the requests of a `PagedAttentionCache`; None where nothing was asked for.
    forward_seconds: of the model, by tokens computed."""
    if not is_asked(config):
        return None
    policy = RequestDraftPolicy(padded, min(WIDTHS[-1], cache.max_batch_tokens), forward_seconds)
    if config.prompt_lookup_num_tokens is not None:
        return LookupDrafts(policy, config.prompt_lookup_num_tokens)
    model, allocator = config.assistant_model, full_attention(cache)
    if allocator is None:
        raise ValueError("assistant_model: all layers of the model have sliding windows, which keep no whole prompt")
    pages = _pages_like(model, allocator)
    forwards = PageForwards(pages)
    return ModelDrafts(policy, model, lambda: forwards.of(model), allocator.tokens_per_page)


def full_attention(cache) -> FullAttentionCacheAllocator | None:
    """Of a `PagedAttentionCache`, what gives blocks to layers that see all tokens; None where all have windows."""
    allocators = cache.cache_allocators.values()
    return next((each for each in allocators if isinstance(each, FullAttentionCacheAllocator)), None)


def refuse(config, reason: str) -> None:
    """Raises ValueError where a `ContinuousBatchingConfig` asks for what this package's forwards alone have."""
    given = [name for name in NEED_FORWARDS if getattr(config, name, None) is not None]
    if given:
        raise ValueError(
            f"{given[0]} in continuous batching needs a model on a CPU with a C++ compiler, with "
            f'attn_implementation="flash_paged" and without compile configs: {reason}'
        )


def check(model, config) -> None:
    """Raises ValueError where `model` cannot have the drafts or the budget that a `ContinuousBatchingConfig` asks
    for."""
    name = transformers_releases.without_prefix(model.config._attn_implementation)
    if name not in api.ATTENTION_NAMES:
        refuse(config, f"attn_implementation is {name!r}")
    if model.device.type != "cpu":
        refuse(config, f"the model is on {model.device}")
    if config.varlen_compile_config is not None or config.decode_compile_config is not None:
        refuse(config, "there is one")
    if getattr(config, "assistant_model", None) is not None:
        _check_assistant(config.assistant_model, model)


def _check_assistant(assistant, model) -> None:
    ModelDrafts.check(assistant)
    ours, theirs = (each.get_input_embeddings().num_embeddings for each in (model, assistant))
    if ours != theirs:
        raise ValueError(f"assistant_model knows {theirs} tokens, and the model {ours}: they need one tokenizer")
    name = transformers_releases.without_prefix(assistant.config._attn_implementation)
    if name not in api.ATTENTION_NAMES or assistant.device.type != "cpu":
        raise ValueError(
            f"assistant_model has attn_implementation={name!r} on {assistant.device}: continuous batching needs "
            '"flash_paged" on a CPU'
        )


def _pages_like(model, allocator) -> RequestPages:
    """Pages of `model` for the blocks of the target's `allocator`. Their memory is taken when they are written."""
    config = model.config.get_text_config(decoder=True)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    blocks = len(allocator._copy_view)
    shape = blocks, allocator.tokens_per_page, heads, dim
    layers = {
        index: tuple(torch.empty(shape, dtype=model.dtype) for _ in range(2))
        for index in range(config.num_hidden_layers)
    }
    group = PageGroup(layers, {})
    if not group.serves(model.dtype, config.num_attention_heads):
        raise ValueError(f"assistant_model={type(model).__name__}: the kernels do not read its pages {shape}")
    return RequestPages([group], WIDTHS[-1])
