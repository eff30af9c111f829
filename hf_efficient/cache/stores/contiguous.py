"""The keys and values of a paged layer as an ordinary cache would hold them."""

import torch

from hf_efficient.cache.bookkeeping.forward_plan import ForwardPlan


def contiguous(layer) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the keys [B, Hk, columns, D] and values [B, Hk, columns, Dv] of a `PagedLayer` that holds tokens: every token
    in its column, zeros where padding was and behind rows that are shorter. Layers with a window give its last
    `window - 1` columns, as transformers' do. Quantized pages are dequantized.

    Raises RuntimeError where an eviction policy chose what stayed, which lies in no column.
    """
    state, pool = layer.state, layer.state.pool
    if layer.eviction is not None:
        raise RuntimeError(
            "PagedCache(eviction=...) keeps other tokens in every head: layers[i].keys and .values have no columns. Use "
            "layers[i].store.token_positions()"
        )
    lengths, mask = list(pool.lengths), state.column_mask
    stored = layer.store.read(ForwardPlan(pool, None, lengths, None, 0))
    result = []
    for states in stored:
        whole = states.new_zeros(*states.shape[:2], state.columns, states.shape[-1])
        for row, (length, dropped) in enumerate(zip(lengths, pool.dropped)):
            if mask is None:
                columns = slice(dropped, dropped + length)
            else:
                columns = mask[row].nonzero().flatten()[dropped:].to(states.device)
            whole[row, :, columns] = states[row, :, :length]
        result.append(whole if state.window is None else whole[:, :, -(state.window - 1) :])
    return result[0], result[1]
