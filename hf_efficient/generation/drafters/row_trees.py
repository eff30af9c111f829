"""Token trees row by row on the host, for drafters that think in Python."""

from typing import NamedTuple

import torch

from hf_efficient.generation.drafters.base import Proposal


class RowTree(NamedTuple):
    """The nodes of one row: token, parent (-1: the row's last token) and confidence of each, parents first."""

    tokens: list[int]
    parents: list[int]
    confidence: list[float]


def proposal_of(trees: list[RowTree], device) -> Proposal | None:
    """None when no row has a node. A chain when every row has one."""
    width = max(len(tree.tokens) for tree in trees)
    if width == 0:
        return None
    whole, confidence, branches = [], [], False
    for tree in trees:
        count = len(tree.tokens)
        filler = width - count
        whole.append([count, *tree.tokens, *[0] * filler, *tree.parents, *[-1] * filler])
        confidence.append(tree.confidence + [0.0] * filler)
        branches = branches or tree.parents != list(range(-1, count - 1))
    whole = torch.tensor(whole, device=device)
    return Proposal(
        whole[:, 1 : width + 1],
        whole[:, 0],
        parents=whole[:, width + 1 :] if branches else None,
        confidence=torch.tensor(confidence, dtype=torch.float32, device=device),
    )


def trees_of(proposal: Proposal) -> list[RowTree]:
    """proposal: with confidence."""
    chain = list(range(-1, proposal.width - 1))
    parents = [chain] * len(proposal.counts) if proposal.parents is None else proposal.parents.tolist()
    rows = zip(proposal.counts.tolist(), proposal.tokens.tolist(), parents, proposal.confidence.tolist())
    return [RowTree(*(values[:count] for values in row)) for count, *row in rows]
