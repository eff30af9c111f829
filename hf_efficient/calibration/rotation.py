"""Rotations of the values inside attention heads, folded into weights so that they cost nothing when the model runs
(QuaRot, https://arxiv.org/abs/2404.00456).

Every weight with `rotate` reads an input that is rotated online (`TransformedFormat`). Attention mixes tokens, never
the channels of a head. So the value projection can rotate the input of the output projection within each head instead:
(A V R) (W_o R)^T = (A V) W_o^T. The statistics of that input change with it and are collected again."""

import dataclasses
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import nn

from hf_efficient.calibration.blocks import weight_of
from hf_efficient.calibration.collect import collect
from hf_efficient.formats.transformed import TransformedFormat
from hf_efficient.kernels.hadamard import random_signs, rotate
from hf_efficient.observers.hooks import watching_outputs


@torch.no_grad()
def rotate_block(block) -> None:
    """Folds the rotation of output projections of a `Block` into its value projections, where running the first batch
    shows that only rounding in the block's dtype changes. The format of the output projection then asks for no online
    rotation. Weights, formats and statistics of `block` change in place."""
    sites: dict[int, list[str]] = {}
    for name in block.linears:  # in the order they are called, those that read one tensor together
        sites.setdefault(id(block.statistics[name]), []).append(name)
    attentions = {
        module: head_dim
        for attention in block.module.modules()
        if isinstance(head_dim := getattr(attention, "head_dim", getattr(attention, "attention_head_size", None)), int)
        for module in attention.modules()
    }
    for producers, readers in pairwise(sites.values()):
        reader = readers[0]
        if len(readers) > 1 or not getattr(block.formats[reader], "rotation", False):
            continue
        columns = weight_of(block.linears[reader]).shape[1]
        candidates = [block.linears[name] for name in reversed(producers) if block.linears[name] in attentions]
        for module in candidates:
            heads = _heads(len(weight_of(module)), columns, attentions[module])
            if any(_fold(block, reader, module, rows) for rows in heads):
                block.formats[reader] = _without_rotation(block.formats[reader])
                hessian, every = block.statistics[reader].hessian is not None, range(len(block.inputs))
                own, weights = {reader: block.linears[reader]}, block.token_weights(every)
                again = collect(block.run, len(every), own, hessian=hessian, weights=weights)
                block.statistics.update(again)
                break


def _heads(rows: int, columns: int, head_dim: int) -> Iterator[torch.Tensor]:
    """Candidates for the rows of a linear (of `rows` outputs) that are values, int64 [heads, head_dim], one for each
    known layout. columns: input width of the linear that reads what attention makes of them."""
    within = torch.arange(head_dim)
    values = (rows - columns) // 2
    if columns % head_dim == 0 and rows % head_dim == 0 and columns % rows == 0:  # (grouped) values by themselves
        yield torch.arange(rows).view(-1, head_dim)
    elif columns % head_dim == 0 and rows == columns + 2 * values and values > 0 and values % head_dim == 0:
        yield torch.arange(rows - values, rows).view(-1, head_dim)  # queries, keys, values
        if values == columns:  # the three of each head together
            yield (torch.arange(2, rows // head_dim, 3) * head_dim)[:, None] + within


def _fold(block, reader: str, module: nn.Module, heads: torch.Tensor) -> bool:
    """Rotates within each head. Where that changes what the linear or the block computes, it is undone: False."""
    linear = block.linears[reader]
    saved = [(p.data, p.data.clone()) for m in (module, linear) for p in m.parameters(recurse=False)]
    before = _outputs(block, linear)
    signs = random_signs(heads.shape[1]).to(module.weight.device)
    for tensor in (weight_of(module), getattr(module, "bias", None)):
        if tensor is not None:
            tensor.data[heads] = _rotate(tensor.data[heads].movedim(1, -1), signs).movedim(-1, 1)
    weight = weight_of(linear)
    weight.copy_(_rotate(weight.unflatten(1, (-1, heads.shape[1])), signs).flatten(1))
    if all(_same(old, new) for old, new in zip(before, _outputs(block, linear))):
        gradients = next((own for name, own in block.gradients.items() if block.linears[name] is module), None)
        if gradients is not None and gradients.output_hessian is not None:
            for side in (gradients.output_hessian, gradients.output_hessian.t()):
                side[heads] = _rotate(side[heads].movedim(1, -1), signs).movedim(-1, 1)
        return True
    for data, old in saved:
        data.copy_(old)
    return False


def _rotate(weight: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Rotated in float32 at least, rounded once to the dtype of the weight."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return rotate(weight.to(wide), signs).to(weight.dtype)


def _outputs(block, reader: nn.Module) -> list[torch.Tensor]:
    """The outputs of the block and of the linear for the first batch."""
    found: list[torch.Tensor] = []
    with watching_outputs({reader: reader}, lambda _, args, kwargs, output: found.append(output)):
        return [block.run(0), *found]


def _same(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether 19 of 20 rows agree up to rounding, which may send single tokens to other experts."""
    tolerance = max(1e-5, 4 * torch.finfo(old.dtype).eps)  # a wrong fold differs by about 1
    old, new = (t.float().flatten(0, -2) for t in (old, new))
    errors = (new - old).norm(dim=-1) / old.norm(dim=-1).clamp_min(1e-30)
    return bool(errors.quantile(0.95) <= tolerance)


def _without_rotation(format: TransformedFormat):
    without = dataclasses.replace(format, rotation=False)
    return format.inner if without == TransformedFormat(format.inner) else without
