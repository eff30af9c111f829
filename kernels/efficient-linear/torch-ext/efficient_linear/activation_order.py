"""GPTQ's activation order (https://arxiv.org/abs/2210.17323): columns are quantized in the order of their importance,
and `g_idx` is the group of each. The kernels read the columns of a group side by side, so the weight's columns are
sorted by group once, when it is loaded, and those of x in every call."""

import torch

from .packing import check_layout, number_of_groups, pack_canonical, unpack_canonical


def resolve_activation_order(
    qweight: torch.Tensor, g_idx: torch.Tensor, *, bits: int, group_size: int, in_features: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sorts the columns of a weight by group, so that

        weight_only_linear(x[:, permutation], pack_weight(codes, ...), scale, zero_point, ...)

    is the product with the weight whose column k has the scale and zero point [N, G] of group g_idx[k].

    qweight: canonical codes uint8 of a weight [N, in_features] (see `pack_weight`).
    g_idx: the group of each column, integers [in_features].

    Returns (canonical codes with sorted columns, permutation int64 [in_features] of the columns of x). The permutation
    is None where the columns are sorted already.

    Raises ValueError when g_idx does not give each group group_size columns (the last one those that remain)."""
    check_layout(bits, group_size)
    if group_size in (None, -1):
        raise ValueError(f"group_size={group_size!r}: a weight of one group has no activation order")
    if tuple(g_idx.shape) != (in_features,) or g_idx.is_floating_point():
        raise ValueError(f"g_idx is {g_idx.dtype} {tuple(g_idx.shape)}: allowed are integers [{in_features}]")
    g_idx = g_idx.to(qweight.device)
    groups = number_of_groups(in_features, group_size)
    permutation = torch.argsort(g_idx, stable=True)
    natural = torch.arange(in_features, device=qweight.device)
    if not torch.equal(g_idx[permutation].long(), natural // group_size):
        raise ValueError(
            f"g_idx has other groups than {groups} of {group_size} columns (the last with those that remain of "
            f"{in_features})"
        )
    if torch.equal(permutation, natural):
        return qweight, None
    codes = unpack_canonical(qweight, bits)[:, :in_features]
    return pack_canonical(codes[:, permutation].contiguous(), bits), permutation
