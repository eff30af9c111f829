"""What a generation of this package returns, what it counts, and how it becomes transformers' own output."""

from dataclasses import dataclass, field

import torch
from transformers import DynamicCache
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from transformers.utils import logging

from hf_efficient.cache.paged_layer import PagedLayer
from hf_efficient.integrations.transformers_compat import cache_name


logger = logging.get_logger(__name__)


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `generate(..., return_dict_in_generate=True)` returns under speculation.

    `sequences`, `scores`, `logits` and `past_key_values` are those of plain generation. `scores[i]` and `logits[i]`
    ([batch, vocabulary]) are zero for a sequence that ended before its i-th generated token. `past_key_values` holds
    only the sequences that had not left the batch at the end, unless the caller passed a cache: that one keeps all.

    num_steps: verification forwards of the target (each is one forward for all live sequences). The prompt's forward,
        which gives every sequence its first token, is not counted.
    row_steps: int64 [batch], the verification forwards in which each sequence took part.
    drafted_tokens: int64 [batch], tokens proposed for the sequence and verified; all nodes of a tree.
    accepted_tokens: int64 [batch], those of them that are in the output.
    tokens_per_step: generated tokens a sequence gains per verification forward: (tokens generated after the first of
        each sequence) / (sum of row_steps). Plain decoding is 1.0; 0.0 when there was no such forward.
    acceptance_by_position: entry i: of the steps in which a sequence had a draft deeper than i, the share that accepted
        its token i, and so all before it.
    draft_seconds, verify_seconds, host_seconds: time spent in the drafter, in the target (forward, logits processors,
        verification) and in the rest of the loop, after the prompt. On a GPU queued work counts where the host first
        waits for it, mostly in `verify_seconds`.
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
    """Counts of a run: `row_steps`, `drafted` and `accepted` tokens by sequence of the batch; `proposed_at` and
    `accepted_at` by position in the draft."""

    batch_size: int
    steps: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    host_seconds: float = 0.0
    proposed_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.row_steps, self.drafted, self.accepted = ([0] * self.batch_size for _ in range(3))

    def add(self, row: int, drafted: int, depth: int, accepted: int) -> None:
        """A sequence took part in a step with `drafted` tokens, `depth` deep, of which `accepted` are in the output."""
        self.row_steps[row] += 1
        self.drafted[row] += drafted
        self.accepted[row] += accepted
        for counts, number in ((self.proposed_at, depth), (self.accepted_at, accepted)):
            counts.extend([0] * (number - len(counts)))
            for position in range(number):
                counts[position] += 1

    def output(self, generated: list[int], **fields) -> SpeculativeOutput:
        """generated: tokens of each sequence."""
        after_first = sum(number - 1 for number in generated)
        accepted_at = self.accepted_at + [0] * len(self.proposed_at)
        return SpeculativeOutput(
            **fields,
            num_steps=self.steps,
            row_steps=torch.tensor(self.row_steps),
            drafted_tokens=torch.tensor(self.drafted),
            accepted_tokens=torch.tensor(self.accepted),
            tokens_per_step=after_first / sum(self.row_steps) if self.steps else 0.0,
            acceptance_by_position=[hits / tried for hits, tried in zip(accepted_at, self.proposed_at)],
            draft_seconds=self.draft_seconds,
            verify_seconds=self.verify_seconds,
            host_seconds=self.host_seconds,
        )

    def log(self, generated: list[int]) -> None:
        """One line at transformers' verbosity "info"."""
        logger.info(
            f"speculation: {sum(generated)} tokens in {self.steps} forwards, {sum(self.accepted)} of "
            f"{sum(self.drafted)} drafted tokens accepted; draft {self.draft_seconds:.3f} s, verify "
            f"{self.verify_seconds:.3f} s, host {self.host_seconds:.3f} s"
        )


def as_transformers(output: GenerateDecoderOnlyOutput, cache: DynamicCache) -> GenerateDecoderOnlyOutput:
    """`output` of the native loop as transformers' loop returns it: logits in float32, and the keys and values of
    `output` in the empty `cache`. Those of padding are zeros, where transformers' are computed."""
    columns = output.sequences.shape[1] - 1
    for index, layer in enumerate(output[cache_name()].layers):
        if isinstance(layer, PagedLayer):
            cache.update(*_contiguous(layer, columns), index)
    logits = output.logits and tuple(step.float() for step in output.logits)
    return GenerateDecoderOnlyOutput(
        sequences=output.sequences, scores=output.scores, logits=logits, **{cache_name(): cache}
    )


def without_statistics(output: SpeculativeOutput) -> GenerateEncoderDecoderOutput:
    """What transformers' loop returns of it for an encoder-decoder, the cache aside, which sequences leave when they
    end."""
    return GenerateEncoderDecoderOutput(sequences=output.sequences, scores=output.scores, logits=output.logits)


def _contiguous(layer: PagedLayer, columns: int) -> list[torch.Tensor]:
    """The keys and values of a layer, [rows, heads, columns, head dim], right-aligned; zeros for what it dropped."""
    pool, result = layer.state.pool, []
    for pages in layer.store.pages.values():
        tensor = pages.new_zeros(len(pool.lengths), columns, *pages.shape[2:])
        for row, (length, dropped) in enumerate(zip(pool.lengths, pool.dropped)):
            tensor[row, columns - length :] = pages.flatten(0, 1)[pool.slots(row, dropped, length)]
        result.append(tensor.transpose(1, 2))
    return result
