"""Drafts from the next tokens that the target found most probable when it last read each token."""

from heapq import heappop, heappush

import torch

from hf_efficient.generation.drafters.base import Drafter
from hf_efficient.generation.sequences import Sequences
from hf_efficient.generation.speculation.proposal import MAX_NODES, Proposal


# Share of the candidates of each rank that were right after a right parent: SmolLM2-135M on summaries, rewriting, code
# and open chat. `TokenRecycling` starts from these and learns its own by rank and depth.
_ACCURACIES = (0.40, 0.08, 0.05, 0.035, 0.02, 0.015, 0.01, 0.01)
_PRIOR_TOKENS = 20.0  # tokens of the user's own that they weigh as much as
_MAX_COUNT = 2000.0  # trials of a rank and depth that later calls count


class TokenRecycling(Drafter):
    """Keeps, for every token of the vocabulary, the `candidates` most probable next tokens of the target's latest
    prediction after it, also of rejected drafts. It proposes a tree: candidates of the sequence's last token,
    candidates of those, and so on (Luo et al. 2024, "Turning Trash into Treasure: Accelerating Inference of Large
    Language Models with Token Recycling"). A token of a prompt without a prediction has the token after it as its only
    candidate.

    Needs no model and no training. The table is int32 [vocabulary, candidates], 4 MB at 128k tokens. The shape of the
    tree follows from how often each rank was right at each depth. It is chosen once per call; nodes are left out where
    no token is known. Table and accuracies are kept for later calls.

    Args:
        candidates: kept for each token, >= 1.
        max_tokens: the greatest depth of a proposal, >= 1.

    Raises ValueError for other arguments, and for a target with another vocabulary size than the first one.
    """

    reads_logits = True
    computes = False

    @torch.inference_mode(False)  # its tensors are written to in later calls, too
    def __init__(self, candidates: int = 8, max_tokens: int = 6):
        for name, value in (("candidates", candidates), ("max_tokens", max_tokens)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} (of TokenRecycling): expected an integer of at least 1")
        self.candidates, self.max_tokens = candidates, max_tokens
        self.table: torch.Tensor | None = None  # and a last row for token -1 (unknown), whose candidates are -1
        first = [_ACCURACIES[min(rank, len(_ACCURACIES) - 1)] for rank in range(candidates)]
        self.right = (torch.tensor(first, dtype=torch.float32) * _PRIOR_TOKENS).repeat(max_tokens, 1)
        self.trials = torch.full_like(self.right, _PRIOR_TOKENS)

    @property
    def remembered_by(self):
        return TokenRecycling  # a new one pays as little as the one before it

    @torch.inference_mode(False)
    def check(self, model) -> None:
        self.check_max_tokens(len(self.right))
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        if self.table is None:
            if vocabulary < self.candidates:
                raise ValueError(f"candidates={self.candidates}: the target has only {vocabulary} tokens")
            self.table = torch.full((vocabulary + 1, self.candidates), -1, dtype=torch.int32)
        elif len(self.table) != vocabulary + 1:
            raise ValueError(
                f"this TokenRecycling has learned from a model of {len(self.table) - 1} tokens, "
                f"{type(model).__name__} has {vocabulary}: make a new one for each model"
            )

    @torch.inference_mode(False)
    def begin(self, sequences: Sequences, hidden=None) -> None:
        self.sequences, device = sequences, sequences.device
        self.table, self.right, self.trials = (x.to(device) for x in (self.table, self.right, self.trials))
        for row in sequences.token_lists():
            row = torch.tensor(row, device=device)
            before = row[:-1]
            unknown = self.table[before, 0] < 0
            self.table[before[unknown], 0] = row[1:][unknown].int()
        shrink = (_MAX_COUNT / self.trials).clamp(max=1.0)
        self.right *= shrink
        self.trials *= shrink
        self._grow(self.right / self.trials)
        self.drafted = None

    def _grow(self, rates: torch.Tensor) -> None:
        """The tree of this call: the `MAX_NODES` nodes that are right most often, best first."""
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
        self.confidence = torch.tensor(confidence, dtype=torch.float32, device=device)
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
        # the index of each node in the proposal, behind the root's
        index = torch.nn.functional.pad(real.cumsum(1) - 1, (1, 0), value=-1)
        parents = index.gather(1, self.parents[order] + 1)
        padding = ~real.gather(1, order)
        return Proposal(
            tokens.gather(1, order).masked_fill_(padding, 0),
            real.sum(1),
            parents=parents.masked_fill_(padding, -1),
            confidence=self.confidence[order].masked_fill_(padding, 0.0),
        )

    def observe(self, tokens: torch.Tensor, counts: torch.Tensor, logits: torch.Tensor) -> None:
        vocabulary = len(self.table) - 1
        predicted = logits[..., :vocabulary].topk(self.candidates).indices.int()
        padding = torch.arange(tokens.shape[1], device=tokens.device) > counts[:, None]
        # backwards, so that of equal tokens the first, more probable node is written last (on a GPU any may win)
        tokens, predicted = tokens.masked_fill(padding, -1), predicted.masked_fill(padding[..., None], -1)
        self.table[tokens.flip(1)] = predicted.flip(1)

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
        """Nothing is kept by sequence."""
