"""Training of a model whose keys and values will lie in quantized pages (LLM-QAT, https://arxiv.org/abs/2305.17888)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from hf_efficient.bit_linear import StraightThrough
from hf_efficient.cache.stores.grouped import WINDOW
from hf_efficient.cache.stores.kv_formats import GROUPED, PER_TOKEN
from hf_efficient.integrations.transformers_compat import attention_of
from hf_efficient.kernels.attention import pages


class QuantizedPages(TorchFunctionMode):
    """Inside, `scaled_dot_product_attention` sees keys and values as the pages of a `PagedCache(kv_format=...)` give
    them back. Their gradients pass straight through the rounding.

    "int8" and "fp8" round every token. "int4" and "int2" leave the first block, the newest 128 tokens before each query
    and groups that are not whole as they are, as the cache does. A window is read as one sequence without padding.
    """

    def __init__(self, kv_format: str):
        super().__init__()
        self.kv_format, self.is_active = kv_format, kv_format != "auto"

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is rounded: for a teacher."""
        before, self.is_active = self.is_active, False
        try:
            yield
        finally:
            self.is_active = before

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is not F.scaled_dot_product_attention or not self.is_active:
            return function(*args, **kwargs)
        named = ("query", "key", "value")[len(args) :]
        (q, k, v), kwargs = (*args, *(kwargs[n] for n in named)), {n: x for n, x in kwargs.items() if n not in named}
        if self.kv_format in PER_TOKEN:
            dtype = PER_TOKEN[self.kv_format]
            k, v = (StraightThrough.apply(x, lambda x: pages.stored_tokens(x, dtype)) for x in (k, v))
            return function(q, k, v, **kwargs)
        bits, group = GROUPED[self.kv_format]
        stop = k.shape[2] // group * group
        if k.shape[2] < WINDOW + 2 * group:  # nothing is old enough
            return function(q, k, v, **kwargs)
        stored = pages.stored_keys(k[:, :, group:stop], bits, group), pages.stored_values(v, bits, group)
        old_k = StraightThrough.apply(k, lambda k: torch.cat([k[:, :, :group], stored[0], k[:, :, stop:]], 2))
        old_v = StraightThrough.apply(v, lambda v: stored[1])
        return _attention(q, (k, v), (old_k, old_v), _in_pages(q.shape[2], k.shape[2], group), **kwargs)


def _in_pages(queries: int, keys: int, group: int) -> torch.Tensor:
    """bool [queries, keys]: which keys the query at the end of the tokens so far reads from pages."""
    newest = torch.arange(keys - queries, keys)[:, None]
    stored, token = (newest + 1 - WINDOW).clamp_min(0) // group * group, torch.arange(keys)
    return (token >= group) & (token < stored)


def _attention(q, new, old, is_old, *, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """`scaled_dot_product_attention` of q [B, Hq, S, D] over the keys and values [B, Hk, n, D] in `old` where `is_old`
    bool [S, n], and elsewhere over those in `new`."""
    is_old = is_old.to(q.device)
    (k, v), (old_k, old_v) = ([x[:, :, None] for x in pair] for pair in (new, old))
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = torch.where(is_old, grouped @ old_k.transpose(-1, -2), grouped @ k.transpose(-1, -2)).float()
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(is_old).triu(1), float("-inf"))
    if attn_mask is not None:
        mask = attn_mask if attn_mask.dim() < 4 else attn_mask[:, :, None]
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    weights = F.dropout(scores.softmax(-1), dropout_p).to(q.dtype)
    out = weights.masked_fill(~is_old, 0) @ old_v + weights.masked_fill(is_old, 0) @ v
    return out.flatten(1, 2)


def check_attention(model, name: str, value) -> None:
    """Raises ValueError where the attention of `model` does not go by `scaled_dot_product_attention`."""
    own = attention_of(model.config)
    if own != "sdpa":
        raise ValueError(
            f"{name}={value!r}: {type(model).__name__} has attn_implementation={own!r}, and training sees inside that "
            "of 'sdpa' alone: load it with attn_implementation='sdpa'"
        )
