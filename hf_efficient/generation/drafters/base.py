"""What a drafter is: something that guesses the next tokens of every row, and is told which guesses were right."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from hf_efficient.generation.sequences import Sequences


@dataclass
class Proposal:
    """The guesses of one step for the live rows.

    tokens: int64 [rows, width], width >= 1, on the device of the sequences; filler after a row's own count.
    counts: int64 [rows], how many of them are real (0..width).
    probabilities: float [rows, width, target vocabulary], what each token was drawn from; None when tokens were not
        drawn at random.
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    probabilities: torch.Tensor | None = None


class Drafter(ABC):
    """Guesses tokens for the live rows of a `Sequences`. A drafter can only cost time, never change the output.

    The loop calls `begin` once, after the target has given each row its first token, and then, step by step: `propose`,
    `accept` with what was kept, and `select` when rows have left. Rows are always the live ones, in their order.
    """

    def check(self, model) -> None:  # noqa: B027
        """Raises ValueError when this drafter cannot draft for `model`, before anything is computed."""

    @abstractmethod
    def begin(self, sequences: Sequences) -> None:
        """Reads the prompts, and the tokens already generated, of the live rows."""

    @abstractmethod
    def propose(self, limits: list[int]) -> Proposal | None:
        """Guesses at most `limits[row]` (>= 0) tokens for each row; None when no row has a guess."""

    @abstractmethod
    def accept(self, tokens: list[list[int]]) -> None:
        """Learns the tokens each row continued with (at least one): its kept guesses and the target's own token."""

    @abstractmethod
    def select(self, rows: list[int]) -> None:
        """Keeps only these rows (indices into the rows so far)."""
