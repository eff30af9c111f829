"""OWL (https://arxiv.org/abs/2310.05175): a block gets less sparsity the more of its weights are outliers by Wanda's
score."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from hf_efficient.calibration.blocks import weight_of, without_cache
from hf_efficient.observers.hooks import watching_inputs


OUTLIER = 5.0  # a score |w| |x| of at least so many times the mean of its linear is an outlier
# largest difference between the sparsity of a block and the mean; less where a linear would leave [0, MOST]
SPAN = 0.08
MOST = 0.999  # sparsity of a linear


@torch.no_grad()
def choose_sparsity(
    model: nn.Module, sparsity: Mapping[str, float], tokens: torch.Tensor, blocks: Iterable[nn.Module]
) -> dict[str, float]:
    """The sparsity of each linear: the same for all of a block, and about as many weights kept in total as asked for.

    One forward pass of the dense model over the tokens, where its weights are, keeps a vector per linear.

    Args:
        sparsity: full name of a linear -> fraction of zeros on average. Linears outside `blocks`, those that no token
            reached, and those that are not pruned keep theirs.
        tokens: int64 [windows, length].
        blocks: modules that hold the linears.
    """
    groups = _groups(model, [name for name, own in sparsity.items() if own], blocks)
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
    sizes, outliers = torch.tensor(sizes, dtype=torch.float64), torch.tensor(outliers, dtype=torch.float64)
    offset = -(outliers - (outliers * sizes).sum() / sizes.sum())
    offset *= SPAN / offset.abs().max().clamp_min(1e-30)
    changes = {name: change for names, change in zip(groups, offset.tolist()) for name in names}
    rooms = (max(0.0, MOST - sparsity[n] if c > 0 else sparsity[n]) / abs(c) for n, c in changes.items() if c)
    share = min([1.0, *rooms])
    return {name: min(max(own + share * changes.get(name, 0), 0.0), max(own, MOST)) for name, own in sparsity.items()}


def _groups(model: nn.Module, names: Iterable[str], blocks: Iterable[nn.Module]) -> list[list[str]]:
    block_names = {id(module): name for name, module in model.named_modules()}
    prefixes = [block_names[id(block)] + "." for block in blocks]
    return [[name for name in names if name.startswith(prefix)] for prefix in prefixes]


def _squared_inputs(model: nn.Module, names: list[str], tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums over rows of squared inputs, float32 [K], of the linears that the tokens reach."""
    squares: dict[str, torch.Tensor] = {}

    def add(name: str, x: torch.Tensor) -> None:
        squares[name] = squares.get(name, 0) + x.float().square().flatten(0, -2).sum(0)

    with watching_inputs({name: model.get_submodule(name) for name in names}, add), without_cache(model):
        for window in tokens.to(model.get_input_embeddings().weight.device):
            model(input_ids=window[None])
    return squares


def _outliers(weight: torch.Tensor, squares: torch.Tensor) -> int:
    scores = weight.float().abs() * squares.sqrt()
    return (scores > OUTLIER * scores.mean()).sum().item()
