"""Learned codebooks: weighted k-means in one dimension, a table of 2^bits entries for each row or for the whole weight.

SqueezeLLM (https://arxiv.org/abs/2306.07629) without its sparse part. The weights are the mean squares of the layer's
inputs, so the objective is |X (W - Q)^T|^2 for uncorrelated inputs."""

import torch
import torch.nn.functional as F

from hf_efficient.formats.codebook import CodebookFormat


FORMATS = (CodebookFormat,)
NEEDS = ()
USES = ("mean_square",)
_ELEMENTS_AT_ONCE = 1 << 19  # weights at a time: bounds the float64 copies
_ITERATIONS = 30  # of Lloyd's algorithm, at most
_CUTS = 64  # pieces of a row in the search for a start
_BINS = 1 << 14  # of the histogram of a weight with one table
_ROUNDS = 3  # each fits the tables to the scales, then the scales to the tables


def quantize(weight: torch.Tensor, format: CodebookFormat, inputs=None) -> dict[str, torch.Tensor]:
    """See `hf_efficient.methods`. inputs: its `mean_square` [K] weighs the squared errors of the columns; None: all
    equal.

    Raises:
        ValueError: a format with a fixed table."""
    if format.codebook != "kmeans":
        raise ValueError(f"method='kmeans' learns a table, codebook={format.codebook!r} has one: use method='rtn'")
    importance = _importance(weight, inputs)
    scale, best = _signed_absmax(weight, format), None
    # squares of what is far from 1 would overflow or vanish
    unit = torch.exp2(scale.abs().amax().clamp_min(torch.finfo(torch.float32).tiny).log2().floor())
    for _ in range(1 if format.group_size in (None, -1) else _ROUNDS):
        stored = format.store_scale(scale, weight.dtype)
        scale = format.scale(stored)
        if format.tables(len(weight)) == 1:
            table = _shared_table(weight, scale, importance, format, unit).to(weight.dtype)
        else:
            table = _row_tables(weight, scale, importance, format).to(weight.dtype)
        codes = format.nearest(weight, scale, table)
        tensors = {"qweight": format.pack(codes), **stored, "codebook": table}
        error, scale = _refit(weight, codes, table.float(), scale, importance, format, unit)
        if best is None or error < best[0]:
            best = error, tensors
    return best[1]


