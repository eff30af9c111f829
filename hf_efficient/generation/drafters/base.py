"""The interface of a drafter: it guesses the next tokens of every sequence, and is told which guesses were accepted."""

from abc import ABC, abstractmethod

import torch

from hf_efficient.generation.sequences import Sequences
from hf_efficient.generation.speculation.proposal import Proposal


class Drafter(ABC):
    """Proposes the next tokens of the live sequences of a `Sequences`: those that have not ended. A drafter changes the
    speed of a generation and never its output. One object serves many calls, one after the other.

    The loop calls `begin` once, before the first proposal. Drafters that read hidden states begin after the target's
    first forward. Then each step calls `propose` and `observe` (unless the drafter rests), then `accept`, and `select`
    if sequences have left the batch. In a call in which drafting never pays nothing is called; of a drafter with
    `watches`, only `begin`, `accept`, `select` and `stirs` are. All arguments have one entry per live sequence, in
    their order.

    Attributes:
        max_tokens: the greatest depth of a proposal, in tokens.
        draws: its proposals are sampled and have `probabilities`.
        relative_cost: estimated time of drafting one token, relative to a forward of the target. Read of drafters with
            `draws`.
        computes: each sequence of a batch makes a proposal slower, also one that has ended, as with a draft model.
        reads_hidden: `begin` and `accept` are given the target's hidden states: the input of its output head,
            concatenated with the outputs of the decoder layers `reads_layers` (indices from 0).
        reads_logits: `observe` is called.
        watches: `stirs` is called while it rests. `begin` and `accept` must then be cheap.
    """

    max_tokens: int
    draws = False
    relative_cost = 0.0
    computes = True
    reads_hidden = False
    reads_layers: tuple[int, ...] = ()
    reads_logits = False
    watches = False

    @property
    def hidden_layers(self) -> tuple[int, ...] | None:
        """`reads_layers`, or None if the drafter reads no hidden states."""
        return self.reads_layers if self.reads_hidden else None

    @property
    def remembered_by(self):
        """The key under which acceptance statistics are kept between calls; it must support weak references."""
        return self

    def check(self, model) -> None:  # noqa: B027
        """Raises ValueError when this drafter cannot draft for `model`, before anything is computed."""

    def check_max_tokens(self, most: int | None = None) -> None:
        """Raises ValueError where `max_tokens` is no integer from 1 to `most`; None: of any size."""
        given = getattr(self, "max_tokens", None)
        if not isinstance(given, int) or isinstance(given, bool) or given < 1 or (most is not None and given > most):
            allowed = "of at least 1" if most is None else f"from 1 to {most}"
            raise ValueError(f"max_tokens={given!r} of {type(self).__name__}: must be an integer {allowed}")

    @abstractmethod
    def begin(self, sequences: Sequences, hidden: torch.Tensor | None = None) -> None:
        """Reads the prompts and the generated tokens of the live sequences.

        hidden: float [B, prompt_length, hidden size * (1 + layers)], the target's hidden states of the prompts.
            Position i predicts token i + 1.
        """

    @abstractmethod
    def propose(self, limits: list[int], nodes: int) -> Proposal | None:
        """Proposes tokens for each sequence b: at most `limits[b]` (>= 0) deep, and at most `nodes` (>= 1) in all. None
        if no sequence has a proposal."""

    def observe(self, tokens: torch.Tensor, counts: torch.Tensor, logits: torch.Tensor) -> None:  # noqa: B027
        """Receives the target's logits for a proposal.

        tokens: int64 [B, width + 1], the last token of each sequence, then its proposed tokens.
        counts: int64 [B], the number of proposed tokens; what follows them is padding. -1 for a sequence that has
            ended, whose row is all padding.
        logits: float [B, width + 1, vocabulary], of the token after each of `tokens`.
        """

    def stirs(self) -> int:
        """Whether drafts may pay again: the number of accepted tokens in a row that repeat earlier text, 0 for too few.
        Must take microseconds, because it is called in steps without a draft."""
        return 0

    @abstractmethod
    def accept(self, tokens: list[list[int]], hidden: torch.Tensor | None = None) -> None:
        """Receives the tokens by which each sequence has grown: the accepted ones and one more from the target; none
        for a sequence that has ended.

        hidden: float [B, longest, hidden size * (1 + layers)]; `hidden[b, i]` predicted `tokens[b][i]`.
        """

    @abstractmethod
    def select(self, rows: list[int]) -> None:
        """Keeps only these sequences (indices into those so far)."""
