"""The interface of a drafter: it guesses the next tokens of every sequence, and is told which guesses were accepted."""

from abc import ABC, abstractmethod

import torch

from hf_efficient.generation.sequences import Sequences
from hf_efficient.generation.speculation.proposal import Proposal


class Drafter(ABC):
    """Guesses tokens for the live sequences of a `Sequences`. A drafter can only cost time, never change the output.

    The loop calls `begin` once before the first proposal; for drafters that read hidden states, after the target has
    given each sequence its first token. Then, in each step: `propose` and `observe`, except in steps where drafting
    does not pay; `accept` with the tokens that each sequence continued with; `select` when sequences have left the
    batch. In a call in which drafting never pays, the loop calls none of them, or of drafters that watch only `begin`,
    `accept`, `select` and `stirs`. Rows of all arguments are the live sequences, in their order. One drafter serves
    many calls, one after the other.

    max_tokens: how many tokens deep it guesses at most.
    draws: its proposals have `probabilities`.
    relative_cost: estimated seconds of drafting one token by those of a forward of the target, for drafters that draw.
    computes: a proposal takes time for each sequence of the batch, one that has ended, too, as of a model.
    reads_hidden: `begin` and `accept` are given hidden states of the target: what its output head reads, concatenated
        with the outputs of the decoder layers `reads_layers` (indices from 0).
    reads_logits: `observe` is called.
    watches: `stirs` is called in steps in which drafting pauses, so `begin` and `accept` must be cheap.
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
        """The decoder layers whose hidden states it reads besides those of the output head; None when it reads none."""
        return self.reads_layers if self.reads_hidden else None

    @property
    def remembered_by(self):
        """The key of its acceptance statistics from call to call; it must be weakly referable."""
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
        """Reads the prompts and the tokens already generated of the live sequences.

        hidden: float [rows, prompt_length, hidden size * (1 + layers)], the target's at each position of the prompts;
            the i-th predicts token i + 1.
        """

    @abstractmethod
    def propose(self, limits: list[int], nodes: int) -> Proposal | None:
        """Guesses at most `limits[row]` (>= 0) tokens deep and at most `nodes` (>= 1) tokens for each sequence; None
        when no sequence has a guess."""

    def observe(self, tokens: torch.Tensor, counts: torch.Tensor, logits: torch.Tensor) -> None:  # noqa: B027
        """Sees the target's logits for a proposal: `logits` float [rows, width + 1, vocabulary], of what follows each
        of `tokens` int64 [rows, width + 1], each sequence's last token and then its guesses, `counts` int64 [rows] of
        which are real. Behind them tokens and logits mean nothing; counts is -1 for a sequence that has ended, of which
        not even the last token was read."""

    def stirs(self) -> int:
        """Whether drafts may pay again, by the tokens accepted since the last call: how many in a row have occurred
        before, 0 for too few. This takes microseconds, where a proposal would take a share of a forward."""
        return 0

    @abstractmethod
    def accept(self, tokens: list[list[int]], hidden: torch.Tensor | None = None) -> None:
        """Learns the tokens each sequence continued with: its accepted guesses and one token of the target's; none for
        a sequence that has ended.

        hidden: float [rows, longest, hidden size * (1 + layers)]; `hidden[b, i]` predicted `tokens[b][i]`.
        """

    @abstractmethod
    def select(self, rows: list[int]) -> None:
        """Keeps only these sequences (indices into those so far)."""