def _signed_absmax(weight, format) -> torch.Tensor:
    """The weight of the largest magnitude of each group, with its sign, float32 [N, G] or [1, 1]. Divided by it, every
    group has the largest entry 1 and reaches less far below 0, so one table fits them better."""
    if format.group_size is None:
        return weight.flatten()[weight.abs().argmax()].float().view(1, 1)
    groups = [format.grouped(rows) for rows in weight.split(max(1, _ELEMENTS_AT_ONCE // weight.shape[1]))]
    return torch.cat([group.gather(-1, group.abs().argmax(-1, keepdim=True))[..., 0] for group in groups])


def _importance(weight, inputs) -> torch.Tensor:
    """float32 [K], mean 1. Columns whose input is always 0 keep a little weight, so that they are still rounded to
    nearest."""
    if inputs is None:
        return torch.ones(weight.shape[1], device=weight.device, dtype=torch.float32)
    importance = inputs.mean_square.float().to(weight.device)
    importance = importance / importance.mean().clamp_min(torch.finfo(torch.float32).tiny)
    return importance.clamp_min(1e-6)


def _refit(weight, codes, table, scale, importance, format, unit) -> tuple[float, torch.Tensor]:
    """(the weighted squared error in squares of `unit`, the scales that minimise it for these codes and tables)."""
    error, scales = 0.0, []
    step = max(1, _ELEMENTS_AT_ONCE // weight.shape[1])
    for first in range(0, len(weight), step):
        rows = slice(first, first + step)
        entries = table.expand(len(weight), -1)[rows].gather(1, codes[rows].long())
        entries, values = format.grouped(entries), format.grouped(weight[rows])
        weights = format.grouped(importance.expand(len(codes[rows]), -1))
        own = scale.expand(len(weight), -1)[rows]
        error += (((entries * own[..., None] - values) / unit).square() * weights).sum(dtype=torch.float64).item()
        fitted = (weights * entries * values).sum(-1) / (weights * entries.square()).sum(-1)
        scales.append(torch.where(fitted.abs() <= torch.finfo(weight.dtype).max, fitted, own))
    return error, scale if format.group_size is None else torch.cat(scales)


def _row_tables(weight, scale, importance, format) -> torch.Tensor:
    step = max(1, _ELEMENTS_AT_ONCE // max(weight.shape[1], (_CUTS + 1) ** 2))
    tables = []
    for first in range(0, len(weight), step):
        values = format.normalised(weight[first : first + step], scale[first : first + step])
        values, order = values.sort()
        tables.append(cluster(values, importance[order], 2**format.bits))
    return torch.cat(tables)


def _shared_table(weight, scale, importance, format, unit) -> torch.Tensor:
    """One table for all rows, from a histogram of the normalised weights. unit: as of `_refit`."""
    sums = torch.zeros(2, _BINS, dtype=torch.float64, device=weight.device)
    step = max(1, _ELEMENTS_AT_ONCE // weight.shape[1])
    for first in range(0, len(weight), step):
        own = scale if len(scale) == 1 else scale[first : first + step]
        values = format.normalised(weight[first : first + step], own)
        weights = (format.grouped(importance.expand(len(values), -1)) * (own / unit).square()[..., None]).flatten(1)
        weights = weights[:, : values.shape[1]].flatten().double()
        values = values.flatten()
        bins = ((values.clamp(-1.5, 1.5) + 1.5) * ((_BINS - 1) / 3)).long()
        sums[0] += torch.bincount(bins, weights, minlength=_BINS)
        sums[1] += torch.bincount(bins, weights * values, minlength=_BINS)
    filled = sums[0] > 0
    if not filled.any():  # all weights are 0
        return torch.zeros(1, 2**format.bits, device=weight.device, dtype=torch.float32)
    weights = sums[0][filled]
    return cluster((sums[1][filled] / weights)[None].float(), weights[None].float(), 2**format.bits)


def cluster(values: torch.Tensor, weights: torch.Tensor, entries: int) -> torch.Tensor:
    """Weighted k-means of each row: sorted tables float32 [R, entries] for sorted float32 values [R, n] with weights
    [R, n].

    Lloyd's algorithm runs from two starts, and each row takes the better result: from the grid of round to nearest, so
    that the result is never worse than that grid, and from the best table for coarser clusters."""
    moments = torch.stack([weights.double() * values.double() ** power for power in range(3)])
    running = F.pad(moments.cumsum(-1), (1, 0))
    best = None
    for table in (_even_start(values, entries), _optimal_start(values, weights, running, entries)):
        for _ in range(_ITERATIONS):
            before, (table, cost) = table, _iterate(table, values, running)
            if torch.equal(before, table):
                break
        if best is None:
            best = table, cost
        best = torch.where((cost < best[1])[:, None], table, best[0]), torch.minimum(cost, best[1])
    return best[0]


def _even_start(values: torch.Tensor, entries: int) -> torch.Tensor:
    low, high = values[:, :1].clamp_max(0), values[:, -1:].clamp_min(0)
    step = (high - low) / (entries - 1)
    zero = (-low / torch.where(step == 0, 1, step)).round()
    return (torch.arange(entries, device=values.device) - zero) * step


def _optimal_start(values: torch.Tensor, weights: torch.Tensor, running: torch.Tensor, entries: int) -> torch.Tensor:
    """The best tables whose clusters are unions of neighbouring pieces of the row, by dynamic programming over `_CUTS`
    pieces. A piece has an equal share of the integral of density^(1/3), as each cluster of a large optimal table
    has."""
    gaps = values.diff(dim=1, append=values[:, -1:])
    cumulated = (weights * gaps.square()).pow(1 / 3).cumsum(1)  # a density is weight / gap
    shares = torch.arange(1, _CUTS, device=values.device) / _CUTS
    cuts = torch.searchsorted(cumulated, cumulated[:, -1:] * shares) + 1  # cut k lies before value cuts[k]
    cuts = F.pad(F.pad(cuts.clamp_max(values.shape[1]), (1, 0)), (0, 1), value=values.shape[1])
    at = running.gather(2, cuts.expand(3, -1, -1))
    mass, first, second = at[:, :, None, :] - at[:, :, :, None]  # [R, i, j]: of pieces i to j - 1
    cost = (second - first.square() / torch.where(mass > 0, mass, 1)).clamp_min(0).float()
    cost.masked_fill_(torch.ones(_CUTS + 1, _CUTS + 1, device=values.device, dtype=torch.bool).tril(-1), torch.inf)
    least, choices = cost[:, 0], []  # [R, j]: least cost of the pieces before j
    for _ in range(entries - 1):
        least, choice = (least[:, :, None] + cost).min(1)
        choices.append(choice)
    borders = [torch.full_like(cuts[:, :1], _CUTS)]
    for choice in reversed(choices):
        borders.append(choice.gather(1, borders[-1]))
    borders = torch.cat([*borders, torch.zeros_like(borders[0])], 1).flip(1)
    mass, first, _ = at.gather(2, borders.expand(3, -1, -1)).diff(dim=2)
    return torch.where(mass > 0, first / torch.where(mass > 0, mass, 1), values[:, :1]).float().sort().values


def _iterate(table, values, running) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of Lloyd's algorithm on sorted tables [R, E]: (new tables, weighted squared errors of the clusters
    around their means, float64 [R]).

    running: float64 [3, R, n + 1], running sums of weight, weight * value and weight * value^2. Sums over a cluster are
    differences of them, so only the borders of clusters are searched. The first entry without a value near it moves to
    the far end of the costliest cluster."""
    count = values.shape[1]
    borders = torch.searchsorted(values, (table[:, 1:] + table[:, :-1]) / 2, right=True)
    borders = F.pad(F.pad(borders, (1, 0)), (0, 1), value=count)
    mass, first, second = running.gather(2, borders.expand(3, -1, -1)).diff(dim=2)
    empty = borders.diff(dim=1) == 0
    mean = torch.where(empty, table.double(), first / torch.where(empty, 1, mass))
    cost = torch.where(empty, 0, second - first * mean).clamp_min(0)
    table = mean.float()
    worst = cost.argmax(1, keepdim=True)
    ends = torch.cat([borders.gather(1, worst), borders.gather(1, worst + 1) - 1], 1)
    ends = values.gather(1, ends.clamp(0, count - 1))  # not used where no cluster costs anything
    end = ends.gather(1, (ends - table.gather(1, worst)).abs().argmax(1, keepdim=True))
    idle = empty.int().argmax(1, keepdim=True)
    moved = table.scatter(1, idle, end)
    table = torch.where(empty.any(1, keepdim=True) & (cost.gather(1, worst) > 0), moved, table)
    return table.sort().values, cost.sum(1)
