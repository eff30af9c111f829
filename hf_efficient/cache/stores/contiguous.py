"""The keys and values of a paged layer as transformers' own caches hold them."""

import torch

from hf_efficient.cache.bookkeeping.cache_state import CacheState
from hf_efficient.cache.bookkeeping.forward_plan import ForwardPlan
from hf_efficient.cache.bookkeeping.tensors import to_device


def contiguous(layer) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the keys [B, Hk, columns, D] and values [B, Hk, columns, Dv] of a `PagedLayer` that holds tokens.

    Every token stands in its column; padding and what lies behind shorter sequences is 0. Layers with a window give the
    last `window - 1` columns. Quantized pages are dequantized.

    Raises RuntimeError for layers that evict: every head keeps other tokens, which have no column in common.
    """
    state, pool = layer.state, layer.state.pool
    if layer.evicts:
        raise RuntimeError(
            "PagedCache(eviction=...) keeps other tokens in every head: layers[i].keys and .values have no columns. "
            "Use layers[i].store.token_positions()"
        )
    lengths, mask = list(pool.lengths), state.column_mask
    stored = layer.store.read(ForwardPlan(pool, None, lengths, None, 0))
    result = []
    for states in stored:
        whole = states.new_zeros(*states.shape[:2], state.columns, states.shape[-1])
        for b, (length, dropped) in enumerate(zip(lengths, pool.dropped)):
            if mask is None:
                columns = slice(dropped, dropped + length)
            else:
                columns = mask[b].nonzero().flatten()[dropped:].to(states.device)
            whole[b, :, columns] = states[b, :, :length]
        result.append(whole if state.window is None else whole[:, :, -(state.window - 1) :])
    return result[0], result[1]


def visible(state: CacheState, plan: ForwardPlan, keys: torch.Tensor, values: torch.Tensor) -> tuple:
    """What the columns of a forward see of all keys and values [B, H, longest sequence, D], contiguous."""
    if not state.is_ragged:
        if state.window is not None:
            window = slice(-(state.window - 1 + plan.width), None)
            keys, values = keys[:, :, window], values[:, :, window]
        return keys.contiguous(), values.contiguous()
    lengths = to_device(plan.lengths, torch.int64, keys.device)
    beyond = (torch.arange(plan.max_length, device=keys.device) >= lengths[:, None])[:, None, :, None]
    keys, values = keys.masked_fill(beyond, 0), values.masked_fill(beyond, 0)
    if any(dropped := state.pool.dropped):
        keys, values = (torch.nn.functional.pad(x, (0, 0, dropped[0], 0)) for x in (keys, values))
    return keys.contiguous(), values.contiguous()
