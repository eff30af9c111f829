"""Coupled groups of a block, found from its graph (LLM-Pruner, https://arxiv.org/abs/2305.11627).

An input channel of a linear can go together with exactly the rows that produce it: row j of `gate_proj` and `up_proj`
with column j of `down_proj`; the queries, keys and values of a head with its columns of `o_proj`; grouped query heads
with the keys and values they share. Dependencies are read from autograd, never from names: the block runs with a random
leaf in place of the output of every linear, and the gradient of an input channel shows which rows it depends on.
Connected channels and rows are a group. Fused projections need nothing special."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_efficient.observers.hooks import replaced_forwards


_PROBES = 4  # at most; a neuron whose ReLU is 0 for all tokens of one probe is found in another


@dataclass(frozen=True)
class Groups:
    """G groups of R units of C input channels of one linear, the reader. A unit is a query head, a group the query
    heads that share keys and values; for neurons R = C = 1.

    Attributes:
        reader: name of the linear in the block.
        columns: its input channels, int64 [G, R, C].
        own: name of a linear -> its output rows that belong to one unit, int64 [G, R, r].
        shared: name of a linear -> its output rows that belong to all units of a group, int64 [G, r].
    """

    reader: str
    columns: torch.Tensor
    own: dict[str, torch.Tensor]
    shared: dict[str, torch.Tensor]

    @property
    def is_heads(self) -> bool:
        """Whether a unit is an attention head: several channels."""
        return self.columns.shape[2] > 1

    def first(self, groups: int, units: int) -> torch.Tensor:
        """bool [G, R]: the first `units` units of the first `groups` groups."""
        kept = torch.zeros(self.columns.shape[:2], dtype=torch.bool)
        kept[:groups, :units] = True
        return kept

    def kept_columns(self, kept: torch.Tensor) -> torch.Tensor:
        """kept: bool [G, R] -> the reader's channels that stay, ascending."""
        return self.columns[kept].flatten().sort().values

    def kept_rows(self, kept: torch.Tensor, linear: str, rows: int) -> torch.Tensor:
        """kept: bool [G, R] -> which of `rows` rows of `linear` stay, bool [rows]; shared rows go with the last
        unit."""
        stay = torch.ones(rows, dtype=torch.bool)
        if linear in self.own:
            stay[self.own[linear][~kept].flatten()] = False
        if linear in self.shared:
            stay[self.shared[linear][~kept.any(1)].flatten()] = False
        return stay


def best_units(group_scores: torch.Tensor, unit_scores: torch.Tensor, keep: tuple[int, int]) -> torch.Tensor:
    """bool [G, R]: the keep[0] groups of the largest scores [G], in each the keep[1] units of the largest scores [G,
    R]."""
    kept = torch.zeros_like(unit_scores, dtype=torch.bool)
    groups = group_scores.topk(keep[0]).indices
    kept[groups[:, None], unit_scores[groups].topk(keep[1], dim=1).indices] = True
    return kept


def find_groups(linears: dict[str, nn.Module], run: Callable[[], object]) -> list[Groups]:
    """The groups of a block, heads first, of readers that have more than one group. linears: name -> nn.Linear or
    Conv1D, all of the block. run: runs the block on about 16 tokens.

    Raises ValueError: groups of one linear that differ in size.
    """
    depends: dict[str, dict[str, torch.Tensor]] = {}
    for seed in range(_PROBES):
        for reader, found in _probe(linears, run, seed).items():
            known = depends.setdefault(reader, {})
            for name, pattern in found.items():
                known[name] = known[name] | pattern if name in known else pattern
        if all(pattern.any(0).all() for known in depends.values() for pattern in known.values()):
            break  # every row has a reader
    found = [groups for reader, patterns in depends.items() if (groups := _groups(reader, patterns)) is not None]
    return sorted(found, key=lambda groups: not groups.is_heads)


