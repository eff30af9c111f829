"""Prompts whose padding stands at the left alone, which is all that rows without padding between their tokens can be."""

import torch


def is_left_padded(input_ids: torch.Tensor, model_kwargs: dict) -> bool:
    """Whether of prompts int64 [batch, length] every row ends in tokens, with padding before them only and positions counted
    from the first of them, as `generate()` lays them out.

    model_kwargs: with `attention_mask` [batch, length], 0 where there is padding, or None; `position_ids` [batch or 1, length].
    """
    mask, position_ids = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if mask is None:
        expected = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        return position_ids is None or _equal(position_ids, expected)
    if mask.shape != input_ids.shape:
        return False
    tokens = mask != 0
    if not bool(tokens[:, -1].all() and (tokens[:, 1:] >= tokens[:, :-1]).all()):
        return False
    expected = (tokens.long().cumsum(-1) - 1).clamp(min=0)
    return position_ids is None or _equal(torch.where(tokens, position_ids, 0), expected)


def _equal(position_ids: torch.Tensor, expected: torch.Tensor) -> bool:
    return position_ids.dim() == 2 and bool((position_ids == expected).all())
