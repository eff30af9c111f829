"""Drafts from what the target itself thought likely after each token, the last time it read that token."""

from heapq import heappop, heappush

import torch

from hf_efficient.generation.drafters.base import Drafter
from hf_efficient.generation.sequences import Sequences
from hf_efficient.generation.speculation.proposal import MAX_NODES, Proposal


# How often the candidate of each rank was the right one after a right parent: SmolLM2-135M on summaries, rewriting, code
# and open chat. `TokenRecycling` starts from it and learns its own, rank by rank and depth by depth.
_RATES = (0.40, 0.08, 0.05, 0.035, 0.02, 0.015, 0.01, 0.01)
_RATES_WEIGH = 20.0  # as many tokens of one's own
_MEMORY = 2000.0  # trials of a rank and depth that are remembered from run to run


class TokenRecycling(Drafter):
    """Keeps the `candidates` likeliest next tokens of every token of the vocabulary, as the target saw them when it last
    read the token, wrong guesses too, and proposes a tree of them: candidates of the row's last token, candidates of
    those, and so on (Luo et al. 2024, "Turning Trash into Treasure: Accelerating Inference of Large Language Models with
    Token Recycling"). Tokens of a prompt that the target was never asked about have the token after them as the only
    candidate. No model and no training; the table is int32 [vocabulary, candidates], 4 MB at 128k tokens.

    Which ranks at which depths are in the tree, and in which order, follows from how often they were right; a run keeps
    one tree, and proposals are the first of its nodes whose token is known. The table and these rates stay for the next run.

    Args:
        candidates: kept for each token, >= 1.
        max_tokens: how many tokens deep it proposes, >= 1.

    Raises ValueError for other arguments, and where a target has another vocabulary size than the one before.
    """

    reads_logits = True

    def __init__(self, candidates: int = 8, max_tokens: int = 6):
        for name, value in (("candidates", candidates), ("max_tokens", max_tokens)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} (of TokenRecycling): expected an integer of at least 1")
        self.candidates, self.max_tokens = candidates, max_tokens
        self.table: torch.Tensor | None = (
            None  # a last row beside the vocabulary's: what follows token -1 is -1, unknown
        )
        first = torch.tensor([_RATES[min(rank, len(_RATES) - 1)] for rank in range(candidates)])
        self.right = (first * _RATES_WEIGH).repeat(max_tokens, 1)
        self.trials = torch.full_like(self.right, _RATES_WEIGH)

    def check(self, model) -> None:
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        if self.table is None:
            if vocabulary < self.candidates:
                raise ValueError(f"candidates={self.candidates}: the target has only {vocabulary} tokens")
            self.table = torch.full((vocabulary + 1, self.candidates), -1, dtype=torch.int32)
        elif len(self.table) != vocabulary + 1:
            raise ValueError(
                f"this TokenRecycling has learned from a model of {len(self.table) - 1} tokens, {type(model).__name__} has "
                f"{vocabulary}: make a new one for each model"
            )

    def begin(self, sequences: Sequences, hidden=None) -> None:
        self.sequences, device = sequences, sequences.device
        self.table, self.right, self.trials = (x.to(device) for x in (self.table, self.right, self.trials))
        for row in sequences.token_lists():
            row = torch.tensor(row, device=device)
            before = row[:-1]
            unknown = self.table[before, 0] < 0
            self.table[before[unknown], 0] = row[1:][unknown].int()
        shrink = (_MEMORY / self.trials).clamp(max=1.0)
        self.right *= shrink
        self.trials *= shrink
        self._grow(self.right / self.trials)
        self.drafted = None

    def _grow(self, rates: torch.Tensor) -> None:
        """The tree of this run: its `MAX_NODES` nodes most often right, the likeliest first."""
        chances, heap, nodes = rates.tolist(), [(-1.0, 0, -1, 0, 0)], []
        while heap and len(nodes) <= MAX_NODES:
            chance, _, parent, depth, rank = heappop(heap)
            nodes.append((parent, depth, rank, -chance))
            if depth < self.max_tokens:
                for rank, rate in enumerate(chances[depth]):
                    order = len(nodes) * self.candidates + rank
                    heappush(heap, (chance * rate, order, len(nodes) - 2, depth + 1, rank))
        parents, depths, ranks, confidence = zip(*nodes[1:])
        device = rates.device
        self.parents, self.depths, self.ranks = (torch.tensor(x, device=device) for x in (parents, depths, ranks))
        self.confidence = torch.tensor(confidence, device=device)
        self.levels = [
            torch.tensor([node for node, at in enumerate(depths) if at == depth], device=device)
            for depth in range(1, max(depths) + 1)
        ]

    def propose(self, limits: list[int], nodes: int) -> Proposal | None:
        last = self.sequences.last(1)
        tokens = torch.cat([last, last.new_full((len(last), len(self.parents)), -1)], 1)
        for level in self.levels:
            tokens[:, level + 1] = self.table[tokens[:, self.parents[level] + 1], self.ranks[level]].long()
        tokens = tokens[:, 1:]
        real = (tokens >= 0) & (self.depths <= torch.tensor(limits, device=tokens.device)[:, None])
        real &= real.cumsum(1) <= nodes
        width = int(real.sum(1).max())
        if width == 0:
            return None
        self.drafted = tokens, real
        order = (~real).int().argsort(dim=1, stable=True)[:, :width]
        place = torch.nn.functional.pad(real.cumsum(1) - 1, (1, 0), value=-1)  # of each node, the root's first
        parents = place.gather(1, self.parents[order] + 1)
        filler = ~real.gather(1, order)
        return Proposal(
            tokens.gather(1, order).masked_fill_(filler, 0),
            real.sum(1),
            parents=parents.masked_fill_(filler, -1),
            confidence=self.confidence[order].masked_fill_(filler, 0.0),
        )

    def observe(self, tokens: torch.Tensor, counts: torch.Tensor, logits: torch.Tensor) -> None:
        vocabulary = len(self.table) - 1
        likeliest = logits[..., :vocabulary].topk(self.candidates).indices.int()
        filler = torch.arange(tokens.shape[1], device=tokens.device) > counts[:, None]
        # backwards: of a token that was read twice the node that stands first is the likelier one (on a GPU either may win)
        tokens, likeliest = tokens.masked_fill(filler, -1), likeliest.masked_fill(filler[..., None], -1)
        self.table[tokens.flip(1)] = likeliest.flip(1)

    def accept(self, tokens: list[list[int]], hidden=None) -> None:
        if self.drafted is None:
            return
        (drafted, real), self.drafted = self.drafted, None
        actual = [new[: self.max_tokens] + [-1] * (self.max_tokens - len(new)) for new in tokens]
        actual = torch.tensor(actual, device=drafted.device)[:, self.depths - 1]  # -1: not known
        right = torch.nn.functional.pad(drafted == actual, (1, 0), value=True)  # the root first
        for level in self.levels:
            right[:, level + 1] &= right[:, self.parents[level] + 1]
        tried = real & (actual >= 0) & right[:, self.parents + 1]
        cell = ((self.depths - 1) * self.candidates + self.ranks).repeat(len(drafted))
        for counter, values in ((self.trials, tried), (self.right, tried & right[:, 1:])):
            counter.view(-1).index_add_(0, cell, values.flatten().float())

    def select(self, rows: list[int]) -> None:
        """Nothing is kept by row."""
