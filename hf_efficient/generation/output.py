"""What a speculative run returns, and what it counts."""

from dataclasses import dataclass, field

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import logging


logger = logging.get_logger(__name__)


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `generate(..., return_dict_in_generate=True)` returns under speculation.

    `sequences`, `scores`, `logits` and `past_key_values` are those of plain generation. `scores[i]` and `logits[i]`
    ([batch, vocabulary]) are zero for a row that ended before its i-th generated token. `past_key_values` holds only the
    rows that had not left the batch at the end, unless the caller passed a cache: that one keeps all rows.

    num_steps: verification forwards of the target (each is one forward for all live rows). The prompt's forward, which
        gives every row its first token, is not counted.
    row_steps: int64 [batch], the verification forwards in which the row took part.
    drafted_tokens: int64 [batch], tokens proposed for the row and verified; all nodes of a tree.
    accepted_tokens: int64 [batch], those of them that are in the output.
    tokens_per_step: generated tokens a row gains per verification forward, over all rows and steps: (tokens generated
        after the first of each row) / (sum of row_steps). Plain decoding is 1.0; 0.0 when there was no such forward.
    acceptance_by_position: of the steps in which a row had a draft so deep, the share in which the draft was kept at least so
        far; the first number is that of the first drafted token.
    draft_seconds, verify_seconds, host_seconds: time spent in the drafter, in the target (forward, logits processors,
        verification) and in the rest of the loop, after the prompt. On a GPU the time of queued work falls to whoever waits
        for it first, mostly `verify_seconds`.
    """

    num_steps: int | None = None
    row_steps: torch.LongTensor | None = None
    drafted_tokens: torch.LongTensor | None = None
    accepted_tokens: torch.LongTensor | None = None
    tokens_per_step: float | None = None
    acceptance_by_position: list[float] | None = None
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    host_seconds: float | None = None


@dataclass
class Statistics:
    """Counts of a run; `row_steps`, `drafted` and `accepted` by batch row, `tried` and `kept` by position in the draft."""

    batch_size: int
    steps: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    host_seconds: float = 0.0
    tried: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.row_steps, self.drafted, self.accepted = ([0] * self.batch_size for _ in range(3))

    def add(self, row: int, drafted: int, depth: int, accepted: int) -> None:
        """A row took part in a step with `drafted` tokens, `depth` deep, of which `accepted` are in the output."""
        self.row_steps[row] += 1
        self.drafted[row] += drafted
        self.accepted[row] += accepted
        for counts, number in ((self.tried, depth), (self.kept, accepted)):
            counts.extend([0] * (number - len(counts)))
            for position in range(number):
                counts[position] += 1

    def output(self, generated: list[int], **fields) -> SpeculativeOutput:
        """generated: tokens of each row."""
        after_first = sum(number - 1 for number in generated)
        kept = self.kept + [0] * len(self.tried)
        return SpeculativeOutput(
            **fields,
            num_steps=self.steps,
            row_steps=torch.tensor(self.row_steps),
            drafted_tokens=torch.tensor(self.drafted),
            accepted_tokens=torch.tensor(self.accepted),
            tokens_per_step=after_first / sum(self.row_steps) if self.steps else 0.0,
            acceptance_by_position=[hits / tried for hits, tried in zip(kept, self.tried)],
            draft_seconds=self.draft_seconds,
            verify_seconds=self.verify_seconds,
            host_seconds=self.host_seconds,
        )

    def log(self, generated: list[int]) -> None:
        """One line at transformers' verbosity "info"."""
        logger.info(
            f"speculation: {sum(generated)} tokens in {self.steps} forwards, {sum(self.accepted)} of {sum(self.drafted)} "
            f"drafted tokens accepted; draft {self.draft_seconds:.3f} s, verify {self.verify_seconds:.3f} s, host "
            f"{self.host_seconds:.3f} s"
        )
