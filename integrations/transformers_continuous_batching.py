"""Continuous batching (`generate_batch`, `ContinuousBatchingManager`) under `attn_implementation="flash_paged"`.

The attention writes and reads transformers' own pages in place; `transformers_paged_formats` has quantized ones. Two
insides of transformers are used: the layout of its `PagedAttentionCache`, and the gate of its decode path, which finds
flash implementations by a version digit in their names.
"""

import functools

import torch

from hf_efficient.integrations import transformers_releases
from hf_efficient.kernels.attention import api


_SHARED = "_hf_efficient_shared"


@torch.compiler.disable  # as transformers' own update of these pages: they are views of one tensor of bytes
def attend_pages(
    cache, layer_idx: int, query, key, value, *, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, read_index,
    write_index, block_table=None, softmax_scale, causal, window_size, softcap, s_aux, **kwargs,
) -> torch.Tensor | None:  # fmt: skip
    """Writes new keys and values into the pages of layer `layer_idx` and attends over them.

    Args:
        query, key, value: [1, Hq, T, D], [1, Hk, T, D], [1, Hk, T, D].
        The others: those with which transformers calls the model.

    Returns:
        [1, T, Hq, D]. None, with nothing written, where no sequence has tokens in the cache, and for a layer with a
        sliding window: its tokens lie in a ring of `window` slots that begins in the middle of a page, and new tokens
        may overwrite what their own queries see, so transformers gathers the ring before it writes.

    Raises:
        ValueError: the pages do not fit the layer's keys and values (multi-head latent attention).
    """
    allocator = cache.layer_to_allocator[layer_idx]
    stored = allocator.num_key_value_heads, allocator.head_dim
    for name, new in (("keys", key), ("values", value)):
        if (new.shape[1], new.shape[3]) != stored:
            raise ValueError(
                f"transformers' continuous batching stores {stored[0]} heads of dim {stored[1]}, and layer {layer_idx} "
                f"has {name} of {new.shape[1]} heads of dim {new.shape[3]}: use generate() for this model"
            )
    reads = read_index[allocator.index]
    if not allocator.supports_block_table or (block_table is None and reads.numel() == 0):
        return None
    k_pages, v_pages = allocator.get_cache_for_block_table(layer_idx)
    scales = allocator.scales(layer_idx) if hasattr(allocator, "scales") else {}
    starts = cu_seq_lens_k[allocator.layer_type]
    is_first = layer_idx == allocator.layer_indices[0]
    options = dict(softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap, s_aux=s_aux)
    if block_table is not None:  # one new token a sequence
        query, key, value = (new.permute(2, 0, 1, 3) for new in (query, key, value))
        seqlens = _shared(starts, is_first, lambda: starts.diff() - 1)  # -1 for the empty sequences of a padded batch
        output = api.flash_attn_with_kvcache(
            query, k_pages, v_pages, key, value, cache_seqlens=seqlens, block_table=block_table[allocator.index],
            **options, **scales,
        )  # fmt: skip
        return output.transpose(0, 1)
    query, key, value = (new[0].transpose(0, 1) for new in (query, key, value))
    api.reshape_and_cache(key, value, k_pages, v_pages, write_index[allocator.index], **scales)
    longest = max_length_k[allocator.layer_type]
    table = _shared(starts, is_first, lambda: block_table_of(reads, starts, longest, allocator.tokens_per_page))
    if scales:
        k_pages, v_pages = api.gather_cache(
            k_pages, v_pages, table, starts, key.dtype, **scales, num_tokens=reads.numel()
        )
        table = None
    output = api.flash_attn_varlen_func(
        query, k_pages, v_pages, cu_seq_lens_q, starts, max_length_q, longest, block_table=table, **options
    )
    return output[None]


def block_table_of(reads: torch.Tensor, starts: torch.Tensor, longest: int, page_size: int) -> torch.Tensor:
    """int32 [B, ceil(longest / page_size)]: the page of every `page_size` tokens of each sequence, -1 beyond its end.

    reads: int64 [tokens], the slots (page * page_size + offset) of the sequences' tokens, which are laid end to end at
    `starts` int32 [B + 1]. Every sequence begins at the beginning of a page. Never waits for the device.
    """
    firsts = starts[:-1, None] + torch.arange(0, longest, page_size, device=reads.device)
    pages = reads[firsts.clamp_max(reads.numel() - 1)] // page_size
    return torch.where(firsts < starts[1:, None], pages, -1).to(torch.int32)


def _shared(owner: torch.Tensor, is_first: bool, make):
    """`make()` once per forward and group of layers, kept on `owner`, a tensor of the batch that all layers are given.

    The first layer always makes it: a CUDA graph is captured with a batch that has already run once, and must contain
    it.
    """
    made = None if is_first else getattr(owner, _SHARED, None)
    if made is None:
        made = make()
        setattr(owner, _SHARED, made)
    return made


def register() -> None:
    """Opens transformers' decode path by block table to our names, and as of 5.19 its cache to formats. Idempotent."""
    from transformers.generation.continuous_batching import initialization

    if transformers_releases.has("5.19"):
        from hf_efficient.integrations import (
            transformers_batching_manager,
            transformers_paged_formats,
            transformers_quantized_pages,
        )

        transformers_paged_formats.register()
        transformers_quantized_pages.register()
        transformers_batching_manager.register()
    else:
        transformers_releases.register_paged_attention(api.ATTENTION_NAMES)
    if not hasattr(initialization.is_flash_attention_requested, "_hf_efficient"):
        initialization.is_flash_attention_requested = _count_our_names(initialization.is_flash_attention_requested)


def _count_our_names(original):
    @functools.wraps(original)
    def is_flash_attention_requested(config=None, *args, **kwargs):
        if transformers_releases.without_prefix(getattr(config, "_attn_implementation", None)) in api.ATTENTION_NAMES:
            return True  # of any version: its callers only ask whether there is one
        return original(config, *args, **kwargs)

    is_flash_attention_requested._hf_efficient = True
    return is_flash_attention_requested
