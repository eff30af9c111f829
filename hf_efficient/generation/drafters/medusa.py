"""Drafts from Medusa heads: from the target's last hidden state, each head guesses one of the tokens to come."""

import functools

import numpy as np
import torch

from hf_efficient.generation.drafters.draft_heads import DraftHeads
from hf_efficient.generation.drafters.last_hidden import LastHiddenMixin
from hf_efficient.generation.speculation.proposal import MAX_NODES, Proposal
from hf_efficient.generation.speculation.token_tree import best_first
from hf_efficient.kernels.replay.function import CapturedFunction


class MedusaHeads(LastHiddenMixin, DraftHeads):
    """Medusa heads (Cai et al. 2024, "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
    Heads").

    Head k (from 0) reads h, the hidden state that predicted a sequence's last token, and guesses the token k + 1
    positions behind it: softmax(W (h + silu(A_k h + b_k))), with W the target's output head. A_k and b_k start at 0.

    Candidates are a static tree: the `MAX_NODES` paths that were right most often on held-out text. Of these, the
    `nodes` with the largest product of probabilities along the path are proposed.

    Args: `max_tokens` is the number of heads; for the others see `DraftHeads`.
    """

    kind, shape_fields = "medusa", ()

    def __init__(self, target: dict, draft_tokens: int, max_tokens: int = 4):
        super().__init__(target, draft_tokens, max_tokens)
        size = self.target["hidden_size"]
        self.weight = torch.nn.Parameter(torch.zeros(max_tokens, size, size))
        self.bias = torch.nn.Parameter(torch.zeros(max_tokens, size))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The inputs of the target's output head, [rows, heads, hidden_size], from hidden [rows, hidden_size]."""
        heads, size = self.bias.shape
        inner = torch.nn.functional.linear(hidden, self.weight.view(-1, size), self.bias.view(-1))
        return hidden[:, None] + torch.nn.functional.silu(inner).view(-1, heads, size)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of each head, [rows, heads, draft tokens], from hidden [rows, hidden_size]."""
        guesses = self(hidden)
        return self.logits(guesses.flatten(0, 1)).unflatten(0, guesses.shape[:2])

    def unroll(self, tokens: torch.Tensor, hidden: torch.Tensor, depth: int):
        """What training compares with the target: as `EagleHead.unroll`."""
        guesses = self(hidden[..., : self.bias.shape[1]].flatten(0, 1)).view(*hidden.shape[:2], *self.bias.shape)
        for head in range(depth):
            yield torch.nn.functional.pad(guesses[:, : -(head + 1), head], (0, 0, head + 1, 0))

    def begin(self, sequences, hidden=None) -> None:
        self._hidden, self._device = hidden[:, -1], sequences.device
        self._tree = static_tree(self.accuracies[: self.max_tokens], MAX_NODES)
        self._token_ids = self.draft_tokens.cpu().numpy()
        self._temperatures = torch.tensor(self.temperatures, device=self.bias.device)[:, None]

    @torch.no_grad()
    def propose(self, limits: list[int], nodes: int) -> Proposal | None:
        if not any(limits):
            return None
        ranks, parents, depths = self._tree
        branches = int(ranks.max()) + 1
        if branches not in self._captures:
            self._captures[branches] = CapturedFunction(functools.partial(self._guess, branches))
        likely, indices = (
            x.cpu().numpy() for x in self._captures[branches](self._hidden.to(self.bias), self._temperatures)
        )
        tokens, confidence = self._token_ids[indices[:, depths - 1, ranks]], likely[:, depths - 1, ranks]
        for depth in range(2, self.max_tokens + 1):
            of = depths == depth
            confidence[:, of] *= confidence[:, parents[of]]
        parents = np.broadcast_to(parents, tokens.shape)
        return best_first(tokens, confidence, parents, depths, limits, min(nodes, self.nodes), self._device)

    def _guess(
        self, branches: int, hidden: torch.Tensor, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The most probable guesses of each head, best first: probabilities and indices among the draft tokens, both
        [rows, heads, branches]."""
        return (self.scores(hidden).float() / temperatures).softmax(-1).topk(branches, dim=-1)


def static_tree(accuracies: list[list[float]], nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The `nodes` paths with the largest product of accuracies, best first; fewer where fewer are above 0.

    accuracies[k][r]: how often the r-th guess of head k is right.
    Returns, for each node: its rank among the guesses of its head, its parent (-1: none) and its depth (from 1), all
    int64 [nodes].
    """
    frontier, tree = [(accuracies[0][0], -1, 0, 1)], []  # (probability, parent, rank, depth)
    while frontier and len(tree) < nodes:
        best = max(frontier, key=lambda node: node[0])
        frontier.remove(best)
        probability, parent, rank, depth = best
        if tree and probability <= 0:
            break
        tree.append((rank, parent, depth))
        own = accuracies[depth - 1]
        if rank + 1 < len(own):
            frontier.append((probability * own[rank + 1] / max(own[rank], 1e-9), parent, rank + 1, depth))
        if depth < len(accuracies):
            frontier.append((probability * accuracies[depth][0], len(tree) - 1, 0, depth + 1))
    return tuple(np.array(values) for values in zip(*tree))
