"""A drafter with a given acceptance rate, from the known output of the target."""

import torch

from hf_efficient.generation.drafters.base import Drafter, Proposal


class Oracle(Drafter):
    """Drafts the target's own greedy output, each token right with probability `acceptance`, independently.

    A step that drafts g tokens deep then gives (1 - acceptance**(g + 1)) / (1 - acceptance) tokens on average.

    Args:
        outputs: int64 [batch, length], prompts and greedy continuations.
        acceptance: 0..1.
        max_tokens: g.
        vocabulary: the target's; wrong tokens are the ones after the right one.
        siblings: 1 drafts one continuation. More draft a tree with so many tokens at every depth, all children of one
            token of the depth before; one of them, at random, is the right one where its parent is right.
    """

    def __init__(self, outputs: torch.Tensor, acceptance: float, max_tokens: int, vocabulary: int, siblings: int = 1):
        self.outputs, self.acceptance, self.max_tokens = outputs, acceptance, max_tokens
        self.vocabulary, self.siblings = vocabulary, siblings
        self.generator = torch.Generator(outputs.device).manual_seed(0)

    def begin(self, sequences, hidden=None) -> None:
        self.sequences, self.rows = sequences, torch.tensor(sequences.live, device=self.outputs.device)

    def propose(self, limits: list[int], nodes: int) -> Proposal | None:
        siblings, device, rows = self.siblings, self.outputs.device, len(limits)
        depth = min(self.max_tokens, max(limits), nodes // siblings)
        if depth == 0:
            return None
        columns = torch.tensor(self.sequences.lengths, device=device)[:, None] + torch.arange(depth, device=device)
        said = self.outputs[self.rows[:, None], columns.clamp(max=self.outputs.shape[1] - 1)]
        self.right = torch.rand(rows, depth, generator=self.generator, device=device) < self.acceptance
        spine = torch.randint(siblings, (rows, depth), generator=self.generator, device=device)
        offset = torch.arange(1, siblings + 1, device=device).expand(rows, depth, -1)
        offset = offset.scatter(2, spine[..., None], torch.where(self.right, 0, spine + 1)[..., None])
        tokens = ((said[..., None] + offset) % self.vocabulary).flatten(1)
        counts = torch.tensor(limits, device=device).clamp(max=depth) * siblings
        if siblings == 1:
            return Proposal(tokens, counts)
        above = torch.nn.functional.pad(spine + torch.arange(depth, device=device) * siblings, (1, 0), value=-1)
        return Proposal(tokens, counts, parents=above[:, :-1].repeat_interleave(siblings, 1))

    def accept(self, tokens: list[list[int]], hidden=None) -> None:
        pass

    def select(self, rows: list[int]) -> None:
        self.rows = self.rows[rows]
