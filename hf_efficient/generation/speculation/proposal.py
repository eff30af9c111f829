"""What a drafter proposes in one step, and what the verification reads."""

from dataclasses import dataclass

import torch


MAX_NODES = 63  # drafted tokens of a sequence: with the root they fill the 64 bits of the attention kernels' tree masks


@dataclass
class Proposal:
    """The drafted tokens of one step, for every live sequence: one continuation, or a tree of continuations.

    tokens: int64 [rows, width], width >= 1, on the device of the sequences; padding after a sequence's own count.
    counts: int64 [rows], how many of them are real (0..width).
    probabilities: float [rows, width, target vocabulary], the distribution q that each token was drawn from; None when
        tokens were not drawn. Siblings are drawn without replacement: q of the next one is what is left, normalised.
    parents: int64 [rows, width], the node that each token follows, -1 for the sequence's last token (the root). A
        parent stands before its children, and siblings differ. At most `MAX_NODES` nodes. None: one continuation a
        sequence.
    confidence: float [rows, width], the estimated probability that the token is accepted, with all those before it. The
        loop verifies only as many leading tokens as pay by it. None: the loop estimates the acceptance itself.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    probabilities: torch.Tensor | None = None
    parents: torch.Tensor | None = None
    confidence: torch.Tensor | None = None

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def on_host(self) -> tuple[list[int], list[list[int]], list[list[int]]]:
        """`counts`, `tokens` and `parents`; of a continuation the parents, too."""
        if self.parents is None:
            return self.counts.tolist(), self.tokens.tolist(), [list(range(-1, self.width - 1))] * len(self.counts)
        if self.counts.device.type == "cpu":
            return self.counts.tolist(), self.tokens.tolist(), self.parents.tolist()
        counts, width = self.counts[:, None], self.width
        whole = torch.cat([counts, self.tokens, self.parents], 1).tolist()  # one transfer
        return tuple(zip(*((row[0], row[1 : 1 + width], row[1 + width :]) for row in whole)))

    def truncated(self, width: int) -> "Proposal":
        """Its first `width` tokens a sequence."""
        if width >= self.width:
            return self
        parts = (self.probabilities, self.parents, self.confidence)
        parts = (None if part is None else part[:, :width] for part in parts)
        return Proposal(self.tokens[:, :width], self.counts.clamp(max=width), *parts)

    def cut(self, counts: list[int]) -> "Proposal":
        """The first `counts[b]` tokens of each sequence b, at least one of all."""
        shorter = self.truncated(max(counts))
        counts = torch.tensor(counts, device=self.counts.device)
        return Proposal(shorter.tokens, counts, shorter.probabilities, shorter.parents, shorter.confidence)

    def simplest(self) -> "Proposal":
        """Itself, or the same without `parents` where no sequence's tokens branch: that is verified in less time."""
        if self.parents is None or self.parents.device.type != "cpu":  # where to look takes time
            return self
        rows = zip(self.parents.tolist(), self.counts.tolist())
        if any(parents[:count] != list(range(-1, count - 1)) for parents, count in rows):
            return self
        return Proposal(self.tokens, self.counts, self.probabilities, None, self.confidence)

    def chain(self) -> "Proposal":
        """The path of a tree that takes the first child everywhere, as one continuation a sequence."""
        if self.parents is None:
            return self
        paths = []  # in Python: torch's calls take longer than the work on so few numbers
        for parents, count in zip(self.parents.tolist(), self.counts.tolist()):
            last, path = -1, []
            for node in range(count):
                if parents[node] == last:
                    path.append(node)
                    last = node
            paths.append(path)
        width = max(1, max(map(len, paths)))
        index = torch.tensor([path + [0] * (width - len(path)) for path in paths], device=self.tokens.device)
        counts = torch.tensor([len(path) for path in paths], device=self.tokens.device)
        tokens, confidence = (
            None if part is None else part.gather(1, index) for part in (self.tokens, self.confidence)
        )
        probabilities = self.probabilities
        if probabilities is not None:
            probabilities = probabilities.gather(1, index[..., None].expand(-1, -1, probabilities.shape[-1]))
        return Proposal(tokens, counts, probabilities, None, confidence)
