"""Token trees: several continuations of a sequence in one forward, sharing their beginnings."""

import heapq
from typing import NamedTuple

import numpy as np
import torch

from hf_efficient.generation.speculation.proposal import MAX_NODES, Proposal


class RowTree(NamedTuple):
    """The tree of one sequence on the host: token, parent (-1: the root) and confidence of each node, parents first."""

    tokens: list[int]
    parents: list[int]
    confidence: list[float]


def proposal_of(trees: list[RowTree], device) -> Proposal | None:
    """The trees of all sequences as one proposal, a chain where each is one. None when no tree has a node."""
    width = max(len(tree.tokens) for tree in trees)
    if width == 0:
        return None
    rows, confidence, is_tree = [], [], False
    for tree in trees:
        count = len(tree.tokens)
        padding = width - count
        rows.append([count, *tree.tokens, *[0] * padding, *tree.parents, *[-1] * padding])
        confidence.append(tree.confidence + [0.0] * padding)
        is_tree = is_tree or tree.parents != list(range(-1, count - 1))
    whole = torch.tensor(rows, device=device)  # one transfer
    return Proposal(
        whole[:, 1 : width + 1],
        whole[:, 0],
        parents=whole[:, width + 1 :] if is_tree else None,
        confidence=torch.tensor(confidence, dtype=torch.float32, device=device),
    )


def trees_of(proposal: Proposal) -> list[RowTree]:
    """The inverse of `proposal_of`, for a proposal with confidence."""
    chain = list(range(-1, proposal.width - 1))
    parents = [chain] * len(proposal.counts) if proposal.parents is None else proposal.parents.tolist()
    rows = zip(proposal.counts.tolist(), proposal.tokens.tolist(), parents, proposal.confidence.tolist())
    return [RowTree(*(values[:count] for values in row)) for count, *row in rows]


def best_first(
    tokens: np.ndarray, confidence: np.ndarray, parents: np.ndarray, depths: np.ndarray, limits, nodes: int, device
) -> Proposal | None:
    """The `nodes` most probable candidates of each sequence as a tree on `device`, most probable node first.

    tokens, parents: int64 [rows, candidates], parents before their children. confidence: float alike, of a node at most
    its parent's. depths: int64 [candidates], from 1. limits: the deepest node allowed, for each sequence.
    """
    if not any(limits):
        return None
    confidence = np.where(depths > np.array(limits)[:, None], np.float32(-1), confidence)
    row, order = np.arange(len(tokens))[:, None], (-confidence).argsort(1, kind="stable")
    rank = order.argsort(1)
    order = order[:, : min(nodes, MAX_NODES)]
    confidence, parents = confidence[row, order], parents[row, order]
    parents = np.where(parents < 0, -1, rank[row, parents])
    found = tokens[row, order], (confidence >= 0).sum(1), parents, confidence.clip(0)
    tokens, counts, parents, confidence = (torch.from_numpy(values).to(device) for values in found)
    return Proposal(tokens, counts, None, parents, confidence)


def spine_first(tokens: np.ndarray, chances: np.ndarray, limits: list[int], nodes: int, device) -> Proposal | None:
    """`best_first` where the first guess of each depth alone is continued, for few candidates.

    tokens: int64 [rows, depth, branches], the guesses of each depth. chances: float alike, the most probable first.
    """
    trees = []
    for tokens_of, chances_of, limit in zip(tokens.tolist(), chances.tolist(), limits):
        candidates, reach = [], 1.0  # minus probability, depth, rank
        for depth, likely in enumerate(chances_of[:limit]):
            if likely[0] != likely[0]:  # NaN, of broken heads
                break
            candidates += [(-reach * chance, depth, rank) for rank, chance in enumerate(likely)]
            reach *= likely[0]
        best, tree = sorted(candidates)[: min(nodes, MAX_NODES)], RowTree([], [], [])
        spine = [-1]  # the node of the first guess of each depth, behind the root
        for node, (negative, depth, rank) in enumerate(best):
            tree.tokens.append(tokens_of[depth][rank])
            tree.parents.append(spine[depth])
            tree.confidence.append(-negative)
            if rank == 0:
                spine.append(node)
        trees.append(tree)
    return proposal_of(trees, device)


def product_trees(tokens: np.ndarray, chances: np.ndarray, limits: list[int], nodes: int, device) -> Proposal | None:
    """The `nodes` most probable paths of each sequence where the guesses of a depth do not depend on the path to it.

    tokens: int64 [rows, depth, branches], the guesses of each depth. chances: float alike, from 0 to 1, descending
    along the branches. limits: the deepest node allowed, for each sequence.
    """
    trees = []
    for row, limit in enumerate(limits):
        likely, depth, tree = chances[row].tolist(), min(limit, chances.shape[1]), RowTree([], [], [])
        # those that may come next: minus probability, depth, rank, parent and the parent's probability
        open_ = [(-likely[0][0], 0, 0, -1, 1.0)] if depth else []
        while open_ and len(tree.tokens) < min(nodes, MAX_NODES):
            negative, level, rank, parent, above = heapq.heappop(open_)
            tree.tokens.append(int(tokens[row, level, rank]))
            tree.parents.append(parent)
            tree.confidence.append(-negative)
            if rank + 1 < len(likely[level]):
                heapq.heappush(open_, (-above * likely[level][rank + 1], level, rank + 1, parent, above))
            if level + 1 < depth:
                child = len(tree.tokens) - 1, -negative
                heapq.heappush(open_, (negative * likely[level + 1][0], level + 1, 0, *child))
        trees.append(tree)
    return proposal_of(trees, device)


def ancestors(parents: torch.Tensor) -> torch.Tensor:
    """Which node descends from which: bool [rows, width + 1, width + 1] over the root (index 0) and the nodes `parents`
    int64 [rows, width]. Row i is true at the ancestors of node i and at itself: what it attends to. Its sum is the
    node's depth + 1."""
    above = parents.cpu().numpy() + 1  # numpy's bits: torch's calls take longer than the work on so few numbers
    seen, row = np.ones((above.shape[0], above.shape[1] + 1), np.uint64), np.arange(len(above))
    for node in range(1, seen.shape[1]):
        seen[:, node] = seen[row, above[:, node - 1]] | np.uint64(1 << node)
    seen = seen[..., None] >> np.arange(seen.shape[1], dtype=np.uint64) & np.uint64(1) > 0
    return torch.from_numpy(seen).to(parents.device)


def depths_of(proposal: Proposal) -> list[int]:
    """The depth of the deepest node of each sequence, 0 without one."""
    deepest = []
    for count, _, parents in zip(*proposal.on_host()):
        depths = [0]  # of the root and the nodes
        for parent in parents[:count]:
            depths.append(depths[parent + 1] + 1)
        deepest.append(max(depths))
    return deepest
