"""What a drafter is: something that guesses the next tokens of every row, and is told which guesses were right."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from hf_efficient.generation.sequences import Sequences


MAX_NODES = 63  # of a token tree: with the token it hangs from, what the attention kernels take


@dataclass
class Proposal:
    """The guesses of one step for the live rows: one continuation a row, or a tree of them.

    tokens: int64 [rows, width], width >= 1, on the device of the sequences; filler after a row's own count.
    counts: int64 [rows], how many of them are real (0..width).
    probabilities: float [rows, width, target vocabulary], what each token was drawn from (siblings are drawn without
        replacement: from what is left, normalised); None when tokens were not drawn at random.
    parents: int64 [rows, width], None for one continuation a row. Else the tokens are nodes of a tree and this is the
        number of each one's parent, -1 for those that follow the row's last token. A parent stands before its children,
        and siblings differ. At most `MAX_NODES` nodes.
    confidence: float [rows, width], how probable it is that the token is kept, with all those before it; by it the loop
        cuts the proposal to as many leading tokens as pay. None: by its own running estimate.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    probabilities: torch.Tensor | None = None
    parents: torch.Tensor | None = None
    confidence: torch.Tensor | None = None

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def cut(self, width: int) -> "Proposal":
        """Its first `width` tokens a row."""
        if width >= self.width:
            return self
        parts = (self.probabilities, self.parents, self.confidence)
        parts = (None if part is None else part[:, :width] for part in parts)
        return Proposal(self.tokens[:, :width], self.counts.clamp(max=width), *parts)

    def chain(self) -> "Proposal":
        """Of a tree, the continuation that takes the first child everywhere."""
        if self.parents is None:
            return self
        kept = []  # in Python: of so few numbers operators take longer
        for parents, count in zip(self.parents.tolist(), self.counts.tolist()):
            at, path = -1, []
            for node in range(count):
                if parents[node] == at:
                    path.append(node)
                    at = node
            kept.append(path)
        width = max(1, max(map(len, kept)))
        places = torch.tensor([path + [0] * (width - len(path)) for path in kept], device=self.tokens.device)
        counts = torch.tensor([len(path) for path in kept], device=self.tokens.device)
        parts = [None if part is None else part.gather(1, places) for part in (self.tokens, self.confidence)]
        drawn = self.probabilities
        if drawn is not None:
            drawn = drawn.gather(1, places[..., None].expand(-1, -1, drawn.shape[-1]))
        return Proposal(parts[0], counts, drawn, None, parts[1])


class Drafter(ABC):
    """Guesses tokens for the live rows of a `Sequences`. A drafter can only cost time, never change the output.

    The loop calls `begin` once, before it first asks for a guess (drafters that read hidden states: after the target has given
    each row its first token), and then, step by step: `propose` and `observe` (not in steps for which guessing does not pay),
    `accept` with what was kept, and `select` when rows have left. In a run in which guessing does not pay it calls none of them.
    Rows are always the live ones, in their order. One drafter serves many runs, one after the other.

    max_tokens: how many tokens deep it guesses at most.
    draws: its proposals have `probabilities`.
    relative_cost: about how many forwards of the target one drafted token costs; for drafters that draw.
    reads_hidden: `begin` and `accept` are given hidden states of the target: what its output head reads and, behind it, what
        the decoder layers `reads_layers` (from 0) gave.
    reads_logits: `observe` is called.
    """

    max_tokens: int
    draws = False
    relative_cost = 0.0
    reads_hidden = False
    reads_layers: tuple[int, ...] = ()
    reads_logits = False

    @property
    def remembered_by(self):
        """What is known of its seconds and of how often it is right stays with this from run to run."""
        return self

    def check(self, model) -> None:  # noqa: B027
        """Raises ValueError when this drafter cannot draft for `model`, before anything is computed."""

    @abstractmethod
    def begin(self, sequences: Sequences, hidden: torch.Tensor | None = None) -> None:
        """Reads the prompts, and the tokens already generated, of the live rows. hidden [rows, prompt_length, hidden size *
        (1 + layers)]: the target's at each prompt column (the i-th predicts token i + 1)."""

    @abstractmethod
    def propose(self, limits: list[int], nodes: int) -> Proposal | None:
        """Guesses at most `limits[row]` (>= 0) tokens deep and at most `nodes` (>= 1) tokens for each row; None when no
        row has a guess."""

    def observe(self, tokens: torch.Tensor, counts: torch.Tensor, logits: torch.Tensor) -> None:  # noqa: B027
        """Sees what the target thinks of a proposal: tokens int64 [rows, width + 1] as it read them (each row's last token,
        then the guesses, `counts` of them real), logits [rows, width + 1, vocabulary] of what follows each."""

    @abstractmethod
    def accept(self, tokens: list[list[int]], hidden: torch.Tensor | None = None) -> None:
        """Learns the tokens each row continued with (at least one, none for a row that has ended): its kept guesses and the
        target's own token. hidden [rows, longest, hidden size * (1 + layers)]: hidden[b, i] predicted tokens[b][i]."""

    @abstractmethod
    def select(self, rows: list[int]) -> None:
        """Keeps only these rows (indices into the rows so far)."""