def _probe(linears: dict[str, nn.Module], run: Callable[[], object], seed: int) -> dict[str, dict[str, torch.Tensor]]:
    """Reader -> producer -> bool [channels of the reader, rows of the producer], for readers whose channels depend on
    some rows only."""
    generator = torch.Generator().manual_seed(seed)
    inputs, leaves, names = {}, {}, list(linears)

    def stand_in(index: int):
        module = linears[names[index]]
        width = module.nf if isinstance(module, Conv1D) else module.out_features

        def forward(x, *args):
            leaf = torch.randn(*x.shape[:-1], width, generator=generator).to(x.device, x.dtype).requires_grad_()
            inputs[names[index]], leaves[names[index]] = x, leaf
            return leaf.clone()  # some models add to it in place

        return forward

    with replaced_forwards(linears.values(), stand_in), torch.enable_grad():
        run()
    patterns = {}
    for reader, x in inputs.items():
        earlier = [name for name in leaves if name != reader]
        if not x.requires_grad:
            continue

        def rows_of(channel, x=x, earlier=earlier):
            wanted = [leaves[name] for name in earlier]
            gradients = torch.autograd.grad(x[..., channel].sum(), wanted, retain_graph=True, allow_unused=True)
            return {n: g.flatten(0, -2).ne(0).any(0).cpu() for n, g in zip(earlier, gradients) if g is not None}

        first = rows_of(0)
        if all(rows.all() for rows in first.values()):
            continue  # behind a norm, which mixes all channels
        each = [first, *(rows_of(channel) for channel in range(1, x.shape[-1]))]
        patterns[reader] = {name: torch.stack([rows[name] for rows in each]) for name in first}
    return patterns


def _groups(reader: str, patterns: dict[str, torch.Tensor]) -> Groups | None:
    """The groups of channels that `reader` reads; None where all depend on each other. Raises ValueError for groups of
    different sizes."""
    everything = torch.cat(list(patterns.values()), dim=1)
    labels = _components(everything)
    number = int(labels.max()) + 1
    sizes = labels.bincount()
    if number == 1 and not _runs(everything):
        return None
    if (sizes != sizes[0]).any():
        raise ValueError(
            f"the inputs of {reader} fall into groups of {sorted(set(sizes.tolist()))} channels: not uniform"
        )
    columns = torch.stack([(labels == group).nonzero().flatten() for group in range(number)])
    units = columns.shape[1] // (_runs(everything) or columns.shape[1])
    columns = columns.view(number, units, -1)
    own, shared = {}, {}
    for name, pattern in patterns.items():
        group_rows = torch.stack([pattern[c.flatten()].any(0) for c in columns])  # [G, rows]
        unit_rows = torch.stack([pattern[unit].any(0) for c in columns for unit in c])  # [G * R, rows]
        is_own = unit_rows.sum(0) == 1
        for mask, rows, target in ((is_own, unit_rows, own), (~is_own, group_rows, shared)):
            lists = [(r & mask).nonzero().flatten() for r in rows]
            if len({len(one) for one in lists}) > 1:
                raise ValueError(f"the rows of {name} that feed {reader} fall into groups that are not uniform")
            if len(lists[0]):
                stacked = torch.stack(lists)
                target[name] = stacked.view(number, units, -1) if target is own else stacked
    return Groups(reader, columns, own, shared)


def _components(pattern: torch.Tensor) -> torch.Tensor:
    """Connected components of bool [channels, rows]: the number of each channel's component, int64 [channels], in
    order."""
    labels = torch.arange(len(pattern))
    while True:
        by_row = torch.where(pattern, labels[:, None], len(pattern)).amin(0)
        new = torch.where(pattern, by_row, len(pattern)).amin(1).minimum(labels)
        if torch.equal(new, labels):
            return labels.unique(return_inverse=True)[1]
        labels = new


def _runs(pattern: torch.Tensor) -> int | None:
    """How many neighbouring channels share a row that no others read (the queries of a head); None where none do."""
    counts = pattern.sum(0)
    positions = torch.arange(len(pattern))[:, None]
    first = torch.where(pattern, positions, len(pattern)).amin(0)
    last = torch.where(pattern, positions, -1).amax(0)
    together = counts[(counts > 1) & (last - first + 1 == counts)]
    return int(together.min()) if len(together) else None
