"""How much sparsity each block gets, where not all are to get the same (OWL, https://arxiv.org/abs/2310.05175): less where
more of the weights are outliers by Wanda's score."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from hf_efficient.calibration.blocks import weight_of, without_cache


OUTLIER = 5.0  # times the mean of a linear's scores |w| |x|
SPAN = 0.08  # how far a block's sparsity may lie from the one asked for


@torch.no_grad()
def choose_sparsity(
    model: nn.Module,
    sparsity: Mapping[str, float],
    tokens: torch.Tensor,
    blocks: Iterable[nn.Module],
    span: float = SPAN,
) -> dict[str, float]:
    """The sparsity of each of the linears in `sparsity` (full name -> fraction of zeros meant on average): the same for all of
    a block, so that about as many weights are kept together as with those given.

    One forward pass of the dense model over `tokens` int64 [windows, length], where its weights are, keeps a vector a linear.
    Linears outside `blocks`, or that no token reached, keep theirs.

    Args:
        blocks: modules that hold the linears.
        span: no block's sparsity is further from the mean than this, nor outside [0, 1).
    """
    groups = _groups(model, sparsity, blocks)
    squares = _squared_inputs(model, [name for names in groups for name in names], tokens)
    groups = [reached for names in groups if (reached := [name for name in names if name in squares])]
    if len(groups) < 2:
        return dict(sparsity)
    weights = {name: weight_of(model.get_submodule(name)) for names in groups for name in names}
    outliers, sizes = [], []
    for names in groups:
        found = sum(_outliers(weights[name], squares[name]) for name in names)
        sizes.append(sum(weights[name].numel() for name in names))
        outliers.append(found / sizes[-1])
    sizes, outliers = torch.tensor(sizes).double(), torch.tensor(outliers).double()
    offset = -(outliers - (outliers * sizes).sum() / sizes.sum())
    offset *= span / offset.abs().max().clamp_min(1e-30)
    chosen = dict(sparsity)
    for names, change in zip(groups, offset.tolist()):
        for name in names:
            chosen[name] = min(max(sparsity[name] + change, 0.0), 0.999)
    return chosen


def _groups(model: nn.Module, names: Iterable[str], blocks: Iterable[nn.Module]) -> list[list[str]]:
    block_names = {id(module): name for name, module in model.named_modules()}
    prefixes = [block_names[id(block)] + "." for block in blocks]
    return [[name for name in names if name.startswith(prefix)] for prefix in prefixes]


def _squared_inputs(model: nn.Module, names: list[str], tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums over rows of squared inputs, float32 [K], of the linears that the tokens reach."""
    squares: dict[str, torch.Tensor] = {}

    def record(name: str):
        def hook(module, args):
            found = args[0].float().square().flatten(0, -2).sum(0)
            squares[name] = squares[name] + found if name in squares else found

        return hook

    hooks = [model.get_submodule(name).register_forward_pre_hook(record(name)) for name in names]
    try:
        with without_cache(model):
            for window in tokens.to(model.get_input_embeddings().weight.device):
                model(input_ids=window[None])
    finally:
        for hook in hooks:
            hook.remove()
    return squares


def _outliers(weight: torch.Tensor, squares: torch.Tensor) -> int:
    scores = weight.float().abs() * squares.sqrt()
    return (scores > OUTLIER * scores.mean()).sum().item()
